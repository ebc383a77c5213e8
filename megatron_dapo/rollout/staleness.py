"""How many weight versions the tokens of a batch are behind the weights that train on them.

A batch of step N is trained at version N. On-policy that is the version which the engine serves while it is collected;
with `rollout.max_staleness` above 0 the engine may serve an older one.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.errors import UserError
from megatron_dapo.types import Group


def trained_version(config: RolloutConfig, step: int, served: int) -> int:
    """The version that trains on the batch of `step`; `served`: the engine's version now."""
    return step if config.max_staleness else served


def staleness_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Of groups trained at `version`: of each group's oldest token (mean, max), and of all tokens (mean)."""
    oldest = [version - group.oldest_version for group in groups]
    spans = [span for group in groups for sample in group.samples for span in sample.weight_spans]
    tokens = sum(span.end - span.start for span in spans)
    behind = sum((version - span.version) * (span.end - span.start) for span in spans)
    return {
        "rollout/staleness": sum(oldest) / max(1, len(oldest)),
        "rollout/staleness_max": float(max(oldest, default=0)),
        "rollout/staleness_tokens": behind / max(1, tokens),
    }


def check_staleness(metrics: dict[str, float], config: RolloutConfig, step: int) -> None:
    """Admission control and carry-over keep this; a resumed run with a lower limit may not."""
    found = metrics["rollout/staleness_max"]
    if config.max_staleness and found > config.staleness_limit:
        raise UserError(
            f"the batch of step {step} has tokens that are {found:.0f} weight versions old, but rollout.max_staleness "
            f"is {config.max_staleness}: if it was lowered for a run that is resumed, use the earlier value until this "
            "step is trained"
        )
