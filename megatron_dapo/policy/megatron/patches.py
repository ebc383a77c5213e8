"""Every place where we replace something of Megatron-Core or torch: one list, `PATCHES`. Modules of ours that run in
SGLang servers (engines/sglang) replace something of SGLang there; docs/megatron.md lists it, too.

A patch says what it replaces and why, which versions of megatron-core need it and where that is reported upstream.
`needed` asks the installed version, in a process without patches. docs/megatron.md shows the list. Tests fail when an
installed version that should need a patch does not, and when another file of this package replaces something.

`install` applies the patches of a machine without CUDA. Those of an optimizer or a model are applied to that object
alone when it is built, also with CUDA.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from megatron.core import jit
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import layers, mappings, random
from megatron.core.transformer.moe import moe_utils, token_dispatcher

from megatron_dapo.policy.megatron import cpu, importing
from megatron_dapo.policy.megatron.optimizer_state import describe_state, set_state

_installed = False


def install() -> None:
    """Lets Megatron-Core run on a machine without CUDA; does nothing where CUDA exists. Idempotent."""
    global _installed
    if cpu.needed() and not _installed:
        _installed = True
        for patch in PATCHES:
            if patch.when == "no CUDA":
                patch.apply()


# ---- without CUDA ----


def _run_helpers_eagerly() -> None:
    jit.disable_jit_fuser()
    torch.compiler.set_stance("force_eager")  # for functions that were decorated before


class _NoForkWarning(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def _keep_rng_on_the_host() -> None:
    random._get_cuda_rng_state = cpu.get_rng_state
    random._set_cuda_rng_state = cpu.set_rng_state
    logging.getLogger(random.__name__).addFilter(_NoForkWarning())


def _bind_router_name() -> None:
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _bind_recompute_names() -> None:
    if not hasattr(random, "FP8GlobalStateManager"):
        random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
        random.activation_recompute_forward = random.fp8_autocast = lambda *a, **k: contextlib.nullcontext()


def _split_sizes_as_numbers() -> None:
    move = token_dispatcher.maybe_move_tensor_to_cpu

    def move_as_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return move(tensor, as_numpy, record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = move_as_numbers


def _exchange_unequal_parts() -> None:
    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_parts(x: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(x, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = x.new_zeros(max(*sizes, 1), *x.shape[1:])
        padded[: x.shape[0]] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatter_parts(x: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(x, group, input_split_sizes, use_global_buffer)
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total.split([int(size) for size in input_split_sizes])[group.rank()].clone()

    mappings._gather_along_first_dim = gather_parts
    mappings._reduce_scatter_along_first_dim = reduce_scatter_parts


_devices: dict[tuple[int, str], list[Any]] = {}  # by process, since threads do not survive a fork, and interfaces


def share_devices() -> None:
    """Of all gloo groups that this process and its forked children create from now on. Idempotent."""
    if c10d.is_gloo_available() and not isinstance(c10d.ProcessGroupGloo, _SharingDevices):
        original = c10d.ProcessGroupGloo
        setattr(c10d, "ProcessGroupGloo", _SharingDevices("ProcessGroupGloo", (), {"original": original}))  # noqa: B010


class _SharingDevices(type):
    """The type of a class that torch uses in place of its own: calls create instances of the original."""

    original: Any

    def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        options = cls.original._Options()
        options._devices = _devices_of_this_process(cls.original)
        options._timeout = timeout
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


def _gloo_threads_per_group() -> float:
    """Threads that torch starts for one more gloo group of its own."""
    groups, before = 4, len(os.listdir("/proc/self/task"))
    kept = [c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60)) for _ in range(groups)]
    return (len(os.listdir("/proc/self/task")) - before) / len(kept)


# ---- of a model or an optimizer, with and without CUDA ----


@contextlib.contextmanager
def fusion_without_apex(wanted: bool) -> Iterator[None]:
    found = layers._grad_accum_fusion_available
    layers._grad_accum_fusion_available = found or wanted
    try:
        yield
    finally:
        layers._grad_accum_fusion_available = found


def separate_expert_gradients(chunk: torch.nn.Module, config: Any) -> None:
    same_split = config.expert_tensor_parallel_size == config.tensor_model_parallel_size
    if config.expert_model_parallel_size == 1 and same_split:
        return
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]


class NonFiniteNorm(Exception):
    """The gradient norm is not finite. No weight has changed."""

    def __init__(self, norm: float) -> None:
        super().__init__(f"the gradient norm is {norm}")


def _stop_at_a_nonfinite_norm(optimizer: Any) -> None:
    original = optimizer.get_grad_norm

    def finite_norm() -> float:
        norm = float(original())
        if not math.isfinite(norm):
            raise NonFiniteNorm(norm)
        return norm

    optimizer.get_grad_norm = finite_norm


def _distributed_parts(optimizer: Any) -> Iterator[DistributedOptimizer]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return (part for part in parts if isinstance(part, DistributedOptimizer))


def _correct_places(optimizer: Any) -> None:
    for part in _distributed_parts(optimizer):
        for group, kinds in enumerate(zip(part.model_fp32_groups, part.model_float16_groups, strict=True)):
            for place, parameter in enumerate(parameter for kind in kinds for parameter in kind):
                part.model_param_group_index_map[parameter] = (group, place)


def save_whole_parameters(optimizer: Any) -> None:
    for part in _distributed_parts(optimizer):
        part.sharded_param_state_fully_reshardable = partial(describe_state, part)
        part._set_main_param_and_optimizer_states = partial(set_state, part)


def patch_optimizer(optimizer: Any) -> None:
    """Applies the patches of an optimizer that Megatron has just made."""
    for patch in PATCHES:
        if patch.when == "optimizer":
            patch.apply(optimizer)


# ---- the list ----


@dataclass(frozen=True, slots=True)
class Patch:
    target: str
    reason: str
    when: Literal["import", "no CUDA", "model", "optimizer"]
    apply: Callable[..., Any]
    needed: Callable[[], bool]
    fixed_in: str = ""  # the first version of megatron-core that needs it no longer; empty: none so far
    upstream: str = ""  # where it is reported; empty: nothing to fix there


def _source_has(text: str, *objects: Any) -> Callable[[], bool]:
    return lambda: all(text in inspect.getsource(item) for item in objects)


PULL = "https://github.com/NVIDIA/Megatron-LM/pull/"
ISSUE = "https://github.com/NVIDIA/Megatron-LM/issues/"
PATCHES = (
    Patch(
        "torch.compile and wandb, while megatron.core is imported",
        "Megatron decorates small functions with torch.compile, which imports the compiler at once, and imports wandb "
        "for a logger of its own: a third of the imports of a rank, unused without CUDA",
        "import", importing.install, _source_has("torch.compile", jit),
    ),
    Patch(
        "the name torch in Megatron's modules, Tensor.type, Tensor.cuda, torch.cuda",
        "Megatron names the device cuda throughout; without CUDA the name means the CPU, and streams, events and "
        "random states are the host's",
        "no CUDA", cpu.let_cuda_mean_cpu, _source_has("torch.cuda.current_device()", layers, mappings),
    ),
    Patch(
        "torch.distributed.distributed_c10d.ProcessGroupGloo",
        "torch starts a network thread for each gloo group; all groups of a process share one",
        "no CUDA", share_devices, lambda: _gloo_threads_per_group() > 2,
    ),
    Patch(
        "megatron.core.jit.jit_fuser",
        "compiling small pointwise functions costs minutes of C++ compilation on a CPU",
        "no CUDA", _run_helpers_eagerly, lambda: jit.jit_fuser is not jit.noop_decorator,
    ),
    Patch(
        "megatron.core.tensor_parallel.random._get_cuda_rng_state, _set_cuda_rng_state",
        "the RNG tracker uses CUDA generators through torch._C",
        "no CUDA", _keep_rng_on_the_host, _source_has("torch.cuda", random._get_cuda_rng_state),
    ),
    Patch(
        "megatron.core.transformer.moe.moe_utils.te_general_gemm",
        "the router reads a name that is defined only where Transformer Engine is installed",
        "no CUDA", _bind_router_name, lambda: not hasattr(moe_utils, "te_general_gemm"), fixed_in="0.17",
    ),
    Patch(
        "megatron.core.tensor_parallel.random.FP8GlobalStateManager, activation_recompute_forward, fp8_autocast",
        "recomputing a norm reads names of Transformer Engine, even without fp8",
        "no CUDA", _bind_recompute_names, lambda: not hasattr(random, "FP8GlobalStateManager"),
    ),
    Patch(
        "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
        "split sizes become numbers only if they are CUDA tensors; gloo needs numbers as well",
        "no CUDA", _split_sizes_as_numbers,
        lambda: torch.is_tensor(moe_utils.maybe_move_tensor_to_cpu(torch.ones(1), as_numpy=True)),
    ),
    Patch(
        "megatron.core.tensor_parallel.mappings._gather_along_first_dim, _reduce_scatter_along_first_dim",
        "expert tensor parallelism gathers and reduces parts of different lengths; gloo needs equal ones",
        "no CUDA", _exchange_unequal_parts, _source_has("torch.split(output", mappings._gather_along_first_dim),
    ),
    Patch(
        "megatron.core.tensor_parallel.layers._grad_accum_fusion_available, while a model is built",
        "Transformer Engine's layers add gradients to main_grad without apex. Only Megatron's output layer would need "
        "apex and refuses to be built; ours does not use it",
        "model", fusion_without_apex,
        _source_has("not _grad_accum_fusion_available", layers.ColumnParallelLinear), upstream=f"{ISSUE}1885",
    ),
    Patch(
        "allreduce of the experts' weights",
        "experts with another tensor-parallel size than the model have replicas on tensor-parallel ranks, but are "
        "marked only under expert parallelism: their gradients would be summed over data-parallel ranks alone",
        "model", separate_expert_gradients,
        _source_has('"allreduce", not (self.is_expert and self.expert_parallel)', layers.ColumnParallelLinear),
        fixed_in="0.19", upstream=f"{PULL}5916",
    ),
    Patch(
        "MegatronOptimizer.get_grad_norm, of the policy's optimizer",
        "a step with a NaN or infinite gradient would change the weights; the norm is known before anything changes",
        "optimizer", _stop_at_a_nonfinite_norm, lambda: "isfinite" not in inspect.getsource(DistributedOptimizer.step),
    ),
    Patch(
        "DistributedOptimizer.model_param_group_index_map, of the policy's optimizer",
        "places of parameters are noted before fp32 parameters move to the front of their group: with bf16 and fp32 "
        "parameters (gated DeltaNet) the state of other parameters is saved",
        "optimizer", _correct_places,
        _source_has("*shard_fp32_params_this_group", DistributedOptimizer._build_model_and_main_param_groups),
        upstream="upstream/optimizer-places.md",
    ),
    Patch(
        "DistributedOptimizer.sharded_param_state_fully_reshardable, _set_main_param_and_optimizer_states, of the "
        "policy's optimizer",
        "buckets are joined without their padding but cut at offsets that count it; all state passes through one "
        "rank's memory; the step count of torch's AdamW does not load",
        "optimizer", save_whole_parameters,
        _source_has("data corruption", DistributedOptimizer.sharded_param_state_fully_reshardable),
        fixed_in="0.20", upstream="upstream/bucket-padding.md",
    ),
)  # fmt: skip
