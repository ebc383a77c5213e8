"""The whole configuration, and the checks that need more than one section."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from megatron_dapo.config.algorithm import PRESETS, AlgorithmConfig, OffPolicyConfig
from megatron_dapo.config.base import ConfigError, Section, is_secret, merged
from megatron_dapo.config.critic import CriticConfig
from megatron_dapo.config.data import DataConfig, EvalConfig, RewardConfig
from megatron_dapo.config.model import ModelShape
from megatron_dapo.config.policy import LoraConfig, PolicyConfig
from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.config.trainer import GateConfig, ObserveConfig, SlurmConfig, TrainerConfig

# Values above these are accepted with a warning.
USUAL = {
    "policy.optimizer.lr": (1e-2, "published runs use 1e-7 to 1e-5"),
    "policy.optimizer.weight_decay": (1.0, "weights would shrink faster than they learn"),
    "algorithm.clip_high": (1.0, "hardly any ratio would be clipped"),
    "algorithm.entropy_coefficient": (0.1, "the bonus would outweigh the reward"),
    "algorithm.kl.coefficient": (1.0, "the penalty would outweigh the reward"),
    "algorithm.overlong.factor": (10.0, "the penalty would outweigh the reward"),
    "rollout.temperature": (2.0, "responses would be close to random tokens"),
    "evaluate.temperature": (2.0, "responses would be close to random tokens"),
    "rollout.samples_per_prompt": (1024, "published runs use 8 to 64"),
    "rollout.sampler.oversampling": (16.0, "it is a multiple of the batch, not a number of prompts"),
    "trainer.steps": (1_000_000, "published runs have 100 to 10000"),
}


class Config(Section):
    policy: PolicyConfig = PolicyConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    data: DataConfig = DataConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    evaluate: EvalConfig = EvalConfig()
    trainer: TrainerConfig = TrainerConfig()
    observe: ObserveConfig = ObserveConfig()
    slurm: SlurmConfig = SlurmConfig()

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: Any) -> Any:
        algorithm = values.get("algorithm") if isinstance(values, dict) else None
        preset = algorithm.get("preset") if isinstance(algorithm, dict) else None
        return merged(PRESETS[preset], values) if preset in PRESETS else values

    @model_validator(mode="after")
    def _evaluate_as_trained(self) -> Self:
        data = self.evaluate.data.model_copy()
        same = {"template", "system"} - data.model_fields_set
        data.__dict__.update({key: getattr(self.data, key) for key in same})  # they do not count as set
        self.__dict__["evaluate"] = self.evaluate.model_copy(update={"data": data})
        return self

    @property
    def warnings(self) -> list[str]:
        """Settings that are accepted but probably not meant, one line each; printed when a run starts."""
        return [
            *self.algorithm.warnings, *self._uncorrected_staleness(), *self._penalty_in_wrong_groups(),
            *self._unusual_values(), *self._without_effect(),
        ]  # fmt: skip

    def _unusual_values(self) -> list[str]:
        found = []
        for key, (usual, why) in USUAL.items():
            value = reduce(getattr, key.split("."), self)
            wide = key == "algorithm.clip_high" and self.algorithm.objective == "cispo"  # its weight is bounded by it
            if isinstance(value, int | float) and value > usual and not wide:
                found.append(f"{key} is {value:g}, which is more than {usual:g}: {why}")
        low, high = self.algorithm.clip_low, self.algorithm.clip_high
        if low > high:
            found.append(
                f"algorithm.clip_low ({low:g}) is above clip_high ({high:g}): DAPO's upper bound is the wider one"
            )
        return found

    def _without_effect(self) -> list[str]:
        """Settings that contradict others, or that the chosen engine does not read."""
        optimizer, rollout, evaluate = self.policy.optimizer, self.rollout, self.evaluate
        found = []
        if optimizer.warmup_steps >= self.trainer.steps:
            found.append(
                f"policy.optimizer.warmup_steps is {optimizer.warmup_steps} of {self.trainer.steps} steps: the run "
                "ends before the learning rate reaches lr"
            )
        pretraining = self.critic.pretraining.steps
        if self.uses_critic and pretraining >= self.trainer.steps:
            found.append(
                f"critic.pretraining.steps is {pretraining} of {self.trainer.steps} steps: the run trains a critic and "
                "leaves the policy as it is"
            )
        if not evaluate.data.files and evaluate.every not in (0, EvalConfig().every):
            found.append(f"evaluate.every is {evaluate.every}, but there is no evaluate.data: nothing is evaluated")
        if rollout.sampler.max_generation_batches is None and rollout.sampler.on_limit != "train":
            found.append(
                f"rollout.sampler.on_limit is {rollout.sampler.on_limit}, but max_generation_batches is null: there "
                "is no limit"
            )
        if rollout.engine != "sglang":
            unused = {"servers": rollout.servers, "weights": rollout.weights}
            keys = [f"rollout.{name}.{key}" for name, section in unused.items() for key, value in section
                    if value != type(section).model_fields[key].get_default(call_default_factory=True)
                    and key not in ("directory", "in_flight")]  # fmt: skip
            found += [f"{key} has no effect with rollout.engine: embedded" for key in keys]
        return found

    def _uncorrected_staleness(self) -> Iterator[str]:
        """The ratio to a recomputed π_old says nothing about the distance from the policy that generated."""
        off_policy, staleness = self.algorithm.off_policy, self.rollout.max_staleness
        corrected = off_policy.reads_old_logprobs or off_policy.opsm_delta is not None
        if staleness >= 2 and not corrected and self.recomputes_old_logprobs:
            yield (
                f"rollout.max_staleness is {staleness} and algorithm.off_policy corrects nothing: stale batches push "
                "the policy further than a clipped ratio shows. Set algorithm.off_policy.importance_weight: token"
            )

    def _penalty_in_wrong_groups(self) -> Iterator[str]:
        """Dynamic sampling drops groups without a right response before the penalty is added (examples/ablations)."""
        penalty, keeps_all = self.algorithm.overlong.penalty, not self.rollout.dynamic_sampling
        if penalty != "none" and keeps_all and self.algorithm.advantage == "group-std":
            yield (
                f"algorithm.overlong.penalty is {penalty} and rollout.dynamic_sampling is false: in a group without a "
                "right response the penalty alone differs, and the group's std makes it as large as a reward, so short "
                "wrong responses are reinforced. Turn dynamic sampling on, or use algorithm.advantage: group-mean"
            )

    @property
    def overlong_max_length(self) -> int:
        return self.algorithm.overlong.max_length or self.rollout.max_response_tokens

    @property
    def aggregation_length(self) -> int:
        return self.algorithm.aggregation_length or self.rollout.max_response_tokens

    @property
    def recomputes_old_logprobs(self) -> bool:
        """Whether the trainer computes the log-probs of the proximal policy; otherwise they are the engine's."""
        if self.trainer.old_logprobs == "auto":
            return self.trainer.updates_per_step > 1 or bool(self.algorithm.off_policy.reads_old_logprobs)
        return self.trainer.old_logprobs == "recompute"

    @property
    def counts_by_log_probs(self) -> bool:
        """Whether a number of the whole mini-batch depends on log-probs, which every rank then needs of all samples."""
        off_policy = self.algorithm.off_policy
        counts = self.algorithm.positive_coefficient > 0 or self.policy.moe_aux_loss_coefficient > 0
        # The samples of one rollout may be on several ranks.
        counts |= self.rollout.generate is not None and self.algorithm.aggregation != "token-mean"
        return off_policy.normalize_weights or (counts and bool(off_policy.sequence_masks))

    @property
    def uses_critic(self) -> bool:
        return self.algorithm.advantage == "gae"

    @property
    def of_critic(self) -> Config:
        """The same run with the critic in the policy's place: its model and optimizer in the policy's layout. Its loss
        is a mean over tokens, without the terms of the policy's."""
        policy = self.policy.model_copy(
            update={
                "model": self.critic.model or self.policy.model,
                "optimizer": self.critic.optimizer,
                "megatron_checkpoint": None,
                "lora": LoraConfig(),
                "routing_replay": "off",
            }
        )
        algorithm = self.algorithm.model_copy(
            update={"aggregation": "token-mean", "positive_coefficient": 0.0, "off_policy": OffPolicyConfig()}
        )
        return self.model_copy(update={"policy": policy, "algorithm": algorithm})

    @property
    def resolved_evaluate(self) -> EvalConfig:
        """`evaluate` with what it leaves to `rollout` filled in."""
        shared = ("stop", "stop_token_ids", "max_response_tokens")
        left = {name: getattr(self.rollout, name) for name in shared if getattr(self.evaluate, name) is None}
        return self.evaluate.model_copy(update=left)

    @property
    def gate(self) -> GateConfig:
        """`trainer.gate`, which allows no gap with `policy.true_on_policy`."""
        exact = {"max_mean_gap": 0.0, "max_gap": 0.0}
        return self.trainer.gate.model_copy(update=exact if self.policy.true_on_policy else {})

    def check(self) -> None:
        checks = (
            self._check_groups, self._check_lengths, self._check_overlong, self._check_environment,
            self._check_critic, self._check_distillation, self._check_time_limits, self._check_off_policy,
            self._check_routing_replay, self._check_true_on_policy, self._check_adapters,
        )  # fmt: skip
        for check in checks:
            check()

    def _check_critic(self) -> None:
        pretraining = self.critic.pretraining
        if pretraining.explained_variance is not None and not pretraining.steps:
            raise ValueError("critic.pretraining.explained_variance ends pre-training before its steps, which are 0")
        if self.uses_critic:
            self.check_second_model()

    def check_second_model(self) -> None:
        """What a run with a critic cannot have. Only the loaded plugin says whether a custom advantage needs one."""
        if self.algorithm.distillation.alone:  # it removes all other advantages, but the critic's are added later
            raise ConfigError("algorithm.distillation.alone needs an algorithm.advantage without a critic (group-std)")
        if self.rollout.servers.share_base:
            raise ConfigError("rollout.servers.share_base needs a run with no critic: set it to false")
        if self.policy.tp_comm_overlap:
            raise ConfigError("policy.tp_comm_overlap has buffers for one model; the critic is a second: turn it off")
        if self.policy.precision == "bf16" and not self.policy.distributed_optimizer:
            raise ConfigError(
                "policy.distributed_optimizer is false, but the critic's value head is in fp32 among weights in bf16, "
                "and Megatron's other optimizer cannot save it: set it to true"
            )

    def _check_distillation(self) -> None:
        distillation = self.algorithm.distillation
        if distillation.enabled and self.rollout.temperature != 1.0:
            raise ValueError(
                f"algorithm.distillation compares log-probs at temperature 1, but rollout.temperature is "
                f"{self.rollout.temperature:g}: set it to 1"
            )
        if distillation.alone and self.rollout.dynamic_sampling:
            raise ValueError(
                "algorithm.distillation.alone trains on every response, but rollout.dynamic_sampling drops groups by "
                "their grades: set it to false"
            )
        if distillation.alone and self.algorithm.positive_coefficient > 0:
            raise ValueError("algorithm.distillation.alone trains without grades: set positive_coefficient to 0")

    def _check_time_limits(self) -> None:
        """The error of the sampler saves the run; the watchdog, which ends a hanging process, cannot."""
        heartbeat, stall = self.trainer.heartbeat, self.rollout.sampler.stall_timeout
        if heartbeat.every and heartbeat.stuck <= stall:
            raise ValueError(
                f"trainer.heartbeat.stuck ({heartbeat.stuck:g}) must be more than rollout.sampler.stall_timeout "
                f"({stall:g}): raise it, or lower the other"
            )

    def _check_off_policy(self) -> None:
        used = self.algorithm.off_policy.reads_old_logprobs
        if used and not self.recomputes_old_logprobs:
            raise ValueError(
                f"algorithm.off_policy.{used[0]} compares the trainer's old log-probs with the engine's, but "
                "trainer.old_logprobs is engine: they are the same numbers, and it would do nothing. Set "
                "trainer.old_logprobs to auto or recompute"
            )

    def _check_true_on_policy(self) -> None:
        policy, rollout = self.policy, self.rollout
        exact, servers = policy.true_on_policy, rollout.servers
        rollout.embedded._exact = exact
        servers.demand(exact=exact and rollout.engine == "sglang")
        if not exact:
            return
        parallel = policy.tensor_parallel * policy.context_parallel * policy.expert_parallel
        if parallel > 1 or policy.precision != ("bf16" if rollout.engine == "sglang" else "fp32"):
            raise ValueError(
                "policy.true_on_policy needs policy.precision bf16 with rollout.engine sglang and fp32 with embedded, "
                "and no tensor, context or expert parallelism"
            )
        other = {
            "policy.lora.rank": policy.lora.rank, "policy.fp8.recipe": policy.fp8.recipe != "none",
            "rollout.servers.tensor_parallel": servers.tensor_parallel > 1,
            "rollout.servers.dtype": servers.dtype not in ("auto", "bfloat16"),
            "rollout.weights.quantization": rollout.weights.quantization != "none",
        }  # fmt: skip
        changed = [
            key for key, value in other.items() if value and (rollout.engine == "sglang" or key == "policy.lora.rank")
        ]
        if changed:
            why = "trainer and engine compute the same products, on one device"
            raise ValueError(f"policy.true_on_policy needs the default of {', '.join(changed)}: {why}")

    def _check_routing_replay(self) -> None:
        mode = self.policy.routing_replay
        self.rollout.servers.demand(returns_experts=mode == "engine")
        if mode == "engine" and self.rollout.engine != "sglang":
            raise ValueError(
                f"policy.routing_replay is engine, but rollout.engine is {self.rollout.engine}: only SGLang's servers "
                "report the experts of a token; change it, or use old_log_probs"
            )
        if mode == "old_log_probs" and not self.recomputes_old_logprobs:
            raise ValueError(
                "policy.routing_replay is old_log_probs, but the trainer computes none: set trainer.old_logprobs to "
                "recompute, or routing_replay to off"
            )
        if mode == "engine" and self.rollout.in_flight and self.rollout.weights.pause_mode == "retract":
            raise ValueError(
                "policy.routing_replay is engine, but rollout.weights.pause_mode is retract: SGLang computes retracted "
                "requests again with the new weights and then reports their experts for tokens that the older weights "
                "generated. Use pause_mode abort or in_place, weights.in_flight: false, or old_log_probs"
            )
        if mode != "off" and self.policy.moe.router_fusion:
            raise ValueError("policy.moe.router_fusion chooses the experts itself: turn it off to use routing_replay")

    def _check_adapters(self) -> None:
        if self.rollout.servers.share_base:
            self._check_shared_base()
        if not self.rollout.sends_adapters:
            return
        if not self.policy.lora.rank:
            raise ValueError(
                "rollout.weights.transport is adapter, but policy.lora.rank is 0: there is no adapter to send"
            )
        if self.policy.megatron_checkpoint:
            raise ValueError(
                "rollout.weights.transport is adapter, which never sends the base, but policy.megatron_checkpoint has "
                "another one than the engines load: convert it to a HF model, or use disk"
            )
        self.rollout.servers.demand(lora=self.policy.lora)

    def _check_shared_base(self) -> None:
        servers, policy = self.rollout.servers, self.policy
        dtypes = ("auto", "bfloat16") if policy.precision == "bf16" else ("float32",)
        needed = {
            "rollout.engine: sglang": self.rollout.engine == "sglang",
            "rollout.weights.transport: adapter": self.rollout.weights.transport == "adapter",
            f"rollout.servers.dtype: {dtypes[-1]}": servers.dtype in dtypes,
            "slurm.engine_nodes: 0": not self.slurm.engine_nodes,
            "trainer.ranks: 1": self.trainer.ranks == 1,
            "rollout.servers.count: 1": servers.count == 1,
            "rollout.servers.tensor_parallel: 1": servers.tensor_parallel == 1,
            "a server that this run starts (no rollout.servers.urls)": not servers.urls,
            "policy.true_on_policy: false": not policy.true_on_policy,
        }
        if missing := [key for key, there in needed.items() if not there]:
            raise ValueError(f"rollout.servers.share_base needs {', '.join(missing)}")

    def _check_environment(self) -> None:
        """Both dictionaries are written into the run directory, and into the batch script."""
        servers, slurm = self.rollout.servers.environment, self.slurm.environment
        for key, variables in (("rollout.servers.environment", servers), ("slurm.environment", slurm)):
            for name in variables:
                if is_secret(name):
                    raise ValueError(
                        f"{key} has {name}, which looks like a secret and would be readable in the run directory: "
                        "export it in the shell that starts the run instead"
                    )

    def _check_groups(self) -> None:
        if self.rollout.samples_per_prompt > 1:
            return
        if self.algorithm.compares_groups:
            raise ValueError(
                "rollout.samples_per_prompt is 1, but advantages compare the samples of one prompt: use 2 or more, or "
                "algorithm.advantage: reinforce++ or gae"
            )
        if self.rollout.dynamic_sampling:
            raise ValueError(
                "rollout.samples_per_prompt is 1, but rollout.dynamic_sampling drops groups whose samples are all "
                "right or all wrong: set it to false"
            )

    def _check_lengths(self) -> None:
        longest = self.rollout.max_prompt_tokens + self.rollout.max_response_tokens
        if self.policy.micro_batch_tokens < longest:
            raise ValueError(
                f"policy.micro_batch_tokens ({self.policy.micro_batch_tokens}) is smaller than the longest sequence, "
                f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest}: raise it to at least "
                f"{-(-longest // self.policy.pack_alignment) * self.policy.pack_alignment}"
            )

    def _check_overlong(self) -> None:
        overlong, response = self.algorithm.overlong, self.rollout.max_response_tokens
        if overlong.penalty in ("soft", "linear"):
            if overlong.cache_length >= self.overlong_max_length:
                raise ValueError(
                    f"algorithm.overlong.cache_length ({overlong.cache_length}) must be smaller than L_max "
                    f"({self.overlong_max_length}): lower it, or every response is penalised"
                )
            if self.overlong_max_length - overlong.cache_length >= response:
                raise ValueError(
                    f"the length penalty starts at {self.overlong_max_length - overlong.cache_length} tokens, but "
                    f"rollout.max_response_tokens is {response}: it would never fire; lower "
                    "algorithm.overlong.max_length or raise rollout.max_response_tokens"
                )
        if overlong.penalty == "relative" and self.overlong_max_length >= response:
            raise ValueError(
                f"algorithm.overlong.penalty 'relative' starts beyond max_length ({self.overlong_max_length}), but "
                f"responses end at {response}: set algorithm.overlong.max_length below it"
            )


