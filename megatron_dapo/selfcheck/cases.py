"""What the self-check compares: a case is a layout (`LayoutSpec`, by its name), a model, options of Megatron (by their
names in `OPTIONS`), a precision, the layers' library and the settings of the loss.

`cases_of` has a layout with every model that fits it, `loss_cases` every objective with every aggregation.
`random_cases` draws from their combinations.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from megatron_dapo.config import Config, ModelShape, check_model, check_world, parse_config
from megatron_dapo.config.algorithm import Aggregation
from megatron_dapo.config.policy import Fp8Config
from megatron_dapo.config.schema import divisors
from megatron_dapo.errors import UserError
from megatron_dapo.policy.megatron.importing import gpu_count
from megatron_dapo.policy.megatron.options import hardware_needs
from megatron_dapo.selfcheck.synthetic import MODELS, MORE_MODELS, ModelSize, multiple, synthetic_shape

PART = re.compile(r"(vpp|etp|tp|pp|cp|dp|ep)([1-9]\d*)|(sp|do)")


@dataclass(frozen=True, slots=True)
class LayoutSpec:
    """A layout by its name, such as `tp2cp2sp`: `sp` is sequence parallelism, `do` the distributed optimizer."""

    name: str
    sizes: dict[str, int] = field(default_factory=dict)
    sequence_parallel: bool = False
    distributed_optimizer: bool = False

    @classmethod
    def parse(cls, name: str) -> LayoutSpec:
        if name == "single":
            return cls(name)
        parts = list(PART.finditer(name))
        kinds = [part[1] or part[3] for part in parts]
        if not name or "".join(part[0] for part in parts) != name or len(set(kinds)) < len(kinds):
            raise UserError(
                f"layout {name!r}: expected parts such as tp2, pp2, vpp2, cp2, dp2, ep2, etp2, sp, do, each at most "
                "once"
            )
        sizes = {part[1]: int(part[2]) for part in parts if part[1]}
        return cls(name, sizes, sequence_parallel="sp" in kinds, distributed_optimizer="do" in kinds)

    def size(self, kind: str) -> int:
        return self.sizes.get(kind, 1)

    @property
    def model_size(self) -> ModelSize:
        """Large enough for the layout: it has to divide layers, key/value heads and experts."""
        stages = self.size("pp") * self.size("vpp")
        return ModelSize(
            layers=multiple(stages, at_least=4),
            kv_heads=multiple(self.size("tp"), at_least=2),
            experts=multiple(self.size("ep"), at_least=4),
        )

    @property
    def world_size(self) -> int:
        """The ranks it needs. Experts are spread over tensor, context and data ranks."""
        model = self.size("tp") * self.size("pp") * self.size("cp")
        experts = -(-self.size("ep") * self.size("etp") // (self.size("tp") * self.size("cp")))
        return model * max(self.size("dp"), experts)


SINGLE = LayoutSpec.parse("single")


def selfcheck_config(layout: LayoutSpec, *, policy: Mapping[str, Any] | None = None, **algorithm: Any) -> Config:
    """fp32 unless `policy` says otherwise. The micro-batch budget depends on the layout, so that the splits differ."""
    budget = 512 if layout.name == "single" else 64 + 16 * (sum(map(ord, layout.name)) % 4)
    tp, cp, aligned = layout.size("tp"), layout.size("cp"), Fp8Config(**(policy or {}).get("fp8", {})).alignment
    rounds = NO_CLIPPING.items() <= algorithm.items()  # a case in bf16 or fp8, or its reference
    # A small eps would turn rounding errors of tiny gradients into steps of full size.
    optimizer = {"lr": 1e-3, "warmup_steps": 0, "eps": 1e-3 if rounds else 1e-5}
    return parse_config(
        {
            "policy": {
                "tensor_parallel": tp,
                "pipeline_parallel": layout.size("pp"),
                "virtual_pipeline": layout.size("vpp"),
                "context_parallel": cp,
                "expert_parallel": layout.size("ep"),
                "expert_tensor_parallel": layout.size("etp"),
                "sequence_parallel": layout.sequence_parallel,
                "distributed_optimizer": layout.distributed_optimizer,
                "precision": "fp32",
                "micro_batch_tokens": multiple(2 * cp * tp * aligned, at_least=budget),
                "head_chunk_tokens": 24,
                "moe_aux_loss_coefficient": 0.5,  # of models with experts; large, so that it shows in every gradient
                "timeout_seconds": 120,
                "optimizer": optimizer,
                **(policy or {}),
            },
            "critic": {"optimizer": optimizer, **({"clip": None} if rounds else {})},
            "rollout": {"max_prompt_tokens": 10, "max_response_tokens": 30, "temperature": 0.9},
            "algorithm": {
                "kl": {"coefficient": 0.05},
                "entropy_coefficient": 0.01,
                "positive_coefficient": 0.1,
                "off_policy": {"importance_weight": "token", "weight_cap": 1.5},
                **algorithm,
            },
        }
    )


# What a name such as cp2+a2a adds to section policy.
OPTIONS: dict[str, dict[str, Any]] = {
    "p2p": {"cp_comm_type": "p2p"},
    "all_gather": {"cp_comm_type": "all_gather"},
    "a2a": {"cp_comm_type": "a2a"},
    "tp_overlap": {"tp_comm_overlap": True},
    "overlap": {"overlap_grad_reduce": True},
    "param_gather": {"overlap_param_gather": True},
    "sequential": {"overlap_grad_reduce": False, "overlap_param_gather": False},
    "uneven": {"first_stage_layers": 1},
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "moe_recompute": {"recompute": "selective", "recompute_modules": ["core_attn", "moe"]},
    "act_recompute": {"recompute": "selective", "recompute_modules": ["layernorm", "moe_act"]},
    "replay": {"routing_replay": "engine"},
    "fixed_experts": {"routing_replay": "engine"},  # of every token
    "gather_tokens": {"moe": {"dispatcher": "allgather"}},
    "lora": {"lora": {"rank": 4, "alpha": 8.0}},
    "small_packs": {"micro_batch_tokens": 128},
    "other_packs": {"micro_batch_tokens": 256},
    "critic": {},  # a value model and its loss
}
DEFAULT_LAYOUTS = (
    "tp2", "tp2sp", "pp2", "pp2vpp2", "cp2", "dp2", "dp2do", "ep2", "tp4sp", "tp2pp2", "tp2cp2sp", "ep2tp2sp",
    "etp2tp2sp", "ep2dp4do", "ep4pp2", "pp2+uneven", "tp2sp+full", "ep2+replay", "dp2do+param_gather", "cp2+all_gather",
    "cp2+a2a", "tp2sp+lora", "tp2cp2sp+critic", "pp2+critic", "dp2do+critic",
)  # fmt: skip
PRECISIONS = ("fp32", "bf16", *get_args(Fp8Config.model_fields["recipe"].annotation)[1:])
NEVER = 100.0
# Of bf16 and fp8: rounding must not decide whether a token is clipped. Clipping is compared in fp32.
NO_CLIPPING: dict[str, Any] = {"clip_low": 0.99, "clip_high": NEVER, "dual_clip": NEVER}
OBJECTIVES = ("dapo", "gspo", "cispo")
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)
OBJECTIVE_LAYOUTS = ("cp2", "dp2")
WORLD_SIZES = {2: 4, 3: 1, 4: 5, 6: 1, 8: 3}  # of random layouts, with their weights
RECOMPUTE = ((), (), ("full",), ("selective",), ("moe_recompute",))
# Of the awkward mini-batch, the masks remove about a third of the tokens, a sixth and a sixth of the sequences.
OFF_POLICY: dict[str, dict[str, Any]] = {
    "off": {},
    "token weight": {"importance_weight": "token", "weight_cap": 1.5},
    "sequence weight": {"importance_weight": "sequence", "weight_cap": 1.5},
    "masks": {"token_mask": [0.5, 2.0], "geometric_mask": [0.8, 1.25], "opsm_delta": 0.05},
    "normalised": {"importance_weight": "token", "weight_cap": 1.5, "normalize_weights": True, "veto": 0.2},
}
# The sequence's ratio is closer to 1 than a token's: with these bounds both kinds clip in the awkward mini-batch.
CLIP: dict[str, dict[str, Any]] = {
    "dapo": {}, "cispo": {"clip_low": 0.2, "clip_high": 0.28},
    "gspo": {"clip_low": 0.05, "clip_high": 0.05, "dual_clip": 10.0},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """`algorithm` are settings on top of the self-check's own, `options` keys of OPTIONS. `precision` is fp32, bf16 or
    a recipe of fp8; `layers` is torch or te."""

    layout: LayoutSpec
    model: str = "dense"
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    size: ModelSize | None = None  # None: as the layout needs it
    precision: str = "fp32"
    layers: str = "torch"

    @property
    def config(self) -> Config:
        policy: dict[str, Any] = {"timeout_seconds": 3600}  # the time of a case is limited by the command
        for name in self.options:
            policy |= OPTIONS[name]
        if self.precision != "fp32":
            policy["precision"] = "bf16"
            if self.model == "hybrid":  # has weights in fp32 and in bf16
                policy["distributed_optimizer"] = True
        if self.precision not in ("fp32", "bf16"):
            policy["fp8"] = {"recipe": self.precision}
        config = selfcheck_config(self.layout, policy=policy, **self.algorithm)
        if not self.is_critic:
            return config
        critic = config.of_critic
        replay = {"routing_replay": config.policy.routing_replay}  # a critic of a run does not replay
        return critic.model_copy(update={"policy": critic.policy.model_copy(update=replay)})

    @property
    def is_critic(self) -> bool:
        return "critic" in self.options

    @property
    def shape(self) -> ModelShape:
        shape = synthetic_shape(self.model, self._size)
        return shape.as_value_model() if self.is_critic else shape

    @property
    def _size(self) -> ModelSize:
        return self.size or self.layout.model_size._replace(wide=self.layers == "te")

    @property
    def reference(self) -> Case:
        """The same model and loss in a single process."""
        kept = tuple(name for name in self.options if name in ("replay", "fixed_experts", "lora", "critic"))
        return replace(self, layout=SINGLE, options=kept, size=self._size)

    @property
    def noise(self) -> list[Case]:
        """What the reference is compared with: itself in other micro-batches and, where it rounds more, in fp32."""
        same = self.reference
        packs = ["small_packs", "other_packs"] if gpu_count() else ["small_packs"]  # a CPU's fp32 has hardly any noise
        packed = [replace(same, options=(*same.options, name)) for name in packs]
        return packed if self.precision == "fp32" else [*packed, replace(same, precision="fp32", layers="torch")]

    @property
    def key(self) -> str:
        """Equal for equal cases."""
        parts = [self.layout.name, self.model, self.algorithm, self.options, self._size, self.precision, self.layers]
        return json.dumps(parts, sort_keys=True)

    @property
    def objective(self) -> str:
        return "value" if self.is_critic else str(self.algorithm.get("objective", "dapo"))

    @property
    def aggregation(self) -> str:
        return str(self.algorithm.get("aggregation", "token-mean"))

    @property
    def name(self) -> str:
        return "+".join([self.layout.name, *self.options])

    def obstacle(self, job_ranks: int | None = None) -> str:
        """Why the case cannot exist; empty when it can."""
        try:
            policy = self.config.policy
            check_model(policy, self.shape)
            check_world(policy, job_ranks or self.layout.world_size)
        except UserError as error:
            return str(error)
        needs = [f"policy.{option}" for option, need in hardware_needs(policy).items() if need in ("te", "fusion")]
        if needs and self.layers != "te":
            return f"{needs[0]} needs --layers te"
        if self.layers == "te" and not (gpu_count() and importlib.util.find_spec("transformer_engine")):
            return "--layers te needs Transformer Engine and an NVIDIA GPU"
        if self.layers == "te" and self.precision == "fp32" and policy.context_parallel > 1:
            return "Transformer Engine has no attention in fp32 for context parallelism; use bf16"
        if "overlap_grad_reduce" in hardware_needs(policy) and not gpu_count():
            return "policy.overlap_grad_reduce needs CUDA"
        if "replay" in self.options and not self.shape.is_moe:
            return "the model has no experts to replay"
        return ""


@dataclass(frozen=True, slots=True)
class Variants:
    """Which cases of a layout: every model in every precision with every kind of layers, as far as they exist."""

    models: Sequence[str] | None = None  # None: all
    precisions: Sequence[str] = ("fp32",)
    layers: Sequence[str] = ("torch",)

    @classmethod
    def parse(cls, models: str, dtypes: str, fp8: str, layers: str) -> Variants:
        """From comma-separated lists."""
        chosen = [[word for word in text.split(",") if word] for text in (models, dtypes, fp8, layers)]
        known = ((*MODELS, *MORE_MODELS), PRECISIONS[:2], PRECISIONS[2:], ("torch", "te"))
        for option, words, names in zip(("models", "dtype", "fp8", "layers"), chosen, known, strict=True):
            if unknown := set(words) - set(names):
                raise UserError(f"--{option}: unknown {', '.join(sorted(unknown))}; choose from {', '.join(names)}")
        precisions = [*chosen[1], *chosen[2]] or ["fp32"]
        return cls(chosen[0] or None, tuple(precisions), tuple(chosen[3]) or ("torch",))


ALL_MODELS = Variants()


def cases_of(name: str, job_ranks: int | None = None, variants: Variants = ALL_MODELS) -> list[Case]:
    """The layout, e.g. tp2sp or cp2+a2a, in every variant that fits it; raises UserError when none does."""
    layout, *options = name.split("+")
    if unknown := set(options) - OPTIONS.keys():
        raise UserError(f"layout {name!r}: no option {', '.join(sorted(unknown))}; there are {', '.join(OPTIONS)}")
    spec = LayoutSpec.parse(layout)
    cases = [
        Case(
            spec,
            model,
            algorithm={} if precision == "fp32" else NO_CLIPPING,
            options=_with_fixed_experts(options, model, precision),
            precision=precision,
            layers=layers,
        )
        for precision in variants.precisions
        for layers in variants.layers
        for model in variants.models or MODELS
    ]
    possible = [case for case in cases if not case.obstacle(job_ranks)]
    if not possible:
        splits_experts = spec.size("ep") * spec.size("etp") > 1 or "replay" in options
        needed = replace(cases[0], model="moe" if splits_experts else "dense")
        raise UserError(f"layout {name!r}: {needed.obstacle(job_ranks) or 'none of the chosen models fits it'}")
    return possible


def _with_fixed_experts(options: Sequence[str], model: str, precision: str) -> tuple[str, ...]:
    """In bf16 and fp8, rounding may choose another expert for a token, which is no small difference. The experts are
    given there; the router's own choice is compared in fp32."""
    if precision == "fp32" or not synthetic_shape(model).is_moe:
        return tuple(options)
    return (*(name for name in options if name != "replay"), "fixed_experts")


