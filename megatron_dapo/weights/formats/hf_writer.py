"""Lays out a HF checkpoint: shards with their headers, the index, and the small files that make it complete."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron_dapo.config.model import ModelShape
from megatron_dapo.files import safetensors_header
from megatron_dapo.weights.formats.hf_reader import INDEX, SINGLE
from megatron_dapo.weights.mapping import Row, stored_rows
from megatron_dapo.weights.stream import Item, OutputFile, Take

MAX_SHARD = 5 * 10**9
SIDE_FILES = (
    "config.json", "generation_config.json", "tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "chat_template*", "additional_chat_templates", "LICENSE*",
)  # fmt: skip
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(slots=True)
class _Shard:
    tensors: list[tuple[str, Row, int, torch.dtype]] = field(default_factory=list)
    nbytes: int = 0

    def header(self) -> bytes:
        return safetensors_header((name, dtype, row.hf_shapes[source]) for name, row, source, dtype in self.tensors)


class HFLayout:
    """The weight files of a HF checkpoint before any of them exists."""

    def __init__(self, shape: ModelShape, dtypes: dict[str, torch.dtype], *, max_shard: int = MAX_SHARD) -> None:
        """`dtypes`: by canonical Megatron name."""
        self._shards = [_Shard()]
        for row in stored_rows(shape):
            for source, name in enumerate(row.hf):
                size = math.prod(row.hf_shapes[source]) * dtypes[row.name].itemsize
                if self._shards[-1].nbytes and self._shards[-1].nbytes + size > max_shard:
                    self._shards.append(_Shard())
                self._shards[-1].tensors.append((name, row, source, dtypes[row.name]))
                self._shards[-1].nbytes += size
        self._headers = [shard.header() for shard in self._shards]
        self.items = [item for i in range(len(self._shards)) for item in self._items(i)]

    @property
    def weight_bytes(self) -> int:
        return sum(shard.nbytes for shard in self._shards)

    @property
    def total(self) -> int:
        return self.weight_bytes + sum(len(header) for header in self._headers)

    def files(self, directory: Path) -> list[OutputFile]:
        return [
            OutputFile(directory / self._name(i), len(self._headers[i]) + shard.nbytes, self._headers[i])
            for i, shard in enumerate(self._shards)
        ]

    def write_index(self, directory: Path) -> None:
        if len(self._shards) == 1:
            return
        where = {name: self._name(i) for i, shard in enumerate(self._shards) for name, *_ in shard.tensors}
        index = {"metadata": {"total_size": self.weight_bytes}, "weight_map": dict(sorted(where.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _name(self, number: int) -> str:
        if len(self._shards) == 1:
            return SINGLE
        return f"model-{number + 1:05d}-of-{len(self._shards):05d}.safetensors"

    def _items(self, number: int) -> list[Item]:
        items, at = [], len(self._headers[number])
        for _, row, source, dtype in self._shards[number].tensors:
            takes = tuple(Take(row.name, s.start, s.rows) for s in row.segments if s.source == source)
            items.append(Item(number, at, dtype, takes))
            at += math.prod(row.hf_shapes[source]) * dtype.itemsize
        return items


def copy_side_files(reference: Path, directory: Path, dtype: torch.dtype | None = None) -> list[str]:
    """Config, tokenizer and generation config. `dtype`: what config.json must say. Returns what is missing."""
    for pattern in SIDE_FILES:
        for path in sorted(reference.glob(pattern)):
            if path.is_dir():
                shutil.copytree(path, directory / path.name)
            else:
                shutil.copyfile(path, directory / path.name)
    if dtype is not None:
        _set_dtype(directory / "config.json", dtype)
    missing = [] if any((directory / name).exists() for name in TOKENIZER_FILES) else ["tokenizer"]
    return missing + ([] if (directory / "generation_config.json").exists() else ["generation_config.json"])


def _set_dtype(file: Path, dtype: torch.dtype) -> None:
    config = json.loads(file.read_text())
    name = str(dtype).removeprefix("torch.")
    key = "dtype" if "dtype" in config else "torch_dtype"
    if config.get(key) != name:
        config[key] = name
        file.write_text(json.dumps(config, indent=2) + "\n")
