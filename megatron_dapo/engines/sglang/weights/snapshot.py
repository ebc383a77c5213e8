"""Weights on disk: one directory per version, complete or absent, readable by SGLang and by transformers.

Buckets become safetensors shards as they arrive; the directory gets its final name when the last one is written.
Tensors are copied straight into the mapped file, by a few threads: on a RAM disk that is several times faster than
putting a file together first and writing it then.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from threading import Thread

import torch

from megatron_dapo.engines.protocol import Bucket, EngineError
from megatron_dapo.files import safetensors_header

WRITERS = 8
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
        self._removal: Thread | None = None  # of the version before; giving back its pages takes a while

    def begin(self, version: int) -> None:
        self._wait_for_removal()
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
        try:
            write_safetensors(self._partial / name, bucket)
        except OSError as error:
            raise EngineError(
                f"cannot write weights to {self._partial} (rollout.weights.directory): {error}"
            ) from error
        self._index |= {key: name for key, _ in bucket}
        self._size += bucket_bytes(bucket)

    def commit(self) -> Path:
        assert self._partial is not None
        index = {"metadata": {"total_size": self._size}, "weight_map": self._index}
        (self._partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        final = self._partial.with_suffix("")
        shutil.rmtree(final, ignore_errors=True)
        self._partial.rename(final)
        if self.current is not None and self.current != final:
            self._removal = Thread(target=shutil.rmtree, args=(self.current, True), name="old-weights")
            self._removal.start()
        self.current, self._partial = final, None
        return final

    def _wait_for_removal(self) -> None:
        if self._removal is not None:
            self._removal.join()
            self._removal = None

    def discard(self) -> None:
        """Forgets a version that did not become complete."""
        if self._partial is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial = None

    def close(self) -> None:
        self._wait_for_removal()
        shutil.rmtree(self._root, ignore_errors=True)
        self.current = None


def write_safetensors(path: Path, bucket: Bucket) -> None:
    """One file of the bucket's tensors, wherever they are."""
    # Large elements first, so that every tensor begins at a multiple of its element size.
    ordered = sorted(bucket, key=lambda pair: -pair[1].element_size())
    head = safetensors_header((name, tensor.dtype, tensor.shape) for name, tensor in ordered)
    *starts, end = accumulate((bucket_bytes([pair]) for pair in ordered), initial=len(head))
    with path.open("wb+") as file:
        # Asked for now, so that a full disk is an error here and not the end of the process in the middle of a copy.
        os.posix_fallocate(file.fileno(), 0, end)
        mapped = mmap.mmap(file.fileno(), end)
    mapped[: len(head)] = head

    def copy(start: int, tensor: torch.Tensor) -> None:
        if tensor.numel():
            place = torch.frombuffer(mapped, dtype=tensor.dtype, count=tensor.numel(), offset=start)
            # Pages come into being here, in every thread; in the middle of a copy CUDA's driver takes them one by one.
            place[:: mmap.PAGESIZE // place.element_size()].zero_()
            place.view(tensor.shape).copy_(tensor.detach())

    with ThreadPoolExecutor(WRITERS) as pool:
        for done in [pool.submit(copy, start, tensor) for start, (_, tensor) in zip(starts, ordered, strict=True)]:
            done.result()


def bucket_bytes(bucket: Bucket) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
