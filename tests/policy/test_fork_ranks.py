"""Forked ranks: results in order, the first failure's reason, and no rank outlives its parent."""

import multiprocessing
import os
import signal
import sys
import time

import psutil
import pytest

from megatron_dapo.policy import fork_ranks
from megatron_dapo.policy.fork_ranks import run_ranks
from megatron_dapo.policy.runtime import RankError


def square(rendezvous, offset):
    return rendezvous.rank**2 + offset, rendezvous.world_size


def test_results_come_in_rank_order():
    assert run_ranks(3, square, 10) == [(10, 3), (11, 3), (14, 3)]


def fail_on_rank_1(rendezvous):
    if rendezvous.rank == 1:
        raise RankError("no more room")
    time.sleep(60)


def test_a_failing_rank_ends_the_others_with_its_reason():
    with pytest.raises(RankError, match="rank 1 of 2: no more room"):
        run_ranks(2, fail_on_rank_1, grace=0.1)


def sleep_forever(rendezvous, folder):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / f"{rendezvous.rank}.tmp").write_text(str(os.getpid()))
    (folder / f"{rendezvous.rank}.tmp").rename(folder / f"{rendezvous.rank}.pid")
    time.sleep(600)


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def is_running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process together with its parent")
def test_ranks_end_with_a_killed_parent(tmp_path):
    parent = multiprocessing.get_context("fork").Process(target=run_ranks, args=(2, sleep_forever, tmp_path))
    parent.start()
    wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    ranks = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    try:
        wait_until(lambda: not any(is_running(pid) for pid in ranks))
    finally:
        for pid in ranks:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


def ask_for_another_parent(rendezvous):
    fork_ranks._die_with(os.getppid() + 1)
    return "still here"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process together with its parent")
def test_a_rank_whose_parent_ended_first_ends_at_once():
    with pytest.raises(RankError, match="exit code 1"):
        run_ranks(1, ask_for_another_parent)
