"""The device "cuda" on a machine without CUDA: Megatron-Core uses that name throughout, and here it means the CPU.

Megatron's modules see a torch whose constructors take that device for the CPU; no other code does. `.cuda()` does
nothing, and the functions of `torch.cuda` that Megatron calls (streams, RNG, synchronisation) act on the host.
`patches.install` applies it, with the other patches that such a machine needs.
"""

from __future__ import annotations

import contextlib
import platform
import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import torch._dynamo  # torch's optimizers import it; after `install` that would fail
from torch.utils._device import _device_constructors

CPU = torch.device("cpu")
LIKE = (torch.empty_like, torch.full_like, torch.ones_like, torch.rand_like, torch.randn_like, torch.zeros_like)


def needed() -> bool:
    return not torch.cuda.is_available()


def let_cuda_mean_cpu() -> None:
    """Once per process, when Megatron's modules are imported."""
    # On ARM, oneDNN uses all cores whatever the number of threads is, and takes longer than OpenBLAS; bf16 may need it.
    if platform.machine() == "aarch64" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    host = _TorchOfTheHost()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and getattr(module, "torch", None) is torch:
            module.torch = host  # type: ignore[attr-defined]
    type_of = torch.Tensor.type

    def named_like_cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Megatron's optimizer accepts only parameters whose type is named 'torch.cuda.…Tensor'."""
        found = type_of(tensor, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    torch.Tensor.type = named_like_cuda  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor  # type: ignore[method-assign]
    torch.Tensor.record_stream = _nothing  # type: ignore[method-assign]
    _patch_torch_cuda()


class _TorchOfTheHost(ModuleType):
    """torch with other constructors."""

    def __init__(self) -> None:
        super().__init__("torch")
        constructors: set[Any] = {*_device_constructors(), *LIKE}
        for make in constructors:
            if make.__name__ in vars(torch) and vars(torch)[make.__name__] is make:
                setattr(self, make.__name__, _on_the_host(make))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_the_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes tensors, with the CPU for the device "cuda" and without pinned memory."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return call


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
