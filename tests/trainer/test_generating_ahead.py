"""Runs that generate while they train (rollout.max_staleness above 0): overlap, staleness, the ledger, exact resume.
tests/engines/test_training_runs.py has such a run on a real server."""

import re
import signal
import threading
import time

import pytest
from forked import assert_same, at_point, records, run, send_signal, steps_of
from long_lists import ALL_CASES, some
from tiny_run import make_model, raw_config

from megatron_dapo import fault_points
from megatron_dapo.engines.embedded.engine import EmbeddedEngine
from megatron_dapo.trainer.signals import REQUEUE

STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def ahead(folder, run_dir, staleness, **changes):
    return raw_config(folder, run_dir, trainer__steps=STEPS, rollout__max_staleness=staleness, **changes)


BETWEEN_BATCHES = {"rollout__weights": {"in_flight": False}}


def assert_ledger(found, staleness):
    """Nothing is lost between two steps, every step is full, and no token is too old. The sampler checks the ledger of
    each step itself."""
    assert len(found) == STEPS
    assert all(m["rollout/samples_trained"] == 16 for m in found)
    carried = [m["rollout/samples_carried_over"] for m in found]
    assert [m["rollout/samples_carried_in"] for m in found] == [0, *carried[:-1]]
    assert all(m["rollout/staleness_max"] <= staleness for m in found)


# ---- batches ahead, weights change between them ----


@pytest.fixture(scope="module", params=[1, 3] if ALL_CASES else [3])
def straight(request, folder, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp(f"straight{request.param}")
    assert run(ahead(folder, run_dir, request.param, **BETWEEN_BATCHES)) == 0
    return request.param, run_dir


def test_batch_n_is_generated_by_version_n_minus_k(straight):
    staleness, run_dir = straight
    found = steps_of(run_dir)
    assert [m["rollout/staleness_max"] for m in found] == [min(step, staleness) for step in range(STEPS)]
    assert [m["rollout/staleness_tokens"] for m in found] == [min(step, staleness) for step in range(STEPS)]
    assert_ledger(found, staleness)
    assert found[-1]["train/mismatch_mean"] > 10 * found[0]["train/mismatch_mean"]


KILLS = {
    "sampling": ("rollouts/sampling", 60),
    "first update of a step": ("loop/before_update", 5),
    "sending weights": ("sync/before_bucket", 4),
    "not published": ("checkpoint/before_publish", 3),
}


@pytest.mark.parametrize("moment", some(KILLS, "sending weights"))
def test_killed_and_resumed_is_the_same_run(moment, straight, folder, tmp_path):
    staleness, run_dir = straight
    raw = ahead(folder, tmp_path, staleness, **BETWEEN_BATCHES)
    assert run(raw, at_point(*KILLS[moment])) == -signal.SIGKILL
    assert len(records(tmp_path)) < STEPS
    assert run(raw) == 0
    assert_same(tmp_path, (folder, run_dir), STEPS)


# ---- weights change in flight ----


def slow_engine():
    """Generation is slower than training, so requests are running whenever weights change."""
    step = EmbeddedEngine._step
    EmbeddedEngine._step = lambda self: (time.sleep(0.01), step(self))[1]


LONG = {"rollout__max_response_tokens": 20, "rollout__max_prompt_tokens": 16}


@pytest.mark.parametrize("pause_mode", some(("abort", "retract", "in_place"), "retract"))
def test_weights_change_while_requests_run(pause_mode, folder, tmp_path):
    """Tokens of one batch come from several versions: the batch was neither ended nor held by an update."""
    raw = ahead(folder, tmp_path, 2, rollout__weights={"pause_mode": pause_mode}, **LONG)
    assert run(raw, slow_engine) == 0
    found = steps_of(tmp_path)
    assert_ledger(found, 2)
    # A batch whose tokens are not all of one age, although no group was carried over.
    mixed = [m for m in found if m["rollout/staleness_max"] != m["rollout/staleness_tokens"]]
    assert mixed and not any(m["rollout/samples_carried_in"] for m in found)


def test_generation_goes_on_while_the_trainer_trains(folder, tmp_path):
    """Each of two steps refuses to train on until another sample of a later batch has been finished."""

    def plant():
        finished = threading.Event()

        def wait_for_a_sample():
            finished.clear()
            assert finished.wait(60), "no sample was finished during an update"

        for count in range(1, 200):
            fault_points.on("rollouts/sampling", finished.set, count=count)
        for update in (3, 5):
            fault_points.on("loop/before_update", wait_for_a_sample, count=update)
        slow_engine()

    assert run(ahead(folder, tmp_path, 3, **LONG), plant) == 0
    assert_ledger(steps_of(tmp_path), 3)


def interrupted(point, count, number):
    def plant():
        slow_engine()
        fault_points.on(point, send_signal(number), count=count)

    return plant


@pytest.mark.parametrize(
    "point", some(("loop/before_update", "rollouts/sampling", "sync/before_bucket"), "sync/before_bucket")
)
def test_killed_in_flight_loses_nothing(point, folder, tmp_path):
    """With weights that change in flight, timing decides the samples; the ledger holds over the kill."""
    raw = ahead(folder, tmp_path, 2, **LONG)
    assert run(raw, interrupted(point, 5 if point != "rollouts/sampling" else 50, signal.SIGKILL)) == -signal.SIGKILL
    assert run(raw) == 0
    assert_ledger(steps_of(tmp_path), 2)


def test_stopped_in_flight_saves_what_is_complete_and_what_is_not(folder, tmp_path, capfd):
    raw = ahead(folder, tmp_path, 2, evaluate__every=2, **LONG)
    raw["evaluate"] |= {"data": {"path": str(folder / "problems.jsonl"), "template": "plain"}, "samples": 2}
    assert run(raw, interrupted("loop/before_update", 5, signal.SIGTERM)) == REQUEUE
    assert "step_2+1; start the same command again" in capfd.readouterr().err
    assert run(raw) == 0
    assert_ledger(steps_of(tmp_path), 2)
    assert [step for step, kind, _ in records(tmp_path) if kind == "eval"] == [0, 2, 4, 6]
    served = re.findall(r"weights: .*", (tmp_path / "logs" / "trainer.log").read_text())
    assert len(served) == STEPS  # each version once; weights between two versions are never served


@pytest.mark.parametrize("limit", some((0, 1), 0))
@pytest.mark.parametrize("in_flight", [False, True])
def test_a_lower_limit_generates_older_batches_again(in_flight, limit, folder, tmp_path):
    """The step that was being trained is finished. Nothing after it has tokens that are older than the new limit."""
    changes = LONG | {"rollout__weights": {"in_flight": in_flight}, "rollout__sampler": {"max_carryover_staleness": 0}}
    assert run(ahead(folder, tmp_path, 2, **changes), interrupted("loop/before_update", 7, signal.SIGTERM)) == REQUEUE
    assert run(ahead(folder, tmp_path, limit, **changes)) == 0
    found = steps_of(tmp_path)
    assert len(found) == STEPS and all(m["rollout/samples_trained"] == 16 for m in found)
    assert [m["rollout/staleness_max"] for m in found][:4] == [0, 1, 2, 2] or in_flight
    assert max(m["rollout/staleness_max"] for m in found[4:]) <= limit
    if not in_flight:  # with it no complete batch waits
        (said,) = re.findall(r"rollout\.max_staleness was .*", (tmp_path / "logs" / "warnings.log").read_text())
        assert int(re.fullmatch(rf".* lowered to {limit}; .* generated again: (\d+)", said)[1]) >= 1
