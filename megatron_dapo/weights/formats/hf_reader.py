"""Reads an HF model directory (safetensors or pytorch_model.bin) through read-only memory maps.

Headers, offsets and the index are checked (`megatron_dapo.files`) before the first tensor is returned; tensor data is
read on access.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_dapo.files import (
    INDEX,
    StoredTensor,
    is_packed,
    read_safetensors_directory,
    unpacked,
)
from megatron_dapo.weights.formats.mapped_file import WeightFiles, rows_of, tensor_over, torch_dtype
from megatron_dapo.weights.formats.torch_file import read_bin_directory

# Weight files: mapped read-only for random access, or read into a buffer of the calling thread.


warnings.filterwarnings("ignore", message="The given buffer is not writable")


def read_hf_directory(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of an HF model directory: safetensors, or else `pytorch_model.bin`."""
    safetensors = any(path.glob("*.safetensors")) or (path / INDEX).exists()
    if not safetensors and any(path.glob("pytorch_model*.bin")):
        return read_bin_directory(path)
    return read_safetensors_directory(path)


class HFReader(Mapping[str, Tensor]):
    """A checked HF checkpoint: names to memory-mapped tensors. Experts have one name each, also where the file has all
    of a layer in one tensor (`packed`)."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        stored = read_hf_directory(self.path)
        self.stored, self.packed = unpacked(stored), is_packed(stored)
        self._files = WeightFiles()

    def __getitem__(self, name: str) -> Tensor:
        stored = self.stored[name]
        return tensor_over(self._files.map(stored.file), stored)

    def dtype(self, name: str) -> torch.dtype:
        return torch_dtype(self.stored[name])

    def rows(self, name: str, start: int, count: int) -> Tensor:
        """Rows [start, start + count) of a tensor: a view of the file."""
        return self[name].narrow(0, start, count)

    def read(self, name: str, start: int, count: int) -> Tensor:
        """Like `rows`, in a buffer that this thread's next call overwrites."""
        return self._files.read(rows_of(self.stored[name], start, count))

    def spans(self, name: str, start: int, count: int) -> Iterator[tuple[int, StoredTensor | None]]:
        """The rows as runs of bytes in files, in order: number of rows, and where they are."""
        if count:
            yield count, rows_of(self.stored[name], start, count)

    def read_into(self, stored: StoredTensor, skip: int, view: memoryview) -> None:
        """Bytes [skip, skip + len(view)) of a stored tensor."""
        self._files.read_into(stored, skip, view)

    def prefetch(self, stored: StoredTensor, skip: int, nbytes: int) -> None:
        """Ask the kernel to read bytes of a stored tensor from disk, without waiting."""
        self._files.prefetch(stored.file, stored.offset + skip, nbytes)

    def files(self) -> list[Path]:
        return sorted({stored.file for stored in self.stored.values()})

    def where(self, name: str) -> str:
        """The file and tensor, for messages."""
        return f"{self.stored[name].file}: tensor {name}"

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)
