"""A bucket of weights as one block of bytes: one collective or one IPC handle moves it, and SGLang splits it.

The tensors are views of the block (`weights/tensor_spec`). SGLang calls this format `flattened_bucket`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_dapo.weights.tensor_spec import TensorSpec, flat_size, flat_starts, in_flat_order

# A part of a weight update: tensors under the names of the HF checkpoint.
Bucket = Sequence[tuple[str, Tensor]]


@dataclass(slots=True, frozen=True, eq=False)
class FlatBucket(Sequence[tuple[str, Tensor]]):
    """(name, tensor) pairs whose tensors are views of `flat`: [bytes], uint8. `receivers`: as of a `RemoteBucket`.
    `readers`: the ends of copies from this block that have been started (see `wait_for_readers`)."""

    flat: Tensor
    specs: tuple[TensorSpec, ...]
    views: tuple[Tensor, ...]
    receivers: tuple[int, ...] = ()
    readers: list[torch.cuda.Event] = field(default_factory=list)

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __len__(self) -> int:
        return len(self.specs)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((spec.name, view) for spec, view in zip(self.specs, self.views, strict=True))


@dataclass(slots=True, frozen=True, eq=False)
class RemoteBucket(Sequence[tuple[str, Tensor]]):
    """A bucket whose tensors are on other ranks: `owner` broadcasts it, or `receivers` hand it to their engines. As a
    sequence it is empty."""

    owner: int
    receivers: tuple[int, ...]
    specs: tuple[TensorSpec, ...]

    def __getitem__(self, index: Any) -> Any:
        return [][index]

    def __len__(self) -> int:
        return 0


def specs_of(bucket: Bucket) -> tuple[TensorSpec, ...]:
    """The tensors of any bucket, also of one that is elsewhere."""
    if isinstance(bucket, FlatBucket | RemoteBucket):
        return bucket.specs
    return tuple(TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket)


def bucket_in(
    memory: Tensor,
    specs: Sequence[TensorSpec],
    receivers: tuple[int, ...] = (),
    readers: list[torch.cuda.Event] | None = None,
) -> FlatBucket:
    """A bucket at the start of `memory` (uint8). `specs` are in flat order. Buckets in the same memory share
    `readers`."""
    starts = flat_starts(specs)
    flat = memory[: starts[-1]]
    views = (
        flat[start : start + spec.bytes].view(spec.dtype).view(spec.shape)
        for start, spec in zip(starts, specs, strict=False)  # the last start is the end
    )
    return FlatBucket(flat, tuple(specs), tuple(views), receivers, [] if readers is None else readers)


def wait_for_readers(bucket: FlatBucket) -> None:
    """What is launched on the current stream from now on runs after the copies from this block."""
    while bucket.readers:
        torch.cuda.current_stream(bucket.flat.device).wait_event(bucket.readers.pop())


def flatten(bucket: Bucket) -> FlatBucket:
    """The bucket itself if it is flat already, otherwise a flat copy on the same device."""
    if isinstance(bucket, FlatBucket):
        return bucket
    specs, tensors = in_flat_order(specs_of(bucket)), dict(bucket)
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    copy = bucket_in(torch.empty(flat_size(specs), dtype=torch.uint8, device=device), specs)
    for name, view in copy:
        view.copy_(tensors[name].detach())
    return copy


class Manifest:
    """The tensors that a weight update must contain, by name: exactly these, each once. Of a model with `tied`
    embeddings the output layer is optional. Without shapes everything is accepted."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], *, tied: bool) -> None:
        self._shapes = shapes
        self._optional = {"lm_head.weight"} if tied else set()
        self._seen: set[str] = set()

    def begin(self) -> None:
        self._seen = set()

    def check(self, bucket: Bucket) -> str:
        """What is wrong with the bucket, or an empty string."""
        for spec in specs_of(bucket):
            name, expected = spec.name, self._shapes.get(spec.name)
            if name in self._seen:
                return f"tensor {name!r} was sent twice"
            self._seen.add(name)
            if self._shapes and expected is None and name not in self._optional:
                return f"the model has no tensor {name!r}"
            if expected is not None and expected != spec.shape:
                return f"tensor {name!r} has shape {spec.shape}, expected {expected}"
        return ""

    def missing(self) -> str:
        absent = sorted(set(self._shapes) - self._seen - self._optional)
        return f"{len(absent)} tensors are missing, the first is {absent[0]!r}" if absent else ""
