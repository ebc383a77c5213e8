"""Whose turn it is, where trainer and engines share GPUs (`rollout.servers.share_gpus`); elsewhere nothing happens.

The trainer gives its memory up in two parts, because the engines need its weights last of all: training state first
(`make_room`), then, once all weights have been sent, the weights themselves (`sending`). Engines take room for weights
before the transfer and for the KV cache after it, so at no time do all four lie side by side. In the other direction
(`to_trainer`) engines let everything go, and what they held comes again with the next weight update.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_dapo.engines.protocol import Bucket
from megatron_dapo.policy.policy import Policy
from megatron_dapo.trainer.collectives import Together

if TYPE_CHECKING:
    from megatron_dapo.trainer.rollout_driver import Rollouts

GIB = 2**30


class Turns:
    """Every method is called by all ranks, in the same order."""

    def __init__(self, shared: bool, policy: Policy, together: Together, log: Callable[[str], None]) -> None:
        self.shared, self.trainers_turn = shared, True
        self._policy, self._together, self._log = policy, together, log

    def clear_the_way(self) -> None:
        """Before the engines start: they size their KV cache by what they find free."""
        if self.shared:
            self._policy.offload_training_state()
            self._policy.offload_weights()
            self._meet()
            self.trainers_turn = False

    def to_trainer(self, rollouts: Rollouts | None) -> None:
        """Ranks but the first pass None. Afterwards the engines serve nothing until the next weight update."""
        if not self.shared or self.trainers_turn:
            return
        before, began = memory(self._policy.runtime.device), time.monotonic()
        future = rollouts.release_memory() if rollouts is not None else None
        self._together.wait(future, "getting the GPUs back from the engines")
        released, after_release = time.monotonic(), memory(self._policy.runtime.device)
        self._policy.onload()
        self.trainers_turn = True
        self._log(
            f"GPU to the trainer: {before}; the engines released theirs in {released - began:.2f} s: {after_release}; "
            f"training state back in {time.monotonic() - released:.2f} s: {memory(self._policy.runtime.device)}"
        )

    def make_room(self) -> None:
        """For the engines' copy of the weights."""
        if self.shared and self.trainers_turn:
            before, began = memory(self._policy.runtime.device), time.monotonic()
            self._policy.offload_training_state()
            self._meet()
            after = memory(self._policy.runtime.device)
            self._log(f"GPU to the engines: {before}; training state away in {time.monotonic() - began:.2f} s: {after}")

    def sending(self, buckets: Iterator[Bucket]) -> Iterator[Bucket]:
        """`buckets`, and when the last one has been taken the weights leave the GPU on every rank."""
        for bucket in buckets:
            # Buckets may be views of the weights, and the last ones may still be on their way when these leave.
            yield [(name, tensor.clone()) for name, tensor in bucket] if self.shared else bucket
        if self.shared and self.trainers_turn:
            self._policy.offload_weights()
            self._meet()
            self.trainers_turn = False

    def all_sent(self) -> None:
        """The engines have read everything: what was kept for them may go."""
        if self.shared:
            self._policy.empty_cache()

    def _meet(self) -> None:
        """No engine may take memory on a GPU whose rank has not given it up yet."""
        here = torch.zeros(1, device=self._policy.runtime.device)
        dist.all_reduce(here)
        here.item()


def memory(device: torch.device) -> str:
    """In words: what is in use on the device, and how much of it is this process's."""
    if device.type != "cuda":
        return "no GPU"
    free, total = torch.cuda.mem_get_info(device)
    mine = torch.cuda.memory_reserved(device)
    return f"{(total - free) / GIB:.1f} GiB in use, {mine / GIB:.1f} of it the trainer's"
