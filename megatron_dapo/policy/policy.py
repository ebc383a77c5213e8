"""The policy: a Qwen model under Megatron's DDP and optimizer. It is scored and updated by mini-batches.

This file builds it, loads, offloads and scores it, and keeps the reference policy; `step` makes one update. Every
rank calls every method, with the same mini-batch.

`Offloader` moves tensors to host memory and back, so that an engine can use the same GPU. It frees device memory by
resizing storages to zero: every tensor, view and bucket that Megatron made stays valid and has its contents again after
`onload`. Host copies are pinned and reused, because pinning costs more than copying.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from numpy.typing import NDArray
from torch import Tensor

from megatron_dapo.algorithm import Needs
from megatron_dapo.config import Config, ModelShape
from megatron_dapo.config.policy import LoraConfig
from megatron_dapo.errors import UserError
from megatron_dapo.policy.batch import Floats, TrainBatch
from megatron_dapo.policy.loss_func import check_transformer_config
from megatron_dapo.policy.megatron.optimizer_state import set_fused
from megatron_dapo.policy.megatron.options import ddp_config, optimizer_config
from megatron_dapo.policy.megatron.patches import patch_optimizer
from megatron_dapo.policy.megatron.runtime import Runtime
from megatron_dapo.policy.model.gpt import PolicyModel, build_model
from megatron_dapo.policy.model.lora import Adapters, load_adapters
from megatron_dapo.policy.step import UpdateStep
from megatron_dapo.sync.gather import WeightBuckets
from megatron_dapo.sync.shared_bucket import open_server_tensor
from megatron_dapo.types import RoutedExperts
from megatron_dapo.weights.adapters import adapter_mappings, base_fingerprint, read_adapter
from megatron_dapo.weights.formats.readers import HFReader
from megatron_dapo.weights.mapping import ParameterMapping, parameter_mappings
from megatron_dapo.weights.model_weights import (
    RankPosition,
    live_adapters,
    live_mappings,
    load_hf_weights,
    use_server_weights,
)


class Policy:
    def __init__(self, config: Config, shape: ModelShape, runtime: Runtime) -> None:
        self.config = config
        self.shape = shape
        self.runtime = runtime
        self._reference: list[Tensor] | None = None
        self.model: list[PolicyModel] = build_model(shape, config.policy, runtime, empty=config.rollout.shares_base)
        if config.policy.lora.rank:
            self._add_adapters(config.policy.lora)
        on_cuda = runtime.device.type == "cuda"
        ddp = ddp_config(config.policy, on_cuda=on_cuda, replicas=runtime.groups.dp_cp.size())
        self.megatron_config = self.model[0].config
        check_transformer_config(self.megatron_config, ddp)
        self.chunks = [self._wrap(chunk, ddp, first=i == 0) for i, chunk in enumerate(self.model)]
        self.optimizer = get_megatron_optimizer(optimizer_config(config.policy), self.chunks)
        patch_optimizer(self.optimizer)
        self.set_fused_adam()
        self.megatron_config.finalize_model_grads_func = finalize_model_grads
        self.megatron_config.grad_scale_func = self.optimizer.scale_loss
        if ddp.overlap_grad_reduce:
            no_syncs = [chunk.no_sync for chunk in self.chunks]
            self.megatron_config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
        self._offloader = Offloader(runtime.device)
        self.step = UpdateStep(config, shape, runtime, self.model, self.chunks, self.optimizer)

    def _add_adapters(self, lora: LoraConfig) -> None:
        for chunk in self.model:
            chunk.adapters = Adapters(
                chunk, self.shape, lora, self.position, self.runtime.groups, self.config.trainer.seed
            )
        if lora.start:
            base = base_fingerprint(self.config.policy.model)
            load_adapters(self.model, read_adapter(lora.start, self.shape, lora, base), self.position)

    def _wrap(self, chunk: PolicyModel, ddp: DistributedDataParallelConfig, first: bool) -> Any:
        module = Float16Module(self.megatron_config, chunk) if self.config.policy.precision == "bf16" else chunk
        return DistributedDataParallel(self.megatron_config, ddp, module, disable_bucketing=not first)

    def set_fused_adam(self) -> None:
        wanted = self.config.policy.optimizer.fused
        set_fused(self.optimizer, self.runtime.device.type == "cuda" if wanted is None else wanted)

    @property
    def needs(self) -> Needs:
        """What the configured loss reads."""
        return self.step.loss.needs

    @property
    def updates(self) -> int:
        """Optimizer updates made so far; the learning-rate schedule depends on it."""
        return self.step.updates

    @updates.setter
    def updates(self, count: int) -> None:
        self.step.updates = count

    @property
    def position(self) -> RankPosition:
        """This rank's coordinates among the ranks that share the weights."""
        groups = self.runtime.groups
        return RankPosition(
            groups.tp.rank(),
            groups.tp.size(),
            groups.ep.rank(),
            groups.ep.size(),
            etp_rank=groups.expt_tp.rank(),
            etp_size=groups.expt_tp.size(),
        )

    def weight_buckets(self, bucket_bytes: int = 512 << 20, **options: Any) -> WeightBuckets:
        """Collective. The weights as buckets of HF-named tensors, for the engines; on rank 0 unless `options` say
        otherwise."""
        options |= {"before": self.step.complete_weights, "merge": self._merged if self.trains_adapters else None}
        return WeightBuckets(self.model, self.shape, self.position, bucket_bytes=bucket_bytes, **options)

    @property
    def trains_adapters(self) -> bool:
        return bool(self.config.policy.lora.rank)

    @property
    def trained_mappings(self) -> Mapping[str, ParameterMapping]:
        """Every trained parameter of the whole model: all weights, or LoRA's adapters."""
        lora = self.config.policy.lora
        if self.trains_adapters:
            return adapter_mappings(self.shape, lora.rank, tuple(lora.targets))
        return parameter_mappings(self.shape)

    def trained_parameters(self) -> Iterator[tuple[ParameterMapping, torch.nn.Parameter]]:
        """Those of them that this rank holds, or holds a shard of."""
        if self.trains_adapters:
            return live_adapters(self.model)
        return live_mappings(self.model, self.shape, self.position)

    def adapter_buckets(self) -> WeightBuckets:
        """Collective. LoRA's adapters under PEFT's names, in one bucket on rank 0."""
        options: dict[str, Any] = {"before": self.step.complete_weights, "adapters": self.trained_mappings}
        options["bucket_bytes"] = sys.maxsize
        return WeightBuckets(self.model, self.shape, self.position, **options)

    def _merged(self, name: str, weight: Tensor) -> Tensor:
        """This rank's shard of a weight as the engines need it: with its adapter."""
        for chunk in self.model:
            weight = chunk.adapters.merged(name, weight)
        return weight

    def load_hf(self, source: str | os.PathLike[str] | Mapping[str, Tensor]) -> None:
        """Fills the model from a HF directory or HF-named tensors. A missing or unknown tensor is an error."""
        load_hf_weights(self.model, self.shape, source, self.position)
        self.optimizer.reload_model_params()

    def use_base(self, references: Mapping[str, str]) -> None:
        """The frozen base becomes that of an engine (`SGLangEngine.shared_base`). Only rows that the engine has in
        another order are copied."""
        base = {name: open_server_tensor(reference, self.runtime.device) for name, reference in references.items()}
        use_server_weights(self.model, self.shape, base, HFReader(self.config.policy.model))

    def offload_training_state(self) -> int:
        """Moves master weights and optimizer state to host memory and drops the gradient buffers, which makes room for
        an engine on the same GPU. The weights stay readable. Returns the bytes freed; `onload` undoes it."""
        self.step.complete_weights()
        self.optimizer.zero_grad()
        buffers = [b for chunk in self.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        freed = self._offloader.offload((buffer.grad_data for buffer in buffers), keep=False)
        weights = {storage_key(parameter) for parameter in self._parameters()}
        return freed + self._offloader.offload(t for t in self._optimizer_tensors() if storage_key(t) not in weights)

    def offload_weights(self) -> int:
        """Moves the weights to host memory as well. Only `onload` may be called afterwards."""
        self.step.complete_weights()
        return self._offloader.offload(self._parameters())

    def offload(self) -> None:
        """Everything to host memory, to make room for another model of the trainer."""
        self.offload_training_state()
        self.offload_weights()

    def onload(self) -> int:
        return self._offloader.onload()

    def empty_cache(self) -> None:
        self._offloader.empty_cache()

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        for wrapper in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            inner = wrapper.optimizer
            yield from (parameter for group in inner.param_groups for parameter in group["params"])
            yield from getattr(inner, "param_to_fp32_param", {}).values()  # of Megatron's optimizer with CPU offload
            yield from (value for state in inner.state.values() for value in state.values() if torch.is_tensor(value))

    def old_log_probs(self, batch: TrainBatch, mini_batches: Sequence[Sequence[int]] | None = None) -> Floats:
        """Log-probs before the first update of a step, as `log_probs`. If `policy.routing_replay` says so, the batch
        gets the experts that computed them, which the updates replay."""
        record = self.config.policy.routing_replay == "old_log_probs"
        return self.log_probs(batch, mini_batches, record=record)[0]

    def collect_experts(self, batch: TrainBatch, mini_batches: Sequence[Sequence[int]]) -> dict[int, RoutedExperts]:
        """Collective. On rank 0 the experts that `old_log_probs` has put into the batches of all ranks, by sample."""
        if batch.routed_experts is None or self.config.policy.routing_replay != "old_log_probs":
            return {}
        return self.step.replay.collect(batch, mini_batches)

    def log_probs(
        self,
        batch: TrainBatch,
        mini_batches: Sequence[Sequence[int]] | None = None,
        *,
        replay: bool = True,
        record: bool = False,
    ) -> tuple[Floats, Floats]:
        """Log-probs and entropies [responses] of every response token, on every rank. No gradient, no state change.
        With `mini_batches` every rank scores the samples that it will train on, and needs no others. `replay`: with the
        experts of the batch, if it has them. `record`: puts the experts into the batch."""
        logprobs, entropy = self._scores(batch, mini_batches, 2, replay=replay, record=record)
        return logprobs, entropy

    def values(self, batch: TrainBatch, mini_batches: Sequence[Sequence[int]] | None = None) -> Floats:
        """Values [responses] of a value model, each of the state before its token; otherwise as `log_probs`."""
        return self._scores(batch, mini_batches, 1)[0]

    def _scores(
        self,
        batch: TrainBatch,
        mini_batches: Sequence[Sequence[int]] | None,
        rows: int,
        *,
        replay: bool = True,
        record: bool = False,
    ) -> NDArray[np.float32]:
        """[rows, responses]: the head's output, on every rank."""
        self.step.validate(batch, "scoring a mini-batch", to_train=False)
        micro_batches = self.step.pack(batch, mini_batches, replay=replay and not record)
        outputs = self.step.score_and_record(batch, micro_batches) if record else self.step.score(micro_batches)
        return self.step.gather(rows, len(batch.loss_mask), micro_batches, outputs)

    def keep_reference(self) -> None:
        """Makes a copy of the present weights in host memory the reference policy. With LoRA the reference is the
        frozen base, which needs no copy."""
        if self.trains_adapters:
            return
        self.step.complete_weights()
        self._reference = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters()]

    def reference_log_probs(self, batch: TrainBatch, mini_batches: Sequence[Sequence[int]] | None = None) -> Floats:
        """Log-probs under the reference policy, as `log_probs`. The policy's own weights are restored afterwards."""
        if self.trains_adapters:
            return self._base_log_probs(batch, mini_batches)
        if self._reference is None:
            raise UserError("there is no reference policy: call keep_reference() once the model is loaded")
        self.step.complete_weights()
        current = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters()]
        try:
            self._set_parameters(self._reference)
            return self.log_probs(batch, mini_batches, replay=False)[0]
        finally:
            self._set_parameters(current)

    def _base_log_probs(self, batch: TrainBatch, mini_batches: Sequence[Sequence[int]] | None) -> Floats:
        try:
            for chunk in self.model:
                chunk.adapters.enabled = False
            return self.log_probs(batch, mini_batches, replay=False)[0]
        finally:
            for chunk in self.model:
                chunk.adapters.enabled = True

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for chunk in self.model for parameter in chunk.parameters()]

    @torch.no_grad()
    def _set_parameters(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters(), values, strict=True):
            parameter.copy_(value, non_blocking=True)

    def update(self, batch: TrainBatch, **options: Any) -> dict[str, float]:
        """One optimizer update. Returns the metrics of the whole mini-batch, the same on every rank. `options`: of
        `UpdateStep.update`."""
        return self.step.update(batch, **options)

    def gradients(self, batch: TrainBatch) -> dict[str, float]:
        """Fills the gradient buffers with the exact gradient of the mini-batch's loss; does not step the optimizer."""
        return self.step.gradients(batch)


