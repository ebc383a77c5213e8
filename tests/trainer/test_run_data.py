"""A run with several prompt files and several benchmarks: its metrics, and exact resume."""

import asyncio
import contextlib
import signal
from collections import Counter
from types import SimpleNamespace

import pytest
from forked import assert_same, at_point, records, run, run_straight, send_signal
from long_lists import some
from tiny_run import raw_config

from megatron_dapo.config import parse_config
from megatron_dapo.data import arithmetic_problems, write_arithmetic
from megatron_dapo.errors import EngineError
from megatron_dapo.rollout.agents.functions import shared
from megatron_dapo.trainer import rollout_driver
from megatron_dapo.trainer.rollout_driver import RolloutDriver
from megatron_dapo.types import StepBatch

STEPS = 5


def config(folder, run_dir):
    raw = raw_config(folder, run_dir, trainer__steps=STEPS, evaluate__every=4)
    for level, name in ((2, "small"), (3, "large")):  # of ten prompts: several epochs in five steps
        if not (folder / f"{name}.jsonl").exists():
            write_arithmetic(folder / f"{name}.jsonl", arithmetic_problems(level, 10, seed=1))
    raw["data"] = {
        "template": "plain",
        "sources": [{"path": str(folder / "small.jsonl"), "weight": 3}, {"path": str(folder / "large.jsonl")}],
    }  # fmt: skip
    problems = str(folder / "problems.jsonl")
    sets = [{"path": problems, "name": "one", "samples": 2}, {"path": problems, "name": "greedy"}]
    raw["evaluate"] |= {"samples": 1, "data": {"template": "plain", "sources": sets}}
    raw["trainer"]["checkpoint"] |= {"best_metric": "eval/greedy/avg@1"}
    return raw


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return run_straight(config, tmp_path_factory)


def test_sources_and_benchmarks_have_metrics_of_their_own(straight):
    _, run_dir = straight
    found = records(run_dir)
    steps = [metrics for _, kind, metrics in found if kind == "step"]
    evaluations = [metrics for _, kind, metrics in found if kind == "eval"]
    assert steps[-1]["data/small/epoch"] >= 2
    assert all(m["data/small/share"] + m["data/large/share"] == 1.0 for m in steps)
    assert all(0 <= m["data/small/accuracy"] <= 1 for m in steps)
    assert [sorted(n for n in m if n.endswith(("avg@1", "avg@2"))) for m in evaluations] == [
        ["eval/greedy/avg@1", "eval/one/avg@2"]
    ] * 3
    for name in ("one", "greedy"):
        assert (run_dir / "evaluations" / f"step_{STEPS}" / name / "results.json").exists()


MOMENTS = {
    "killed while sampling": at_point("rollouts/sampling", 60),
    "killed while training": at_point("loop/before_update", 7),
    "stopped while sampling": at_point("rollouts/sampling", 60, send_signal(signal.SIGTERM, hold=True)),
}


@pytest.mark.parametrize("moment", some(MOMENTS, "stopped while sampling"))
def test_killed_or_stopped_and_resumed_is_the_same_run(moment, straight, tmp_path):
    folder, _ = straight
    assert run(config(folder, tmp_path), MOMENTS[moment]) != 0
    assert run(config(folder, tmp_path)) == 0
    assert_same(tmp_path, straight, STEPS)


class Tools:
    """Counts calls, like what rollout functions share."""

    def __init__(self):
        self.calls = 0

    def take_metrics(self):
        taken, self.calls = self.calls, 0
        return {"tools/calls": float(taken)}


@pytest.mark.parametrize("fails", [False, True])
def test_what_graders_and_tools_do_in_an_evaluation_is_not_the_next_steps(fails, straight, tmp_path, monkeypatch):
    """What training has counted before it is kept."""
    driver = RolloutDriver(parse_config(config(straight[0], tmp_path)))
    counts = Counter({"reward/seconds": 1.0, "reward/ungraded/timeout": 2})
    driver._responses = SimpleNamespace(
        graders=SimpleNamespace(metrics=lambda: dict(counts), last_error=""), add_texts=lambda samples: None
    )
    driver._engine, driver._function, driver._sampler = SimpleNamespace(), print, SimpleNamespace(collect=None)
    warned = []
    driver._observer = SimpleNamespace(warn=warned.append)

    async def evaluate(*settings):
        counts.update({"reward/seconds": 10.0, "reward/ungraded/timeout": 20, "reward/ungraded/by-grader": 3})
        shared("tools", Tools).calls += 30
        if fails:
            raise EngineError("planted")

    async def collect(step):
        return StepBatch(step, [])

    async def evaluated():
        shared("tools", Tools).calls += 4
        for step in (0, 1):  # nothing is collected in between
            with contextlib.suppress(EngineError):
                await driver.evaluate(step, lambda done, total: None)
        shared("tools", Tools).calls += 1
        driver._sampler.collect = collect
        batches = [await driver._collect(step) for step in (0, 1)]
        return [batch.metrics["tools/calls"] for batch in batches]

    monkeypatch.setattr(rollout_driver, "evaluate_sets", evaluate)
    assert asyncio.run(evaluated()) == [5, 0]
    counts["reward/ungraded/by-grader"] += 1
    found = {name: value for name, value in driver.reward_metrics().items() if value}
    assert found == {"reward/seconds": 1.0, "reward/ungraded/timeout": 2, "reward/ungraded/by-grader": 1}
    assert not any(driver.reward_metrics().values())
    counts.update({"reward/errors": 1.0, "reward/graded": 999.0, "reward/ungraded": 1.0})
    driver._responses.graders.last_error = "ValueError at grader.py:3: no number"
    assert driver.reward_metrics()["reward/errors"] == 1 and warned == []
    counts.update({"reward/errors": 3.0, "reward/graded": 61.0, "reward/ungraded": 4.0})
    for _ in range(2):  # a warning says when grading begins to fail
        assert driver.reward_metrics()["reward/errors"] == 3
        counts.update({"reward/errors": 3.0, "reward/graded": 61.0, "reward/ungraded": 4.0})
    assert warned == ["ungraded: 4 of 65 responses; the grader's last error: ValueError at grader.py:3: no number"]
