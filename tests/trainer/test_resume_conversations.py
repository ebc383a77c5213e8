"""Exact resume in mid-conversation: killed or stopped between two turns of a rollout function, a run gives the numbers
of one that was never interrupted."""

import json
import signal
from functools import partial

import pytest
from forked import assert_same, at_point, records, run, run_straight, send_signal, steps_of
from tiny_run import evaluated_config

from megatron_dapo.trainer.signals import REQUEUE

STEPS = 2
AMONG_FIRST_TURNS = 6 * 2 * 2 + 8  # turns until then: of the evaluation before the first step, and some of its batch
config = partial(
    evaluated_config, steps=STEPS, rollout__max_response_tokens=16, rollout__generate="python:tiny_rollout.two_turns"
)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return run_straight(config, tmp_path_factory)


def samples_of(state):
    """Every sample in a state, wherever it is."""
    if isinstance(state, dict):
        return [state] if "engine_logprobs" in state else [s for value in state.values() for s in samples_of(value)]
    return [s for value in state for s in samples_of(value)] if isinstance(state, list) else []


def test_a_run_with_a_rollout_function_trains_on_generated_tokens(straight):
    _, run_dir = straight
    for metrics in steps_of(run_dir):
        assert metrics["rollout/turns_mean"] == 2
        assert 0.1 < metrics["rollout/appended_share"] < 0.5
        assert metrics["train/mismatch_max"] < 1e-4  # of appended tokens it would be large
        assert metrics["rollout/length_max"] <= 10
    assert [kind for _, kind, _ in records(run_dir)].count("eval") == 2
    _, *lines = (run_dir / "samples" / "step_000001.jsonl").read_text().splitlines()
    shown = [json.loads(line) for line in lines]
    assert all(text.startswith("[assistant] ") and "\n[tool] <" in text for text in (item["text"] for item in shown))
    (question, *_) = sorted((run_dir / "evaluations").rglob("*.txt"))
    assert "[tool] <" in question.read_text()


def test_killed_in_mid_conversation_and_resumed_is_the_same_run(straight, tmp_path):
    folder, straight_dir = straight
    raw = config(folder, tmp_path)
    assert run(raw, at_point("rollouts/after_turn", 70)) == -signal.SIGKILL
    assert len(records(tmp_path)) < len(records(straight_dir))
    assert run(raw) == 0
    assert_same(tmp_path, straight, STEPS)


@pytest.mark.parametrize("function", ["two_turns", "two_turns_again"])
def test_stopped_in_mid_conversation_saves_it_and_resumes_exactly(function, straight, tmp_path):
    """With resume: turn the saved turns are used; with restart they are generated again, and counted."""
    folder, _ = straight
    raw = config(folder, tmp_path, rollout__generate=f"python:tiny_rollout.{function}")
    stop = send_signal(signal.SIGTERM, hold=True)
    assert run(raw, at_point("rollouts/after_turn", AMONG_FIRST_TURNS, stop)) == REQUEUE
    state = json.loads((tmp_path / "checkpoints" / "step_0+0" / "trainer.json").read_text())
    unfinished = [sample for sample in samples_of(state) if sample["grade"] is None and sample["turns"]]
    assert unfinished and not any(len(sample["turns"]) > 2 for sample in unfinished)
    assert run(raw) == 0
    if function == "two_turns":
        assert_same(tmp_path, straight, STEPS)
    else:
        assert sum(metrics.get("rollout/restarted", 0) for metrics in steps_of(tmp_path)) > 0
        losses = [[metrics["train/loss"] for metrics in steps_of(run_dir)] for run_dir in (tmp_path, straight[1])]
        assert losses[0] == losses[1]
