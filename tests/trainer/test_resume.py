"""Exact resume: killed at any moment and started again, a run gives the numbers of one that was never interrupted."""

import errno
import json
import os
import re
import shutil
import signal
from functools import partial

import pytest
from forked import assert_same, at_point, fail_with, from_point, records, run, run_straight, send_signal
from long_lists import some
from tiny_run import evaluated_config

from megatron_dapo.data import arithmetic_problems, write_arithmetic
from megatron_dapo.trainer.signals import INTERRUPTED, REQUEUE

STEPS = 4
config = partial(evaluated_config, steps=STEPS)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The run without interruption."""
    return run_straight(config, tmp_path_factory)


def test_every_step_is_recorded_once_and_trains(straight):
    _, run_dir = straight
    found = records(run_dir)
    assert [step for step, kind, _ in found if kind == "step"] == list(range(1, STEPS + 1))
    assert [step for step, kind, _ in found if kind == "eval"] == [0, 2, 4]
    losses = [metrics["train/loss"] for _, kind, metrics in found if kind == "step"]
    assert len(set(losses)) == STEPS  # every step changes the weights


# Fault points and how often they are reached until the run is killed: two updates per step, at least 16 samples.
MOMENTS = {
    "sampling": ("rollouts/sampling", 40),
    "grading": ("rollouts/before_grade", 40),
    "first update of a step": ("loop/before_update", 5),
    "second update of a step": ("loop/before_update", 6),
    "old log-probs": ("loop/before_log_probs", 3),
    "sending weights": ("sync/before_bucket", 2),
    "weights sent but not served": ("sync/before_serve", 2),
    "evaluation after the save": ("rollouts/evaluating", 18),
    "saving: nothing is copied": ("checkpoint/before_stage", 2),
    "saving: nothing is written": ("checkpoint/before_write", 2),
    "saving: some files are written": ("checkpoint/write_file", 2 * 7 + 4),  # a checkpoint of this run has seven
    "saving: all files are written": ("checkpoint/after_write", 3),
    "saving: not published": ("checkpoint/before_publish", 3),
    "saving: not pruned": ("checkpoint/before_prune", 3),
}
# The other moments of a save: tests/checkpoints, without a whole run. While sampling, and before an update: the run
# that is killed twice. While weights are sent: test_generating_ahead.py.
MOMENTS = some(MOMENTS, "evaluation after the save", "saving: some files are written")


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_and_resumed_is_the_same_run(moment, straight, tmp_path):
    folder, straight_dir = straight
    raw = config(folder, tmp_path)
    assert run(raw, at_point(*MOMENTS[moment])) == -signal.SIGKILL
    assert len(records(tmp_path)) < len(records(straight_dir))
    assert run(raw) == 0
    assert_same(tmp_path, straight, STEPS)


def test_killed_twice_with_rare_checkpoints(straight, tmp_path):
    """Steps since the last checkpoint are done again, not counted twice."""
    raw = config(straight[0], tmp_path, trainer__checkpoint={"every": 2})
    assert run(raw, at_point("loop/before_update", 6)) == -signal.SIGKILL
    assert run(raw, at_point("rollouts/sampling", 10)) == -signal.SIGKILL
    assert run(raw) == 0
    assert_same(tmp_path, straight, STEPS)


TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
STOPS = {  # where, when, which signal, whether the rollout thread is held until the loop notices it, what is saved
    "training": ("loop/before_update", 5, TERM, False, r"step_2\+1"),
    "training, its terminal closed": ("loop/before_update", 5, HUP, False, r"step_2\+1"),
    "the last update of a step": ("loop/before_update", 6, TERM, False, "step_3"),
    "sampling": ("rollouts/sampling", 40, TERM, True, r"step_\d\+0"),
    "sampling, by Ctrl-C": ("rollouts/sampling", 40, INT, True, r"step_\d\+0"),
    "having sampled the whole batch": ("rollouts/after_collect", 3, TERM, True, r"step_2\+0"),
    "evaluating": ("rollouts/evaluating", 18, TERM, True, "step_2"),
}


# Each signal and each place once.
@pytest.mark.parametrize(
    "moment",
    some(STOPS, "training, its terminal closed", "the last update of a step", "sampling, by Ctrl-C", "evaluating"),
)
def test_stopped_run_saves_first_and_resumes_exactly(moment, straight, tmp_path, capfd):
    point, count, number, hold, name = STOPS[moment]
    folder, _ = straight
    raw = config(folder, tmp_path)
    code = run(raw, at_point(point, count, send_signal(number, hold)))
    assert code == (INTERRUPTED if number == INT else REQUEUE)
    saved = sorted((tmp_path / "checkpoints").glob("step_*"), key=lambda path: path.stat().st_mtime)[-1]
    assert re.fullmatch(name, saved.name)
    said = capfd.readouterr().err
    assert f"stopped ({signal.Signals(number).name}) while " in said
    assert str(saved) in said and "start the same command again to continue" in said
    assert run(raw) == 0
    assert_same(tmp_path, straight, STEPS)


def test_checkpoints_after_a_resume_have_the_score_of_the_recorded_evaluation(straight, tmp_path):
    """The checkpoint was saved before its evaluation, which is not repeated."""
    folder, finished = straight
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    *earlier, last = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    changed, count = re.subn(r'("eval/avg@2": ?)[\d.]+', r"\g<1>0.987", last)
    assert count == 1
    (tmp_path / "metrics.jsonl").write_text("".join([*earlier, changed]))
    assert run(evaluated_config(folder, tmp_path, steps=STEPS + 1)) == 0
    manifest = json.loads((tmp_path / "checkpoints" / f"step_{STEPS + 1}" / "manifest.json").read_text())
    assert manifest["score"] == 0.987


def test_the_score_of_the_model_before_training_is_no_checkpoints(straight, tmp_path):
    """step_1 has not been evaluated: the best one must not be it because the model it started from was good."""
    assert run(evaluated_config(straight[0], tmp_path, steps=2)) == 0
    folder = tmp_path / "checkpoints"
    assert [json.loads((folder / f"step_{n}" / "manifest.json").read_text())["score"] for n in (1, 2)] == [None, None]
    assert json.loads((folder / "best.json").read_text())["checkpoint"] == "step_2"


def test_without_evaluations_the_accuracy_is_the_score(straight, tmp_path):
    """Switched off with `every`, whatever problems there are."""
    raw = evaluated_config(straight[0], tmp_path, steps=1)
    raw["evaluate"]["every"] = 0
    assert run(raw) == 0
    ((_, _, metrics),) = records(tmp_path)
    manifest = json.loads((tmp_path / "checkpoints" / "step_1" / "manifest.json").read_text())
    assert manifest["score"] == metrics["reward/accuracy_all"]


DISK_FULL = fail_with(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def put_file_in_the_way(run_dir):
    """checkpoints becomes a file while the run is on."""

    def action():
        (run_dir / "checkpoints").rename(run_dir / "elsewhere")
        (run_dir / "checkpoints").write_text("in the way")

    return action


def flip_a_bit(run_dir):
    path = run_dir / "checkpoints" / f"step_{STEPS}" / "policy" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


LAST = {  # faults of the last checkpoint, and one of another; the exit code; what is said
    "the disk was full before": (lambda d: at_point("checkpoint/before_write", 2, DISK_FULL), 0, "step_2 was not"),
    "the disk is full once": (lambda d: at_point("checkpoint/before_write", STEPS, DISK_FULL), 0, "was not saved"),
    "the disk stays full": (lambda d: from_point("checkpoint/before_write", STEPS, DISK_FULL), 1, "No space left"),
    "a file is in the way": (lambda d: at_point("loop/before_update", 2 * STEPS, put_file_in_the_way(d)), 1,
                             "a file is in the way"),
    "damaged as soon as it is written": (lambda d: at_point("checkpoint/before_prune", STEPS, lambda: flip_a_bit(d)), 0,
                                         "step_4 saved"),
}  # fmt: skip


@pytest.mark.parametrize("fault", LAST)
def test_finished_means_that_the_last_checkpoint_is_on_disk_and_good(fault, straight, tmp_path, capfd):
    folder, _ = straight
    plant, code, said = LAST[fault]
    assert run(config(folder, tmp_path), plant(tmp_path)) == code
    logs = "".join((tmp_path / "logs" / name).read_text() for name in ("warnings.log", "trainer.log"))
    assert said in capfd.readouterr().err + logs
    if (tmp_path / "elsewhere").exists():
        (tmp_path / "checkpoints").unlink()
        (tmp_path / "elsewhere").rename(tmp_path / "checkpoints")
    if code:
        assert not (tmp_path / "checkpoints" / f"step_{STEPS}").exists()
        assert run(config(folder, tmp_path)) == 0
    assert_same(tmp_path, straight, STEPS)


def test_a_stop_whose_save_fails_is_not_called_saved(straight, tmp_path, capfd):
    def plant():
        at_point("loop/before_update", 5, send_signal(TERM))()
        from_point("checkpoint/before_write", 3, DISK_FULL)()

    assert run(config(straight[0], tmp_path), plant) == 1
    said = capfd.readouterr().err
    assert "It could not be saved: " in said and "step_2; remove the cause, then start the same command again" in said
    assert run(config(straight[0], tmp_path)) == 0
    assert_same(tmp_path, straight, STEPS)


def test_other_data_is_a_wrong_configuration_and_no_reason_to_try_again(straight, tmp_path, capfd):
    folder, run_dir = straight
    shutil.copytree(run_dir, tmp_path / "run", symlinks=True)
    raw = config(folder, tmp_path / "run")
    write_arithmetic(tmp_path / "other.jsonl", arithmetic_problems(2, 48, seed=9))
    raw["data"]["path"] = str(tmp_path / "other.jsonl")
    assert run(raw) == 2
    said = capfd.readouterr().err
    assert "the saved position belongs to a set of" in said and "again" not in said
    assert records(tmp_path / "run") == records(run_dir)
    assert all((tmp_path / "run" / f).read_text() == (run_dir / f).read_text() for f in ("config.yaml", "resume.json"))


def test_a_kl_term_cannot_begin_between_two_updates(straight, tmp_path, capfd):
    raw = config(straight[0], tmp_path)
    assert run(raw, at_point("loop/before_update", 1, send_signal(signal.SIGTERM))) == REQUEUE
    assert run(raw | {"algorithm": {"kl": {"coefficient": 0.1}}}) == 2
    assert "saved in mid-step: set algorithm.kl.coefficient after it" in capfd.readouterr().err
    assert (tmp_path / "checkpoints" / "step_0+1").is_dir()


def test_finished_run_records_nothing_when_started_again(straight):
    folder, run_dir = straight
    before = records(run_dir)
    assert run(config(folder, run_dir)) == 0
    assert records(run_dir) == before


def test_old_checkpoints_are_removed_and_the_best_is_kept(straight):
    _, run_dir = straight
    names = {p.name for p in (run_dir / "checkpoints").iterdir() if p.is_dir() and not p.is_symlink()}
    assert {f"step_{STEPS}", f"step_{STEPS - 1}"} <= names
    assert len(names) <= 3
    assert not any(name.startswith(".") for name in names)
