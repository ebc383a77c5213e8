"""A rank that sends weights beside rank 0: its buckets, all of them, in their order, and those of this update."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from megatron_dapo.sync import remote_sender
from megatron_dapo.sync.bucket import RemoteBucket, bucket_in
from megatron_dapo.sync.remote_sender import RemoteSender, SenderLink, UpdateFailed
from megatron_dapo.weights.tensor_spec import TensorSpec

JOIN = {
    "action": "join", "address": "nowhere", "port": 1, "world": 3, "backend": "gloo", "timeout": 5,
    "names": {"2": "group-of-rank-2"},
}  # fmt: skip


class RecordedGroup:
    """A process group that only records what is sent. `gate`: sends wait for it."""

    sent: list[int]
    gate = threading.Event()

    def __init__(self, name, backend, timeout):
        assert name == "group-of-rank-2"

    def join(self, address, port, world):
        assert (address, port, world) == ("nowhere", 1, 3)

    def send(self, flat):
        assert self.gate.wait(20)
        if flat[0] == 99:
            raise RuntimeError("connection closed")
        self.sent.append(int(flat[0]))

    def leave(self):
        pass


@pytest.fixture
def group(monkeypatch):
    monkeypatch.setattr(RecordedGroup, "sent", [], raising=False)
    monkeypatch.setattr(RecordedGroup, "gate", threading.Event())
    RecordedGroup.gate.set()
    monkeypatch.setattr(remote_sender, "GroupSource", RecordedGroup)
    monkeypatch.setattr(remote_sender, "POLL", 0.02)
    return RecordedGroup


def bucket(number):
    return bucket_in(torch.full((4,), number, dtype=torch.uint8), [TensorSpec(f"t{number}", torch.uint8, (4,))])


def links(update, store=None):
    """Rank 0's and rank 2's."""
    store = store or dist.HashStore()
    return [SenderLink(store, rank, [0, 2], update, 5.0) for rank in (0, 2)]


def mixed(numbers, read=None):
    """Rank 2 owns the even buckets of the update; of the others it sees nothing."""
    for number in numbers:
        if read is not None:
            read.append(number)
        yield bucket(number) if number % 2 == 0 else []


def test_own_buckets_are_sent_once_and_in_order(group):
    first, second = links(1)
    first.post_plan(JOIN)
    assert RemoteSender().send(mixed(range(7)), second) == ""
    assert group.sent == [0, 2, 4, 6]
    first.wait_joined(2)


def test_it_returns_after_the_last_bucket_has_been_sent(group):
    """Otherwise the memory of the last bucket would be filled or freed while it is sent."""
    first, second = links(1)
    first.post_plan(JOIN)
    group.gate.clear()
    sending = threading.Thread(target=RemoteSender().send, args=(mixed([0]), second))
    sending.start()
    sending.join(0.3)
    assert sending.is_alive() and group.sent == []
    group.gate.set()
    sending.join(20)
    assert group.sent == [0]


def test_an_update_follows_its_own_plan(group):
    """The plan of the update before, or its failure, says nothing about this one."""
    store = dist.HashStore()
    sender, (first, second) = RemoteSender(), links(1, store)
    first.post_plan(JOIN)
    assert sender.send(mixed([0]), second) == ""
    first.fail("an engine died")
    first, second = links(2, store)
    with pytest.raises(Exception, match="rank 0 has not posted a plan"):
        SenderLink(store, 2, [0, 2], 2, 0.0).plan()
    first.post_plan({"action": "same"})
    assert sender.send(mixed([0, 2]), second) == ""
    assert group.sent == [0, 0, 2]


@pytest.mark.parametrize("what", ["payload", "checksums"])
def test_rank_0_keeps_nothing_large_of_an_update(what):
    """Checksums of a large mixture of experts are a megabyte in every update."""
    store = dist.HashStore()
    first, second = links(1, store)
    if what == "payload":
        second.put_payload(4, "reference")
        assert first.payload(4, 2) == "reference"
    else:
        second.put_checksums({"t": (3, 5)})
        assert first.checksums(2) == {"t": [3, 5]}
    assert store.num_keys() == 0


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_after_a_failure_nothing_more_is_sent_but_all_buckets_are_read(group, where):
    first, second = links(1)
    first.post_plan(JOIN)
    read = []

    def buckets():
        for found in mixed(range(7), read):
            if read[-1] == 2:
                if where == "here":
                    yield bucket(99)
                    continue
                while not group.sent:  # bucket 0 is on its way
                    time.sleep(0.001)
                group.gate.clear()
            if read[-1] == 3 and where == "elsewhere":
                first.fail("an engine died")
            yield found
        group.gate.set()

    failure = RemoteSender().send(buckets(), second)
    assert read == list(range(7)) and 6 not in group.sent and 4 not in group.sent
    if where == "here":
        assert "connection closed" in failure and first.error() == "rank 2: RuntimeError: connection closed"
    else:
        assert failure == "an engine died" and first.error() == ""
        with pytest.raises(UpdateFailed):
            second.raise_if_failed()


def test_references_carry_the_number_of_their_bucket(group, monkeypatch):
    """Rank 0 counts all buckets, also those of other ranks. Memory is used again when the engines have loaded it."""

    def share(bucket, *, pack_experts):
        return type("S", (), {"payload": f"bucket {int(bucket.flat[0])}, packed {pack_experts}"})()

    monkeypatch.setattr(remote_sender, "share", share)
    first, second = links(1)
    first.post_plan({"action": "share", "pack_experts": True})
    read = []
    sending = threading.Thread(target=RemoteSender().send, args=(mixed(range(7), read), second))
    sending.start()
    for number in (0, 2, 4, 6):
        assert first.payload(number, 2) == f"bucket {number}, packed True"
        assert max(read) <= number + 3  # the next one is prepared, the one after it is not
        first.done(number)
    sending.join(20)
    assert not sending.is_alive() and read == list(range(7))


def test_rank_0_sees_the_buckets_of_other_ranks_without_their_tensors():
    remote = RemoteBucket(2, (), bucket(4).specs)
    assert len(remote) == 0 and list(remote) == [] and remote.specs[0].name == "t4"
