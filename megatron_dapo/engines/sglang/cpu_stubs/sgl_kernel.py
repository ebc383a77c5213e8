"""CPU stub for SGLang's kernel package, which is published for CUDA only."""

from __future__ import annotations

import platform
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

__version__ = "0.4.6.post1"
__path__: list[str] = []

SUBMODULES = ("elementwise", "flash_attn", "kvcacheio", "scalar_type", "speculative", "utils")


def assign_req_to_token_pool_cpu(
    requests: Tensor, token_pool: Tensor, starts: Tensor, ends: Tensor, locations: Tensor, width: int
) -> None:
    """Writes the next cache locations to columns [starts[i], ends[i]) of line `requests[i]` of the pool."""
    used = 0
    for line, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        token_pool[line, start:end] = locations[used : used + end - start].to(token_pool.dtype)
        used += end - start


class _Names:
    """`scalar_types.<any name>`: quantised kernels look up their types when they are imported."""

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def _lacking(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def call(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU; this server runs on the CPU with a stub")

    call.__name__ = name
    return call


def _submodule(name: str) -> ModuleType:
    module = ModuleType(f"{__name__}.{name}")
    module.__getattr__ = _lacking  # type: ignore[method-assign]
    if name == "scalar_type":
        module.ScalarType, module.scalar_types = str, _Names()  # type: ignore[attr-defined]
    return module


def _define_arm64_operators() -> None:
    """On an aarch64 CPU SGLang calls these without checking whether the kernels exist.

    The first two bind threads to cores and open shared memory; the others exchange tensors of tensor-parallel ranks
    through it. Without shared memory this is correct, only slower.
    """
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("init_cpu_threads_env(str cores) -> str")
    library.impl("init_cpu_threads_env", lambda cores: "", "CompositeExplicitAutograd")
    library.define("initialize(int world_size, int rank) -> ()")
    library.impl("initialize", lambda world_size, rank: None, "CompositeExplicitAutograd")
    library.define("shm_allreduce(Tensor(a!) data, int op) -> ()")
    library.impl("shm_allreduce", _all_reduce, "CompositeExplicitAutograd")
    library.define("shm_allgather(Tensor data, int dim) -> Tensor")
    library.impl("shm_allgather", _all_gather, "CompositeExplicitAutograd")
    _libraries.append(library)


def _all_reduce(data: Tensor, op: int) -> None:
    torch.distributed.all_reduce(data, group=_tensor_parallel_group())


def _all_gather(data: Tensor, dim: int) -> Tensor:
    group = _tensor_parallel_group()
    parts = [torch.empty_like(data) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, data.contiguous(), group=group)
    return torch.cat(parts, dim)


def _tensor_parallel_group() -> Any:
    from sglang.srt.distributed import get_tp_group

    return get_tp_group().device_group


_libraries: list[torch.library.Library] = []  # an operator lives as long as the library that defined it
if platform.machine() == "aarch64":
    _define_arm64_operators()
__getattr__ = _lacking
for _name in SUBMODULES:
    sys.modules[f"{__name__}.{_name}"] = globals()[_name] = _submodule(_name)
