"""Proof that a server holds the weights that were sent to it.

First line: checksums (in_server/megatron_dapo_checksums.py). The sender sums every tensor in the memory from which it
is sent, each rank of the server what it has of the tensor. The server's sums must add up to the sender's.

Second line: log-probs of a fixed text, which must agree between servers. A server is probed when its checksums do not
cover every tensor, or when it gets its first version, which also measures how much its log-probs vary by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from megatron_dapo.engines.sglang.in_server.megatron_dapo_checksums import Parts, checksums
from megatron_dapo.sync.bucket import FlatBucket
from megatron_dapo.types import LogProbs
from megatron_dapo.weights.tensor_spec import TensorSpec, flat_starts

# Any tokens will do, since all servers get the same and every vocabulary has them.
PROBE = (11, 7, 3, 19, 2, 5, 23, 17)
# Log-probs vary with the batch (the rounding of bf16 kernels). Two servers may differ by NOISE_FACTOR times the
# largest variation measured, within these limits.
NOISE_FACTOR = 4.0
SMALLEST_TOLERANCE, LARGEST_TOLERANCE = 0.02, 0.5
WORD = 1 << 64

Sums = dict[str, tuple[int, int]]  # by tensor: its elements, its checksum modulo 2^64


@dataclass(slots=True)
class SentChecksums:
    """Of one bucket. On a GPU they are computed while the bucket is sent."""

    specs: tuple[TensorSpec, ...]
    sums: torch.Tensor
    computed: torch.cuda.Event | None

    def read(self) -> Sums:
        if self.computed is not None:
            self.computed.synchronize()
        return {
            spec.name: (spec.bytes // spec.dtype.itemsize, total % WORD)
            for spec, total in zip(self.specs, self.sums.tolist(), strict=True)
        }


def checksums_of(bucket: FlatBucket) -> SentChecksums:
    """In the thread that produces the buckets, whose stream orders this before the memory is used again."""
    device = bucket.flat.device
    sums = checksums(_parts(bucket.specs), len(bucket.specs), device, bucket.flat.data_ptr())
    computed = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
    return SentChecksums(bucket.specs, sums, computed)


@lru_cache(maxsize=1024)  # a run has the same buckets in every update
def _parts(specs: tuple[TensorSpec, ...]) -> Parts:
    parts = Parts()
    for number, (spec, start) in enumerate(zip(specs, flat_starts(specs), strict=False)):  # the last start is the end
        if spec.bytes:
            size = spec.dtype.itemsize
            parts.add(number, start, size, 0, [(spec.bytes // size, 1, 1)])
    parts.freeze()
    return parts


@dataclass(slots=True, frozen=True)
class Comparison:
    """`differing`: tensors, and what is wrong with each. `unproven`: tensors that arrived, but which the engine does
    not use or has changed in a way that could not be followed, such as another data type."""

    differing: dict[str, str]
    unproven: tuple[str, ...]

    def __str__(self) -> str:
        first = "; ".join(f"{name}: {wrong}" for name, wrong in [*self.differing.items()][:3])
        return f"{len(self.differing)} tensors differ from what was sent: {first}"


def compare(sent: Sums, ranks: Sequence[Mapping[str, str]]) -> Comparison:
    """`ranks`: by tensor, `elements:which:checksum` of what each rank of the server has of it. Ranks with the same part
    must have the same checksum, and different parts add up to the tensor. A rank may hold a tensor several times."""
    differing, unproven = {}, []
    for name, (elements, expected) in sent.items():
        parts: dict[str, tuple[int, int]] = {}
        found, agree = False, True
        for rank in ranks:
            if name in rank:
                count, which, checksum = rank[name].split(":")
                part = (int(count), int(checksum))
                found, agree = True, agree and parts.setdefault(which, part) == part
        held, total = (sum(values) for values in zip(*parts.values(), strict=True)) if parts else (0, 0)
        if not found:
            differing[name] = "it did not arrive"
        elif not agree:
            differing[name] = "ranks that hold the same part of it disagree"
        elif not held and elements:
            unproven.append(name)
        elif elements and held % elements:
            differing[name] = f"{held} of {elements} elements are there"
        elif elements and total % WORD != held // elements * expected % WORD:
            differing[name] = "other values"
    return Comparison(differing, tuple(unproven))


class Probes:
    """Servers agree on a fixed text with the median server of the version, also those that join later."""

    def __init__(self) -> None:
        self._agreed: tuple[int, LogProbs] | None = None  # version, its log-probs
        self.noise = 0.0  # the largest variation of one server's log-probs under the same weights

    @property
    def tolerance(self) -> float:
        return min(LARGEST_TOLERANCE, max(SMALLEST_TOLERANCE, NOISE_FACTOR * self.noise))

    def measured(self, repeated: Sequence[LogProbs]) -> LogProbs:
        """The first of several probes of one server, taken under different loads."""
        self.noise = max(self.noise, float(np.ptp(np.stack(repeated), axis=0).max()))
        return repeated[0]

    def describe(self, version: int) -> str:
        if self._agreed is None or self._agreed[0] != version:
            return ""
        return f"agree on the log-prob of a fixed text: {float(self._agreed[1].sum()):.4f}"

    def compare(self, version: int, found: Mapping[str, LogProbs]) -> dict[str, str]:
        """By server: what is wrong."""
        if found and (self._agreed is None or self._agreed[0] != version):
            self._agreed = (version, np.median(np.stack(list(found.values())), axis=0))
        gaps = {name: float(np.abs(values - self._agreed[1]).max()) for name, values in found.items() if self._agreed}
        return {
            name: f"its log-probs of a fixed text differ from the others' by {gap:.3f}, more than {self.tolerance:.3f}"
            for name, gap in gaps.items()
            if gap > self.tolerance
        }
