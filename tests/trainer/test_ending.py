"""A run that must end while its weights are consistent saves first, on all ranks, and says how to continue."""

import gc
import re
import signal
import time

import pytest
from forked import assert_same, at_point, fail_with, records, run, run_in_ranks, run_straight, send_signal
from tiny_run import evaluated_config

from megatron_dapo import fault_points
from megatron_dapo.config import parse_config
from megatron_dapo.engines.embedded.engine import EmbeddedEngine
from megatron_dapo.errors import EngineError, RankError
from megatron_dapo.evaluation import EvaluationError
from megatron_dapo.trainer import rollout_driver
from megatron_dapo.trainer.signals import INTERRUPTED
from megatron_dapo.trainer.watchdog import HUNG

STEPS = 3


def config(folder, run_dir, **changes):
    """Saves only at the end by itself."""
    checkpoint = {"every": 0, "keep": 2}
    return evaluated_config(folder, run_dir, STEPS, trainer__checkpoint=checkpoint, **changes)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The run without an error."""
    return run_straight(config, tmp_path_factory)


def checkpoints(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step_*"))


def assert_finished(run_dir):
    """Every step was trained on whole groups, and none twice."""
    steps = [(step, metrics) for step, kind, metrics in records(run_dir) if kind == "step"]
    assert [step for step, _ in steps] == list(range(1, STEPS + 1))
    assert all(metrics["rollout/samples_trained"] == 16 for _, metrics in steps)


# ---- errors of rank 0's work ----


def lose_engine():
    """From the second update on every request fails."""

    async def fail(self, *args):
        raise EngineError("planted: the last server is gone")

    def lose():
        EmbeddedEngine.generate = fail

    fault_points.on("loop/before_update", lose, count=2)


def test_lost_engine(straight, tmp_path, capfd):
    raw = config(straight[0], tmp_path)
    assert run(raw, lose_engine) == 1
    said = capfd.readouterr().err
    assert "rank 0 failed while sampling the batch of step 2" in said and "the last server is gone" in said
    assert f"Saved first: {tmp_path / 'checkpoints' / 'step_1+0'}; start the same command again to continue." in said
    assert "Traceback" not in said
    assert run(raw) == 0
    assert_finished(tmp_path)


def break_grader(how, tmp_path):
    return at_point("loop/before_update", 2, lambda: (tmp_path / "broken").write_text(how))


@pytest.mark.parametrize(
    ("how", "reason"), [("wrong", "rollout.sampler.on_limit is stop"), ("raise", "the grader is broken")]
)
def test_grader_that_breaks_or_accepts_nothing(how, reason, straight, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("BREAK", str(tmp_path / "broken"))
    raw = config(straight[0], tmp_path / "run", reward__grader="python:tiny_reward.breakable", reward__max_errors=2,
                 reward__environment=["BREAK"],
                 rollout__sampler={"max_generation_batches": 2, "on_limit": "stop"})  # fmt: skip
    assert run(raw, break_grader(how, tmp_path)) == 1
    said = capfd.readouterr().err
    assert reason in said and "step_1+0; start the same command again" in said
    shown = list((tmp_path / "run/samples").glob("step_000002.txt"))
    assert len(shown) == (how == "wrong"), "of the step that kept nothing"
    assert all("dropped: all-wrong" in file.read_text() for file in shown)
    (tmp_path / "broken").unlink()
    raw["rollout"]["sampler"]["max_generation_batches"] = None
    assert run(raw) == 0
    assert_finished(tmp_path / "run")


def test_failed_evaluation_loses_no_step_and_is_repeated(straight, tmp_path, capfd):
    raw = config(straight[0], tmp_path)
    assert run(raw, at_point("rollouts/evaluating", 14, fail_with(EvaluationError("planted")))) == 1
    said = capfd.readouterr().err
    assert "evaluating after step 2: EvaluationError: planted" in said
    assert f"Saved first: {tmp_path / 'checkpoints' / 'step_2'};" in said
    assert run(raw) == 0
    assert_same(tmp_path, straight, STEPS)


def test_error_before_anything_has_changed_saves_nothing(straight, tmp_path, capfd):
    raw = config(straight[0], tmp_path)
    assert run(raw, at_point("rollouts/evaluating", 1, fail_with(EvaluationError("planted")))) == 1
    assert "Nothing was trained yet; start the same command again to continue." in capfd.readouterr().err
    assert checkpoints(tmp_path) == []


def test_save_that_fails_says_so_beside_the_first_error(straight, tmp_path, capfd):
    def plant():
        lose_engine()
        fault_points.on("checkpoint/before_write", fail_with(OSError("planted: the disk is full")))

    assert run(config(straight[0], tmp_path), plant) == 1
    said = capfd.readouterr().err
    assert "the last server is gone" in said and "It could not be saved: " in said and "the disk is full" in said
    assert checkpoints(tmp_path) == []


def test_all_ranks_save(straight, tmp_path):
    raw = config(straight[0], tmp_path, policy__tensor_parallel=2)
    with pytest.raises(RankError, match=r"the last server is gone.*Saved first: .*step_1\+0"):
        run_in_ranks(raw, lambda _: lose_engine())
    assert checkpoints(tmp_path) == ["step_1+0"]
    assert run(config(straight[0], tmp_path)) == 0  # another layout
    assert_finished(tmp_path)


# ---- Ctrl-C, and threads that hang ----


def test_second_interrupt_ends_the_run_at_once_without_a_save(straight, tmp_path, capfd):
    def interrupt_twice():
        send_signal(signal.SIGINT, hold=True)()
        send_signal(signal.SIGINT)()
        time.sleep(600)

    assert (
        run(config(straight[0], tmp_path), at_point("rollouts/sampling", 20, interrupt_twice), timeout=60)
        == INTERRUPTED
    )
    said = capfd.readouterr().err
    assert "press Ctrl-C again to end at once" in said and "interrupted twice: ending without saving" in said
    assert checkpoints(tmp_path) == []


@pytest.mark.parametrize("point", ["rollouts/sampling", "rollouts/evaluating"])
def test_blocked_rollout_thread_is_found(point, straight, tmp_path, capfd):
    """The main thread waits and lives; nothing finishes in the rollout thread."""
    raw = config(straight[0], tmp_path, rollout__sampler={"stall_timeout": 7},
                 trainer__heartbeat={"every": 0.2, "silent": 60, "stuck": 8})  # fmt: skip
    assert run(raw, at_point(point, 3, lambda: time.sleep(600)), timeout=120) == HUNG
    doing = {"rollouts/sampling": "sampling the batch of step 1", "rollouts/evaluating": "evaluating after step 0"}
    assert re.search(rf"has made no progress for \d+ s while {doing[point]}", capfd.readouterr().err)
    stacks = (tmp_path / "logs" / "stacks_rank_0.txt").read_text()
    assert "test_ending.py" in stacks  # where the rollout thread sleeps


def test_closing_a_blocked_rollout_thread_has_a_time_limit(straight, tmp_path, capfd, caplog, monkeypatch):
    parsed = parse_config(config(straight[0], tmp_path))
    driver = rollout_driver.RolloutDriver(parsed)
    driver.start().result(60)
    monkeypatch.setattr(rollout_driver, "CLOSE_SECONDS", 0.5)
    driver._loop.call_soon_threadsafe(time.sleep, 3)
    driver.close()
    assert "waited 0.5 s for the engines and graders to close" in capfd.readouterr().err
    driver._thread.join()  # it came back, and closed everything
    del driver
    gc.collect()
    assert "Task was destroyed" not in caplog.text
