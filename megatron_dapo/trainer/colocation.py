"""Weights to the engines, and hand-overs of GPU memory where trainer and engines are colocated
(`rollout.servers.share_gpus`; elsewhere there are none).

    trainer                              engines
    offload_training_state               (hold nothing)
    send the weights                     take memory for the weights and load them
    offload_weights
                                         take memory for the KV cache and serve
                                         release everything
    onload

At most two of training state, trainer weights, engine weights and KV cache are on the GPU at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum

import torch

from megatron_dapo.engines.protocol import WeightReport
from megatron_dapo.observe.observer import NullObserver, Observer
from megatron_dapo.policy.policy import Policy
from megatron_dapo.trainer.collectives import Collectives, DriverError
from megatron_dapo.trainer.rollouts import Rollouts

GIB = 2**30
SYNC_ATTEMPTS = 3


class OnGpu(Enum):
    """What the trainer has on its GPUs."""

    EVERYTHING = "everything"
    WEIGHTS = "the weights"
    NOTHING = "nothing"


class Colocation:
    """Every method is called by all ranks, in the same order."""

    def __init__(self, shared: bool, policy: Policy, collectives: Collectives, rollouts: Rollouts) -> None:
        self.observer: Observer = NullObserver()
        self.shared = shared
        self.on_gpu = OnGpu.EVERYTHING
        self._policy = policy
        self._collectives = collectives
        self._rollouts = rollouts

    def sync_weights(self, version: int) -> None:
        """The engines serve `version` afterwards. If no engine does, all weights are sent again: meanwhile servers are
        restarted."""
        for attempt in range(1, SYNC_ATTEMPTS + 1):
            self.onload()
            try:
                with self.observer.phase("sync"):
                    self._offload_training_state()
                    self._rollouts.load_weights(version)
                    self._offload_weights()
                    report = self._rollouts.serve_weights(version)
                if report is not None:
                    self.observer.log(describe(report))
                return
            except DriverError as error:
                if not error.by_engine or attempt == SYNC_ATTEMPTS:
                    raise
                self.observer.warn(f"weight sync, attempt {attempt} of {SYNC_ATTEMPTS}: {error}")

    def offload_all(self) -> None:
        """Before the engines start: they size their KV cache by the memory they find free."""
        self._offload_training_state()
        self._offload_weights()

    def _offload_training_state(self) -> None:
        """Makes room for the engines' copy of the weights."""
        if not self.shared or self.on_gpu is not OnGpu.EVERYTHING:
            return
        before, began = self._memory(), time.monotonic()
        self._policy.offload_training_state()
        self._collectives.barrier()  # an engine takes memory only after every rank has freed its own
        self.on_gpu = OnGpu.WEIGHTS
        self.observer.log(
            f"GPU to the engines: {before}; training state offloaded in {time.monotonic() - began:.2f} s: "
            f"{self._memory()}"
        )

    def _offload_weights(self) -> None:
        """Makes room for the engines' KV cache. No bucket of the weights may be in use any more."""
        if not self.shared or self.on_gpu is not OnGpu.WEIGHTS:
            return
        self._policy.offload_weights()
        self._collectives.barrier()
        self.on_gpu = OnGpu.NOTHING

    def onload(self) -> None:
        """The engines release their memory, and everything of the trainer is on the GPU again. The engines serve
        nothing until the next weight sync."""
        if self.shared and self.on_gpu is not OnGpu.EVERYTHING:
            with self.observer.phase("hand_over"):
                self._onload(self._rollouts.release_memory)

    def onload_or_close_engines(self) -> None:
        """As `onload`, for a run that ends: engines that cannot release their memory are closed instead."""
        try:
            self.onload()
        except DriverError as error:
            self.observer.log(f"{error}; closing the engines instead")
            self._onload(self._rollouts.close_engines)

    def _onload(self, release: Callable[[], None]) -> None:
        before, began = self._memory(), time.monotonic()
        release()
        released, after_release = time.monotonic(), self._memory()
        self._policy.onload()
        self.on_gpu = OnGpu.EVERYTHING
        self.observer.log(
            f"GPU to the trainer: {before}; the engines released theirs in {released - began:.2f} s: {after_release}; "
            f"training state onloaded in {time.monotonic() - released:.2f} s: {self._memory()}"
        )

    def _memory(self) -> str:
        return memory(self._policy.runtime.device)


def describe(report: WeightReport) -> str:
    moving = report.seconds - report.parts.get("memory", 0.0)
    parts = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in report.parts.items())
    return (
        f"weights: {report.tensors} tensors, {report.bytes / 1e9:.3f} GB in {report.seconds:.2f} s"
        f"{f' ({parts})' if parts else ''}, {report.bytes / max(moving, 1e-9) / 1e9:.1f} GB/s without taking memory "
        f"back; {report.proof}"
    )


def memory(device: torch.device) -> str:
    """For the log: what is in use on the device, and how much of it by this process."""
    if device.type != "cuda":
        return "no GPU"
    free, total = torch.cuda.mem_get_info(device)
    mine = torch.cuda.memory_reserved(device)
    return f"{(total - free) / GIB:.1f} GiB in use, {mine / GIB:.1f} of it the trainer's"
