import errno
import fcntl
import os
import shutil

import pytest
import tiny_qwen

from megatron_dapo.weights.formats.readers import CheckpointReader


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """HF directories by kind, fp32, in one file. Read only: tests that damage one take a `copy_of`."""
    root = tmp_path_factory.mktemp("models")
    return {kind: tiny_qwen.save(tiny_qwen.build(kind), root / kind) for kind in tiny_qwen.KINDS}


@pytest.fixture
def copy_of(models, tmp_path):
    def copy(kind):
        return shutil.copytree(models[kind], tmp_path / f"copy-{kind}")

    return copy


@pytest.fixture(params=["cached", "direct", "refused by open", "refused by read"])
def reads(request, monkeypatch):
    """How the files are read: as a cached file, past the page cache, or by a file system that cannot do that.
    Yields the offsets of the direct reads."""
    if request.param == "cached":
        monkeypatch.setattr(CheckpointReader, "reads_direct", lambda self, stored: False)
        yield []
        return
    direct, read, open_file = [], os.preadv, CheckpointReader._descriptor

    def descriptor(self, file, flags=0):
        if flags and request.param == "refused by open":
            raise OSError(errno.EINVAL, "no direct reads")
        return open_file(self, file, flags)

    def preadv(fd, buffers, at):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            direct.append(at)
            if request.param == "refused by read":
                raise OSError(errno.EINVAL, "no direct reads")
        return read(fd, buffers, at)

    monkeypatch.setattr(CheckpointReader, "reads_direct", lambda self, stored: stored.file not in self._not_direct)
    monkeypatch.setattr(CheckpointReader, "_descriptor", descriptor)
    monkeypatch.setattr(os, "preadv", preadv)
    yield direct
    assert bool(direct) == (request.param != "refused by open")
