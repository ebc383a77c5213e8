"""The gate: before the first update, trainer and engine must agree on the log-probs of the engine's samples.

A wrong weight mapping, RoPE base, temperature or tokenizer shows as a gap between the two log-probs of the same token.
Without the gate, such a run looks healthy for hours. With it, the run ends in its first minute with the measured gap.
A gap within the limits is printed, logged and, for the first step of a run, recorded as `gate/…`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_dapo.config.trainer import GateConfig
from megatron_dapo.errors import GateError
from megatron_dapo.policy.batch import Floats, TrainBatch


@dataclass(frozen=True, slots=True)
class Gap:
    """|log π_trainer − log π_engine| over the compared tokens, and KL(engine‖trainer) by its k3 estimate, in nats."""

    mean: float
    largest: float
    kl: float
    tokens: int

    def __str__(self) -> str:
        return (
            f"trainer and engine agree: mean |gap| {self.mean:.3g} nats, largest {self.largest:.3g}, KL {self.kl:.3g}, "
            f"over {self.tokens} tokens"
        )

    @property
    def metrics(self) -> dict[str, float]:
        return {"gate/mean_gap": self.mean, "gate/max_gap": self.largest, "gate/kl": self.kl}


def check_gate(
    batch: TrainBatch, logprobs: Floats, config: GateConfig, trained: NDArray[np.bool_] | None = None
) -> Gap:
    """Compares the trainer's `logprobs` [responses] with the engine's, of the tokens that are `trained` (default: all).
    Raises GateError if the gap is beyond the limits."""
    assert batch.engine_logprobs is not None
    difference = logprobs.astype(np.float64) - batch.engine_logprobs
    if trained is not None:  # the engine has no log-probs of the other tokens
        difference = np.where(trained, difference, 0.0)
    gap, compared = np.abs(difference), len(difference) if trained is None else int(trained.sum())
    mean, largest = (float(gap.sum() / compared), float(gap.max())) if compared else (0.0, 0.0)
    if not (mean <= config.max_mean_gap and largest <= config.max_gap):
        worst = int(np.argmax(np.where(np.isnan(gap), np.inf, gap)))
        sample = int(np.searchsorted(batch.response_offsets, worst, side="right")) - 1
        raise GateError(
            f"trainer and engine disagree about the engine's own samples: mean |gap| {mean:.4g} nats (limit "
            f"{config.max_mean_gap:g}), largest {largest:.4g} (limit {config.max_gap:g}) in sample {sample}, response "
            f"token {worst - int(batch.response_offsets[sample])}. The usual causes: the engine serves other weights "
            "than policy.model, a different RoPE base or norm epsilon, another sampling temperature, or less precision "
            "than trainer.gate allows for."
        )
    return Gap(mean, largest, float((np.expm1(difference) - difference).sum() / max(compared, 1)), compared)
