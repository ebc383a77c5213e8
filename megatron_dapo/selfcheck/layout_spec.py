"""The layouts that the self-check runs: how they are named, and the configuration of the compared updates."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from megatron_dapo.config import Config, parse_config
from megatron_dapo.errors import UserError

PART = re.compile(r"(vpp|tp|pp|cp|dp|ep)([1-9]\d*)|(sp|do)")


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
                f"layout {name!r}: expected parts such as tp2, pp2, vpp2, cp2, dp2, ep2, sp, do, each at most once"
            )
        sizes = {part[1]: int(part[2]) for part in parts if part[1]}
        return cls(name, sizes, sequence_parallel="sp" in kinds, distributed_optimizer="do" in kinds)

    def size(self, kind: str) -> int:
        return self.sizes.get(kind, 1)

    @property
    def model(self) -> str:
        """Expert parallelism needs experts; pipeline stages are tested with tied embeddings, the harder case."""
        if self.size("ep") > 1:
            return "moe"
        return "tied" if self.size("pp") > 1 else "dense"

    @property
    def world_size(self) -> int:
        """The ranks it needs. Experts are spread over tensor, context and data ranks."""
        model = self.size("tp") * self.size("pp") * self.size("cp")
        experts = -(-self.size("ep") // (self.size("tp") * self.size("cp")))
        return model * max(self.size("dp"), experts)


def selfcheck_config(layout: LayoutSpec, **algorithm: Any) -> Config:
    """fp32, with a micro-batch budget that depends on the layout, so that the splits differ."""
    budget = 512 if layout.name == "single" else 64 + 16 * (sum(map(ord, layout.name)) % 4)
    return parse_config(
        {
            "policy": {
                "tensor_parallel": layout.size("tp"),
                "pipeline_parallel": layout.size("pp"),
                "virtual_pipeline": layout.size("vpp"),
                "context_parallel": layout.size("cp"),
                "expert_parallel": layout.size("ep"),
                "sequence_parallel": layout.sequence_parallel,
                "distributed_optimizer": layout.distributed_optimizer,
                "precision": "fp32",
                "micro_batch_tokens": budget,
                "head_chunk_tokens": 24,
                "timeout_seconds": 120,
                "optimizer": {"lr": 1e-3, "warmup_steps": 0},
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
