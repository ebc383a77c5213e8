"""A bucket as a server sees it: one block of bytes and the tensors in it (`flattened_bucket`). Another process on the
same host maps the block: CUDA IPC on a GPU, a file of shared memory elsewhere.

Experts can be described as few large tensors (`packed`), so that SGLang does not search a name for each matrix. In a
bucket the matrices of an expert (gate, up, down) follow each other, and so do the experts of a layer. A run of n
experts is therefore one block of memory: [n, 3 * rows of gate, columns of gate]. Only the description that goes to the
servers changes: the memory, the manifest and the snapshot stay as they are. The servers load such a block with a
module of ours (engines/sglang/in_server). Matrices of an expert that a bucket does not have completely, and everything
else, keep their names. Scales of fp8 weights are packed like the weights.
"""

from __future__ import annotations

import base64
import io
import os
import pickle
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing  # registers how tensors are pickled by reference to shared memory
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megatron_dapo.errors import EngineError
from megatron_dapo.sync.bucket import Bucket, flatten
from megatron_dapo.weights.tensor_spec import TensorSpec, flat_starts

PREFIX = "experts::"
STDERR = 2
_MATRIX = re.compile(r"^(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(\w+)$")


def packed(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The same memory, with `experts::LAYER::FIRST EXPERT::weight` for every run of whole experts."""
    specs, found, i = tuple(specs), list[TensorSpec](), 0
    while i < len(specs):
        if _is_expert(specs[i : i + 3]):
            _add_expert(found, specs[i])
            i += 3
        else:
            found.append(specs[i])
            i += 1
    return tuple(found)


def _is_expert(matrices: Sequence[TensorSpec]) -> bool:
    """Whether these are gate, up and down of one expert."""
    names = [match for spec in matrices if (match := _MATRIX.match(spec.name))]
    if [name[3] for name in names] != ["gate", "up", "down"]:
        return False
    gate, up, down = matrices
    same = {(*name.group(1, 2, 4), spec.dtype) for name, spec in zip(names, matrices, strict=True)}
    return len(same) == 1 and len(gate.shape) == 2 and gate.shape == up.shape == down.shape[::-1]


def _add_expert(found: list[TensorSpec], gate: TensorSpec) -> None:
    """Appends one expert, to the last run if it is the next one of it."""
    match = _MATRIX.match(gate.name)
    assert match is not None
    layer, expert, _, kind = match.groups()
    one = (3 * gate.shape[0], gate.shape[1])
    if found and found[-1].name.startswith(PREFIX):
        last, (count, *size) = found[-1], found[-1].shape
        _, its_layer, first, its_kind = last.name.split("::")
        same = (its_layer, its_kind, last.dtype, tuple(size)) == (layer, kind, gate.dtype, one)
        if same and int(first) + count == int(expert):
            found[-1] = TensorSpec(last.name, last.dtype, (count + 1, *one))
            return
    found.append(TensorSpec(f"{PREFIX}{layer}::{expert}::{kind}", gate.dtype, (1, *one)))


DEVICE_ARGUMENT = 6  # of torch's rebuild_cuda_tensor


@dataclass(slots=True)
class SharedBucket:
    """A pickle, and the memory it refers to, which must outlive the requests.

    The memory may be overwritten as soon as the servers have replied: torch synchronises a server's stream when the
    server drops the tensors, which happens before its reply.
    """

    payload: str
    memory: list[torch.Tensor]

    def free(self) -> None:
        self.memory.clear()

    def expect(self, readers: int) -> None:
        """`readers` processes will open the payload. Torch expects one for each pickle, and removes the name of shared
        memory after they have closed it."""
        for tensor in self.memory:
            for _ in range(0 if tensor.is_cuda else readers - 1):
                tensor.untyped_storage()._shared_incref()


def shared_memory(size: int) -> torch.Tensor:
    """[size] bytes that `share` refers to without a copy. Their pages exist already: making them takes longer than
    writing to them. Call `share` first: it starts torch's process for such memory."""
    return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_using_filename_cpu(size)).zero_()


def share(bucket: Bucket, *, pack_experts: bool = False, by_value: bool = False) -> SharedBucket:
    """Pickles a reference to the bucket's block of memory, or the block itself, in SGLang's format
    `flattened_bucket`."""
    flat = flatten(bucket)
    specs = packed(flat.specs) if pack_experts else flat.specs
    starts = flat_starts(specs)
    # SGLang reads these attributes. Its own class cannot be imported here, and its unpickler allows this one.
    metadata = [
        SimpleNamespace(
            name=spec.name, shape=spec.shape, dtype=spec.dtype, start_idx=start, end_idx=start + spec.bytes,
            numel=spec.bytes,
        )
        for spec, start in zip(specs, starts, strict=False)  # the last start is the end
    ]  # fmt: skip
    content = {"flattened_tensor": flat.flat, "metadata": metadata}
    if by_value:
        return SharedBucket(base64.b64encode(pickle.dumps(content)).decode(), [])
    # Shared by file name: a file descriptor would have to be sent over a socket, and there is none to the server.
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    # Torch starts a process for such files, which lives as long as a server has one open: it must not keep our stderr.
    os.set_inheritable(STDERR, False)
    try:
        buffer = io.BytesIO()
        _Pickler(buffer).dump(content)
    finally:
        os.set_inheritable(STDERR, True)
        torch.multiprocessing.set_sharing_strategy(before)
    return SharedBucket(base64.b64encode(buffer.getvalue()).decode(), [flat.flat])


def open_server_tensor(reference: str, device: torch.device) -> torch.Tensor:
    """A tensor in a server's memory, by the reference that in_server/megatron_dapo_base.py made."""
    gpu, arguments = pickle.loads(base64.b64decode(reference))
    if not gpu:
        file, shared, count, dtype, shape = arguments
        tensor = torch.from_file(file, shared, count, dtype=dtype).view(shape)
        os.unlink(file)
        return tensor
    if gpu != (own := str(torch.cuda.get_device_properties(device).uuid)):
        raise EngineError(f"the server is on GPU {gpu}, the trainer on {own}: rollout.servers.share_base needs one GPU")
    arguments = (*arguments[:DEVICE_ARGUMENT], device.index, *arguments[DEVICE_ARGUMENT + 1 :])
    return rebuild_cuda_tensor(*arguments)


class _Pickler(ForkingPickler):
    """Names a GPU by its UUID, which SGLang reads: the server's process may number the GPUs differently."""

    def reducer_override(self, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reduce_tensor(value)
        uuid = str(torch.cuda.get_device_properties(value.device).uuid)
        return rebuild, (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :])
