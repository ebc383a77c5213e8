"""One update: pack a mini-batch, run Megatron's pipeline schedule over it, reduce the metrics, step the optimizer.

The schedule's loss functions return sums. `finalize_model_grads` divides every gradient once by the global count. Loss,
gradients and weights are those of a single process, whatever the layout, the micro-batch split and the packing.

Every rank passes the same mini-batch; tokens and log-probs of samples that other data-parallel ranks train on may be
missing (zeros). A mini-batch without an active token changes nothing and reports `update_skipped`. Bad input and
non-finite numbers raise the same error on all ranks, before any weight has changed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_dapo.algorithm import PolicyLoss, Proximal, TokenBatch, positive_weights, token_weights
from megatron_dapo.algorithm.advantages import reads_values
from megatron_dapo.algorithm.objective import blank
from megatron_dapo.algorithm.value_loss import ValueLoss
from megatron_dapo.batch_invariant import BatchInvariant
from megatron_dapo.config import Config, ModelShape
from megatron_dapo.config.policy import OptimizerConfig
from megatron_dapo.errors import UserError
from megatron_dapo.policy.batch import Floats, Ints, PackedMicroBatch, PackingSpec, TrainBatch, pack
from megatron_dapo.policy.head.fused import HeadRequest
from megatron_dapo.policy.loss_func import (
    MetricReducer,
    OnePassLoss,
    ReadOutput,
    from_head,
    from_value_head,
    make_loss_func,
)
from megatron_dapo.policy.megatron.patches import NonFiniteNorm
from megatron_dapo.policy.megatron.runtime import Runtime
from megatron_dapo.policy.model.gpt import PolicyModel
from megatron_dapo.policy.model.router import MicroBatchRouting, router_layers
from megatron_dapo.policy.routing_replay import ExpertLoad, RoutingReplay, record
from megatron_dapo.policy.schedule import schedule_micro_batches, shares_of_ranks

# The learning rate as a function of the number of updates made. It has no state, so there is nothing to save.


def learning_rate(config: OptimizerConfig, update: int, updates_per_step: int, total_steps: int) -> float:
    """The rate of update number `update`, counted from 0. Warm-up is linear; its first update has a rate above zero."""
    warmup = config.warmup_steps * updates_per_step
    if update < warmup:
        return config.lr * (update + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    decay = max(1, (config.decay_steps or total_steps) * updates_per_step - warmup)
    progress = min(1.0, (update - warmup) / decay)
    left = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr + (config.lr - config.min_lr) * left


def set_learning_rate(optimizer: Any, rate: float, weight_decay: float) -> None:
    """Sets what Megatron leaves to its own scheduler: the rate, and the weight decay (none for norms and biases)."""
    for group in optimizer.param_groups:
        group["lr"] = rate
        group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)


MakeLossFunc = Callable[[PackedMicroBatch], Any]


class UpdateRefused(UserError):
    """No weight has changed; the mini-batch may be skipped."""


class NonFiniteError(UpdateRefused):
    """A NaN or infinity in the loss or the gradient."""


class MismatchError(UpdateRefused):
    """The engine's log-probs are not those of its weights."""


def steps_with_updates(config: Config, is_critic: bool) -> int:
    """Steps of a run that update the critic, or the policy: at most these, if explained_variance ends pre-training."""
    pretraining = config.critic.pretraining
    fixed = not is_critic and reads_values(config.algorithm) and pretraining.explained_variance is None
    return max(1, config.trainer.steps - (pretraining.steps if fixed else 0))


