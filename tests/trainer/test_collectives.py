"""Ranks wait on the CPU: not in a call of the default group, which is NCCL's on a GPU, and with little CPU time."""

import dataclasses
import multiprocessing
import signal
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tiny_run import environment, evaluated_config

from megatron_dapo import fault_points
from megatron_dapo.config import ConfigError, check_config, parse_config
from megatron_dapo.errors import EngineError
from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.selfcheck.cases import LayoutSpec, selfcheck_config
from megatron_dapo.trainer import loop
from megatron_dapo.trainer.collectives import BULK, Collectives, DriverError
from megatron_dapo.trainer.signals import Stopped, StopSignal

ON_CPU, ON_DEVICE = "CPU", "device"
CALLS = (
    "all_reduce", "all_gather_into_tensor", "batch_isend_irecv", "broadcast", "recv", "send",
    "barrier", "all_gather_object", "broadcast_object_list",
)  # fmt: skip


def joined(policy, **options):
    """As on a GPU: the default group is not the control group."""
    return dataclasses.replace(initialize(policy, **options), control=dist.new_group(backend="gloo"))


def note_calls(runtime, note):
    """Every call of torch.distributed is noted first: ON_CPU or ON_DEVICE."""

    def noted(call):
        def wrapper(*args, **options):
            groups = [arg for arg in (*args, *options.values()) if isinstance(arg, dist.ProcessGroup)]
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            on_cpu = groups == [runtime.control] and all(tensor.device.type == "cpu" for tensor in tensors)
            note(ON_CPU if on_cpu else ON_DEVICE)
            return call(*args, **options)

        return wrapper

    for name in CALLS:
        setattr(dist, name, noted(getattr(dist, name)))


# ---- each method ----


def join(rendezvous):
    runtime = joined(selfcheck_config(LayoutSpec.parse("single")).policy, rendezvous=rendezvous)
    calls = []
    note_calls(runtime, calls.append)
    return Collectives(runtime, StopSignal()), calls


def use_everything(rendezvous):
    """The messages of a run between two ranks; returns what the device was used for."""
    sharing, calls = join(rendezvous)
    mine = rendezvous.rank == 0
    assert sharing.agree(mine)
    sharing.stop_if_requested("starting")
    sharing.arrive()
    sharing.barrier()
    with sharing.on_driver("working") as first:
        assert first == mine
    for kind, raised in ((EngineError("no server"), DriverError), (ConfigError("no such key"), ConfigError)):
        with pytest.raises(raised, match=str(kind)), sharing.on_driver("working") as first:
            if first:
                raise kind
    future = Future() if mine else None
    if mine:
        future.set_exception(EngineError("lost"))
    with pytest.raises(DriverError, match="rank 0 failed while sampling: EngineError: lost") as caught:
        sharing.wait(future, "sampling")
    assert caught.value.by_engine
    sharing.stop.number = signal.SIGTERM if mine else 0
    with pytest.raises(Stopped, match="SIGTERM"):
        sharing.wait(Future() if mine else None, "sampling", stoppable=True)
    with pytest.raises(Stopped, match="SIGTERM"):
        sharing.stop_if_requested("training")
    small = np.arange(9)
    assert np.array_equal(sharing.share_array(small if mine else None), small)
    assert sharing.share_array(None) is None
    assert ON_DEVICE not in calls
    calls.clear()
    large = np.arange(BULK, dtype=np.int32)
    assert np.array_equal(sharing.share_array(large if mine else None), large)
    everyone = sharing.scatter_array(large if mine else None, np.array([0, BULK // 2, BULK]), [[0], [1]])
    assert np.array_equal(everyone[BULK // 2 :], large[BULK // 2 :])
    return [list(part) for part in np.split(np.array(calls), np.flatnonzero(np.array(calls) == ON_CPU))[1:]]


def test_only_large_arrays_use_the_device_and_only_after_all_ranks_have_arrived():
    for transfers in run_ranks(2, use_everything):
        assert len(transfers) == 2 and all(part[0] == ON_CPU and set(part[1:]) == {ON_DEVICE} for part in transfers)


def wait_for_driver(rendezvous, seconds):
    """CPU time of this process per second of waiting."""
    sharing, _ = join(rendezvous)
    future = None
    if rendezvous.rank == 0:
        future = Future()
        threading.Timer(seconds, future.set_result, [7]).start()
    sharing.arrive()
    began, used = time.monotonic(), time.process_time()
    assert sharing.wait(future, "sampling", stoppable=True) == (7 if rendezvous.rank == 0 else None)
    return (time.process_time() - used) / (time.monotonic() - began)


def test_a_waiting_rank_uses_less_than_five_percent_of_a_core():
    shares = run_ranks(3, wait_for_driver, 4.0)
    assert max(shares) < 0.05, shares


# ---- a whole run ----

device_calls = multiprocessing.Array("i", 2)  # that each rank has begun
looks = multiprocessing.Value("i", 0)
MOMENTS = (
    ("rollouts/before_collect", 1), ("rollouts/sampling", 5), ("rollouts/evaluating", 3), ("loop/before_sync", 1),
    ("sync/before_serve", 1), ("checkpoint/before_write", 1), ("rollouts/before_collect", 2),
)  # fmt: skip


def rank(rendezvous, raw):
    """Rank 0 pauses at each of MOMENTS. Rank 1 must not have begun a device's call that rank 0 has not begun."""

    def look():
        time.sleep(0.5)
        looks.value += 1
        assert device_calls[1] <= device_calls[0], "rank 1 waits in a call of the device's group"

    def count(kind):
        device_calls[rendezvous.rank] += kind == ON_DEVICE

    def initialized(*args, **options):
        runtime = joined(*args, **options)
        note_calls(runtime, count)
        return runtime

    loop.initialize = initialized
    if rendezvous.rank == 0:
        for name, arrival in MOMENTS:
            fault_points.on(name, look, count=arrival)
    parsed = parse_config(raw)
    return loop.train(parsed, check_config(parsed, rendezvous.world_size), rendezvous)


def test_while_rank_0_works_alone_the_others_wait_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    raw = evaluated_config(tmp_path / "model", tmp_path / "run", 2, policy__tensor_parallel=2)
    assert run_ranks(2, rank, raw) == [0, 0]
    assert looks.value == len(MOMENTS) and device_calls[0] == device_calls[1] > 0
