"""`critic`: the value model of `algorithm.advantage: gae`, its optimizer and its pre-training."""

from __future__ import annotations

from pydantic import Field

from megatron_dapo.config.base import PathText, Section
from megatron_dapo.config.policy import OptimizerConfig


class PretrainingConfig(Section):
    """Before the first policy update the critic alone is trained, on responses of the unchanged policy. VAPO's authors
    report 11 instead of 60 points without it."""

    steps: int = Field(0, ge=0)
    """Steps that train only the critic. They count as steps of the run."""
    explained_variance: float | None = Field(None, lt=1)
    """End pre-training earlier, as soon as the critic explains this share of the returns' variance in a batch; null:
    after `steps`."""


class CriticConfig(Section):
    """A model that predicts the return after each token, in the policy's layout, on the policy's ranks. Read only with
    `algorithm.advantage: gae`."""

    model: PathText = ""
    """What the critic starts from: a HF directory or name as in policy.model, with the same tokenizer. A language model
    gets a value head of zeros; a reward model of one label (score, v_head) and an exported critic bring theirs. Also a
    checkpoint's critic/ folder. Empty: policy.model."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=2e-6)
    clip: float | None = Field(0.5, gt=0)
    """A value that the updates have moved by more than this gains nothing from a smaller loss; null: no clipping."""
    epochs: int = Field(1, ge=1)
    """Passes over the mini-batches of a step."""
    offload: bool | None = None
    """Policy and critic take turns on the GPU: the one that does not compute is in host memory; null: on CUDA. They
    always do so if engines share the GPU."""
    pretraining: PretrainingConfig = PretrainingConfig()
