"""Megatron's `loss_func`, made from the policy loss, and the metrics that come with it. `make_loss_func` is usable in
any Megatron training script.

Megatron divides by the global token count, over all ranks and all micro-batches, if three things hold:
`TransformerConfig.calculate_per_token_loss` is True, the loss function returns the 3-tuple (local sum, local integer
count, metrics), and `finalize_model_grads` gets that count before the optimizer steps. `make_loss_func` returns such a
function. `check_transformer_config` refuses settings under which the result would depend on the layout.

Metrics of one update are reduced over micro-batches and ranks (`MetricReducer`), those of a step over its updates
(`StepMetrics`). A name says how its values combine: names that end in `_max` are maxima, those in `TOTALS` are sums,
all others means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.algorithm import LossOutputs, PolicyLoss, Proximal, Scores, TokenBatch
from megatron_dapo.algorithm.loss import Reduce, identity
from megatron_dapo.algorithm.value_loss import ValueLoss
from megatron_dapo.config import ConfigError
from megatron_dapo.policy.megatron.runtime import Runtime

LossFunc = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Any]]]
ReadOutput = Callable[[Tensor], Any]  # what the model's output says about each token: Scores or values
Loss = PolicyLoss | ValueLoss


def from_head(output: Tensor) -> Scores:
    """Reads our head's output [2, tokens]."""
    return Scores(output[0], output[1])


def from_value_head(output: Tensor) -> Tensor:
    """Reads the values of a value head's output [1, tokens]."""
    return output[0]


def from_cross_entropy(output: Tensor) -> Scores:
    """Reads what a plain GPTModel returns when it gets labels: the cross-entropy of each token, [b, s]."""
    return Scores(-output.float().flatten())


