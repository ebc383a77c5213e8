"""Forked ranks: results in order, the first failure's reason, and no rank outlives its parent."""

import multiprocessing
import os
import signal
import sys
import threading
import time

import psutil
import pytest
from tiny_run import raw_config, write_config
from waiting import wait_for

from megatron_dapo.cli import main
from megatron_dapo.config import ConfigError
from megatron_dapo.errors import RankError, UserError
from megatron_dapo.processes.fork_ranks import run_in_fork, run_ranks
from megatron_dapo.processes.supervisor import end_with_parent


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


def fail_with_config_error(rendezvous):
    raise ConfigError("rollout.samples_per_prompt is 8: use 4")


def test_a_wrong_configuration_is_raised_as_one():
    """The command ends with exit code 2 then, and a launcher does not start it again."""
    with pytest.raises(ConfigError, match=r"^rollout\.samples_per_prompt is 8: use 4$"):
        run_ranks(2, fail_with_config_error)


def test_the_command_ends_with_exit_code_2(tmp_path, monkeypatch, capfd):
    def train(*_):
        raise ConfigError("planted: it does not fit the checkpoint")

    monkeypatch.setattr("megatron_dapo.trainer.loop.train", train)
    raw = raw_config(tmp_path / "model", tmp_path / "run", policy__tensor_parallel=2, reward__grader="exact")
    assert main(["train", str(write_config(raw, tmp_path / "run.yaml"))]) == 2
    said = capfd.readouterr().err
    assert said.endswith("megatron-dapo: planted: it does not fit the checkpoint\n") and "Traceback" not in said


def test_one_call_in_a_fork():
    """Its result, its own error, the traceback of any other, or the exit code."""
    assert run_in_fork(divmod, 7, 2) == (3, 1)
    with pytest.raises(ConfigError, match=r"^rollout\.samples_per_prompt is 8: use 4$"):
        run_in_fork(fail_with_config_error, None)
    with pytest.raises(UserError, match=r"(?s)Traceback.*ZeroDivisionError"):
        run_in_fork(divmod, 1, 0)
    with pytest.raises(UserError, match="ended with exit code 7"):
        run_in_fork(os._exit, 7)


def sleep_forever(rendezvous, folder):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / f"{rendezvous.rank}.tmp").write_text(str(os.getpid()))
    (folder / f"{rendezvous.rank}.tmp").rename(folder / f"{rendezvous.rank}.pid")
    time.sleep(600)


def is_running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process together with its parent")
def test_ranks_end_with_a_killed_parent(tmp_path):
    parent = multiprocessing.get_context("fork").Process(target=run_ranks, args=(2, sleep_forever, tmp_path))
    parent.start()
    wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == 2, 30, "two ranks", 0.02)
    ranks = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    try:
        wait_for(lambda: not any(is_running(pid) for pid in ranks), 30, "their end", 0.02)
    finally:
        for pid in ranks:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


def ask_for_another_parent(rendezvous):
    end_with_parent(os.getppid() + 1)
    return "still here"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process together with its parent")
def test_a_rank_whose_parent_ended_first_ends_at_once():
    with pytest.raises(RankError, match="exit code 1"):
        run_ranks(1, ask_for_another_parent)


# ---- Ctrl-C ----


def save_when_asked(rendezvous, folder):
    """As the loop does: SIGTERM lets it save and return."""
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    (folder / f"{rendezvous.rank}.pid").write_text(str(os.getpid()))
    while not asked.wait(0.02):
        pass
    (folder / f"{rendezvous.rank}.saved").touch()
    return 75


def interrupted(function, folder, times):
    """Presses Ctrl-C as a terminal does, for the launcher and its ranks; returns the launcher's exit code."""

    def launcher():
        os.setpgrp()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
        try:
            run_ranks(2, function, folder, grace=0.1)
        except KeyboardInterrupt:
            os._exit(130)

    parent = multiprocessing.get_context("fork").Process(target=launcher)
    parent.start()
    wait_for(lambda: len(list(folder.glob("*.pid"))) == 2, 30, "two ranks", 0.02)
    for _ in range(times):
        os.killpg(parent.pid, signal.SIGINT)
        time.sleep(0.3)
    for _ in range(30):
        parent.join(1)
        if times > 1 and parent.is_alive():
            os.killpg(parent.pid, signal.SIGINT)  # on a busy machine two signals can arrive as one
    alive = parent.is_alive()
    parent.kill()
    parent.join()
    assert not alive, "the launcher did not end"
    return parent.exitcode


def test_one_interrupt_lets_every_rank_save(tmp_path, capfd):
    assert interrupted(save_when_asked, tmp_path, times=1) == 130
    assert sorted(path.name for path in tmp_path.glob("*.saved")) == ["0.saved", "1.saved"]
    assert "interrupted: saving at the next safe point; press Ctrl-C again to end at once" in capfd.readouterr().err


def test_a_second_interrupt_kills_ranks_that_do_not_end(tmp_path):
    assert interrupted(sleep_forever, tmp_path, times=2) == 130
    assert not any(is_running(int(path.read_text())) for path in tmp_path.glob("*.pid"))