class UpdateStep:
    """Runs mini-batches through the model chunks of this rank, and counts the updates."""

    def __init__(
        self,
        config: Config,
        shape: ModelShape,
        runtime: Runtime,
        model: list[PolicyModel],
        chunks: list[Any],
        optimizer: Any,
    ) -> None:
        """`chunks` are the model's chunks under Megatron's DDP."""
        self.config = config
        self.shape = shape
        self.runtime = runtime
        self.chunks = chunks
        self.optimizer = optimizer
        self.updates = 0
        is_critic = shape.head == "value"
        self.updates_per_step = config.trainer.updates_per_step * (config.critic.epochs if is_critic else 1)
        self.total_steps = steps_with_updates(config, is_critic)
        self.loss: PolicyLoss | ValueLoss = ValueLoss(config.critic.clip) if is_critic else PolicyLoss(config.algorithm)
        self._read_output: ReadOutput = from_value_head if is_critic else from_head
        self.replay = RoutingReplay(shape, runtime, router_layers(model) if shape.is_moe else ())
        self.packing = PackingSpec.of(config.policy, runtime.groups.cp.rank(), runtime.groups.tp.rank())
        self.forward_backward = get_forward_backward_func()
        self._weight_gradient = _weight_gradient(model[-1], frozen=bool(config.policy.lora.rank))
        self._overlaps_gather = any(chunk.ddp_config.overlap_param_gather for chunk in chunks)
        self._weights_incomplete = False
        self.recorded: Floats | None = None

    def update(
        self, batch: TrainBatch, *, first: bool = False, max_mismatch: float | None = None, record: bool = False
    ) -> dict[str, float]:
        """One optimizer update. Returns the metrics of the whole mini-batch, the same on every rank. `first`: of a
        step; its log-probs are the proximal policy's, whose mismatch with the engine is known without another pass, and
        may be `max_mismatch`. `record`: `recorded` has the log-probs and entropies [2, responses] after that."""
        started = time.monotonic()
        self.validate(batch, "checking a mini-batch")
        micro_batches = self.pack(batch)
        metrics = self.gradients(batch, micro_batches, first=first, record=record)
        metrics |= _packing_metrics(micro_batches)
        if metrics["nonfinite_tokens"]:
            self.zero_grad()
            raise NonFiniteError(
                f"{metrics['nonfinite_tokens']:.0f} of {metrics['tokens']:.0f} active tokens have a NaN or infinite "
                f"log-prob or loss in update {self.updates}; no weight has changed"
            )
        if max_mismatch is not None and not metrics.get("mismatch_mean", 0.0) <= max_mismatch:
            self.zero_grad()
            raise MismatchError(
                f"the engine's log-probs of its own samples differ by {metrics['mismatch_mean']:.3g} nats (limit "
                f"{max_mismatch:g}); no weight has changed"
            )
        skipped = metrics["denominator"] == 0
        metrics |= {"grad_norm": 0.0, "lr": 0.0} if skipped else self.step_optimizer()
        return metrics | {"update_skipped": float(skipped), "update_seconds": time.monotonic() - started}

    def gradients(
        self,
        batch: TrainBatch,
        micro_batches: list[PackedMicroBatch] | None = None,
        *,
        first: bool = False,
        record: bool = False,
    ) -> dict[str, float]:
        """Fills the gradient buffers with the exact gradient of the mini-batch's loss; does not step the optimizer."""
        micro_batches = self.pack(batch) if micro_batches is None else micro_batches
        proximal: Proximal = "old" if batch.old_logprobs is not None else "current" if first else "unknown"
        inputs = LossInputs(batch, self.config, proximal, self.loss)
        self.zero_grad()
        balances = self.shape.is_moe and self.config.policy.moe_aux_loss_coefficient > 0
        denominator = inputs.denominator if balances else 0
        if balances:
            self._set_load_balancing(micro_batches, denominator)
        stored = self.run(micro_batches, self._loss_func_maker(inputs, record))
        if record:
            outputs = [metrics["scores"] for metrics in stored]
            self.recorded = self.gather(2, len(batch.loss_mask), micro_batches, outputs)
        given = {"reference": batch.ref_logprobs is not None, "engine": batch.engine_logprobs is not None}
        reducer = MetricReducer(self.loss, self.runtime, **given, proximal=proximal, read_output=self._read_output)
        metrics = reducer.reduce(stored)
        if balances and metrics["denominator"] != denominator:
            raise RuntimeError(f"Megatron divides by {metrics['denominator']:.0f}, the loss announced {denominator}")
        if self.shape.is_moe:
            metrics |= ExpertLoad.gather(micro_batches, self.shape, self.runtime).metrics()
        if self.config.policy.routing_replay != "off":
            metrics |= self.replay.metrics(micro_batches)
        return metrics

    def validate(self, batch: TrainBatch, doing: str, *, to_train: bool = True) -> None:
        error: Exception | None = None
        try:
            batch.validate(self.shape.vocab, self.config.policy.micro_batch_tokens)
            if self._replays(batch):
                self.replay.check(batch)
            if to_train:
                self._check_needs(batch)
        except UserError as found:
            error = found
        self.runtime.raise_together(error, doing)

    def _check_needs(self, batch: TrainBatch) -> None:
        if isinstance(self.loss, ValueLoss) and (batch.values is None or batch.returns is None):
            raise UserError("the mini-batch has no values or no returns: the critic's loss needs both")
        if batch.behaviour_logprobs is None:
            raise UserError("the mini-batch has neither old_logprobs nor engine_logprobs: the ratio needs one")
        needs = self.loss.needs
        needed_by_name = {"ref_logprobs": needs.reference, "engine_logprobs": needs.engine, "right": needs.right}
        for name, needed in needed_by_name.items():
            if needed and getattr(batch, name) is None:
                raise UserError(f"the loss of section algorithm reads {name}, but the mini-batch has no {name}")

    def shares(self, lengths: Ints, mini_batches: Sequence[Sequence[int]]) -> list[list[int]]:
        """The samples whose tokens each data-parallel rank needs, for updates and scoring. `lengths`: [samples]."""
        padded = [self.packing.padded(int(length)) for length in lengths]
        return shares_of_ranks(padded, self.runtime.groups.dp.size(), mini_batches)

    def _replays(self, batch: TrainBatch) -> bool:
        return self.config.policy.routing_replay != "off" and batch.routed_experts is not None

    def pack(
        self, batch: TrainBatch, mini_batches: Sequence[Sequence[int]] | None = None, *, replay: bool = True
    ) -> list[PackedMicroBatch]:
        """This data-parallel rank's micro-batches, of its share of these mini-batches; default: one of all samples.
        Without `replay` the routers choose the experts even if the batch has them."""
        groups, policy = self.runtime.groups, self.config.policy
        padded = [self.packing.padded(int(length)) for length in batch.lengths]
        multiple = policy.pipeline_parallel if policy.virtual_pipeline > 1 else 1
        everyone = schedule_micro_batches(padded, groups.dp.size(), policy.micro_batch_tokens, multiple, mini_batches)
        mine = [pack(batch, indices, self.packing, self.runtime.device) for indices in everyone[groups.dp.rank()]]
        if self.shape.is_moe:
            for micro in mine:
                real = torch.from_numpy(micro.routed >= 0).to(self.runtime.device, non_blocking=True)
                micro.packed.routing = MicroBatchRouting(real)
                if replay and self._replays(batch):
                    self.replay.attach(batch, micro)
        return mine

    def score(self, micro_batches: list[PackedMicroBatch], *, head: bool = True) -> list[Tensor]:
        """Log-probs and entropies [2, tokens] of each micro-batch (last stage only), without gradient. Without `head`
        the layers run, but no token is scored."""
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            outputs = self.run(
                micro_batches, lambda micro: lambda output, non_loss_data=True: output, score=True, head=head
            )
        for chunk in self.chunks:
            chunk.train()
        return outputs

    def gather(
        self, rows: int, responses: int, micro_batches: list[PackedMicroBatch], outputs: Sequence[Tensor]
    ) -> Floats:
        """Collective. [rows, responses] on every rank, from [rows, tokens] of each micro-batch on the last stages."""
        table = torch.zeros(rows, responses, device=self.runtime.device)
        if self.runtime.is_last_stage:
            for micro, output in zip(micro_batches, outputs, strict=True):
                table[:, torch.from_numpy(micro.slots).to(table.device)] = output.float()
            dist.all_reduce(table, group=self.runtime.groups.dp_cp)
        dist.broadcast(table, src=self.runtime.last_stage_rank, group=self.runtime.groups.pp)
        return table.cpu().numpy()

    def score_and_record(self, batch: TrainBatch, micro_batches: list[PackedMicroBatch]) -> list[Tensor]:
        """`score`, after which the batch has the experts of every token in this rank's layers."""
        record(micro_batches)
        outputs = self.score(micro_batches)
        batch.routed_experts = self.replay.recorded(batch, micro_batches)
        return outputs

    def _set_load_balancing(self, micro_batches: list[PackedMicroBatch], denominator: int) -> None:
        """Counts the load of the whole mini-batch, which every micro-batch's gradient depends on (see model/router)."""
        self.score(micro_batches, head=False)
        load = ExpertLoad.gather(micro_batches, self.shape, self.runtime)
        slopes = load.slopes(self.config.policy.moe_aux_loss_coefficient, denominator)
        for micro in micro_batches:
            assert micro.packed.routing is not None
            micro.packed.routing.slopes = slopes

    def run(
        self, micro_batches: list[PackedMicroBatch], make_loss: MakeLossFunc, *, score: bool = False, head: bool = True
    ) -> list[Any]:
        """Megatron's schedule over the micro-batches; returns what the loss functions stored (last stage only)."""
        if score:
            self.complete_weights()

        policy = self.config.policy
        invariant = policy.true_on_policy and not policy.uses_exact_kernels

        def forward_step(iterator: Iterator[PackedMicroBatch], model: Any) -> tuple[Tensor, Any]:
            micro = next(iterator)
            loss = make_loss(micro)
            one_pass = loss if isinstance(loss, OnePassLoss) else None
            scored = slice(None if head else 0)
            request = HeadRequest(
                micro.positions[scored],
                micro.targets[scored],
                vocab=self.shape.vocab,
                temperature=self.config.rollout.temperature,
                exact=policy.uses_exact_kernels,
                chunk_tokens=policy.head_chunk(self.shape.vocab),
                loss=one_pass,
                weight_gradient=self._weight_gradient,
            )
            with BatchInvariant() if invariant else nullcontext():
                output = model(micro.input_ids, micro.position_ids, None, packed_seq_params=micro.packed, head=request)
            return output, one_pass.loss_func if one_pass else loss

        iterators = [iter(micro_batches) for _ in self.chunks]
        stored: list[Any] = self.forward_backward(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=self.config.policy.micro_batch_tokens,
            micro_batch_size=1,
            forward_only=score,
            collect_non_loss_data=score,
        )
        self._weights_incomplete = False  # the forward pass has gathered them
        return stored

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _loss_func_maker(self, inputs: LossInputs, record: bool) -> MakeLossFunc:
        def make(micro: PackedMicroBatch) -> Any:
            tokens = inputs.of(micro.slots, micro.sequence_ids, micro.sequences, self.runtime.device)
            if isinstance(self.loss, PolicyLoss) and not self.loss.needs.whole_sequences:
                return OnePassLoss(tokens, self.loss, record=record)
            groups = self.runtime.groups
            return make_loss_func(tokens, self.loss, cp_group=groups.cp, read_output=self._read_output, record=record)

        return make

    def step_optimizer(self) -> dict[str, float]:
        """Clips and steps. If the gradient is not finite, every rank raises and nothing has changed."""
        optimizer = self.config.policy.optimizer
        rate = learning_rate(optimizer, self.updates, self.updates_per_step, self.total_steps)
        set_learning_rate(self.optimizer, rate, optimizer.weight_decay)
        try:
            _, norm, _ = self.optimizer.step()
        except NonFiniteNorm as error:
            self.zero_grad()
            raise NonFiniteError(f"{error} in update {self.updates}; no weight has changed") from None
        self._weights_incomplete = self._overlaps_gather
        self.updates += 1
        return {"grad_norm": float(norm), "lr": rate}

    def complete_weights(self) -> None:
        """Collective. Gathers the weights of the last update, if that was left to the next forward pass. Everything
        that reads weights outside of a training pass calls it first."""
        if self._weights_incomplete:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
            self._weights_incomplete = False


