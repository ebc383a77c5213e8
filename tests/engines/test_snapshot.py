"""Snapshots: safetensors reads back what was written, a version is complete or absent, dead ones are removed."""

import errno
import json
import multiprocessing
import os
import shutil
import socket
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from megatron_dapo.errors import EngineError
from megatron_dapo.sync.snapshot import (
    LOCK,
    FileImage,
    Snapshot,
    is_ram_disk,
    remove_dead_snapshots,
)


def versions(snapshot):
    return [path.name for path in snapshot._root.iterdir() if path.name != LOCK]


def test_tensors_of_all_kinds_are_read_back_bit_for_bit(tmp_path):
    whole = torch.randn(6, 8)
    bucket = [
        ("odd", torch.randn(3).bfloat16()),
        ("wide", torch.randn(5, 7).double()),
        ("single", torch.tensor(2.5)),
        ("view", whole[1:3]),
        ("transposed", whole.t()),
        ("nothing", torch.zeros(0, 4)),
        ("half", torch.randn(9).half()),
    ]
    FileImage(bucket, tmp_path / "x.safetensors").fill(bucket)
    found = load_file(tmp_path / "x.safetensors")
    assert set(found) == {name for name, _ in bucket}
    for name, tensor in bucket:
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    FileImage([], tmp_path / "empty.safetensors").fill([])
    assert load_file(tmp_path / "empty.safetensors") == {}


def test_a_version_replaces_the_previous_one_and_indexes_every_tensor(tmp_path):
    snapshot = Snapshot(tmp_path, "")
    for version in (1, 2):
        snapshot.begin(version)
        snapshot.add([("a", torch.full((4,), float(version)))])
        snapshot.add([("b", torch.ones(2, 2).bfloat16())])
        assert not (snapshot._root / f"version-{version}").exists()
        path = snapshot.commit()
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 24 and set(index["weight_map"]) == {"a", "b"}
    assert {file.stat().st_mode & 0o777 for file in path.glob("*.safetensors")} == {0o600}
    assert snapshot._root.stat().st_mode & 0o777 == 0o700, "other users of the machine cannot even list it"
    assert load_file(path / index["weight_map"]["a"])["a"].tolist() == [2.0] * 4
    snapshot.wait()
    assert versions(snapshot) == ["version-2"]
    snapshot.close()
    assert not path.exists()


