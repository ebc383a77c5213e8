"""The device "cuda" on a machine without CUDA: Megatron-Core uses that name throughout, and here it means the CPU.

A TorchFunctionMode rewrites the device in every torch call with `device="cuda"`, `.cuda()` or `.to("cuda")` of the
thread that installs it. The functions of `torch.cuda` that Megatron calls (streams, RNG, synchronisation) act on the
host. `patches.install` applies it, with the other patches that such a machine needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # torch's optimizers import it; after `install` that would fail
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def needed() -> bool:
    return not torch.cuda.is_available()


def let_cuda_mean_cpu() -> None:
    """Once per process."""
    CudaMeansCpu().__enter__()
    _patch_torch_cuda()


def _is_cuda(device: Any) -> bool:
    return device.type == "cuda" if isinstance(device, torch.device) else str(device).startswith("cuda")


class CudaMeansCpu(TorchFunctionMode):
    """Rewrites CUDA device arguments to the CPU for every torch call of this thread."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizer accepts only parameters whose type is named 'torch.cuda.…Tensor'.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], str | torch.device) and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        if kwargs.get("device") is not None and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


class HostStream:
    """Replaces a CUDA stream or event: the host executes in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: None

    def record_event(self, *args: Any) -> HostStream:
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: HostStream) -> float:
        return 0.0


def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def _patch_torch_cuda() -> None:
    stream = HostStream()
    replacements: dict[str, Any] = {
        "current_device": lambda: CPU,
        "current_stream": lambda *a, **k: stream,
        "default_stream": lambda *a, **k: stream,
        "stream": lambda *a, **k: contextlib.nullcontext(),
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "manual_seed": lambda seed: torch.manual_seed(seed) and None,
        "is_current_stream_capturing": lambda: False,
        "memory_allocated": _zero,
        "max_memory_allocated": _zero,
        "Stream": HostStream,
        "Event": HostStream,
    }
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        replacements[name] = _nothing
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.random.get_rng_state = get_rng_state
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _nothing)
