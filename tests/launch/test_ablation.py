"""The designs, the runner (with a trainer that only writes its metrics) and the statistics of `megatron-dapo
ablate`."""

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_dapo.ablation import runs
from megatron_dapo.ablation.command import plan
from megatron_dapo.ablation.designs import SWITCHES, Effect, effects, variants
from megatron_dapo.ablation.results import band, effect_of, interval, read_curves, value_of, verdict
from megatron_dapo.ablation.runs import Job, run_jobs
from megatron_dapo.cli import main
from megatron_dapo.config import load_config
from megatron_dapo.observe.metrics_file import EVAL, STEP, Record

CONFIG = """
rollout: {engine: embedded, max_response_tokens: 8}
algorithm: {overlong: {cache_length: 4}}
trainer: {steps: 2}
evaluate: {every: 1, data: {path: held_out.jsonl}}
"""


def line(step, kind, **metrics):
    return json.dumps({"step": step, "kind": kind, "metrics": metrics}) + "\n"


def train(config_file, settings):
    """Stands in for the trainer: a run is two steps and an evaluation whose score is the number of changes; notes its
    start."""
    folder = Path(settings[-1].partition("=")[2])
    task, name = folder.parent.parent.parent, folder.parent.name
    changes = 0 if name == "none" else name.count("+") + 1
    with (folder / "starts").open("a") as file:
        file.write(os.environ.get("OMP_NUM_THREADS", "") + "\n")
    if (task / "broken").exists() and name == "token_loss":
        return 3
    step = {"reward/mean": 0.5, "train/entropy": 1.0 / (1 + changes)}
    lines = [line(1, "step", **step), line(2, "step", **step), line(2, "eval", **{"eval/avg@4": changes / 10})]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return 0


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "task.yaml"
    file.write_text(CONFIG)
    return file


@pytest.fixture
def fake_trainer(monkeypatch):
    monkeypatch.setattr(runs, "import_trainer", lambda driver: None)
    monkeypatch.setattr(runs, "_train", train)
    return lambda function: monkeypatch.setattr(runs, "_train", function)


# ---- designs ----


def test_the_grid_has_every_combination_once(config):
    rows = variants(load_config(config), "grid")
    assert len(rows) == len({row.folder for row in rows}) == len({row.settings for row in rows}) == 16
    assert {row.folder for row in rows} >= {"none", "overlong", "clip_higher+dynamic_sampling+token_loss+overlong"}


def test_a_combination_has_the_same_effective_configuration_in_every_design(config):
    """Only then may designs share its folder."""
    found = {}
    for design in ("order", "grid", "leave-one-out"):
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


def test_a_configuration_with_a_critic_has_vapos_parts(config):
    """Each removed once, as in its paper, with the published score, and DAPO; every row is a valid configuration."""
    critic = ["algorithm.advantage=gae", "rollout.dynamic_sampling=false", "critic.pretraining.steps=1"]
    loaded = load_config(config, critic)
    dapo, *rows = variants(loaded, "order")
    assert rows == variants(loaded, "leave-one-out") and (dapo.folder, dapo.paper) == ("dapo", 50)
    assert [row.paper for row in rows] == [5, 11, 33, 45, 46, 53, 54, 55, 60]
    assert [rows[0].name, rows[2].name, rows[-1].name] == ["plain PPO", "without decoupled GAE", "full VAPO"]
    dumps = [load_config(config, [*critic, *row.settings]) for row in rows]
    assert len({repr(dump) for dump in dumps}) == len(rows) == 9
    with_dapo = load_config(config, [*critic, *dapo.settings, "algorithm.preset=dapo"])
    assert with_dapo == load_config(config, ["algorithm.preset=dapo", "critic.pretraining.steps=1"])
    whole, no_groups = dumps[-1], dumps[-2]
    for one in (whole, no_groups):  # the same number of samples in a step and in an update
        assert one.rollout.samples_per_prompt * one.trainer.prompts_per_step == 16 * 512
        assert one.rollout.samples_per_prompt * one.trainer.mini_batch_prompts == 16 * 32
    small = [*critic, "rollout.samples_per_prompt=2", "trainer.prompts_per_step=30", "trainer.mini_batch_prompts=15"]
    small_dapo = load_config(config, [*small, *variants(load_config(config, small), "order")[0].settings])
    assert small_dapo.rollout.samples_per_prompt == 8  # DAPO needs groups, and has no fewer samples than VAPO
    assert (small_dapo.trainer.prompts_per_step, small_dapo.trainer.mini_batch_prompts) == (8, 4)
    found = effects("order", loaded)
    assert [effect.pairs for effect in found] == [((rows[-1].folder, row.folder),) for row in [*rows[1:-1], dapo]]


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


def curves(held_out, score=(0.0,)):
    return {"held_out": {"x": [5], "y": [held_out]}, "score": {"x": list(range(len(score))), "y": list(score)}}


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
    assert value_of("reward_noise", curves(0, score=(0.0, 1.0, 0.0, 2.0))) == pytest.approx(1.0)
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
    assert "<script>" in (out / "ablation.html").read_text()

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


