"""A bucket that another process on the same host maps: CUDA IPC on a GPU, a file of shared memory elsewhere."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing  # registers how tensors are pickled by reference to shared memory
from torch.multiprocessing.reductions import reduce_tensor

from megatron_dapo.engines.protocol import Bucket
from megatron_dapo.engines.sglang.weights.expert_packing import packed
from megatron_dapo.sync.bucket import flat_starts, flatten

DEVICE_ARGUMENT = 6  # of torch's rebuild_cuda_tensor


@dataclass(slots=True)
class SharedBucket:
    """A pickle, and the memory it refers to, which must outlive the requests.

    The memory may be overwritten as soon as the servers have replied: torch synchronises a server's stream when the
    server drops the tensors, which happens before its reply.
    """

    payload: str
    memory: list[torch.Tensor]

    def expect(self, readers: int) -> None:
        """So many processes will open the payload. For memory that is shared by name torch expects one for each pickle,
        and removes the name after as many have closed it."""
        for tensor in self.memory:
            for _ in range(0 if tensor.is_cuda else readers - 1):
                tensor.untyped_storage()._shared_incref()


def share(bucket: Bucket, *, pack_experts: bool = False) -> SharedBucket:
    """Pickles a reference to the bucket's block of memory, in SGLang's format `flattened_bucket`."""
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
    # Shared by file name: a file descriptor would have to be sent over a socket, and there is none to the server.
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        buffer = io.BytesIO()
        _Pickler(buffer).dump({"flattened_tensor": flat.flat, "metadata": metadata})
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    return SharedBucket(base64.b64encode(buffer.getvalue()).decode(), [flat.flat])


class _Pickler(ForkingPickler):
    """Names a GPU by its UUID, which SGLang reads: the server's process may number the GPUs differently."""

    def reducer_override(self, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reduce_tensor(value)
        uuid = str(torch.cuda.get_device_properties(value.device).uuid)
        return rebuild, (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :])
