"""The designs, the runner (with a trainer that only writes its metrics) and the statistics of `megatron-dapo
ablate`."""

import json
import os
import signal
import sys
import threading

import pytest

from megatron_dapo.cli import main
from megatron_dapo.config import load_config
from megatron_dapo.launch import ablation_runs
from megatron_dapo.launch.ablation_designs import DESIGNS, SWITCHES, Effect, effects, variants
from megatron_dapo.launch.ablation_results import band, effect_of, interval, read_curves, value_of, verdict
from megatron_dapo.launch.ablation_runs import Job, run_jobs
from megatron_dapo.observe.metrics_file import EVAL, STEP, Record

CONFIG = """
rollout: {engine: embedded, max_response_tokens: 8}
algorithm: {overlong: {cache_length: 4}}
trainer: {steps: 2}
evaluate: {every: 1, data: {path: held_out.jsonl}}
"""
# Stands in for the trainer: two steps and an evaluation whose score is the number of changes; notes its start.
TRAINER = """
import json, os, sys, pathlib
folder, changes = pathlib.Path(sys.argv[1]), int(sys.argv[2])
(folder / "starts").open("a").write(os.environ.get("OMP_NUM_THREADS", "") + "\\n")
if (folder.parent.parent.parent / "broken").exists() and folder.parent.name == "token_loss":
    sys.exit(3)
def line(step, kind, **metrics):
    return json.dumps({"step": step, "kind": kind, "metrics": metrics}) + "\\n"
step = {"reward/mean": 0.5, "train/entropy": 1.0 / (1 + changes)}
(folder / "metrics.jsonl").write_text(
    line(1, "step", **step) + line(2, "step", **step) + line(2, "eval", **{"eval/avg@4": changes / 10}))
"""


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "task.yaml"
    file.write_text(CONFIG)
    return file


@pytest.fixture
def fake_trainer(monkeypatch):
    def command(job):
        count = 0 if job.combination == "none" else job.combination.count("+") + 1
        return [sys.executable, "-S", "-c", TRAINER, str(job.folder), str(count)]

    monkeypatch.setattr(ablation_runs, "_command", command)


# ---- designs ----


def test_the_grid_has_every_combination_once(config):
    rows = variants(load_config(config), "grid")
    assert len(rows) == len({row.folder for row in rows}) == len({row.settings for row in rows}) == 16
    assert {row.folder for row in rows} >= {"none", "overlong", "clip_higher+dynamic_sampling+token_loss+overlong"}


def test_a_combination_has_the_same_effective_configuration_in_every_design(config):
    """Only then may designs share its folder."""
    found = {}
    for design in DESIGNS:
        for row in variants(load_config(config), design):
            dump = load_config(config, row.settings).model_dump()
            assert found.setdefault(row.folder, dump) == dump, f"{design}: {row.name}"
    assert len(found) == 18  # the grid, and the paper's two steps with the overlong filter alone


def test_leave_one_out_is_all_none_and_all_but_one(config):
    names = {row.folder: row.name for row in variants(load_config(config), "leave-one-out")}
    every = "+".join(SWITCHES)
    assert names == {
        "none": "naive GRPO", every: "full DAPO",
        "dynamic_sampling+token_loss+overlong": "without clip-higher",
        "clip_higher+token_loss+overlong": "without dynamic sampling",
        "clip_higher+dynamic_sampling+overlong": "without token-level loss",
        "clip_higher+dynamic_sampling+token_loss": "without overlong handling",
    }  # fmt: skip


@pytest.mark.parametrize(("design", "labels", "pairs"), [("grid", 4, 8), ("leave-one-out", 4, 1), ("order", 5, 1)])
def test_effects_compare_combinations_that_differ_in_one_change(config, design, labels, pairs):
    loaded = load_config(config)
    changes = {row.folder: row.changes for row in variants(loaded, design)}
    found = effects(design, loaded)
    assert len(found) == labels and all(len(set(effect.pairs)) == pairs for effect in found)
    for effect in found:
        differences = {changes[a] - changes[b] for a, b in effect.pairs}
        assert len(differences) == 1 and all(changes[b] < changes[a] for a, b in effect.pairs)


# ---- statistics ----


def curves(score, reward=(0.0,)):
    return {"held_out": {"x": [5], "y": [score]}, "reward": {"x": list(range(len(reward))), "y": list(reward)}}


