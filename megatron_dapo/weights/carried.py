"""Tensors that a model's files have beside the weights that we train: multi-token prediction (`mtp.`), a vision tower.

They are converted but neither trained nor synced. A torch_dist checkpoint keeps them beside the model's configuration,
as the only tensors of `hf/model.safetensors`; an export returns them under the same names, from there or from the
reference's files. `ModelShape.carried` has the prefixes of their names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_dapo.config.model import ModelShape
from megatron_dapo.files import INDEX, SINGLE, StoredTensor, safetensors_header
from megatron_dapo.weights.copy import copy_tensors
from megatron_dapo.weights.formats.hf_reader import HFReader
from megatron_dapo.weights.output_file import CheckpointReader, OutputFile, RowRange, TensorWrite

FILE = SINGLE
ONLY, SHARD = "model-00001-of-00001.safetensors", "model-carried.safetensors"


def open_carried(directory: Path, shape: ModelShape) -> HFReader | None:
    """The files of `directory`, if they have such tensors."""
    if not shape.carried or not any(directory.glob("*.safetensors")):
        return None
    weights = HFReader(directory)
    return weights if carried_names(weights, shape) else None


def carried_names(weights: HFReader, shape: ModelShape) -> list[str]:
    return sorted(name for name in weights if name.startswith(shape.carried))


def copy_carried(weights: HFReader, shape: ModelShape, file: Path) -> list[StoredTensor]:
    """Copy them to a new file, as they are. Returns them."""
    names = carried_names(weights, shape)
    if not names:
        return []
    header = safetensors_header((name, weights.dtype(name), weights.stored[name].shape) for name in names)
    writes, at = [], len(header)
    for name in names:
        stored = weights.stored[name]
        writes.append(TensorWrite(0, at, weights.dtype(name), (RowRange(name, 0, stored.shape[0]),)))
        at += stored.nbytes
    file.unlink(missing_ok=True)  # of an interrupted conversion
    copy_tensors(weights, writes, [OutputFile(file, at, header)])
    return [weights.stored[name] for name in names]


def export_carried(reference: Path, directory: Path, shape: ModelShape) -> tuple[list[StoredTensor], list[str]]:
    """Add the reference's to the HF checkpoint in `directory`, as one more shard. Returns them, and what is missing."""
    weights = open_carried(reference, shape)
    if weights is None:
        prefixes = " or ".join(f"{prefix}*" for prefix in shape.carried)
        return [], [f"{reference} has no tensors {prefixes}: there are none in the result"] if shape.carried else []
    index = directory / INDEX
    if index.exists():
        known = json.loads(index.read_text())
    else:  # readers would not look for a second file beside model.safetensors
        stored = HFReader(directory).stored
        (directory / SINGLE).rename(directory / ONLY)
        size = sum(tensor.nbytes for tensor in stored.values())
        known = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(stored, ONLY)}
    copied = copy_carried(weights, shape, directory / SHARD)
    known["metadata"]["total_size"] += sum(tensor.nbytes for tensor in copied)
    known["weight_map"] |= dict.fromkeys((tensor.name for tensor in copied), SHARD)
    known["weight_map"] = dict(sorted(known["weight_map"].items()))
    index.write_text(json.dumps(known, indent=2) + "\n")
    return copied, []


class WithCarried:
    """A checkpoint's weights, and the carried tensors that are stored beside them."""

    def __init__(self, weights: CheckpointReader, carried: HFReader) -> None:
        self.path, self._weights, self._carried = weights.path, weights, carried

    def _of(self, name: str) -> CheckpointReader:
        return self._carried if name in self._carried else self._weights

    def dtype(self, name: str) -> torch.dtype:
        return self._of(name).dtype(name)

    def rows(self, name: str, start: int, count: int) -> Tensor:
        return self._of(name).rows(name, start, count)

    def spans(self, name: str, start: int, count: int) -> Iterator[tuple[int, StoredTensor | None]]:
        return self._of(name).spans(name, start, count)

    def read_into(self, stored: StoredTensor, skip: int, view: memoryview) -> None:
        self._carried.read_into(stored, skip, view)  # by its file

    def prefetch(self, stored: StoredTensor, skip: int, nbytes: int) -> None:
        self._carried.prefetch(stored, skip, nbytes)

    def read(self, name: str, start: int, count: int) -> Tensor:
        return self._of(name).read(name, start, count)

    def where(self, name: str) -> str:
        return self._of(name).where(name)