def check_model(policy: PolicyConfig, shape: ModelShape, max_tokens: int | None = None) -> None:
    """Checks the layout against the model. Every message names the key to change."""
    _check_heads(policy, shape)
    if policy.alignment_problem:
        raise ConfigError(f"policy: {policy.alignment_problem}")
    _check_mlp(policy, shape)
    _check_stages(policy, shape)
    _check_linear_attention(policy, shape)
    _check_experts(policy, shape)
    _check_exact_kernels(policy, shape)
    if max_tokens is not None:
        _check_positions(shape, "rollout", max_tokens)


def _check_positions(shape: ModelShape, section: str, tokens: int) -> None:
    if tokens > shape.max_positions:
        raise ConfigError(
            f"rollout.max_prompt_tokens + {section}.max_response_tokens is {tokens}, but the model has "
            f"{shape.max_positions} positions (max_position_embeddings): lower one of them"
        )


def _check_exact_kernels(policy: PolicyConfig, shape: ModelShape) -> None:
    if not policy.uses_exact_kernels:
        return
    reasons = {
        "experts": shape.is_moe,
        "linear attention": bool(shape.linear),
        "gated attention": shape.attention_gate,
        "zero-centred norms": shape.zero_centred_norms,
        "scaled rotary positions (rope_scaling)": shape.rope_scaling is not None,
        "partly rotated heads": shape.rotated != shape.head_dim,
        f"heads of size {shape.head_dim}": shape.head_dim not in (16, 32, 64, 128, 256),
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ConfigError(
            f"policy.true_on_policy has no kernels for models with {', '.join(found)} on CUDA: turn it off, or use the "
            "embedded engine on the CPU, in fp32"
        )


def _check_heads(policy: PolicyConfig, shape: ModelShape) -> None:
    tp = policy.tensor_parallel
    if shape.heads % tp:
        raise ConfigError(
            f"policy.tensor_parallel {tp} does not divide the model's {shape.heads} attention heads; choose one of "
            f"{_divisors(shape.heads)}"
        )
    if shape.kv_heads % tp and tp % shape.kv_heads:
        fitting = [d for d in divisors(shape.heads) if shape.kv_heads % d == 0 or d % shape.kv_heads == 0]
        raise ConfigError(
            f"policy.tensor_parallel is {tp}, but the model has {shape.kv_heads} key/value heads: it must divide them "
            f"or be a multiple of them; choose one of {', '.join(map(str, fitting))}"
        )


def _check_mlp(policy: PolicyConfig, shape: ModelShape) -> None:
    tp = policy.tensor_parallel
    sizes = {
        "the MLP": 0 if shape.moe_layers == shape.layers else shape.ffn_hidden,
        "the shared expert": shape.shared_ffn_hidden,
    }
    for what, size in sizes.items():
        if size % tp:
            raise ConfigError(
                f"policy.tensor_parallel is {tp}, but {what} has {size} hidden units: choose one of "
                f"{_divisors(math.gcd(size, shape.heads))}"
            )


def _check_stages(policy: PolicyConfig, shape: ModelShape) -> None:
    pp, vpp = policy.pipeline_parallel, policy.virtual_pipeline
    stages = policy.stage_layers(shape.layers)
    if stages is None or any(count % vpp for count in stages):
        given = [f"{n} {c}" for n in ("first_stage_layers", "last_stage_layers") if (c := getattr(policy, n))]
        product = f"policy.pipeline_parallel × virtual_pipeline is {pp} × {vpp} = {pp * vpp}"
        ends = stage_ends(shape.layers, pp, vpp)
        uneven = f", or set policy.first_stage_layers={ends[0]} and policy.last_stage_layers={ends[1]}" if ends else ""
        raise ConfigError(
            f"{product}{', with ' + ' and '.join(given) if given else ''}, but the model has {shape.layers} layers: "
            f"choose a product among {_divisors(shape.layers)}{uneven}"
        )
    if policy.recompute_layers is not None and policy.recompute_layers > max(stages) // vpp:
        raise ConfigError(
            f"policy.recompute_layers is {policy.recompute_layers}, but a model chunk has {max(stages) // vpp} layers: "
            "lower it, or remove it to recompute all"
        )


def stage_ends(layers: int, pp: int, vpp: int) -> tuple[int, int] | None:
    """Layers of the first and the last stage such that the others are equal, all as even as possible; the last stage,
    which has the output layer, gets no more than the first."""
    pairs = [
        (first, last)
        for first in range(vpp, layers, vpp)
        for last in range(vpp, first + 1, vpp)
        if pp > 2 and (rest := layers - first - last) > 0 and rest % ((pp - 2) * vpp) == 0
    ]
    return min(pairs, key=lambda pair: max(abs(end - layers / pp) for end in pair), default=None)


def _check_linear_attention(policy: PolicyConfig, shape: ModelShape) -> None:
    tp, cp = policy.tensor_parallel, policy.context_parallel
    if shape.linear and shape.linear.key_heads % (tp * cp):
        raise ConfigError(
            f"policy.tensor_parallel × context_parallel is {tp} × {cp}, but the gated DeltaNet layers have "
            f"{shape.linear.key_heads} key heads, which both split: choose a product among "
            f"{_divisors(shape.linear.key_heads)}"
        )
    if shape.linear and policy.precision == "bf16" and not policy.distributed_optimizer:
        raise ConfigError(
            "policy.distributed_optimizer is false, but gated DeltaNet layers have parameters in fp32 among those in "
            "bf16, and Megatron's other optimizer cannot save them: set it to true"
        )
    if shape.attention_gate and tp > shape.kv_heads:
        raise ConfigError(
            f"policy.tensor_parallel is {tp}, but the model has {shape.kv_heads} key/value heads, and Megatron cannot "
            "give one head of gated attention to several ranks: lower tensor_parallel, or use context_parallel"
        )


def _check_experts(policy: PolicyConfig, shape: ModelShape) -> None:
    ep, etp = policy.expert_parallel, policy.expert_tensor_parallel
    if not shape.is_moe:
        for name, size in (("expert_parallel", ep), ("expert_tensor_parallel", etp)):
            if size > 1:
                raise ConfigError(f"policy.{name} is {size}, but the model has no experts: set it to 1")
        if policy.routing_replay != "off":
            raise ConfigError(
                f"policy.routing_replay is {policy.routing_replay}, but the model has no experts: remove it"
            )
    elif shape.experts % ep:
        raise ConfigError(
            f"policy.expert_parallel is {ep}, but the model has {shape.experts} experts: "
            f"choose one of {_divisors(shape.experts)}"
        )
    elif shape.expert_ffn_hidden % etp:
        raise ConfigError(
            f"policy.expert_tensor_parallel is {etp}, but experts have {shape.expert_ffn_hidden} hidden units: "
            "choose a divisor"
        )
    tp = policy.tensor_parallel
    if shape.is_moe and tp > 1 and not policy.uses_sequence_parallel:
        raise ConfigError(
            f"policy.sequence_parallel is false, but the model has experts and policy.tensor_parallel is {tp}: without "
            "sequence parallelism every tensor-parallel rank would send the same tokens to the experts, which Megatron "
            "refuses: remove policy.sequence_parallel, or set tensor_parallel to 1"
        )
    of_experts = {"moe": True, "moe_act": True, "shared_experts": True, "mlp": False}
    for module in policy.recompute_modules:
        needed = of_experts.get(module)
        if (needed and not shape.is_moe) or (needed is False and shape.moe_layers == shape.layers):
            kind = "no experts" if needed else "experts instead of dense MLPs: use moe"
            raise ConfigError(f"policy.recompute_modules has {module!r}, but the model has {kind}")


def check_world(policy: PolicyConfig, world_size: int) -> None:
    """Checks the layout against the number of ranks."""
    if world_size % policy.model_ranks:
        raise ConfigError(
            f"{world_size} ranks cannot hold tensor × pipeline × context parallel = {policy.tensor_parallel} × "
            f"{policy.pipeline_parallel} × {policy.context_parallel} = {policy.model_ranks}: "
            f"use a multiple of {policy.model_ranks} ranks"
        )
    # Experts are spread over tensor × context × data ranks of one pipeline stage.
    stage, etp = world_size // policy.pipeline_parallel, policy.expert_tensor_parallel
    if stage % (policy.expert_parallel * etp):
        product = "" if etp == 1 else f" × expert_tensor_parallel = {policy.expert_parallel} × {etp}"
        raise ConfigError(
            f"policy.expert_parallel{product} is {policy.expert_parallel * etp}, but a pipeline stage has {stage} "
            f"{'rank' if stage == 1 else 'ranks'}: choose one of {_divisors(stage)}"
        )


def check_config(config: Config, world_size: int | None = None, shape: ModelShape | None = None) -> ModelShape | None:
    """All checks that read the model directory; with `shape` it is not read. Returns the model's shape, or None when no
    model is named."""
    if not config.policy.model:
        if world_size is not None:
            check_world(config.policy, world_size)
        return None
    if shape is None:
        if not Path(config.policy.model).is_dir():
            raise ConfigError(f"policy.model: {config.policy.model} is not a directory, nor OWNER/NAME on the hub")
        shape = ModelShape.from_dir(config.policy.model)
    if shape.head == "value":
        raise ConfigError(f"policy.model: {config.policy.model} is a value model; it can be critic.model")
    check_model(config.policy, shape, config.rollout.max_prompt_tokens + config.rollout.max_response_tokens)
    if config.evaluate.data.files:  # servers refuse longer requests
        evaluated = config.rollout.max_prompt_tokens + (config.evaluate.max_response_tokens or 0)
        _check_positions(shape, "evaluate", evaluated)
    if config.policy.moe_aux_loss_coefficient and not shape.is_moe:
        raise ConfigError("policy.moe_aux_loss_coefficient is set, but the model has no experts: remove it")
    if shape.dense_layers and config.rollout.engine == "sglang":
        raise ConfigError(
            f"{config.policy.model} has layers without experts (mlp_only_layers, decoder_sparse_step), but SGLang, up "
            "to 0.5.23, gives experts with random weights to every layer: use rollout.engine embedded, or another model"
        )
    targets = set(config.policy.lora.targets)
    in_experts = shape.is_moe and (not targets or bool(targets & {"gate_proj", "up_proj", "down_proj"}))
    if config.rollout.sends_adapters and (in_experts or shape.linear):
        raise ConfigError(
            f"rollout.weights.transport is adapter, but {config.policy.model} has experts or linear attention, whose "
            "adapters SGLang may skip: use disk, tensor or distributed, or, for a model with experts, attention layers "
            "alone (policy.lora.targets: [q_proj, k_proj, v_proj, o_proj])"
        )
    if config.rollout.shares_base and shape.is_moe:
        raise ConfigError("rollout.servers.share_base is for dense models: SGLang arranges experts in another way")
    if world_size is not None:
        check_world(config.policy, world_size)
    for section, tokens in (("rollout", config.rollout.stop_token_ids), ("evaluate", config.evaluate.stop_token_ids)):
        if (last := max(tokens or (), default=0)) >= shape.vocab:
            raise ConfigError(
                f"{section}.stop_token_ids has {last}, but the model's vocabulary has {shape.vocab} tokens: remove it"
            )
    return shape


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _divisors(n: int) -> str:
    return ", ".join(map(str, divisors(n)))
