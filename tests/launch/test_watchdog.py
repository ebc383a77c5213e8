"""A rank that hangs ends all ranks within a known time; the reason names it and its stack is written."""

import errno
import json
import multiprocessing
import os
import signal
import time

import pytest

from megatron_dapo.config.trainer import HeartbeatConfig
from megatron_dapo.trainer import watchdog as watchdog_module
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
                time.sleep(SECONDS * 3)  # both ranks: neither makes progress
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


def test_rank_without_progress_is_named_and_ends_all_ranks(tmp_path):
    assert codes(start(tmp_path, "sleep")) == [HUNG, HUNG]
    ended = (tmp_path / "heartbeat/ended").read_text()
    assert ended.startswith("hanging: rank 1 (pid ") and "while update 5" in ended and "hang_here" in ended
    assert "hang_here" in (tmp_path / "stacks_rank_1.txt").read_text()
    assert "rank_1" in "".join(p.name for p in tmp_path.glob("stacks_*"))


def test_stopped_process_is_named_by_the_rank_that_watches_it(tmp_path):
    """It cannot report anything itself."""
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


def test_ranks_that_wait_for_each_other_end(tmp_path):
    assert codes(start(tmp_path, "wait")) == [HUNG, HUNG]


def test_working_ranks_are_not_ended_and_leave_no_files(tmp_path):
    (tmp_path / "heartbeat").mkdir()
    (tmp_path / "heartbeat/ended").write_text("hanging: in an earlier run\n")
    assert codes(start(tmp_path, "nothing")) == [0, 0]
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == []


def test_sigusr2_writes_the_stacks(tmp_path):
    processes = start(tmp_path, "never")
    time.sleep(0.7)
    os.kill(processes[0].pid, signal.SIGUSR2)
    time.sleep(0.5)
    assert "in rank" in (tmp_path / "stacks_rank_0.txt").read_text()
    for process in processes:
        process.kill()
        process.join()


def test_log_folder_is_that_of_the_newest_attempt(tmp_path):
    assert log_folder(tmp_path) == tmp_path / "logs"
    (tmp_path / "logs/attempt_3").mkdir(parents=True)
    (tmp_path / "logs/latest").symlink_to("attempt_3")
    assert log_folder(tmp_path) == (tmp_path / "logs/attempt_3").resolve()


def test_silence_must_be_longer_than_two_heartbeats():
    with pytest.raises(ValueError, match="must be more than two heartbeats"):
        HeartbeatConfig(every=5, silent=10)


def without_progress(folder):
    """One rank, whose log folder is on a file system that cannot be written."""
    with Watchdog(CONFIG, folder, 0, 1) as watchdog:
        (folder / "heartbeat").rmdir()
        (folder / "heartbeat").write_text("not a directory: every write fails")
        for _ in range(600):
            watchdog.mark("waiting", False)
            time.sleep(0.1)


def test_full_disk_does_not_hide_a_rank_without_progress(tmp_path, capfd):
    process = multiprocessing.get_context("fork").Process(target=without_progress, args=(tmp_path,))
    process.start()
    assert codes([process]) == [HUNG]
    assert "has made no progress" in capfd.readouterr().err


def on_a_full_disk(number, folder, index_of_hang):
    """No file can be created any more, and none can grow."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with Watchdog(CONFIG, folder, number, 2) as watchdog:
        for index in range(45):
            watchdog.mark(f"update {index}", index < index_of_hang)
            if index == 5:
                watchdog_module.write_atomically = full
            time.sleep(0.1)


@pytest.mark.parametrize(("index_of_hang", "expected"), [(100, [0, 0]), (7, [HUNG, HUNG])])
def test_full_disk_does_not_silence_a_rank(index_of_hang, expected, tmp_path):
    """For longer than `silent` and `stuck` its heartbeats are seen by the other rank, and so is that they stop."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=on_a_full_disk, args=(n, tmp_path, index_of_hang)) for n in range(2)]
    for process in processes:
        process.start()
    assert codes(processes) == expected


def test_a_heartbeat_has_the_status_of_the_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_dapo.trainer.watchdog.gpu_status", lambda: {"utilization_ratio": 0.5})
    with Watchdog(CONFIG, tmp_path, 0, 1) as one:
        one._write()
        found = json.loads((tmp_path / "heartbeat" / "rank_0.json").read_text())
    assert found["gpu"] == {"utilization_ratio": 0.5} and found["host"]
