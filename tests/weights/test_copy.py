"""Files are filled block by block: every byte arrives, and every value is checked, wherever blocks begin and end."""

import errno
import fcntl
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dapo.files import Dtype, safetensors_header
from megatron_dapo.weights import copy
from megatron_dapo.weights.copy import OutputFile, RowRange, TensorWrite, copy_tensors
from megatron_dapo.weights.formats.readers import HFReader

# Odd sizes: elements of b and c lie across the ends of blocks.
TENSORS = {
    "a": torch.arange(2501).bfloat16(),
    "b": torch.randn(45, 33, generator=torch.Generator().manual_seed(0)),
    "c": torch.randn(70, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
}


def copied(folder, dtypes=None, reverse=False):
    """The tensors of `folder` in a new file, as `dtypes` or as they are; with `reverse`, row by row from the last."""
    source = HFReader(folder)
    types = {name: (dtypes or {}).get(name, source.dtype(name)) for name in TENSORS}
    header = safetensors_header((name, types[name], TENSORS[name].shape) for name in TENSORS) + b""
    writes, at = [], len(header)
    for name, tensor in TENSORS.items():
        rows = len(tensor)
        ranges = [RowRange(name, row, 1) for row in reversed(range(rows))] if reverse else [RowRange(name, 0, rows)]
        writes.append(TensorWrite(0, at, types[name], tuple(ranges)))
        at += tensor.numel() * types[name].itemsize
    out = folder / "out"
    not_finite, _ = copy_tensors(source, writes, [OutputFile(out, at, header)], workers=2)
    assert out.stat().st_size == at
    return load_file(out), not_finite


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(copy, "BLOCK", 4096)
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtypes", [None, {"b": Dtype("bfloat16"), "c": Dtype("float32")}])
def test_every_byte_arrives(folder, dtypes, reverse, reads):
    found, not_finite = copied(folder, dtypes, reverse)
    assert not_finite == []
    for name, tensor in TENSORS.items():
        expected = tensor.flip(0) if reverse else tensor
        assert torch.equal(found[name], expected.to(found[name].dtype))


@pytest.mark.parametrize("reads", ["cached", "direct"], indirect=True)
def test_a_value_that_is_not_finite_is_found_anywhere(folder, reads):
    """Also in an element that lies across two blocks."""
    for name, index in [("a", 2500), *(("b", i) for i in range(0, 45 * 33, 23)), *(("c", i) for i in range(500, 520))]:
        spoiled = {key: tensor.clone() for key, tensor in TENSORS.items()}
        spoiled[name].view(-1)[index] = float("inf")
        save_file(spoiled, folder / "model.safetensors")
        assert [line.endswith(f"tensor {name}") for line in copied(folder)[1]] == [True], index
        (folder / "out").unlink()


def test_gaps_between_tensors_are_zero(folder):
    """Buffers are used again; a gap at the end of a block must not show what was in them."""
    rows = (RowRange("a", 0, 2501),)
    writes = [TensorWrite(0, at, Dtype("bfloat16"), rows) for at in (0, 20_000, 40_000)]
    copy_tensors(HFReader(folder), writes, [OutputFile(folder / "out", 60_000)], workers=1)
    found = (folder / "out").read_bytes()
    assert len(found) == 60_000
    for at in (0, 20_000, 40_000):
        assert any(found[at + 4096 : at + 5002]) and not any(found[at + 5002 : at + 20_000])


def test_a_file_system_without_direct_writes_gets_buffered_ones(folder, monkeypatch):
    real_open, real_write, refused = os.open, os.pwrite, []

    def pwrite(fd, data, at):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append("write")
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    assert torch.equal(copied(folder)[0]["b"], TENSORS["b"]) and "write" in refused
    (folder / "out").unlink()

    def refusing_open(path, flags, *mode):
        if flags & os.O_DIRECT:
            refused.append("open")
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *mode)

    monkeypatch.setattr(os, "open", refusing_open)
    assert torch.equal(copied(folder)[0]["b"], TENSORS["b"]) and "open" in refused
