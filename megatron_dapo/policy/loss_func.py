"""Megatron's `loss_func`, made from the policy loss. Usable in any Megatron training script.

Megatron divides by the global token count, over all ranks and all micro-batches, if three things hold:
`TransformerConfig.calculate_per_token_loss` is True, the loss function returns the 3-tuple (local sum, local integer
count, metrics), and `finalize_model_grads` gets that count before the optimizer steps. `make_loss_func` returns such a
function. `check_transformer_config` refuses settings under which the result would depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.algorithm import LossOutputs, PolicyLoss, Scores, TokenBatch
from megatron_dapo.config import ConfigError

LossFunc = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Any]]]
ReadOutput = Callable[[Tensor], Scores]  # what the model's output says about each token


def from_head(output: Tensor) -> Scores:
    """Reads our head's output [2, tokens]."""
    return Scores(output[0], output[1])


def from_cross_entropy(output: Tensor) -> Scores:
    """Reads what a plain GPTModel returns when it gets labels: the cross-entropy of each token, [b, s]."""
    return Scores(-output.float().flatten())


def make_loss_func(
    batch: TokenBatch,
    loss: PolicyLoss,
    *,
    cp_group: dist.ProcessGroup | None = None,
    read_output: ReadOutput = from_head,
) -> LossFunc:
    """The `loss_func` of one micro-batch. `cp_group` is needed if sequences are split over ranks."""

    def reduce(values: Tensor) -> Tensor:
        if cp_group is not None and cp_group.size() > 1:
            dist.all_reduce(values, group=cp_group)
        return values

    def loss_func(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        result = loss(read_output(output), batch, reduce)
        return result.loss_sum, *_count_and_metrics(result, result.loss_sum)

    return loss_func


def _count_and_metrics(result: LossOutputs, loss: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """The second and third element of Megatron's 3-tuple. Megatron accumulates counts in int32."""
    sums = {"loss_sum": loss.detach().double(), "denominator": result.denominator.double()}
    return result.denominator.to(torch.int32), {"sums": sums | result.sums, "maxima": result.maxima}


class OnePassLoss:
    """The same loss for the one-pass head, which calls it chunk by chunk inside the model.

    Metrics are computed in `loss_func`, when the device already has the large products of the head queued.
    """

    def __init__(self, batch: TokenBatch, loss: PolicyLoss) -> None:
        self.batch = batch
        self._loss = loss
        self._scores: list[tuple[Tensor, Tensor]] = []

    def __call__(self, chunk: slice, logprobs: Tensor, entropy: Tensor) -> Tensor:
        self._scores.append((logprobs.detach(), entropy.detach()))
        return self._loss.sum(Scores(logprobs, entropy), self.batch.part(chunk))

    def loss_func(self, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Megatron's loss_func; `output` is the loss that the model returned."""
        nothing = torch.zeros(0, device=output.device)  # a placeholder micro-batch scores no token
        logprobs, entropy = (torch.cat([nothing, *(pair[i] for pair in self._scores)]) for i in (0, 1))
        self._scores = []
        result = self._loss(Scores(logprobs, entropy), self.batch)
        return output, *_count_and_metrics(result, output)


def check_transformer_config(config: Any, ddp_config: Any = None) -> None:
    """Raises ConfigError for Megatron settings under which the normaliser would be wrong."""
    if not config.calculate_per_token_loss:
        raise ConfigError(
            "calculate_per_token_loss is False: Megatron would average per micro-batch and ignore context parallelism; "
            "set TransformerConfig(calculate_per_token_loss=True)"
        )
    if ddp_config is not None and ddp_config.average_in_collective:
        raise ConfigError("average_in_collective is True: it divides by the number of ranks once more; set it to False")
