"""What the self-check compares: a case is a layout (`LayoutSpec`, by its name), a model and the settings of the loss.

`default_cases` is the table of the command: every layout with every model that fits it, and every objective with every
aggregation in layouts that split sequences and batches. `random_cases` draws from all their combinations.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from megatron_dapo.config import Config, ModelShape, check_model, check_world, parse_config
from megatron_dapo.config.algorithm import Aggregation
from megatron_dapo.errors import UserError
from megatron_dapo.selfcheck.synthetic import MODELS, ModelSize, multiple, synthetic_shape

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
    """fp32, with a micro-batch budget that depends on the layout, so that the splits differ."""
    budget = 512 if layout.name == "single" else 64 + 16 * (sum(map(ord, layout.name)) % 4)
    tp, cp = layout.size("tp"), layout.size("cp")
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
                "micro_batch_tokens": multiple(2 * cp * tp, at_least=budget),
                "head_chunk_tokens": 24,
                "moe_aux_loss_coefficient": 0.5,  # of models with experts; large, so that it shows in every gradient
                "timeout_seconds": 120,
                # A small eps would turn rounding errors of tiny gradients into steps of full size.
                "optimizer": {"lr": 1e-3, "warmup_steps": 0, "eps": 1e-5},
                **(policy or {}),
            },
            "rollout": {"max_prompt_tokens": 10, "max_response_tokens": 30, "temperature": 0.9},
            "algorithm": {
                "kl": {"coefficient": 0.05},
                "entropy_coefficient": 0.01,
                "off_policy": {"importance_weight": "token", "weight_cap": 1.5},
                **algorithm,
            },
        }
    )


DEFAULT_LAYOUTS = (
    "tp2", "tp2sp", "pp2", "pp2vpp2", "cp2", "dp2", "dp2do", "ep2", "tp4sp", "tp2pp2", "tp2cp2sp", "ep2tp2sp",
    "etp2tp2sp", "ep2dp4do", "ep4pp2",
)  # fmt: skip
OBJECTIVES = ("dapo", "gspo", "cispo")
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)
OBJECTIVE_LAYOUTS = ("cp2", "dp2")
WORLD_SIZES = {2: 4, 3: 1, 4: 5, 6: 1, 8: 3}  # of random layouts, with their weights
RECOMPUTE: tuple[dict[str, Any], ...] = (
    {}, {}, {"recompute": "full"}, {"recompute": "selective"},
    {"recompute": "selective", "recompute_modules": ["core_attn", "moe"]},
)  # fmt: skip
# Of the awkward mini-batch, the masks remove about a third of the tokens, a sixth and a sixth of the sequences.
OFF_POLICY: dict[str, dict[str, Any]] = {
    "off": {},
    "token weight": {"importance_weight": "token", "weight_cap": 1.5},
    "sequence weight": {"importance_weight": "sequence", "weight_cap": 1.5},
    "masks": {"token_mask": [0.5, 2.0], "geometric_mask": [0.8, 1.25], "opsm_delta": 0.05},
}
# The sequence's ratio is closer to 1 than a token's: with these bounds both kinds clip in the awkward mini-batch.
CLIP: dict[str, dict[str, Any]] = {
    "dapo": {}, "cispo": {}, "gspo": {"clip_low": 0.05, "clip_high": 0.05, "dual_clip": 10.0},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """`algorithm` and `policy` are settings on top of the self-check's own."""

    layout: LayoutSpec
    model: str = "dense"
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)
    size: ModelSize | None = None  # None: as the layout needs it

    @property
    def config(self) -> Config:
        return selfcheck_config(self.layout, policy=self.policy, **self.algorithm)

    @property
    def shape(self) -> ModelShape:
        return synthetic_shape(self.model, self.size or self.layout.model_size)

    @property
    def reference(self) -> Case:
        """The same model and loss in a single process."""
        kept = {key: value for key, value in self.policy.items() if key in ("routing_replay", "lora")}
        return replace(self, layout=SINGLE, policy=kept, size=self.size or self.layout.model_size)

    @property
    def key(self) -> str:
        """Equal for equal cases."""
        size = self.size or self.layout.model_size
        return json.dumps([self.layout.name, self.model, self.algorithm, self.policy, list(size)], sort_keys=True)

    @property
    def objective(self) -> str:
        return str(self.algorithm.get("objective", "dapo"))

    @property
    def aggregation(self) -> str:
        return str(self.algorithm.get("aggregation", "token-mean"))

    @property
    def name(self) -> str:
        recompute = [self.policy.get("recompute", ""), *self.policy.get("recompute_modules", [])]
        replay = "replay" if "routing_replay" in self.policy else ""
        return " ".join(filter(None, [self.layout.name, *recompute, replay]))

    def obstacle(self, job_ranks: int | None = None) -> str:
        """Why the case cannot exist; empty when it can."""
        try:
            policy = self.config.policy
            check_model(policy, self.shape)
            check_world(policy, job_ranks or self.layout.world_size)
        except UserError as error:
            return str(error)
        return ""


def cases_of(layout: LayoutSpec, job_ranks: int | None = None) -> list[Case]:
    """The layout with every model that fits it; raises UserError when none does."""
    cases = [Case(layout, model) for model in MODELS]
    possible = [case for case in cases if not case.obstacle(job_ranks)]
    if not possible:
        needed = Case(layout, "moe" if layout.size("ep") * layout.size("etp") > 1 else "dense")
        raise UserError(f"layout {layout.name!r}: {needed.obstacle(job_ranks)}")
    return possible


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
    policy = dict(rng.choice(RECOMPUTE))
    if experts and rng.random() < 0.3:
        policy["routing_replay"] = "engine"
    return Case(layout, model, settings, policy, size)


def _random_layout(rng: random.Random, world: int, *, experts: bool) -> LayoutSpec:
    sizes = {"tp": 1, "pp": 1, "cp": 1, "dp": 1}
    for factor in _prime_factors(world):
        sizes[rng.choice(list(sizes))] *= factor
    if sizes["pp"] > 1 and rng.random() < 0.4:
        sizes["vpp"] = 2
    if experts:
        stage = world // sizes["pp"]
        sizes["ep"] = rng.choice(_divisors(stage))
        sizes["etp"] = rng.choice([1, *_divisors(stage // sizes["ep"])])
    split = sizes["tp"] > 1 and (experts or rng.random() < 0.6)
    parts = [f"{kind}{size}" for kind, size in sizes.items() if size > 1]
    return LayoutSpec.parse("".join([*parts, *(["sp"] if split else []), *(["do"] if rng.random() < 0.5 else [])]))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _prime_factors(number: int) -> Iterator[int]:
    factor = 2
    while number > 1:
        while number % factor == 0:
            yield factor
            number //= factor
        factor += 1
