"""Host copies of tensors: exact, in reused memory, and within what the machine allows."""

import os
from pathlib import Path

import pytest
import torch

from megatron_dapo.checkpoints import files
from megatron_dapo.checkpoints.files import HostBuffers, available_host_memory

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 1 << 14)
    monkeypatch.setattr(files, "SMALL_CHUNK", 1 << 12)


def some_tensors(seed):
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randn(100, 7, generator=g), torch.randn(3000, generator=g), torch.randn(9, generator=g).bfloat16(),
        torch.tensor(2.5), torch.empty(0, 4), torch.randn(20, 30, generator=g).t(), torch.arange(5000),
    ]  # fmt: skip


def test_copies_are_equal_and_independent():
    buffers, tensors = HostBuffers(CPU), some_tensors(0)
    copies = [buffers.copy(tensor) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        assert torch.equal(copy, tensor) and copy.is_contiguous() and copy.dtype == tensor.dtype
        assert buffers.holds(copy) and buffers.holds(copy.view(-1)[:1]) and not buffers.holds(tensor)
    for tensor in tensors:
        tensor.zero_()
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, some_tensors(0), strict=True))


def test_memory_is_reused_after_a_reset():
    buffers = HostBuffers(CPU)
    addresses = []
    for seed in (0, 1, 2):
        buffers.reset()
        copies = [buffers.copy(tensor) for tensor in some_tensors(seed)]
        assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, some_tensors(seed), strict=True))
        addresses.append([copy.data_ptr() for copy in copies])
    assert addresses[0] == addresses[1] == addresses[2]


def test_reserved_memory_is_enough():
    buffers, tensors = HostBuffers(CPU), some_tensors(0)
    sizes = [tensor.nbytes for tensor in tensors]
    missing = buffers.missing(sizes)
    assert sum(sizes) < missing < 1.5 * sum(sizes)
    buffers.reserve(sizes)
    assert sum(map(len, buffers._chunks)) == missing
    for tensor in tensors:
        buffers.copy(tensor)
    buffers.reserve(sizes)
    assert sum(map(len, buffers._chunks)) == missing and buffers.missing(sizes) == 0


def test_a_forked_process_does_not_get_the_memory():
    """It would be copied, where CUDA has pinned it."""
    buffers = HostBuffers(CPU)
    address = buffers.copy(torch.ones(1000)).data_ptr()
    assert f"{address & ~0xFFF:x}-" in Path("/proc/self/maps").read_text()
    child = os.fork()
    if child == 0:
        found = f"{address & ~0xFFF:x}-" in Path("/proc/self/maps").read_text()
        os._exit(int(found))
    assert os.waitpid(child, 0)[1] == 0


def test_the_limit_of_a_control_group_counts(tmp_path, monkeypatch):
    group = tmp_path / "job" / "step"
    group.mkdir(parents=True)
    for folder, limit, current, cache in ((group, "max", 0, 0), (group.parent, "10000", 7000, 2000)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{current}\n")
        (folder / "memory.stat").write_text(f"anon 5000\ninactive_file {cache}\n")
    membership = tmp_path / "cgroup"
    membership.write_text("0::/job/step\n")
    monkeypatch.setattr(files, "CGROUPS", tmp_path)
    monkeypatch.setattr(files, "MEMBERSHIP", membership)
    assert available_host_memory() == 5000
    (group.parent / "memory.max").write_text("max\n")
    assert available_host_memory() > 1 << 20
