"""Reading buckets: all are produced, prepared and released in one thread, whatever the receiver does."""

import asyncio
import threading

import pytest

from megatron_dapo.sync.bucket import BucketReader


class Receiver:
    """Receives buckets; fails at the one with this number."""

    def __init__(self, fails_at, kind):
        self.fails_at, self.kind, self.threads = fails_at, kind, set()
        self.most, self.prepared, self.released = 0, [], []

    def buckets(self):
        for number in range(5):
            self.threads.add(threading.get_ident())
            yield [(str(number), None)]

    def prepare(self, bucket):
        self.threads.add(threading.get_ident())
        self.prepared.append(bucket[0][0])
        self.most = max(self.most, len(self.prepared) - len(self.released))
        return bucket[0][0]

    def release(self, prepared):
        self.threads.add(threading.get_ident())
        self.released.append(prepared)

    async def read(self):
        async with BucketReader(self.buckets(), self.prepare, self.release) as reader:
            async for _, prepared in reader:
                assert prepared not in self.released
                if prepared == self.fails_at:
                    raise self.kind("the receiver fails")


@pytest.mark.parametrize("fails_at", [None, "0", "3", "4"])
def test_every_bucket_is_produced_and_released_in_one_thread(fails_at):
    receiver = Receiver(fails_at, ValueError)
    if fails_at is None:
        asyncio.run(receiver.read())
    else:
        with pytest.raises(ValueError, match="the receiver fails"):
            asyncio.run(receiver.read())
    assert receiver.prepared == receiver.released == ["0", "1", "2", "3", "4"]
    assert len(receiver.threads) == 1 and threading.get_ident() not in receiver.threads
    assert receiver.most == 2  # the current one, and the next


def test_a_cancelled_receiver_releases_its_buckets():
    receiver = Receiver("2", asyncio.CancelledError)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(receiver.read())
    assert receiver.released == ["0", "1", "2"]
