"""Weight sync in the main thread: no rank is left behind in a bucket."""

import asyncio
import os
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.errors import EngineError
from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.trainer.collectives import Collectives, DriverError
from megatron_dapo.trainer.rollouts import WeightSync
from megatron_dapo.trainer.signals import Stopped, StopSignal


class Buckets:
    """Three buckets, each of them a collective: a rank that stops early leaves the others waiting."""

    made = 0
    has_remote_senders = False

    def buckets(self):
        for number in range(3):
            dist.all_reduce(torch.ones(1))
            self.made += 1
            yield [("weight", torch.full((2,), float(number)))]


class Engine:
    """Loads `wanted` buckets in a thread of its own, as an engine does, and then fails if it is told to."""

    def __init__(self, wanted, error=None):
        self.wanted, self.error, self.loaded, self.threads = wanted, error, [], set()

    def load_weights(self, version, stream):
        return ThreadPoolExecutor(1).submit(lambda: asyncio.run(self._load(stream)))

    async def _load(self, stream):
        if self.wanted:
            stream.open(lambda bucket: self.threads.add(threading.current_thread()))
            for _ in range(self.wanted):
                try:
                    bucket, _ = await anext(stream)
                except StopAsyncIteration:
                    break
                self.loaded.append(float(bucket[0][1][0]))
        if self.error is not None:
            raise self.error


def send(rendezvous, wanted, error):
    runtime = initialize(PolicyConfig(timeout_seconds=20), rendezvous=rendezvous)
    buckets, engine = Buckets(), Engine(wanted, error)
    failure = None
    with StopSignal() as stop:
        sync = WeightSync(buckets, Collectives(runtime, stop))
        try:
            sync.send(7, engine if rendezvous.rank == 0 else None)
        except DriverError as found:
            failure = str(found), found.by_engine, found.may_save
        dist.barrier()  # every rank is here: none is stuck in a bucket
    in_main_thread = engine.threads <= {threading.main_thread()}
    return buckets.made, engine.loaded, in_main_thread, failure


def test_all_ranks_produce_every_bucket_in_the_main_thread():
    (made, loaded, in_main_thread, failure), (others, _, _, _) = run_ranks(2, send, 4, None)
    assert (made, others, loaded) == (3, 3, [0.0, 1.0, 2.0]) and in_main_thread and failure is None


def test_an_engine_that_gives_up_early_leaves_no_rank_waiting():
    ours, others = run_ranks(2, send, 1, EngineError("planted: no server is left"))
    message = "rank 0 failed while sending weight version 7 to the engines: EngineError: planted: no server is left"
    assert ours[0] == others[0] == 3 and ours[1] == [0.0]
    assert ours[3] == others[3] == (message, True, True)


@pytest.mark.parametrize("error", [None, EngineError("planted")])
def test_what_an_engine_did_not_read_is_discarded(error):
    """An engine without servers of its own reads no bucket at all."""
    ours, others = run_ranks(2, send, 0, error)
    assert ours[:2] == (3, []) and others[0] == 3


def stop_while_no_server_works(rendezvous):
    runtime = initialize(PolicyConfig(timeout_seconds=20), rendezvous=rendezvous)
    engine, loading = Engine(0), Future()  # the engine waits until a server has been restarted
    engine.load_weights = lambda version, stream: loading
    with StopSignal() as stop:
        sync = WeightSync(Buckets(), Collectives(runtime, stop))
        if rendezvous.rank == 0:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(Stopped, match="SIGTERM"):
            sync.send(7, engine if rendezvous.rank == 0 else None)
    return loading.cancelled()


def test_a_run_stops_while_the_engines_have_no_server_that_takes_weights():
    """Restarts of servers may take an hour, and Slurm ends a run that does not stop in time."""
    assert run_ranks(2, stop_while_no_server_works) == [True, False]
