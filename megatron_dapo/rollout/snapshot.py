"""Weights on disk: one directory per version, complete or absent, readable by SGLang and by transformers.

Buckets become safetensors shards as they arrive; the directory gets its final name when the last one is written.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_dapo.rollout.engine import Bucket, EngineError

FILES_TO_COPY = ("*.json", "merges.txt", "vocab.txt", "*.model", "*.jinja")


class Snapshot:
    """Versions under `directory`; a new complete version replaces the one before."""

    def __init__(self, directory: str | Path, model: str | Path) -> None:
        """`model`: the HF directory whose configuration and tokenizer files go with the weights."""
        self._root = Path(directory) / f"megatron-dapo-weights-{os.getpid()}"
        self.model = model
        self._partial: Path | None = None
        self._index: dict[str, str] = {}
        self._size = 0
        self.current: Path | None = None

    def begin(self, version: int) -> None:
        self._partial = self._root / f"version-{version}.partial"
        shutil.rmtree(self._partial, ignore_errors=True)
        try:
            self._partial.mkdir(parents=True)
        except OSError as error:
            raise EngineError(
                f"cannot write weights below {self._root} (rollout.weights.directory): {error}"
            ) from error
        self._index, self._size = {}, 0
        for pattern in FILES_TO_COPY if self.model else ():
            for path in Path(self.model).glob(pattern):
                if not path.name.endswith(".index.json"):
                    shutil.copy(path, self._partial)

    def add(self, bucket: Bucket) -> None:
        assert self._partial is not None
        name = f"model-{len(list(self._partial.glob('*.safetensors'))) + 1:05d}.safetensors"
        tensors = {key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in bucket}
        save_file(tensors, self._partial / name, metadata={"format": "pt"})
        self._index |= dict.fromkeys(tensors, name)
        self._size += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def commit(self) -> Path:
        assert self._partial is not None
        index = {"metadata": {"total_size": self._size}, "weight_map": self._index}
        (self._partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        final = self._partial.with_suffix("")
        shutil.rmtree(final, ignore_errors=True)
        self._partial.rename(final)
        if self.current is not None and self.current != final:
            shutil.rmtree(self.current, ignore_errors=True)
        self.current, self._partial = final, None
        return final

    def discard(self) -> None:
        """Forgets a version that did not become complete."""
        if self._partial is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial = None

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)
        self.current = None


def bucket_bytes(bucket: Bucket) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
