"""Megatron-Core, unmodified, on a machine without CUDA.

Megatron-Core names the device "cuda" throughout. `install()` makes that name mean the CPU in this process:

1. A TorchFunctionMode rewrites the device in every torch call with `device="cuda"`, `.cuda()` or `.to("cuda")`.
2. The functions of `torch.cuda` that Megatron calls (streams, RNG, synchronisation) act on the host.
3. Code in Megatron-Core that neither reaches is replaced; each patch below names what it replaces and why.

The mode belongs to the thread that installs it: call `install` in every thread that uses Megatron-Core. On a machine
with CUDA it does nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # torch's optimizers import it; after `install` that would fail
import torch.distributed.distributed_c10d as c10d
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_installed_mode: TorchFunctionMode | None = None


def needed() -> bool:
    return not torch.cuda.is_available()


def install() -> None:
    """Idempotent. Does nothing where CUDA exists."""
    global _installed_mode
    if not needed() or _installed_mode is not None:
        return
    _installed_mode = CudaMeansCpu()
    _installed_mode.__enter__()
    _patch_torch_cuda()
    share_devices()
    for patch in (
        _run_fused_helpers_eagerly,
        _keep_rng_on_the_host,
        _bind_missing_moe_names,
        _bind_missing_recompute_names,
        _split_sizes_as_numbers,
        _exchange_unequal_parts,
    ):
        patch()


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


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
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
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
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
    torch.cuda.random.get_rng_state = _get_rng_state
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _nothing)


def _run_fused_helpers_eagerly() -> None:
    """Megatron wraps small pointwise functions in torch.compile, which costs minutes of C++ compilation here."""
    from megatron.core import jit

    jit.disable_jit_fuser()
    torch.compiler.set_stance("force_eager")  # for functions that were decorated before


class _NoForkWarning(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def _keep_rng_on_the_host() -> None:
    """The RNG tracker uses CUDA generators through torch._C. Here both RNGs are the host's."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = _get_rng_state
    random._set_cuda_rng_state = _set_rng_state
    logging.getLogger(random.__name__).addFilter(_NoForkWarning())


def _bind_missing_moe_names() -> None:
    """The router of 0.16 reads a name that is defined only if Transformer Engine is installed."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _bind_missing_recompute_names() -> None:
    """Recomputing a norm reads names of Transformer Engine, even without fp8."""
    from megatron.core.tensor_parallel import random

    if not hasattr(random, "FP8GlobalStateManager"):
        random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
        random.activation_recompute_forward = random.fp8_autocast = lambda *a, **k: contextlib.nullcontext()


def _split_sizes_as_numbers() -> None:
    """The token dispatcher converts split sizes to numbers only for CUDA tensors; gloo needs numbers as well."""
    from megatron.core.transformer.moe import token_dispatcher

    move = token_dispatcher.maybe_move_tensor_to_cpu

    def move_as_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return move(tensor, as_numpy, record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = move_as_numbers


def _exchange_unequal_parts() -> None:
    """Expert tensor parallelism gathers and reduces parts of different lengths; gloo needs equal ones."""
    from megatron.core.tensor_parallel import mappings

    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_parts(x: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(x, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = x.new_zeros(max(*sizes, 1), *x.shape[1:])
        padded[: x.shape[0]] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatter_parts(x: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(x, group, input_split_sizes, use_global_buffer)
        total = x.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split([int(size) for size in input_split_sizes])[group.rank()].clone()

    mappings._gather_along_first_dim = gather_parts
    mappings._reduce_scatter_along_first_dim = reduce_scatter_parts


# All gloo groups of a process share one network device, and so one thread that waits for its sockets.


_devices: dict[tuple[int, str], list[Any]] = {}  # by process, since threads do not survive a fork, and interfaces


def share_devices() -> None:
    """Of all groups that this process and its forked children create from now on. Idempotent."""
    if c10d.is_gloo_available() and not isinstance(c10d.ProcessGroupGloo, _SharingDevices):
        original = c10d.ProcessGroupGloo
        setattr(c10d, "ProcessGroupGloo", _SharingDevices("ProcessGroupGloo", (), {"original": original}))  # noqa: B010


class _SharingDevices(type):
    """The type of a class that torch uses in place of its own: calls create instances of the original."""

    original: Any

    def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        options = cls.original._Options()
        options._devices, options._timeout = _devices_of_this_process(cls.original), timeout
        options._threads = 2 * len(options._devices)  # as torch does
        return cls.original(store, rank, size, options)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.original)


def _devices_of_this_process(original: Any) -> list[Any]:
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    key = (os.getpid(), interfaces)
    if key not in _devices:
        _devices.clear()
        _devices[key] = [original.create_device(interface=name) for name in interfaces.split(",") if name] or [
            original.create_default_device()
        ]
    return _devices[key]
