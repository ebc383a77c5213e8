"""Updates that contain only what changed since the last version that all servers have acknowledged.

At small learning rates most bf16 weights do not change in a step. A delta holds, for each tensor, the positions of the
changed elements and the XOR of their old and new bits, and the sums of all words before and after. The servers apply it
with a module of ours (in_server/megatron_dapo_delta.py), which compares the sums.

The sender keeps a copy of the weights. A delta is only sent to servers that have acknowledged exactly that copy and
have not restarted since; otherwise, and after any error, everything is sent. So is a bucket whose delta would be
larger.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dapo.sync.bucket import FlatBucket, TensorSpec, flat_starts, flatten

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Members = list[tuple[str, int]]  # servers: name and incarnation


class DeltaEncoder:
    def __init__(self) -> None:
        self._copies: list[Tensor] = []  # the buckets of the last update
        self._base: tuple[int, Members] | None = None  # the version they are, and the servers that acknowledged it
        self._next = 0
        self.active = False  # whether this update is a delta
        self.members: Members = []  # the servers that may get it
        self.sent_bytes = 0  # in this update

    def begin(self, versions: dict[tuple[str, int], int | None]) -> bool:
        """Whether this update can be a delta: `versions` has what each server serves now."""
        self.active = self._base is not None and versions == dict.fromkeys(self._base[1], self._base[0])
        self.members = self._base[1] if self._base is not None else []
        self._base, self._next, self.sent_bytes = None, 0, 0
        return self.active

    def acknowledge(self, version: int, members: Members) -> None:
        """These servers, all of the update, serve `version`."""
        self._base = (version, members)

    @torch.no_grad()
    def encode(self, bucket: FlatBucket) -> FlatBucket:
        """The bucket, or a smaller one with its changes. The next update is compared with this one."""
        found = self._encode(bucket)
        self.sent_bytes += found.flat.nbytes
        return found

    def _encode(self, bucket: FlatBucket) -> FlatBucket:
        number, self._next = self._next, self._next + 1
        if number == len(self._copies):
            self._copies.append(bucket.flat.clone())
            return bucket
        copy = self._copies[number]
        if copy.shape != bucket.flat.shape:
            self._copies[number] = bucket.flat.clone()
            return bucket
        changes = flatten(self._changes(bucket, copy)) if self.active else None
        copy.copy_(bucket.flat)
        return changes if changes is not None and changes.flat.nbytes < bucket.flat.nbytes else bucket

    def _changes(self, bucket: FlatBucket, copy: Tensor) -> list[tuple[str, Tensor]]:
        found: list[tuple[str, Tensor]] = []
        starts = flat_starts(bucket.specs)
        for spec, start in zip(bucket.specs, starts, strict=False):  # the last start is the end
            words = WORDS[spec.dtype.itemsize]
            new, old = (flat[start : start + spec.bytes].view(words) for flat in (bucket.flat, copy))
            positions = (new != old).nonzero().squeeze(1)
            if len(positions):
                label = _label(spec, old, new)
                bits = torch.bitwise_xor(new[positions], old[positions])
                found += [(f"delta::positions::{spec.name}", positions.int()), (f"delta::bits::{label}", bits)]
        return found


def _label(spec: TensorSpec, old: Tensor, new: Tensor) -> str:
    """Name, type, shape and the sums of its words before and after."""
    sums = (int(words.sum(dtype=torch.int64)) for words in (old, new))
    dtype = str(spec.dtype).removeprefix("torch.")
    return "::".join((spec.name, dtype, "x".join(map(str, spec.shape)), *map(str, sums)))