def make_loss_func(
    batch: TokenBatch,
    loss: Loss,
    *,
    cp_group: dist.ProcessGroup | None = None,
    read_output: ReadOutput = from_head,
    record: bool = False,
) -> LossFunc:
    """The `loss_func` of one micro-batch. `cp_group` is needed if sequences are split over ranks. `record`: the metrics
    are computed in fp64, and come with the scores."""

    def reduce(values: Tensor) -> Tensor:
        if cp_group is not None and cp_group.size() > 1:
            dist.all_reduce(values, group=cp_group)
        return values

    def loss_func(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        scores = read_output(output)
        result = loss(scores, batch, reduce)
        if record and isinstance(loss, PolicyLoss):
            return result.loss_sum, *_recorded(loss, scores, batch, reduce)
        return result.loss_sum, *_count_and_metrics(result, result.loss_sum)

    return loss_func


def _count_and_metrics(result: LossOutputs, loss: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """The second and third element of Megatron's 3-tuple. Megatron accumulates counts in int32."""
    sums = {"loss_sum": loss.detach().double(), "denominator": result.denominator.double()}
    return result.denominator.to(torch.int32), {"sums": sums | result.sums, "maxima": result.maxima}


def _recorded(loss: PolicyLoss, scores: Scores, batch: TokenBatch, reduce: Reduce = identity) -> tuple[Tensor, Any]:
    """Count and metrics of a step whose tokens are recorded: what fp64 arithmetic makes of the recorded numbers."""
    with torch.no_grad():
        exact = [tensor.detach().double() for tensor in scores if tensor is not None]
        result = loss(Scores(*exact), batch.double(), reduce)
    count, metrics = _count_and_metrics(result, result.loss_sum)
    return count, metrics | {"scores": torch.stack(exact)}


class OnePassLoss:
    """The same loss for the one-pass head, which calls it chunk by chunk inside the model.

    Metrics are computed in `loss_func`, when the device already has the large products of the head queued.
    """

    def __init__(self, batch: TokenBatch, loss: PolicyLoss, *, record: bool = False) -> None:
        self.batch = batch
        self._loss = loss
        self._record = record
        self._scores: list[tuple[Tensor, Tensor]] = []

    def __call__(self, chunk: slice, logprobs: Tensor, entropy: Tensor) -> Tensor:
        self._scores.append((logprobs.detach(), entropy.detach()))
        return self._loss.sum(Scores(logprobs, entropy), self.batch.part(chunk))

    def loss_func(self, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Megatron's loss_func; `output` is the loss that the model returned."""
        nothing = torch.zeros(0, device=output.device)  # a placeholder micro-batch scores no token
        logprobs, entropy = (torch.cat([nothing, *(pair[i] for pair in self._scores)]) for i in (0, 1))
        self._scores = []
        if self._record:
            return output, *_recorded(self._loss, Scores(logprobs, entropy), self.batch)
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


class MetricReducer:
    """Reduces loss metrics over micro-batches, data and context ranks, and broadcasts them to all pipeline stages.

    Only the last pipeline stage has metrics, but every rank must know how many numbers the broadcast has. So the names
    are found once, by running the (pure) loss on one token.
    """

    def __init__(
        self, loss: Loss, runtime: Runtime, *, reference: bool, engine: bool, proximal: Proximal = "old",
        read_output: ReadOutput = from_head,
    ) -> None:  # fmt: skip
        one = torch.zeros(1)
        batch = TokenBatch(
            old_logprobs=one, advantages=one, mask=one.bool(), weights=one, counts=one.long(),
            sequence_ids=one.long(), sequences=1, old_values=one, returns=one, proximal=proximal,
            ref_logprobs=one if reference else None, engine_logprobs=one if engine else None,
            positive=one if loss.needs.right else None,
        )  # fmt: skip
        result = loss(read_output(torch.zeros(2, 1)), batch)
        self.sums = ["loss_sum", "denominator", *result.sums]
        self.maxima = list(result.maxima)
        self.runtime = runtime

    def reduce(self, micro_batches: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Collective. Means over active tokens, maxima, `loss` over the global denominator, and the counts."""
        sums, maxima = self._total(micro_batches, "sums"), self._total(micro_batches, "maxima")
        group = self.runtime.groups.dp_cp
        if self.runtime.is_last_stage:
            dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        both = torch.cat([sums, maxima])
        dist.broadcast(both, src=self.runtime.last_stage_rank, group=self.runtime.groups.pp)
        values = dict(zip([*self.sums, *self.maxima], both.tolist(), strict=True))
        return mean_metrics(values, self.sums)

    def _total(self, micro_batches: Sequence[dict[str, Any]], kind: str) -> Tensor:
        names: list[str] = getattr(self, kind)
        values = [torch.stack([m[kind][name].double() for name in names]) for m in micro_batches if names]
        if not values:
            return torch.zeros(len(names), dtype=torch.float64, device=self.runtime.device)
        stacked = torch.stack(values)
        return stacked.sum(0) if kind == "sums" else stacked.amax(0)


def mean_metrics(values: Mapping[str, float], sums: Sequence[str]) -> dict[str, float]:
    """From sums and maxima: means over active tokens; `loss` is over the denominator."""
    tokens, denominator = values["tokens"], values["denominator"]
    out = {name: values[name] for name in ("tokens", "nonfinite_tokens", "denominator")}
    out["loss"] = values["loss_sum"] / denominator if denominator else 0.0
    for name in sums:
        if name not in ("loss_sum", *out):
            out[name] = values[name] / tokens if tokens else 0.0
    return out | {name: value for name, value in values.items() if name not in sums}


TOTALS = frozenset({"tokens", "denominator", "nonfinite_tokens", "update_skipped", "update_seconds", "micro_batches"})
SKIPPED = "update_skipped"


@dataclass(slots=True)
class StepMetrics:
    """Combines the metrics of a step's updates: totals are added, maxima are maxima, the rest are means.

    A skipped update changed no weight and has no loss: it enters the totals only. Where every update was skipped there
    are no means and no maxima. The state is plain JSON, for a step that is saved between two of its updates.
    """

    totals: dict[str, float] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if name in TOTALS:
                self.totals[name] = self.totals.get(name, 0.0) + value
            elif metrics.get(SKIPPED):
                continue
            elif name.endswith("_max"):
                self.maxima[name] = max(self.maxima.get(name, value), value)
            else:
                self.sums[name] = self.sums.get(name, 0.0) + value
                self.counts[name] = self.counts.get(name, 0) + 1

    def result(self, prefix: str = "") -> dict[str, float]:
        means = {name: total / self.counts[name] for name, total in self.sums.items()}
        return {f"{prefix}{name}": value for name, value in (self.totals | means | self.maxima).items()}

    def to_state(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> StepMetrics:
        return cls(**{name: dict(values) for name, values in state.items()})