@dataclass(slots=True)
class _Offloaded:
    storage: torch.UntypedStorage
    bytes: int
    host: Tensor | None  # None: the contents are not kept


class Offloader:
    """Moves the storages of one device to host memory and back. Offloading twice changes nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._offloaded: dict[int, _Offloaded] = {}
        self._hosts: dict[int, Tensor] = {}

    def offload(self, tensors: Iterable[Tensor], *, keep: bool = True) -> int:
        """Frees the storages of `tensors`; returns the number of bytes freed. With `keep=False` the contents are
        arbitrary after `onload`: for buffers that are overwritten before they are read."""
        freed = 0
        fresh = {storage_key(t): t.untyped_storage() for t in tensors if t.device == self._device}
        for key, storage in fresh.items():
            size = storage.nbytes()
            if key in self._offloaded or not size:
                continue
            host = self._copy_to_host(key, storage) if keep else None
            self._offloaded[key] = _Offloaded(storage, size, host)
            freed += size
        self._synchronize()
        for key in fresh:
            if key in self._offloaded:
                self._offloaded[key].storage.resize_(0)
        self.empty_cache()
        return freed

    def empty_cache(self) -> None:
        """Returns memory that torch has cached to the device, so that other processes can use it."""
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # tensors that an engine has received and closed
            torch.cuda.empty_cache()

    def onload(self) -> int:
        """Restores everything that is offloaded; returns the number of bytes."""
        restored = 0
        for entry in self._offloaded.values():
            entry.storage.resize_(entry.bytes)
            if entry.host is not None:
                _as_bytes(entry.storage, self._device).copy_(entry.host, non_blocking=True)
            restored += entry.bytes
        self._offloaded.clear()
        self._synchronize()
        return restored

    def _copy_to_host(self, key: int, storage: torch.UntypedStorage) -> Tensor:
        host = self._hosts.get(key)
        if host is None or host.numel() != storage.nbytes():
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._hosts[key] = host
        return host.copy_(_as_bytes(storage, self._device), non_blocking=True)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def storage_key(tensor: Tensor) -> int:
    """Equal for all tensors that share one storage."""
    return tensor.untyped_storage()._cdata


def _as_bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
