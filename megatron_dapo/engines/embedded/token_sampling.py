"""Samples tokens from the distribution that SGLang samples from, with one random number per (seed, position).

Sequences are independent of each other, so a request's tokens do not depend on the batch. The random number of a
position is a hash of the request's seed and the position in the whole sequence: a sample that is interrupted and
continued gets the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_dapo.engines.protocol import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position): splitmix64 applied twice, the upper 53 bits."""
    with np.errstate(over="ignore"):
        mixed = _splitmix(_splitmix(seeds) + positions * _GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@torch.inference_mode()
def sample_tokens(
    logits: Tensor, params: Sequence[SamplingParams], numbers: NDArray[np.float64]
) -> tuple[Tensor, Tensor]:
    """logits [tokens, vocabulary] -> (token, log-prob), each [tokens]; log-probs as protocol.py defines them."""
    temperatures = torch.tensor([p.temperature if p.temperature > 0 else 1.0 for p in params])
    logprobs = torch.log_softmax(logits.float() / temperatures.unsqueeze(1), dim=-1)
    weights = logprobs.exp().double()
    if any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params):
        weights = _truncate(weights, params)
    ends = weights.cumsum(-1)
    thresholds = torch.from_numpy(numbers).unsqueeze(1) * ends[:, -1:]
    tokens = (ends <= thresholds).sum(-1)
    greedy = torch.tensor([p.temperature == 0 for p in params])
    # A threshold that rounds up to the total lies beyond the last token: take the most likely one instead.
    tokens = torch.where(greedy | (tokens >= logits.shape[1]), logprobs.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _truncate(weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Sets weights outside top-k, top-p and min-p to zero; all three are measured on the full distribution."""
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    top_k = torch.tensor([p.top_k if p.top_k > 0 else weights.shape[1] for p in params]).unsqueeze(1)
    top_p = torch.tensor([p.top_p for p in params], dtype=weights.dtype).unsqueeze(1)
    min_p = torch.tensor([p.min_p for p in params], dtype=weights.dtype).unsqueeze(1)
    excluded = torch.arange(weights.shape[1]).unsqueeze(0) >= top_k
    excluded |= (before > top_p) & (top_p < 1)
    excluded |= ordered < ordered[:, :1] * min_p
    return torch.zeros_like(weights).scatter_(1, order, ordered.masked_fill(excluded, 0.0))
