"""The device "cuda" on a machine without CUDA: Megatron-Core uses that name throughout, and here it means the CPU.

Functions that create tensors, `.cuda()` and `.to("cuda")` use the CPU instead, in the whole process. The functions of
`torch.cuda` that Megatron calls (streams, RNG, synchronisation) act on the host. `patches.install` applies it, with the
other patches that such a machine needs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # torch's optimizers import it; after the patches that would fail

CPU = torch.device("cpu")


def needed() -> bool:
    return not torch.cuda.is_available()


def let_cuda_mean_cpu() -> None:
    """Once per process."""
    _patch_torch()
    _patch_torch_cuda()


def _is_cuda(device: Any) -> bool:
    return device.type == "cuda" if isinstance(device, torch.device) else str(device).startswith("cuda")


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the CPU for a CUDA device and without pinned memory."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None and _is_cuda(kwargs["device"]):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return call


def _patch_torch() -> None:
    for name in ("arange", "as_tensor", "empty", "empty_like", "full", "ones", "rand", "randn", "tensor", "zeros"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    to, kind = torch.Tensor.to, torch.Tensor.type

    def move(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], str | torch.device) and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        return to(tensor, *args, **kwargs)

    def name_of_type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = kind(tensor, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    replacements: dict[str, Any] = {
        "to": _on_cpu(move),
        "cuda": lambda tensor, *a, **k: tensor,
        "record_stream": lambda tensor, stream: None,
        "type": name_of_type,  # Megatron's optimizer accepts only parameters of a type 'torch.cuda.…Tensor'
    }
    for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"):
        replacements[name] = _on_cpu(getattr(torch.Tensor, name))
    for name, replacement in replacements.items():
        setattr(torch.Tensor, name, replacement)


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