def loss_cases(layout: LayoutSpec) -> list[Case]:
    """Every objective with every aggregation, except what `cases_of` has."""
    settings = [loss_settings(o, a, "sequence weight") for o in OBJECTIVES for a in AGGREGATIONS]
    return [Case(layout, "dense", setting) for setting in settings]


def loss_settings(objective: str, aggregation: str, off_policy: str) -> dict[str, Any]:
    """`off_policy` is a key of OFF_POLICY."""
    settings = {"objective": objective, "aggregation": aggregation, "off_policy": OFF_POLICY[off_policy]}
    return settings | CLIP[objective]


def random_cases(count: int, seed: int) -> list[Case]:
    """Different cases with at most 8 ranks; the same ones for the same seed."""
    rng = random.Random(seed)
    found: dict[str, Case] = {}
    while len(found) < count:
        case = _random_case(rng)
        if not case.obstacle():
            found.setdefault(case.key, case)
    return list(found.values())


def _random_case(rng: random.Random) -> Case:
    model = rng.choice(MODELS)
    experts = synthetic_shape(model).is_moe
    layout = _random_layout(rng, *rng.choices(list(WORLD_SIZES), list(WORLD_SIZES.values())), experts=experts)
    settings = loss_settings(rng.choice(OBJECTIVES), rng.choice(AGGREGATIONS), rng.choice(list(OFF_POLICY)))
    size = layout.model_size
    if layout.size("tp") == 4 and rng.random() < 0.5:
        size = size._replace(kv_heads=2)  # fewer than ranks: each is computed on two of them
    options = rng.choice(RECOMPUTE)
    if experts and rng.random() < 0.3:
        options = (*options, "replay")
    return Case(layout, model, settings, options, size)


def _random_layout(rng: random.Random, world: int, *, experts: bool) -> LayoutSpec:
    sizes = {"tp": 1, "pp": 1, "cp": 1, "dp": 1}
    rest = world
    while rest > 1:
        factor = divisors(rest)[1]  # a prime
        sizes[rng.choice(list(sizes))] *= factor
        rest //= factor
    if sizes["pp"] > 1 and rng.random() < 0.4:
        sizes["vpp"] = 2
    if experts:
        stage = world // sizes["pp"]
        sizes["ep"] = rng.choice(divisors(stage))
        sizes["etp"] = rng.choice([1, *divisors(stage // sizes["ep"])])
    split = sizes["tp"] > 1 and (experts or rng.random() < 0.6)
    parts = [f"{kind}{size}" for kind, size in sizes.items() if size > 1]
    return LayoutSpec.parse("".join([*parts, *(["sp"] if split else []), *(["do"] if rng.random() < 0.5 else [])]))