@pytest.fixture
def ram_disk():
    if not is_ram_disk(Path("/dev/shm")):
        pytest.skip("/dev/shm is not a RAM disk here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_a_ram_disk_keeps_one_set_of_files_that_every_version_overwrites(ram_disk):
    """Whatever the buckets look like: the version holds exactly the last ones, and nothing is current meanwhile."""
    snapshot = Snapshot(ram_disk, "")
    assert snapshot.in_ram
    inodes = []
    versions_of = [[4, 6], [4, 6], [5, 6], [4], [4, 6, 8]]  # elements of each bucket
    for version, sizes in enumerate(versions_of):
        snapshot.begin(version, background=True)
        assert snapshot.current is None
        for number, size in enumerate(sizes):
            snapshot.add([(f"w{number}", torch.full((size,), float(version)))])
        path = snapshot.commit()
        snapshot.wait()
        assert path == snapshot.current and versions(snapshot) == [f"version-{version}"]
        index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
        assert {name: load_file(path / file)[name].tolist() for name, file in index.items()} == {
            f"w{number}": [float(version)] * size for number, size in enumerate(sizes)
        }
        assert len(list(path.glob("*.safetensors"))) == len(sizes)
        inodes.append([(path / file).stat().st_ino for file in index.values()])
    assert inodes[0] == inodes[1] and inodes[1][0] != inodes[2][0]
    snapshot.begin(9)
    snapshot.discard()
    assert snapshot.current is None and not versions(snapshot)
    snapshot.close()


@pytest.mark.parametrize("background", [True, False])
def test_a_ram_disk_that_was_full_has_whole_versions_again(background, ram_disk, monkeypatch):
    """There was room for all tensors, and none for the index."""
    snapshot, write = Snapshot(ram_disk, ""), Path.write_text
    for version in range(3):
        full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        monkeypatch.setattr(Path, "write_text", full if version == 1 else write)
        snapshot.begin(version, background=background)
        snapshot.add([("a", torch.full((4,), float(version)))])
        with pytest.raises((OSError, EngineError)) if version == 1 else nullcontext():
            path = snapshot.commit()
            snapshot.wait()
    assert load_file(path / "model-00001.safetensors")["a"].tolist() == [2.0] * 4
    snapshot.close()


def test_a_background_snapshot_is_current_when_its_thread_has_written_it(tmp_path, monkeypatch):
    """The bucket may change as soon as `add` returns."""
    snapshot = Snapshot(tmp_path, "")
    snapshot.in_ram = False
    may_write, write = Event(), FileImage.write
    monkeypatch.setattr(FileImage, "write", lambda copy, path: may_write.wait(20) and write(copy, path))
    weight = torch.ones(4)
    for version in (1, 2):
        may_write.clear()
        snapshot.begin(version, background=True)
        snapshot.add([("a", weight.mul_(2))])
        path = snapshot.commit()
        weight.add_(1)
        assert snapshot.exists and snapshot.current != path
        may_write.set()
        snapshot.wait()
        assert snapshot.current == path and versions(snapshot) == [f"version-{version}"]
    assert load_file(path / "model-00001.safetensors")["a"].tolist() == [6.0] * 4
    monkeypatch.setattr(FileImage, "write", lambda copy, path: os.stat("/nowhere"))
    snapshot.begin(3, background=True)
    snapshot.add([("a", weight)])
    snapshot.commit()
    with pytest.raises(EngineError, match=r"rollout\.weights\.directory.*/nowhere"):
        snapshot.wait()
    assert not versions(snapshot) or snapshot.current != path
    snapshot.close()


def test_a_full_disk_is_an_error_that_names_the_key(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    snapshot = Snapshot(tmp_path, "")
    snapshot.begin(1)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EngineError, match=r"rollout\.weights\.directory.*No space left"):
        snapshot.add([("a", torch.ones(4))])
    snapshot.discard()
    assert snapshot.current is None and not versions(snapshot)


def own_a_snapshot(directory, pipe):
    snapshot = Snapshot(directory, "")
    snapshot.begin(1)
    pipe.send(snapshot.commit())
    time.sleep(100)


@pytest.mark.parametrize("step", ["open", "rename"])
def test_a_disk_that_was_full_at_the_first_version_has_the_next_one(tmp_path, monkeypatch, step):
    """The directory is claimed by a lock file in it, and only then has its name."""
    owner, snapshot = os if step == "open" else Path, Snapshot(tmp_path, "")
    with monkeypatch.context() as full:
        full.setattr(owner, step, mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(EngineError, match="No space left"):
            snapshot.begin(1)
    snapshot.begin(2)
    snapshot.add([("a", torch.ones(4))])
    assert snapshot.commit().is_dir() and (snapshot._root / LOCK).exists()
    snapshot.close()
    assert not [*tmp_path.iterdir()]


def test_only_snapshots_of_dead_processes_are_removed(tmp_path):
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(2)]
    dead, alive = (context.Process(target=own_a_snapshot, args=(tmp_path, theirs)) for _, theirs in pipes)
    dead.start()
    alive.start()
    try:
        of_dead, of_alive = (ours.recv() for ours, _ in pipes)
        elsewhere = of_dead.parent.with_name(of_dead.parent.name.replace(socket.gethostname(), "another-host"))
        shutil.copytree(of_dead.parent, elsewhere)
        other = tmp_path / "megatron-dapo-weights-without-a-lock"
        other.mkdir()
        assert remove_dead_snapshots(tmp_path) == []
        dead.kill()
        dead.join()
        mine = Snapshot(tmp_path, "")
        mine.begin(1)
        assert remove_dead_snapshots(tmp_path) == [of_dead.parent]
        assert not of_dead.exists() and of_alive.is_dir() and elsewhere.is_dir() and other.is_dir()
        assert mine._root.is_dir()
        mine.close()
        assert not mine._root.exists()
    finally:
        dead.kill()
        alive.kill()


def test_two_snapshots_of_one_process_are_independent(tmp_path):
    """An evaluation beside a run: closing one leaves the other."""
    first, second = Snapshot(tmp_path, ""), Snapshot(tmp_path, "")
    for snapshot in (first, second):
        snapshot.begin(1)
        snapshot.add([("a", torch.ones(4))])
        snapshot.commit()
    first.close()
    assert second.current.is_dir() and remove_dead_snapshots(tmp_path) == []
    second.close()
