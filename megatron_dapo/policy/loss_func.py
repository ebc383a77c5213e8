"""Megatron's `loss_func`, made from DAPO's policy loss. Usable in any Megatron training script.

Megatron divides by the number of tokens correctly, over tensor, pipeline, context and data parallel ranks and all
micro-batches at once, if three things hold: `TransformerConfig.calculate_per_token_loss` is True, the loss function
returns the 3-tuple (local sum, local integer count, metrics), and the optimizer step follows
`finalize_model_grads` with that count. `make_loss_func` returns such a function; `check_transformer_config` refuses a
configuration under which the result would be off by a factor of the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.algorithm import LossInputs, LossOutputs, policy_loss, policy_loss_sum
from megatron_dapo.config import ConfigError
from megatron_dapo.config.algorithm import AlgorithmConfig

LossFunc = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Any]]]
# What the model's output says about each token: log-probs, and entropies where they are known.
ReadOutput = Callable[[Tensor], tuple[Tensor, Tensor | None]]


@dataclass(slots=True)
class LossTokens:
    """What is known of each token before the forward pass. Every tensor is [tokens]; see LossInputs."""

    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor
    counts: Tensor
    sequence_ids: Tensor
    sequences: int
    ref_logprobs: Tensor | None = None
    engine_logprobs: Tensor | None = None

    def part(self, chunk: slice) -> LossTokens:
        """These tokens alone. Right for losses of single tokens; sequence-level ones need them all."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if isinstance(value, Tensor):
                values[name] = value[chunk]
        return LossTokens(**values)

    def with_scores(self, logprobs: Tensor, entropy: Tensor | None) -> LossInputs:
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        return LossInputs(logprobs=logprobs, entropy=entropy, **known)


def from_head(output: Tensor) -> tuple[Tensor, Tensor | None]:
    """Reads our head's output [2, tokens]."""
    return output[0], output[1]


def from_cross_entropy(output: Tensor) -> tuple[Tensor, Tensor | None]:
    """Reads what a plain GPTModel returns when it is given labels: the cross-entropy of each token, [b, s]."""
    return -output.float().flatten(), None


def make_loss_func(
    tokens: LossTokens,
    config: AlgorithmConfig,
    *,
    cp_group: dist.ProcessGroup | None = None,
    read_output: ReadOutput = from_head,
) -> LossFunc:
    """The `loss_func` of one micro-batch. `cp_group` is needed where sequences are split over ranks."""

    def reduce(values: Tensor) -> Tensor:
        if cp_group is not None and cp_group.size() > 1:
            dist.all_reduce(values, group=cp_group)
        return values

    def loss_func(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        logprobs, entropy = read_output(output)
        result = policy_loss(tokens.with_scores(logprobs, entropy), config, reduce)
        return result.loss_sum, *_count_and_metrics(result, result.loss_sum)

    return loss_func


def _count_and_metrics(result: LossOutputs, loss: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """What follows the loss in Megatron's 3-tuple. Megatron accumulates counts in int32."""
    sums = {"loss_sum": loss.detach().double(), "denominator": result.denominator.double()}
    return result.denominator.to(torch.int32), {"sums": sums | result.sums, "maxima": result.maxima}


def is_per_token(config: AlgorithmConfig) -> bool:
    """Whether a token's loss needs nothing of its sequence but itself, so that the one-pass head can compute it."""
    return config.objective != "gspo" and config.importance_sampling.level != "sequence"


class OnePassLoss:
    """The same loss for the one-pass head, which calls it chunk by chunk inside the model.

    Metrics wait until `loss_func`: by then the device has the large products of the backward pass to work on.
    """

    def __init__(self, tokens: LossTokens, config: AlgorithmConfig) -> None:
        self._tokens, self._config = tokens, config
        self._scores: list[tuple[Tensor, Tensor]] = []

    def __call__(self, chunk: slice, logprobs: Tensor, entropy: Tensor) -> Tensor:
        self._scores.append((logprobs.detach(), entropy.detach()))
        return policy_loss_sum(self._tokens.part(chunk).with_scores(logprobs, entropy), self._config)

    def loss_func(self, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Megatron's loss_func; `output` is the loss that the model returned."""
        nothing = torch.zeros(0, device=output.device)  # a placeholder micro-batch scores no token
        logprobs = torch.cat([nothing, *(pair[0] for pair in self._scores)])
        entropy = torch.cat([nothing, *(pair[1] for pair in self._scores)])
        self._scores = []
        result = policy_loss(self._tokens.with_scores(logprobs, entropy), self._config)
        return output, *_count_and_metrics(result, output)


def check_transformer_config(config: Any, ddp_config: Any = None) -> None:
    """Raises ConfigError for Megatron settings under which the normaliser would be wrong."""
    if not config.calculate_per_token_loss:
        raise ConfigError(
            "calculate_per_token_loss is False: Megatron would average per micro-batch and ignore context parallelism; "
            "set TransformerConfig(calculate_per_token_loss=True)"
        )
    if ddp_config is not None and ddp_config.average_in_collective:
        raise ConfigError("average_in_collective divides by the number of ranks once more; set it to False")
