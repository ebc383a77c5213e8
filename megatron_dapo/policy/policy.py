"""The policy: a Qwen model under Megatron's DDP and optimizer, scored and updated by mini-batches.

One update is: split the mini-batch over data-parallel ranks and pack it; run Megatron's pipeline schedule, whose
loss function returns sums; let `finalize_model_grads` divide every gradient once by the global count; step. Loss,
gradients and weights are those of a single process, whatever the layout, the micro-batch split and the packing.

Every rank passes the same mini-batch. A mini-batch without an active token is a no-op that says so in its metrics.
Bad input and non-finite numbers are the same error on all ranks, raised before any weight has changed.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_dapo.algorithm import token_weights
from megatron_dapo.config import Config, ModelShape
from megatron_dapo.errors import UserError
from megatron_dapo.policy.batch import Floats, TrainBatch
from megatron_dapo.policy.head.fused import HeadRequest
from megatron_dapo.policy.learning_rate import learning_rate, set_learning_rate
from megatron_dapo.policy.loss_func import (
    LossTokens,
    OnePassLoss,
    check_transformer_config,
    is_per_token,
    make_loss_func,
)
from megatron_dapo.policy.metrics import MetricReducer
from megatron_dapo.policy.model.gpt import DTYPES, PolicyModel, build_model
from megatron_dapo.policy.offload import Offloader, storage_key
from megatron_dapo.policy.packing import Layout, PackedMicroBatch, pack
from megatron_dapo.policy.runtime import Runtime
from megatron_dapo.policy.schedule import plan
from megatron_dapo.weights.model_weights import Place, load_hf_weights
from megatron_dapo.weights.sync import WeightStream

MakeLossFunc = Callable[[PackedMicroBatch], Any]


class NonFiniteError(UserError):
    """A NaN or infinity in the loss or the gradient. No weight has changed; the mini-batch may be skipped."""


class Policy:
    def __init__(self, config: Config, shape: ModelShape, runtime: Runtime) -> None:
        self.config, self.shape, self.runtime = config, shape, runtime
        self.updates = 0
        self._reference: list[Tensor] | None = None
        self._reducers: dict[tuple[bool, bool], MetricReducer] = {}
        self.model: list[PolicyModel] = build_model(shape, config.policy, runtime)
        self.layout = Layout.of(config.policy, runtime.groups.cp.rank())
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=runtime.device.type == "cuda",
            use_distributed_optimizer=config.policy.distributed_optimizer,
            average_in_collective=False,
        )
        self.megatron_config = self.model[0].config
        check_transformer_config(self.megatron_config, ddp_config)
        self.chunks = [self._wrap(chunk, ddp_config, first=i == 0) for i, chunk in enumerate(self.model)]
        self.optimizer = get_megatron_optimizer(self._optimizer_config(), self.chunks)
        self.megatron_config.finalize_model_grads_func = finalize_model_grads
        self.megatron_config.grad_scale_func = self.optimizer.scale_loss
        if ddp_config.overlap_grad_reduce:
            no_syncs = [chunk.no_sync for chunk in self.chunks]
            self.megatron_config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
        self._forward_backward = get_forward_backward_func()
        self._offloader = Offloader(runtime.device)
        self._weight_gradient = self._where_the_head_adds()

    def _wrap(self, chunk: PolicyModel, ddp_config: DistributedDataParallelConfig, first: bool) -> Any:
        module = Float16Module(self.megatron_config, chunk) if self.config.policy.precision == "bf16" else chunk
        return DistributedDataParallel(self.megatron_config, ddp_config, module, disable_bucketing=not first)

    def _where_the_head_adds(self) -> Any:
        """The head adds its weight's gradient to main_grad itself: no second copy of the largest gradient there is."""
        last = self.model[-1]
        shared = last.post_process and last.share_embeddings_and_output_weights and last.pre_process
        return "added-shared" if shared else "added"

    def _optimizer_config(self) -> MegatronOptimizerConfig:
        optimizer, precision = self.config.policy.optimizer, self.config.policy.precision
        return MegatronOptimizerConfig(
            optimizer="adam",
            lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.beta1,
            adam_beta2=optimizer.beta2,
            adam_eps=optimizer.eps,
            clip_grad=optimizer.grad_clip,
            bf16=precision == "bf16",
            params_dtype=DTYPES[precision],
            use_distributed_optimizer=self.config.policy.distributed_optimizer,
        )

    @property
    def place(self) -> Place:
        """Where this rank stands among those that share weights."""
        groups = self.runtime.groups
        return Place(groups.tp.rank(), groups.tp.size(), groups.ep.rank(), groups.ep.size(), etp_rank=0, etp_size=1)

    def weight_stream(self, bucket_bytes: int = 512 << 20) -> WeightStream:
        """Collective. The weights as buckets of HF-named tensors on rank 0, for the engines."""
        return WeightStream(self.model, self.shape, self.place, bucket_bytes=bucket_bytes)

    def load_hf(self, source: str | os.PathLike[str] | Mapping[str, Tensor]) -> None:
        """Fills the model from a HF directory or HF-named tensors: every tensor accounted for, or an error."""
        load_hf_weights(self.model, self.shape, source, self.place)
        self.optimizer.reload_model_params()

    def offload_training_state(self) -> int:
        """Moves master weights and optimizer state to host memory and drops the gradient buffers, which makes room for
        an engine on the same GPU. The weights stay readable. Returns the bytes freed; `onload` undoes it."""
        self.optimizer.zero_grad()
        buffers = [b for chunk in self.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        freed = self._offloader.offload((buffer.grad_data for buffer in buffers), keep=False)
        weights = {storage_key(parameter) for parameter in self._parameters()}
        return freed + self._offloader.offload(t for t in self._optimizer_tensors() if storage_key(t) not in weights)

    def offload_weights(self) -> int:
        """Moves the weights to host memory as well. Only `onload` may be called afterwards."""
        return self._offloader.offload(self._parameters())

    def onload(self) -> int:
        return self._offloader.onload()

    def empty_cache(self) -> None:
        self._offloader.empty_cache()

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        for wrapper in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            inner = wrapper.optimizer
            yield from (parameter for group in inner.param_groups for parameter in group["params"])
            yield from (value for state in inner.state.values() for value in state.values() if torch.is_tensor(value))

    def log_probs(self, batch: TrainBatch) -> tuple[Floats, Floats]:
        """Log-probs and entropies [responses] of every response token, on every rank. No gradient, no state change."""
        self._validate(batch, "scoring a mini-batch", to_train=False)
        micro_batches = self._pack(batch)
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            outputs = self._run(micro_batches, lambda micro: lambda output, non_loss_data=True: output, score=True)
        for chunk in self.chunks:
            chunk.train()
        table = torch.zeros(2, len(batch.loss_mask), device=self.runtime.device)
        if self.runtime.is_last_stage:
            for micro, output in zip(micro_batches, outputs, strict=True):
                table[:, torch.from_numpy(micro.slots).to(table.device)] = output.float()
            dist.all_reduce(table, group=self.runtime.groups.dp_cp)
        dist.broadcast(table, src=self.runtime.last_stage_rank, group=self.runtime.groups.pp)
        logprobs, entropy = table.cpu().numpy()
        return logprobs, entropy

    def keep_reference(self) -> None:
        """The weights as they are now become the reference policy of the KL term; they are kept in host memory."""
        self._reference = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters()]

    def reference_log_probs(self, batch: TrainBatch) -> Floats:
        """Log-probs under the reference policy. The policy's own weights are back in place afterwards."""
        if self._reference is None:
            raise UserError("there is no reference policy: call keep_reference() once the model is loaded")
        current = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters()]
        try:
            self._set_parameters(self._reference)
            return self.log_probs(batch)[0]
        finally:
            self._set_parameters(current)

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for chunk in self.model for parameter in chunk.parameters()]

    @torch.no_grad()
    def _set_parameters(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters(), values, strict=True):
            parameter.copy_(value, non_blocking=True)

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """One optimizer update. Returns the metrics of the whole mini-batch, the same on every rank."""
        started = time.monotonic()
        self._validate(batch, "checking a mini-batch")
        micro_batches = self._pack(batch)
        metrics = self.gradients(batch, micro_batches)
        metrics |= self._packing_metrics(micro_batches)
        if metrics["nonfinite_tokens"]:
            self._zero_grad()
            raise NonFiniteError(
                f"{metrics['nonfinite_tokens']:.0f} of {metrics['tokens']:.0f} active tokens have a NaN or infinite "
                f"log-prob or loss in update {self.updates}; no weight has changed"
            )
        skipped = metrics["denominator"] == 0
        metrics |= {"grad_norm": 0.0, "lr": 0.0} if skipped else self._step()
        return metrics | {"update_skipped": float(skipped), "update_seconds": time.monotonic() - started}

    def gradients(self, batch: TrainBatch, micro_batches: list[PackedMicroBatch] | None = None) -> dict[str, float]:
        """Fills the gradient buffers with the exact gradient of the mini-batch's loss; steps nothing."""
        micro_batches = self._pack(batch) if micro_batches is None else micro_batches
        self._zero_grad()
        stored = self._run(micro_batches, self._loss_func_maker(batch))
        return self._reducer(batch.ref_logprobs is not None, batch.engine_logprobs is not None).reduce(stored)

    def _reducer(self, reference: bool, engine: bool) -> MetricReducer:
        """Made once for each kind of batch: which metrics there are depends on nothing else."""
        kind = (reference, engine)
        if kind not in self._reducers:
            self._reducers[kind] = MetricReducer(
                self.config.algorithm, self.runtime, reference=reference, engine=engine
            )
        return self._reducers[kind]

    def _validate(self, batch: TrainBatch, doing: str, *, to_train: bool = True) -> None:
        error: Exception | None = None
        try:
            batch.validate(self.shape.vocab, self.config.policy.micro_batch_tokens)
            if to_train and batch.behaviour_logprobs is None:
                raise UserError("the mini-batch has neither old_logprobs nor engine_logprobs: the ratio needs one")
            if to_train and self.config.algorithm.kl.coefficient and batch.ref_logprobs is None:
                raise UserError("algorithm.kl.coefficient is set, but the mini-batch has no ref_logprobs")
        except UserError as found:
            error = found
        self.runtime.raise_together(error, doing)

    def _pack(self, batch: TrainBatch) -> list[PackedMicroBatch]:
        groups, policy = self.runtime.groups, self.config.policy
        padded = [self.layout.padded(int(length)) for length in batch.lengths]
        multiple = policy.pipeline_parallel if policy.virtual_pipeline > 1 else 1
        mine = plan(padded, groups.dp.size(), policy.micro_batch_tokens, multiple)[groups.dp.rank()]
        return [pack(batch, indices, self.layout, self.runtime.device) for indices in mine]

    def _loss_func_maker(self, batch: TrainBatch) -> MakeLossFunc:
        """Weights and counts are fixed here, on the whole mini-batch, before anything is split."""
        algorithm, device = self.config.algorithm, self.runtime.device
        sample_of = np.repeat(np.arange(batch.samples), batch.response_lengths)
        weights, counts = token_weights(
            algorithm.aggregation,
            torch.from_numpy(batch.loss_mask),
            torch.from_numpy(sample_of),
            batch.samples,
            self.config.aggregation_length,
        )

        def pick(values: Any, micro: PackedMicroBatch) -> Any:
            return None if values is None else torch.as_tensor(values[micro.slots]).to(device, non_blocking=True)

        def make(micro: PackedMicroBatch) -> Any:
            tokens = LossTokens(
                old_logprobs=pick(batch.behaviour_logprobs, micro),
                advantages=pick(batch.advantages[sample_of], micro),
                mask=pick(batch.loss_mask, micro),
                weights=pick(weights, micro),
                counts=pick(counts, micro),
                sequence_ids=torch.from_numpy(micro.sequence_ids).to(device, non_blocking=True),
                sequences=micro.sequences,
                ref_logprobs=pick(batch.ref_logprobs, micro),
                engine_logprobs=pick(batch.engine_logprobs, micro),
            )
            if is_per_token(algorithm):
                return OnePassLoss(tokens, algorithm)
            return make_loss_func(tokens, algorithm, cp_group=self.runtime.groups.cp)

        return make

    def _run(self, micro_batches: list[PackedMicroBatch], make_loss: MakeLossFunc, *, score: bool = False) -> list[Any]:
        """Megatron's schedule over the micro-batches; returns what the loss functions stored (last stage only)."""

        def forward_step(iterator: Iterator[PackedMicroBatch], model: Any) -> tuple[Tensor, Any]:
            micro = next(iterator)
            loss = make_loss(micro)
            one_pass = loss if isinstance(loss, OnePassLoss) else None
            request = HeadRequest(
                micro.positions,
                micro.targets,
                vocab=self.shape.vocab,
                temperature=self.config.rollout.temperature,
                chunk_tokens=self.config.policy.head_chunk(self.shape.vocab),
                loss=one_pass,
                weight_gradient=self._weight_gradient,
            )
            output = model(micro.input_ids, micro.position_ids, None, packed_seq_params=micro.packed, head=request)
            return output, one_pass.loss_func if one_pass else loss

        iterators = [iter(micro_batches) for _ in self.chunks]
        return self._forward_backward(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=self.config.policy.micro_batch_tokens,
            micro_batch_size=1,
            forward_only=score,
            collect_non_loss_data=score,
        )

    def _zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _step(self) -> dict[str, float]:
        """Clips and steps, unless the gradient is not finite: then every rank raises and nothing has changed."""
        optimizer, trainer = self.config.policy.optimizer, self.config.trainer
        rate = learning_rate(optimizer, self.updates, trainer.updates_per_step, trainer.steps)
        set_learning_rate(self.optimizer, rate, optimizer.weight_decay)
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            self._zero_grad()
            raise NonFiniteError(f"the gradient norm is {norm} in update {self.updates}; no weight has changed")
        self.optimizer.step()
        self.updates += 1
        return {"grad_norm": norm, "lr": rate}

    def _packing_metrics(self, micro_batches: list[PackedMicroBatch]) -> dict[str, float]:
        tokens, padding = sum(m.tokens for m in micro_batches), sum(m.padding for m in micro_batches)
        return {"micro_batches": float(len(micro_batches)), "padding_share": padding / tokens}
