"""One run directory, one run: exactly one process holds the lock, and a lock left by a dead process is taken over."""

import json
import multiprocessing
import os
import signal
import time
from dataclasses import replace

import pytest

from megatron_dapo.errors import LockLost, UserError
from megatron_dapo.trainer import run_lock
from megatron_dapo.trainer.run_lock import Holder, RunDirInUse, RunLock

FORK = multiprocessing.get_context("fork")


def hold(run_dir, ready, release):
    with RunLock(run_dir):
        ready.set()
        release.wait(60)


@pytest.fixture
def held(tmp_path):
    """A process that holds the lock of tmp_path."""
    ready, release = FORK.Event(), FORK.Event()
    process = FORK.Process(target=hold, args=(tmp_path, ready, release))
    process.start()
    assert ready.wait(30)
    yield process, release
    process.kill()
    process.join()


def lock_file(run_dir):
    (path,) = (run_dir / "lock").glob("*.json")
    return path


def put_lock(run_dir, holder):
    """A lock file as `holder` would have left it."""
    (run_dir / "lock").mkdir(exist_ok=True)
    path = run_dir / "lock" / "7.json"
    path.write_text(json.dumps({name: getattr(holder, name) for name in Holder.__slots__}))
    return path


def on_another_machine(**changes):
    here = Holder.this_process()
    return replace(here, host="node7", pid=41, started="1", namespace="other boot/1", token="t", **changes)


def test_second_run_is_refused_with_the_holder_named(held, tmp_path):
    process, _ = held
    with pytest.raises(RunDirInUse) as refused, RunLock(tmp_path):
        pass
    said = str(refused.value)
    assert f"pid {process.pid} on {run_lock.socket.gethostname()}, since 2" in said and "\n" not in said
    assert "stop it, or set another trainer.run_dir" in said


def test_released_lock_is_free_at_once(held, tmp_path):
    process, release = held
    release.set()
    process.join(30)
    assert json.loads(lock_file(tmp_path).read_text())["released"]
    with RunLock(tmp_path) as lock:
        lock.verify()
    assert lock_file(tmp_path).name == "2.json"


def test_lock_of_a_killed_process_is_taken_over_at_once(held, tmp_path):
    process, _ = held
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    with RunLock(tmp_path) as lock:
        lock.verify()


def test_reused_pid_is_not_the_holder(tmp_path):
    """The pid exists, but the process started at another time."""
    put_lock(tmp_path, replace(Holder.this_process(), started="1"))
    with RunLock(tmp_path):
        pass


def test_requeued_slurm_job_takes_over_its_own_lock_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    put_lock(tmp_path, on_another_machine(job="42", restarts=0))
    with RunLock(tmp_path, stale=1000):
        pass


def test_lock_of_another_machine_is_stale_only_after_its_heartbeat_stood_still(tmp_path, capsys):
    put_lock(tmp_path, on_another_machine())
    began = time.monotonic()
    with RunLock(tmp_path, beat=0.2, stale=1.0):
        assert time.monotonic() - began > 1.0
    said = capsys.readouterr().err
    assert "waiting up to 1 s for a sign of life" in said and "pid 41 on node7" in said and "taking over" in said


def test_beating_lock_of_another_machine_is_in_use(tmp_path):
    path = put_lock(tmp_path, on_another_machine(job="9", restarts=2))

    def beat():
        while True:
            time.sleep(0.2)
            os.utime(path)

    process = FORK.Process(target=beat)
    process.start()
    try:
        with pytest.raises(RunDirInUse, match="pid 41 on node7, Slurm job 9 restart 2"), RunLock(tmp_path, stale=30):
            pass
    finally:
        process.kill()
        process.join()


def test_holder_beats(tmp_path):
    with RunLock(tmp_path, beat=0.05):
        before = lock_file(tmp_path).stat().st_mtime_ns
        deadline = time.monotonic() + 20
        while lock_file(tmp_path).stat().st_mtime_ns == before and time.monotonic() < deadline:
            time.sleep(0.05)
        assert lock_file(tmp_path).stat().st_mtime_ns > before


def test_removed_lock_is_noticed(tmp_path):
    with RunLock(tmp_path) as lock:
        lock_file(tmp_path).unlink()
        with pytest.raises(LockLost, match="was removed"):
            lock.verify()


def test_lock_taken_over_is_noticed_and_the_new_one_survives_the_release_of_the_old(tmp_path):
    with RunLock(tmp_path) as old:
        lock_file(tmp_path).rename(tmp_path / "aside")
        put_lock(tmp_path, replace(Holder.this_process(), started="1"))  # as if a long time had passed
        with RunLock(tmp_path) as new:
            (tmp_path / "aside").rename(tmp_path / "lock" / "7.json")
            old._number = 7
            with pytest.raises(LockLost, match="taken over by another run"):
                old.verify()
            old.__exit__()
            new.verify()


def test_forked_child_can_verify(tmp_path):
    with RunLock(tmp_path) as lock:
        child = FORK.Process(target=lock.verify)
        child.start()
        child.join(30)
        assert child.exitcode == 0


def contend(run_dir, gate, results):
    gate.wait(60)
    try:
        with RunLock(run_dir) as lock:
            results.put("won")
            gate.wait(60)  # until all have decided
            lock.verify()
    except RunDirInUse:
        results.put("refused")
        gate.wait(60)


@pytest.mark.parametrize("left_over", ["nothing", "a stale lock", "a released lock"])
def test_of_simultaneous_starts_exactly_one_wins(left_over, tmp_path):
    for attempt in range(10):
        run_dir = tmp_path / str(attempt)
        run_dir.mkdir()
        if left_over != "nothing":
            stale = replace(Holder.this_process(), started="1", released=left_over == "a released lock")
            put_lock(run_dir, stale)
        gate, results = FORK.Barrier(5), FORK.SimpleQueue()
        processes = [FORK.Process(target=contend, args=(run_dir, gate, results)) for _ in range(5)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0] * 5
        assert sorted(results.get() for _ in processes) == ["refused"] * 4 + ["won"], attempt


def test_slow_contender_does_not_get_a_number_that_is_gone(tmp_path, monkeypatch):
    """It saw an empty folder; until it creates number 1, others have taken and removed it."""
    real, looks = RunLock._highest, []

    def highest(self):
        looks.append(1)
        return 0 if len(looks) == 1 else real(self)

    with RunLock(tmp_path):
        lock_file(tmp_path).rename(tmp_path / "lock" / "2.json")
        monkeypatch.setattr(RunLock, "_highest", highest)
        with pytest.raises(RunDirInUse), RunLock(tmp_path):
            pass
        assert lock_file(tmp_path).name == "2.json"


def test_run_dir_that_cannot_be_created_is_an_error_with_a_reason(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"trainer\.run_dir: .*file/run cannot be locked: .*Not a directory"):
        RunLock(tmp_path / "file" / "run").__enter__()


def test_file_systems_without_hard_links(tmp_path, monkeypatch):
    def link(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", link)
    with RunLock(tmp_path) as lock:
        lock.verify()
        with pytest.raises(RunDirInUse), RunLock(tmp_path):
            pass