class LossInputs:
    """What the loss needs to know of a mini-batch. Weights and counts are computed here, before anything is split."""

    def __init__(self, batch: TrainBatch, config: Config, proximal: Proximal, loss: PolicyLoss | ValueLoss) -> None:
        self._batch = batch
        self._proximal = proximal
        self._loss = loss
        self._weights: Any = None
        self._counts: Any = None
        self._positive: Tensor | None = None
        self._mean_weight = 1.0
        self._sample_of = np.repeat(np.arange(batch.samples), batch.response_lengths)  # [responses]
        self._advantages = batch.advantages[self._sample_of]  # [responses]
        if batch.token_advantages is not None:
            self._advantages = self._advantages + batch.token_advantages
        # What a mean over sequences counts: rollouts. One may consist of several samples, some of them excluded.
        counted, mask = self._sample_of, torch.from_numpy(batch.loss_mask)
        if batch.rollouts is not None:
            counted, mask = np.unique(batch.rollouts, return_inverse=True)[1][self._sample_of], self._counted
        self._weights, self._counts = token_weights(
            config.algorithm.aggregation, mask, torch.from_numpy(counted), batch.samples, config.aggregation_length
        )
        if isinstance(loss, PolicyLoss) and config.algorithm.off_policy.normalize_weights:
            self._mean_weight = loss.off_policy.mean_weight(self.everything())
        if loss.needs.right and batch.right is not None:
            right = self._counted & torch.from_numpy(batch.right[self._sample_of])
            self._positive = positive_weights(config.algorithm.positive_coefficient, right, self.denominator)

    @property
    def denominator(self) -> int:
        """What Megatron will divide by: the counts without the sequences that the loss excludes."""
        return int(blank(self._counts, self._counted).sum())

    @property
    def _counted(self) -> Tensor:
        """bool [responses]. Other ranks' log-probs are needed only where a correction excludes sequences."""
        if isinstance(self._loss, ValueLoss) or not self._loss.config.off_policy.sequence_masks:
            return torch.from_numpy(self._batch.loss_mask)
        return self._loss.included(self.everything())

    def everything(self) -> TokenBatch:
        """All response tokens, on the host."""
        slots = np.arange(len(self._sample_of))
        return self.of(slots, self._sample_of, self._batch.samples, torch.device("cpu"))

    def of(self, slots: Ints, sequence_ids: Ints, sequences: int, device: torch.device) -> TokenBatch:
        """These response tokens."""

        def pick(values: Any) -> Any:
            return None if values is None else torch.as_tensor(values[slots]).to(device, non_blocking=True)

        batch = self._batch
        return TokenBatch(
            old_logprobs=pick(batch.behaviour_logprobs),
            advantages=pick(self._advantages),
            mask=pick(batch.loss_mask),
            weights=pick(self._weights),
            counts=pick(self._counts),
            sequence_ids=torch.from_numpy(sequence_ids).to(device, non_blocking=True),
            sequences=sequences,
            ref_logprobs=pick(batch.ref_logprobs),
            engine_logprobs=pick(batch.engine_logprobs),
            old_values=pick(batch.values),
            returns=pick(batch.returns),
            positive=pick(self._positive),
            proximal=self._proximal,
            mean_weight=self._mean_weight,
        )


def _weight_gradient(last: PolicyModel, *, frozen: bool) -> Literal["added", "added-shared", "none"]:
    """The head adds its weight's gradient to main_grad itself: no second copy of the largest gradient there is."""
    if frozen:
        return "none"
    shared = last.post_process and last.share_embeddings_and_output_weights and last.pre_process
    return "added-shared" if shared else "added"


def _packing_metrics(micro_batches: list[PackedMicroBatch]) -> dict[str, float]:
    tokens, padding = sum(m.tokens for m in micro_batches), sum(m.padding for m in micro_batches)
    return {"micro_batches": float(len(micro_batches)), "padding_share": padding / tokens}
