"""The atomic write and the safetensors headers that several rooms share."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dapo import files
from megatron_dapo.files import DamagedFile, read_safetensors_header, safetensors_header, write_atomically


@pytest.mark.parametrize("fsync", [True, False])
def test_the_new_content_replaces_the_old_one(tmp_path, fsync):
    path = tmp_path / "state.json"
    write_atomically(path, "old", fsync=fsync)
    write_atomically(path, b"new", fsync=fsync)
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["state.json"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_content_and_nothing_else(tmp_path, monkeypatch, call):
    path = tmp_path / "state.json"
    write_atomically(path, "old")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, call, full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["state.json"]


def test_a_kill_during_the_write_leaves_the_old_content(tmp_path):
    """The process is killed after the temporary file is written, before the rename."""
    path = tmp_path / "state.json"
    write_atomically(path, "old")
    script = (
        "import os, signal; from megatron_dapo import files\n"
        "files.os.replace = lambda *args: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"files.write_atomically({str(path)!r}, 'new')\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert path.read_text() == "old"


def unsupported(*names):
    raise OSError(95, "Operation not supported")


def repeated(*names, link=os.link):
    """As NFS when a reply is lost."""
    link(*names)
    link(*names)


@pytest.mark.parametrize("link", [os.link, unsupported, repeated])
def test_a_file_is_created_once(tmp_path, monkeypatch, link):
    monkeypatch.setattr(os, "link", link)
    path = tmp_path / "run.yaml"
    files.create_atomically(path, "first")
    with pytest.raises(FileExistsError):
        files.create_atomically(path, "second")
    assert path.read_text() == "first" and os.listdir(tmp_path) == ["run.yaml"]


def test_the_trial_write_creates_the_folder_and_leaves_no_file(tmp_path):
    files.check_writable(tmp_path / "new" / "logs")
    assert os.listdir(tmp_path / "new" / "logs") == []


TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16),
    "empty": torch.empty(0, 5, dtype=torch.int64), "scalar": torch.tensor(7, dtype=torch.int16),
    "flags": torch.tensor([True, False]),
}  # fmt: skip


def test_the_safetensors_library_reads_our_header(tmp_path):
    path = tmp_path / "x.safetensors"
    head = safetensors_header((name, tensor.dtype, tensor.shape) for name, tensor in TENSORS.items())
    data = b"".join(bytes(t.contiguous().view(-1).view(torch.uint8).numpy()) for t in TENSORS.values())
    path.write_bytes(head + data)
    assert len(head) % 8 == 0
    found = load_file(path)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items()) and len(found) == len(TENSORS)


def test_we_read_the_header_that_the_safetensors_library_writes(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path)
    raw = path.read_bytes()
    found = read_safetensors_header(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        stored = found[name]
        assert (stored.shape, f"torch.{stored.dtype}") == (tuple(tensor.shape), str(tensor.dtype))
        data = bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        assert raw[stored.offset : stored.offset + stored.nbytes] == data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated or not a safetensors file"),
        (b"\xff" * 16, "truncated or not a safetensors file"),
        ((4).to_bytes(8, "little") + b"{]{]", "header is damaged"),
        ((4).to_bytes(8, "little") + b"\xff\xfe\xff\xfe", "header is damaged"),
        ((2).to_bytes(8, "little") + b"[]", "not an object"),
    ],
)
def test_a_damaged_header_is_an_error_with_the_file_name(tmp_path, content, message):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(DamagedFile, match=message) as error:
        read_safetensors_header(path)
    assert str(path) in str(error.value) and "download" in str(error.value)


def test_a_missing_file_is_an_error_with_its_name(tmp_path):
    with pytest.raises(DamagedFile, match=r"gone\.safetensors is missing"):
        read_safetensors_header(tmp_path / "gone.safetensors")