def test_interval_is_students_t():
    """1, 2, 3: mean 2, variance 1, t(0.975, 2) = 4.302653: half width 4.302653/√3 = 2.484138."""
    assert interval([1.0, 2.0, 3.0]) == {
        "mean": 2.0, "low": pytest.approx(2 - 2.484138, abs=1e-5), "high": pytest.approx(2 + 2.484138, abs=1e-5),
        "runs": 3,
    }  # fmt: skip
    assert interval([0.5]) == {"mean": 0.5, "low": None, "high": None, "runs": 1}


def test_effect_is_the_mean_of_pairs_within_each_seed():
    """Seed 0: (3 − 1 + 5 − 1)/2 = 3; seed 1: (4 − 1 + 3 − 1)/2 = 2.5; seed 2 is not complete and does not count.
    Mean 2.75, sd √0.125, t(0.975, 1) = 12.7062: half width 12.7062·√(0.125/2) = 3.17655, so 0 is included."""
    runs = {
        "a": {0: curves(3.0), 1: curves(4.0), 2: curves(9.0)},
        "b": {0: curves(1.0), 1: curves(1.0), 2: curves(0.0)},
        "c": {0: curves(5.0), 1: curves(3.0)},
        "d": {0: curves(1.0), 1: curves(1.0), 2: curves(7.0)},
    }
    found = effect_of(Effect("x", (("a", "b"), ("c", "d"))), "held_out", runs)
    assert found["per_seed"] == [3.0, 2.5] and found["mean"] == 2.75
    assert (found["low"], found["high"]) == (pytest.approx(2.75 - 3.17655, 1e-4), pytest.approx(2.75 + 3.17655, 1e-4))
    assert found["verdict"] == "no visible effect"
    one = {name: {0: by_seed[0]} for name, by_seed in runs.items()}
    assert effect_of(Effect("x", (("a", "b"),)), "held_out", one)["verdict"] == "one seed: no interval"
    assert effect_of(Effect("x", (("a", "e"),)), "held_out", runs) is None


@pytest.mark.parametrize(
    ("low", "mean", "high", "said"),
    [(-1, 1, 3, "no visible effect"), (0.1, 1, 2, "higher"), (-3, -2, -1, "lower"), (0, 1, 2, "no visible effect")],
)
def test_verdict_names_the_direction_only_if_the_interval_excludes_zero(low, mean, high, said):
    assert verdict({"low": low, "mean": mean, "high": high}) == said


def test_value_of_a_run():
    """Mean of the last quarter of the steps; reward noise: neighbours differ by 1, 1, 2: √(6/3/2) = 1."""
    eight = {"x": list(range(8)), "y": [0.0] * 6 + [2.0, 4.0]}
    assert value_of("entropy", {"entropy": eight}) == 3.0
    assert value_of("reward_noise", curves(0, reward=(0.0, 1.0, 0.0, 2.0))) == pytest.approx(1.0)
    assert value_of("held_out", {"held_out": {"x": [0, 5], "y": [0.1, 0.7]}}) == 0.7
    assert value_of("entropy", {}) is None


def test_band_has_the_steps_that_all_runs_have():
    found = band([{"x": [1, 2, 3], "y": [0.0, 1.0, 5.0]}, {"x": [2, 1], "y": [3.0, 0.0]}])
    assert (found["x"], found["y"]) == ([1, 2], [0.0, 2.0])
    assert found["low"][0] == found["high"][0] == 0.0 and found["low"][1] < 1.0 < 3.0 < found["high"][1]


def test_curves_of_a_run(tmp_path):
    """Yield and effective batch count groups with a signal, whether they were filtered or trained on without one."""
    records = [
        Record(1, STEP, {"rollout/groups_kept": 16, "reward/zero_advantage_share": 0.25, "train/entropy": 0.5}),
        Record(2, STEP, {"rollout/groups_kept": 16, "rollout/dropped/all-wrong": 48, "train/entropy": float("nan")}),
        Record(2, EVAL, {"eval/set/avg@8": 0.5, "eval/set/avg@8_low": 0.4}),
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(record.to_line() for record in records))
    found = read_curves(tmp_path)
    assert found["effective_batch"] == {"x": [1, 2], "y": [12.0, 16.0]}
    assert found["yield"] == {"x": [1, 2], "y": [0.75, 0.25]}
    assert found["entropy"] == {"x": [1], "y": [0.5]} and found["held_out"] == {"x": [2], "y": [0.5]}