def test_no_run_is_started_that_would_not_end_in_time(config, tmp_path, fake_trainer):
    """A run of the first call took 100 s. One minute is too short for another; two minutes are not."""
    jobs = [Job(str(config), (), tmp_path / "out", name, 0) for name in ("none", "token_loss")]
    (first,) = run_jobs(jobs[:1], 1, lambda outcome: None)
    stored = json.loads(first.job.result_file.read_text()) | {"seconds": 100.0}
    first.job.result_file.write_text(json.dumps(stored))
    found = run_jobs(jobs, 1, lambda outcome: None, minutes=1)
    assert [(outcome.skipped, outcome.problem) for outcome in found] == [(True, ""), (False, "not run")]
    assert not jobs[1].folder.exists()
    found = run_jobs(jobs, 1, lambda outcome: None, minutes=2)
    assert [(outcome.skipped, outcome.problem) for outcome in found] == [(True, ""), (False, "")]


def test_a_time_limit_ends_the_trainers_that_still_run(config, tmp_path, fake_trainer):
    """The trainer would never end. It is asked to, as with SIGTERM (below)."""
    fake_trainer(lambda config_file, settings: time.sleep(600))
    job = Job(str(config), (), tmp_path / "out", "none", 0)
    (outcome,) = run_jobs([job], 1, lambda outcome: None, minutes=0.01)
    assert outcome.problem == "not run" and job.folder.exists() and not job.result_file.exists()


def test_leave_one_out_starts_with_the_full_recipe(config, tmp_path):
    """Every effect needs it, and naive GRPO is in none of them."""
    found = plan({tmp_path: str(config)}, {tmp_path: load_config(config)}, (), "leave-one-out", 1)
    assert [found[0].combination, found[-1].combination] == ["+".join(SWITCHES), "none"] and len(found) == 6


def test_where_external_servers_listen_does_not_change_a_result(config, tmp_path):
    digests = {
        Job(str(config), (f"rollout.servers.urls=['http://127.0.0.1:{port}']",), tmp_path, "none", 0).digest()
        for port in (1, 2)
    }
    assert len(digests) == 1


def test_clip_higher_must_be_something_to_switch_off(config, tmp_path, capsys):
    assert main(["ablate", str(config), "--set", "algorithm.clip_high=0.2", "--out", str(tmp_path)]) == 2
    assert "clip_high" in capsys.readouterr().err


def test_a_grid_starts_with_leave_one_out_and_the_tasks_alternate(config, tmp_path):
    """Stopped early, it has the same seeds of the same combinations for every task."""
    tasks = {tmp_path / name: str(config) for name in ("a", "b")}
    configs = {task: load_config(file) for task, file in tasks.items()}
    found = plan(tasks, configs, (), "grid", 2)
    assert len(found) == len(set(found)) == 64 and [job.task.name for job in found] == ["a", "b"] * 32
    first = {row.folder for row in variants(configs[tmp_path / "a"], "leave-one-out")}
    assert [job.combination in first for job in found] == [True] * 24 + [False] * 40
    assert [job.seed for job in found] == [0] * 12 + [1] * 12 + [0] * 20 + [1] * 20
    assert [job.seed for job in plan(tasks, configs, (), "order", 2)] == [0] * 12 + [1] * 12


def test_each_run_is_a_fork_that_writes_its_own_log(fake_trainer, config, tmp_path):
    """What a run changes in memory or prints does not reach the next one, nor this process. One raises, one is
    killed."""
    seen = []

    def train(config_file, settings):
        seen.append(settings[-2])
        print(seen, flush=True)
        os.write(2, b"to stderr")
        if settings[-2].endswith("1"):
            raise RuntimeError("second run")
        if settings[-2].endswith("2"):
            os.kill(os.getpid(), signal.SIGKILL)
        return 7

    fake_trainer(train)
    jobs = [Job(str(config), (), tmp_path / "out", "none", seed) for seed in range(3)]
    problems = [outcome.problem for outcome in run_jobs(jobs, 1, lambda outcome: None)]
    assert [re.search(r"ended with code (-?\d+)", problem)[1] for problem in problems] == ["7", "1", "-9"]
    assert jobs[0].log.read_text() == "['trainer.seed=0']\nto stderr"
    assert jobs[1].log.read_text().startswith("['trainer.seed=1']\nto stderr")
    assert "RuntimeError: second run" in jobs[1].log.read_text()
    assert seen == []


def test_sigterm_inside_a_destructor_is_not_lost(fake_trainer, config, tmp_path):
    class Signal:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)

    fake_trainer(lambda config_file, settings: 1 if "trainer.seed=0" in settings else time.sleep(600))
    jobs = [Job(str(config), (), tmp_path / "out", "none", seed) for seed in (0, 1)]
    outcomes = run_jobs(jobs, 2, lambda outcome: str(Signal()))
    assert [outcome.problem.split(":")[0] for outcome in outcomes] == ["ended with code 1", "not run"]


def test_sigterm_ends_the_running_trainers(fake_trainer, config, tmp_path):
    """The trainer would never end. While it saves, a second signal comes: `timeout` and Slurm signal whole groups."""

    def save(number, frame):
        (tmp_path / "saving").touch()
        while not (tmp_path / "second").exists():
            time.sleep(0.01)
        sys.exit(143)

    def train(config_file, settings):
        signal.signal(signal.SIGTERM, save)
        print(os.getpid(), flush=True)
        time.sleep(600)

    fake_trainer(train)
    job = Job(str(config), (), tmp_path / "out", "none", 0)

    def terminate_twice():
        while not (job.log.exists() and job.log.read_text().endswith("\n")):
            threading.Event().wait(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        while not (tmp_path / "saving").exists():
            threading.Event().wait(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        (tmp_path / "second").touch()

    threading.Thread(target=terminate_twice).start()
    (outcome,) = run_jobs([job], 1, lambda outcome: None)
    assert outcome.problem == "not run" and not job.result_file.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(job.log.read_text().split()[0]), 0)
