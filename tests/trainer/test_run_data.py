"""A run with several prompt files and several benchmarks: its metrics, and exact resume."""

import signal

import pytest
from forked import assert_same, at_point, records, run, run_straight, send_signal
from long_lists import some
from tiny_run import raw_config

from megatron_dapo.data import arithmetic_problems, write_arithmetic

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
