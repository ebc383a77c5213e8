"""The layouts that the self-check runs: how they are named, and the configuration of the compared updates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_dapo.config import Config, parse_config
from megatron_dapo.errors import UserError
from megatron_dapo.selfcheck.synthetic import ModelSize, multiple

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
