"""The two records that a loss reads: `TokenBatch`, known before the forward pass, and `Scores`, from the model.

Tokens are flat and packed: every tensor is [tokens]. A batch is one micro-batch, or one context-parallel rank's share
of it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

# Where the log-probs of the proximal policy are: the trainer's, before the first update of a step. "old": old_logprobs.
# "current": the scores, because no weight has changed since. "unknown": nowhere; old_logprobs are the engine's.
Proximal = Literal["old", "current", "unknown"]


class Scores(NamedTuple):
    """What the model says about each token. Both are differentiable and fp32."""

    logprobs: Tensor  # the policy's log-prob of the token
    entropy: Tensor | None = None  # of the policy's distribution at the token

    def part(self, chunk: slice) -> Scores:
        return Scores(self.logprobs[chunk], None if self.entropy is None else self.entropy[chunk])


@dataclass(slots=True)
class TokenBatch:
    """What is known of each token before the forward pass. Nothing here has a gradient.

    Positions that belong to no sequence (padding) have mask False and any id within 0..sequences−1.
    """

    old_logprobs: Tensor  # of the policy that the ratio compares with
    advantages: Tensor
    mask: Tensor  # bool: tokens that carry loss; truncated and ungraded samples are already masked out
    weights: Tensor  # from token_weights()
    counts: Tensor  # integer, from token_weights()
    sequence_ids: Tensor  # int64, 0..sequences−1
    sequences: int
    ref_logprobs: Tensor | None = None  # of the frozen reference policy
    engine_logprobs: Tensor | None = None  # as the inference engine reported them
    proximal: Proximal = "old"

    def proximal_logprobs(self, scores: Scores) -> Tensor | None:
        return {"old": self.old_logprobs, "current": scores.logprobs, "unknown": None}[self.proximal]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that the batch has, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def part(self, chunk: slice) -> TokenBatch:
        """These tokens alone. Only losses of single tokens may be computed on a part."""
        return replace(self, **{name: tensor[chunk] for name, tensor in self.tensors.items()})  # type: ignore[arg-type]

    def blanked(self) -> TokenBatch:
        """Zero at every masked position."""
        kept = ("mask", "sequence_ids")
        zeroed = {name: blank(tensor, self.mask) for name, tensor in self.tensors.items() if name not in kept}
        return replace(self, **zeroed)  # type: ignore[arg-type]


def blank(tensor: Tensor, mask: Tensor) -> Tensor:
    """`tensor` with zeros where `mask` is False. A product would not do: 0·NaN is NaN, and so is its gradient."""
    return torch.where(mask, tensor, torch.zeros_like(tensor))


INTEGERS = (torch.int64, torch.int32)
FLOATS = (torch.float32, torch.float64)  # a bf16 log-prob of −10 is off by up to 0.03
DTYPES = {"mask": (torch.bool,), "counts": INTEGERS, "sequence_ids": (torch.int64,)}


def check_shapes(scores: Scores, batch: TokenBatch) -> None:
    """Raises a ValueError that names the tensor. Reads shapes and types only, never values on the device."""
    tokens = scores.logprobs.numel()
    entropy = {} if scores.entropy is None else {"entropy": scores.entropy}
    for name, tensor in ({"logprobs": scores.logprobs} | batch.tensors | entropy).items():
        if tuple(tensor.shape) != (tokens,):
            raise ValueError(f"{name}: expected shape ({tokens},) like logprobs, found {tuple(tensor.shape)}")
        allowed = DTYPES.get(name, FLOATS)
        if tensor.dtype not in allowed:
            expected = " or ".join(str(dtype) for dtype in allowed)
            raise ValueError(f"{name}: expected {expected}, found {tensor.dtype}")
