"""A file that `torch.save` wrote: its objects, and the position of every tensor. No code from the file runs.

For `pytorch_model.bin` and for Megatron's legacy checkpoints. Tensors are not loaded: they are read from the mapped
file later, in blocks.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from megatron_dapo.files import DamagedFile, StoredTensor, merge_tensors, numbered_files
from megatron_dapo.weights.formats.mapped_file import map_file
from megatron_dapo.weights.formats.safe_pickle import UnsafePickle, load_torch_pickle, tensor_of
from megatron_dapo.weights.formats.torch_zip import BadArchive, open_archive


class TorchFile:
    """`tree` holds the pickled containers and values; `stored` gives the position of a tensor in it."""

    def __init__(self, path: Path, *, opaque: bool = False) -> None:
        """`opaque`: objects beside the tensors are allowed; they become inert stand-ins."""
        self.path = path
        if not path.stat().st_size:
            raise DamagedFile(f"{path} is empty; copy it again")
        view = memoryview(map_file(path))
        if bytes(view[:4]) != b"PK\3\4":
            raise DamagedFile(
                f"{path} is not a zip archive: truncated, a Git LFS pointer, or saved by torch before 1.6; load it "
                "with torch and save it again"
            )
        try:
            self._records = open_archive(view)
            at, size = self._records["data.pkl"]
            self.tree: Any = load_torch_pickle(bytes(view[at : at + size]), opaque=opaque)
        except (BadArchive, KeyError) as error:
            raise DamagedFile(f"{path}: not a file of torch.save, or truncated ({error})") from None
        except UnsafePickle as error:
            raise DamagedFile(f"{path}: refused or damaged: {error}") from None

    def stored(self, name: str, value: Any) -> StoredTensor | None:
        """The position of a tensor in `tree`; None if `value` is no tensor."""
        try:
            found = tensor_of(value)
        except UnsafePickle as error:
            raise DamagedFile(f"{self.path}: tensor {name}: {error}") from None
        if found is None:
            return None
        dtype, shape, key, offset = found
        at, size = self._records.get(f"data/{key}", (0, -1))
        begin, need = offset * dtype.itemsize, math.prod(shape) * dtype.itemsize
        if begin + need > size:
            raise DamagedFile(f"{self.path}: tensor {name}: holds {max(size, 0)} bytes of data, needs {begin + need}")
        return StoredTensor(name, self.path, str(dtype).removeprefix("torch."), shape, at + begin)


def read_bin_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one `pytorch_model*.bin`, which must hold nothing else."""
    file = TorchFile(path)
    if not isinstance(file.tree, dict):
        raise DamagedFile(f"{path}: holds a {type(file.tree).__name__}; expected a dictionary of tensors")
    found = {}
    for name, value in file.tree.items():
        stored = file.stored(str(name), value)
        if stored is None:
            raise DamagedFile(f"{path}: {name} is not a tensor; expected a dictionary of tensors")
        found[str(name)] = stored
    return found


def read_bin_directory(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a directory with `pytorch_model.bin`, or with several numbered files."""
    single = path / "pytorch_model.bin"
    files = [single] if single.exists() else numbered_files(path, "pytorch_model", "bin")
    return merge_tensors(read_bin_file(file) for file in files)
