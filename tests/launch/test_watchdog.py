"""A rank that hangs, in whatever way, ends all ranks within a known time, with a name and with stacks."""

import multiprocessing
import os
import signal
import time

import pytest

from megatron_dapo.config.trainer import HeartbeatConfig
from megatron_dapo.trainer.watchdog import HUNG, Watchdog, log_folder

CONFIG = HeartbeatConfig(every=0.1, silent=1.5, stuck=3.0)
SECONDS = 20


def rank(number, folder, hangs_in):
    with Watchdog(CONFIG, folder, number, 2) as watchdog:
        for index in range(600):
            watchdog.mark(f"update {index}")
            if hangs_in == "sleep" and number == 1 and index == 5:
                hang_here()
            if hangs_in == "wait" and index == 5:
                time.sleep(SECONDS * 3)  # both: neither goes on
            if hangs_in == "nothing" and index == 25:
                return
            time.sleep(0.1)


def hang_here():
    time.sleep(SECONDS * 3)


def start(folder, hangs_in):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=rank, args=(number, folder, hangs_in)) for number in range(2)]
    for process in processes:
        process.start()
    return processes


def codes(processes):
    deadline = time.monotonic() + SECONDS
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
    found = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return found


def test_a_loop_that_does_not_go_on(tmp_path):
    assert codes(start(tmp_path, "sleep")) == [HUNG, HUNG]
    ended = (tmp_path / "heartbeat/ended").read_text()
    assert ended.startswith("hanging: rank 1 (pid ") and "while update 5" in ended and "hang_here" in ended
    assert "hang_here" in (tmp_path / "stacks_rank_1.txt").read_text()
    assert "rank_1" in "".join(p.name for p in tmp_path.glob("stacks_*"))


def test_a_stopped_process(tmp_path):
    """It cannot say anything itself: the other one notices and says who it was."""
    processes = start(tmp_path, "never")
    time.sleep(1)
    os.kill(processes[1].pid, signal.SIGSTOP)
    began = time.monotonic()
    processes[0].join(SECONDS)
    assert processes[0].exitcode == HUNG and time.monotonic() - began < SECONDS / 2
    processes[1].kill()
    processes[1].join()
    ended = (tmp_path / "heartbeat/ended").read_text()
    assert f"rank 1 (pid {processes[1].pid} on " in ended and "has been silent for" in ended
    assert "in rank" in (tmp_path / "stacks_rank_0.txt").read_text()


def test_all_wait_for_each_other(tmp_path):
    assert codes(start(tmp_path, "wait")) == [HUNG, HUNG]


def test_ranks_that_work_are_left_alone_and_leave_nothing_behind(tmp_path):
    (tmp_path / "heartbeat").mkdir()
    (tmp_path / "heartbeat/ended").write_text("hanging: of a run before this one\n")
    assert codes(start(tmp_path, "nothing")) == [0, 0]
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == []


def test_stacks_on_demand(tmp_path):
    processes = start(tmp_path, "never")
    time.sleep(0.7)
    os.kill(processes[0].pid, signal.SIGUSR2)
    time.sleep(0.5)
    assert "in rank" in (tmp_path / "stacks_rank_0.txt").read_text()
    for process in processes:
        process.kill()
        process.join()


def test_logs_of_the_attempt(tmp_path):
    assert log_folder(tmp_path) == tmp_path / "logs"
    (tmp_path / "logs/attempt_3").mkdir(parents=True)
    (tmp_path / "logs/latest").symlink_to("attempt_3")
    assert log_folder(tmp_path) == (tmp_path / "logs/attempt_3").resolve()


def test_silence_must_be_longer_than_two_beats():
    with pytest.raises(ValueError, match="must be more than two beats"):
        HeartbeatConfig(every=5, silent=10)
