"""This process in the job: device, process groups, and errors that reach all ranks.

`initialize` joins the job (torchrun's or srun's environment, or an explicit `Rendezvous`), with NCCL on CUDA or with
gloo on the CPU. Every collective has the configured timeout. Messages between ranks and waits use a gloo group
(`control`), because a rank that waits in an NCCL call keeps its GPU busy. `raise_together` turns an error on one rank
into the same error on all ranks, before another rank waits for the failed one.
"""

from __future__ import annotations

import contextlib
import gc
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.errors import RankError
from megatron_dapo.policy.megatron import cpu, patches
from megatron_dapo.processes.fork_ranks import Rendezvous

T = TypeVar("T")


@dataclass(frozen=True)
class Runtime:
    """This rank's device and process groups (Megatron's ProcessGroupCollection)."""

    device: torch.device
    groups: Any
    rank: int
    world_size: int
    virtual_pipeline: int = 1
    control: Any = None  # a gloo group of all ranks; None: the default group is one

    @property
    def is_last_stage(self) -> bool:
        return bool(self.groups.pp.rank() == self.groups.pp.size() - 1)

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last pipeline stage of this rank's pipeline."""
        return dist.get_global_rank(self.groups.pp, self.groups.pp.size() - 1)

    def gather(self, mine: T) -> list[T]:
        """Collective. What each rank passes, in the order of the ranks, on all of them."""
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, mine, group=self.control)
        return found

    def raise_together(self, error: Exception | None, doing: str) -> None:
        """Collective. If any rank passes an error, all ranks raise RankError with the reason of the lowest of them."""
        failed = torch.tensor([int(error is not None)])
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self.control)
        if not failed.item():
            return
        reasons = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        lines = [f"rank {rank} failed while {doing}: {reason}" for rank, reason in enumerate(reasons) if reason]
        more = f" (and {len(lines) - 1} more ranks)" if len(lines) > 1 else ""
        raise RankError(lines[0] + more) from error


def initialize(policy: PolicyConfig, *, seed: int = 0, rendezvous: Rendezvous | None = None) -> Runtime:
    """Joins the job and builds Megatron's process groups for this layout."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    patches.install()
    if policy.is_deterministic:
        _use_deterministic_algorithms()
    rendezvous = rendezvous or Rendezvous.from_environment()
    timeout = timedelta(seconds=policy.timeout_seconds)
    device = _join(rendezvous, timeout)
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=policy.tensor_parallel,
        pipeline_model_parallel_size=policy.pipeline_parallel,
        virtual_pipeline_model_parallel_size=policy.virtual_pipeline if policy.virtual_pipeline > 1 else None,
        context_parallel_size=policy.context_parallel,
        expert_model_parallel_size=policy.expert_parallel,
        expert_tensor_parallel_size=policy.expert_tensor_parallel,
        distributed_timeout_minutes=max(1, round(policy.timeout_seconds / 60)),
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return Runtime(
        device=device,
        groups=ProcessGroupCollection.use_mpu_process_groups(),
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        virtual_pipeline=policy.virtual_pipeline,
        control=None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo", timeout=timeout),
    )


def _use_deterministic_algorithms() -> None:
    """Before the first CUDA call: cuBLAS and Transformer Engine read these variables when they start."""
    for name, value in (("CUBLAS_WORKSPACE_CONFIG", ":4096:8"), ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")):
        os.environ[name] = value
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _join(rendezvous: Rendezvous, timeout: timedelta) -> torch.device:
    if cpu.needed():
        backend, device = "gloo", cpu.CPU
    else:
        backend, device = "nccl", torch.device("cuda", rendezvous.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # A single process needs no address.
        where: dict[str, Any] = {"init_method": rendezvous.url} if rendezvous.url else {"store": dist.HashStore()}
        dist.init_process_group(
            backend, rank=rendezvous.rank, world_size=rendezvous.world_size, timeout=timeout, **where
        )
    return device


def shutdown(*, failed: bool = False) -> None:
    """`failed`: other ranks may never join a collective that this rank has begun, and destroying its NCCL group would
    wait for them. It is aborted."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if failed and dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # the error of the run is the one to show
            dist.distributed_c10d._abort_process_group()
    elif dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # gloo's threads, about fifty per layout, end with the last reference to their group