# ---- the command ----


def starts(out):
    return {str(file.parent.relative_to(out / "runs")): file.read_text().split() for file in out.rglob("starts")}


def test_runs_are_shared_resumed_and_not_repeated(config, tmp_path, fake_trainer, capsys):
    out = tmp_path / "out"
    words = ["ablate", str(config), "--out", str(out), "--jobs", "4", "--seeds", "2"]
    out.mkdir()
    (out / "broken").touch()
    assert main([*words, "--grid"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "30 runs trained, 0 finished before, 2 not finished" in said and "token_loss, seed 1: ended with code 3" in said
    )
    table = json.loads((out / "table.json").read_text())
    assert (table["finished"], table["planned"]) == (30, 32)
    assert {row["folder"]: row["seeds"] for row in table["combinations"]}["token_loss"] == []

    (out / "broken").unlink()
    assert main([*words, "--grid"]) == 0
    assert "2 runs trained, 30 finished before, 0 not finished" in " ".join(capsys.readouterr().out.split())
    found = starts(out)
    assert len(found) == 32 and all(
        threads == ["1"] for folder, threads in found.items() if "token_loss/" not in folder or "+" in folder
    )
    assert found["token_loss/seed_0"] == ["1", "1"]
    table = json.loads((out / "table.json").read_text())
    effect = {item["label"]: item["measures"]["held_out"] for item in table["effects"]}["clip-higher"]
    assert effect["mean"] == pytest.approx(0.1) and effect["verdict"] == "higher"
    assert table["runs"]["none"]["0"]["held_out"] == {"x": [2], "y": [0.0]}
    assert "<script>" in (out / "ablation.html").read_text() and (out / "ablation.png").stat().st_size > 1000

    assert main([*words, "--design", "leave-one-out"]) == 0
    assert "0 runs trained, 12 finished before" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--set", "trainer.steps=3"]) == 1, "results of other settings are not mixed in"
    assert "other settings" in capsys.readouterr().out


def test_several_tasks_have_a_folder_each_and_discarded_runs_leave_their_curves(config, tmp_path, fake_trainer, capsys):
    other = tmp_path / "other.yaml"
    other.write_text(CONFIG)
    out = tmp_path / "out"
    words = ["ablate", str(config), str(other), "--out", str(out), "--jobs", "4", "--seeds", "1", "--discard-runs"]
    assert main(words) == 0
    for task in ("task", "other"):
        assert (out / task / "ablation.html").exists() and not list((out / task / "runs").rglob("metrics.jsonl"))
    assert main(words) == 0
    assert "0 runs trained, 12 finished before" in " ".join(capsys.readouterr().out.split())


def test_no_run_is_started_after_the_time_limit(config, tmp_path, fake_trainer, capsys):
    assert main(["ablate", str(config), "--out", str(tmp_path / "out"), "--minutes", "0"]) == 1
    assert "18 not finished" in " ".join(capsys.readouterr().out.split())


def test_clip_higher_must_be_something_to_switch_off(config, tmp_path, capsys):
    assert main(["ablate", str(config), "--set", "algorithm.clip_high=0.2", "--out", str(tmp_path)]) == 2
    assert "clip_high" in capsys.readouterr().err


def test_sigterm_ends_the_running_trainers(config, tmp_path, monkeypatch):
    """The trainer of the second run would never end; the first one's result stays."""
    script = "import sys, time, pathlib; pathlib.Path(sys.argv[1], 'metrics.jsonl').touch(); time.sleep(600)"
    monkeypatch.setattr(ablation_runs, "_command", lambda job: [sys.executable, "-S", "-c", script, str(job.folder)])
    job = Job(str(config), (), tmp_path / "out", "none", 0)
    processes = []
    popen = ablation_runs.subprocess.Popen
    monkeypatch.setattr(
        ablation_runs.subprocess, "Popen", lambda *a, **k: processes.append(popen(*a, **k)) or processes[-1]
    )

    def terminate_when_running():
        while not (job.folder / "metrics.jsonl").exists():
            threading.Event().wait(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate_when_running).start()
    (outcome,) = run_jobs([job], 1, lambda outcome: None)
    assert outcome.problem == "not run" and not job.result_file.exists()
    assert processes[0].poll() == -signal.SIGTERM
