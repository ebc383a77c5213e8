"""Buckets are produced, prepared and released in one thread, all of them, whatever the engine does."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_dapo.sync.bucket_stream import BucketStream

ALL = ["0", "1", "2", "3", "4"]


class Receiver:
    """Receives buckets; fails at the one with this number."""

    def __init__(self, fails_at=None, kind=ValueError, unprepared=None):
        self.fails_at, self.kind, self.unprepared, self.threads = fails_at, kind, unprepared, set()
        self.most, self.produced, self.prepared, self.released = 0, [], [], []

    def buckets(self):
        for number in ALL:
            self.threads.add(threading.get_ident())
            self.produced.append(number)
            yield [(number, None)]

    def prepare(self, bucket):
        self.threads.add(threading.get_ident())
        if bucket[0][0] == self.unprepared:
            raise MemoryError("no memory for it")
        self.prepared.append(bucket[0][0])
        self.most = max(self.most, len(self.prepared) - len(self.released))
        return bucket[0][0]

    def release(self, prepared):
        self.threads.add(threading.get_ident())
        self.released.append(prepared)

    async def read(self, stream=None):
        async with BucketStream.of(stream or self.buckets()).open(self.prepare, self.release) as opened:
            async for _, prepared in opened:
                assert prepared not in self.released
                if prepared == self.fails_at:
                    raise self.kind("the receiver fails")

    def read_while_this_thread_fills(self):
        """As the trainer does: the engine is in another thread."""
        stream = BucketStream()
        with ThreadPoolExecutor(1) as engine:
            reading = engine.submit(lambda: asyncio.run(self.read(stream)))
            reading.add_done_callback(stream.close)
            stream.fill(self.buckets())
            return reading.exception(30)


@pytest.mark.parametrize("fails_at", [None, "0", "3", "4"])
def test_every_bucket_is_produced_and_released_in_one_thread(fails_at):
    receiver = Receiver(fails_at)
    if fails_at is None:
        asyncio.run(receiver.read())
    else:
        with pytest.raises(ValueError, match="the receiver fails"):
            asyncio.run(receiver.read())
    assert receiver.prepared == receiver.released == ALL
    assert len(receiver.threads) == 1 and threading.get_ident() not in receiver.threads
    assert receiver.most == 2  # the current one, and the next


@pytest.mark.parametrize(
    ("receiver", "error"),
    [
        (Receiver(), None),
        (Receiver("2"), ValueError),
        (Receiver("2", asyncio.CancelledError), asyncio.CancelledError),
        (Receiver(unprepared="1"), MemoryError),
    ],
    ids=["works", "fails", "is cancelled", "cannot prepare"],
)
def test_the_thread_that_fills_the_stream_produces_and_frees_all(receiver, error):
    found = receiver.read_while_this_thread_fills()
    assert error is None or isinstance(found, error)
    assert receiver.produced == ALL and receiver.released == receiver.prepared
    assert receiver.threads == {threading.get_ident()}


def test_an_engine_that_never_reads_leaves_nobody_waiting():
    receiver, stream = Receiver(), BucketStream()
    stream.close()
    stream.fill(receiver.buckets())
    assert receiver.produced == ALL and not receiver.prepared


@pytest.mark.parametrize("reads", [True, False])
def test_an_error_of_the_producer_is_the_engines_if_it_reads(reads):
    def buckets():
        yield [("0", None)]
        raise ValueError("rank 3 died")

    async def main():
        with pytest.raises(ValueError, match="rank 3 died"):
            await Receiver().read(buckets())

    if reads:
        asyncio.run(main())
        return
    stream = BucketStream()
    stream.close()
    with pytest.raises(ValueError, match="rank 3 died"):
        stream.fill(buckets())
