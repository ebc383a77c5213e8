"""The observer's promises: exact files after a resume, times that add up, and no failure of it ends a run."""

import io
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from synthetic_runs import make_groups, step_metrics

from megatron_dapo.config.trainer import ObserveConfig
from megatron_dapo.observe.console import PlainConsole, evaluation_text
from megatron_dapo.observe.metrics_file import STEP, is_wall_clock, read_records
from megatron_dapo.observe.observer import NullObserver, Observer
from megatron_dapo.observe.rich_console import RichConsole
from megatron_dapo.types import SamplerProgress

QUIET = ObserveConfig(console="off", samples_every=2, report=False)


def observer(folder: Path, config: ObserveConfig = QUIET) -> Observer:
    return Observer(config, folder, total_steps=8, settings={})


def numbers(step: int) -> dict[str, float]:
    return {name: value for name, value in step_metrics(step, 8, seed=0).items() if not name.startswith("time/")}


def train(watched: Observer, steps: range) -> None:
    for step in steps:
        with watched.phase("rollout"):
            pass
        if step % 3 == 0:
            watched.evaluation(step, {"eval/avg@8": step / 10, "eval/seconds": time.monotonic()})
        watched.step(step, numbers(step), make_groups(step))


def contents(folder: Path) -> tuple[list[tuple[int, str, dict[str, float]]], dict[str, bytes]]:
    """All records without wall-clock metrics, and all transcripts."""
    records = [
        (r.step, r.kind, {name: value for name, value in r.metrics.items() if not is_wall_clock(name)})
        for r in read_records(folder / "metrics.jsonl")
    ]
    return records, {path.name: path.read_bytes() for path in sorted((folder / "samples").iterdir())}


@pytest.mark.parametrize("dies_after", [4, 5, 6, 7])
def test_a_resumed_run_leaves_the_same_files_as_an_uninterrupted_one(tmp_path, dies_after):
    straight = observer(tmp_path / "straight")
    train(straight, range(1, 9))
    first = observer(tmp_path / "resumed")
    train(first, range(1, 5))
    state, at_checkpoint = first.state(), contents(tmp_path / "resumed")
    train(first, range(5, dies_after + 1))  # then the process dies, without a close
    second = observer(tmp_path / "resumed")
    second.restore(state)
    second.rewind(4)
    assert contents(tmp_path / "resumed") == at_checkpoint
    train(second, range(5, 9))
    assert contents(tmp_path / "resumed") == contents(tmp_path / "straight")
    assert [step for step, kind, _ in contents(tmp_path / "straight")[0] if kind == STEP] == list(range(1, 9))


def test_a_run_that_died_before_its_first_checkpoint_starts_again(tmp_path):
    straight = observer(tmp_path / "straight")
    straight.evaluation(0, {"eval/avg@8": 0.1})
    train(straight, range(1, 5))
    died = observer(tmp_path / "again")
    died.evaluation(0, {"eval/avg@8": 0.1})
    train(died, range(1, 4))
    again = observer(tmp_path / "again")  # no rewind: there is no checkpoint
    again.evaluation(0, {"eval/avg@8": 0.1})
    train(again, range(1, 5))
    assert contents(tmp_path / "again") == contents(tmp_path / "straight")


def test_an_evaluation_that_is_repeated_after_a_resume_is_recorded_once(tmp_path):
    watched = observer(tmp_path)
    watched.step(1, {"a": 1})
    watched.evaluation(1, {"eval/avg@8": 0.5})
    again = observer(tmp_path)
    assert again.evaluation_of(1) == {}, "without a rewind the run starts again"
    again.rewind(1)
    assert (again.evaluation_of(1), again.evaluation_of(0)) == ({"eval/avg@8": 0.5}, {})
    again.evaluation(1, {"eval/avg@8": 0.5})
    again.evaluation(1, {"eval/other/avg@8": 0.2})
    assert [r.metrics for r in read_records(tmp_path / "metrics.jsonl")][1:] == [
        {"eval/avg@8": 0.5}, {"eval/other/avg@8": 0.2},
    ]  # fmt: skip


def test_phases_add_up_to_the_step_and_nested_seconds_count_once(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("megatron_dapo.observe.observer.time.monotonic", lambda: clock[0])
    watched = observer(tmp_path)
    clock[0] += 50  # before the first phase: part of no step
    with watched.phase("update"):
        clock[0] += 3
        with watched.phase("log_probs"):
            clock[0] += 2
        clock[0] += 1
    clock[0] += 0.5
    with pytest.raises(RuntimeError), watched.phase("sync"):
        clock[0] += 4
        raise RuntimeError
    watched.step(1, {})
    with watched.phase("update"):
        clock[0] += 2
        watched.step(2, {})  # within a phase
        clock[0] += 5
    watched.step(3, {})
    times = [r.metrics for r in read_records(tmp_path / "metrics.jsonl")]
    assert times[0] == {"time/update": 4, "time/log_probs": 2, "time/sync": 4, "time/other": 0.5, "time/step": 10.5}
    assert times[1] == {"time/update": 2, "time/other": 0, "time/step": 2}
    assert times[2] == {"time/update": 5, "time/other": 0, "time/step": 5}


@pytest.mark.parametrize(
    ("name", "wall"),
    [("time/update", True), ("rollout/seconds", True), ("train/update_seconds", True), ("rollout/dropped/stale", False),
     ("rollout/tokens_per_second", True), ("train/loss", False), ("rollout/groups_kept", False)],
)  # fmt: skip
def test_wall_clock_metrics_are_recognised_by_name(name, wall):
    assert is_wall_clock(name) is wall


def test_plain_console_prints_steps_evaluations_and_warnings(tmp_path, capsys):
    watched = observer(tmp_path, ObserveConfig(console="plain", report=False))
    metrics = {
        "reward/mean": 0.4123, "reward/accuracy": 0.5, "reward/accuracy_all": 0.375,
        "train/entropy": 0.25, "rollout/length_trained": 812.4,
        "rollout/groups_kept": 8, "rollout/dropped/all-wrong": 7, "rollout/dropped/all-correct": 1,
        "rollout/dropped/unfinished": 30, "rollout/tokens_per_second": 12_345.0,
    }  # fmt: skip
    watched.step(2, metrics)
    watched.evaluation(2, {"eval/avg@8": 0.625, "eval/avg@8_low": 0.5, "eval/avg@8_high": 0.7})
    watched.warn("look [here]")
    watched.report("a [gap]")
    watched.close("finished")
    step, evaluation, warning, line, end = capsys.readouterr().out.splitlines()
    assert step.startswith(
        "step 2/8  reward (trained) 0.412  accuracy (all) 37.5%  entropy 0.250  length (trained) 812.4  yield 50.0%"
    )
    assert "rollout tok/s 12.3k" in step
    assert evaluation == "step 2 evaluation  avg@8 62.5%"
    assert warning == "WARNING: look [here]" and end == "run finished"
    assert line.endswith("] a [gap]") and "a [gap]" in (tmp_path / "logs" / "trainer.log").read_text()


def test_only_scores_and_rates_are_percentages():
    metrics = {"eval/moderate/avg@8": 0.5, "eval/moderate/mean_tokens": 412.5, "eval/moderate/truncation_rate": 0.125}
    assert evaluation_text(metrics) == "moderate/avg@8 50.0%  moderate/mean_tokens 412  moderate/truncation_rate 12.5%"


def test_off_is_silent_and_auto_is_plain_without_a_terminal(tmp_path, capsys):
    observer(tmp_path / "off").step(1, {"reward/mean": 1.0})
    assert capsys.readouterr().out == ""
    observer(tmp_path / "auto", ObserveConfig(report=False)).step(1, {"reward/mean": 1.0})
    assert capsys.readouterr().out == "step 1/8  reward (trained) 1.00  time 0.0s\n"


@pytest.fixture
def clock(monkeypatch):
    """The time that consoles see, in seconds; no thread prints by itself."""
    now = [0.0]
    monkeypatch.setattr("megatron_dapo.observe.console.time.monotonic", lambda: now[0])
    monkeypatch.setattr(PlainConsole, "_watch", lambda self: None)
    return now


def test_a_long_rollout_is_reported_once_a_minute(clock):
    stream = io.StringIO()
    console = PlainConsole(stream)
    for _ in range(100):
        clock[0] += 2
        console.sampling(SamplerProgress(1, 64, 12, {"all-wrong": 3, "surplus": 0}, 5, 80, 100, 9000, 3.0))
    state = "12/64 groups, 3 all-wrong, 80 running, 3000 tok/s"
    assert stream.getvalue().splitlines() == [
        f"[60.0s] rollout for 58.0s: {state}", f"[2min] rollout for 2min: {state}", f"[3min] rollout for 3min: {state}",
    ]  # fmt: skip


def test_plain_console_says_what_a_starting_run_waits_for(clock):
    stream = io.StringIO()
    console = PlainConsole(stream)
    console.phase_started("start")
    console.note("start", "starting 2 SGLang servers")
    for _ in range(30):
        clock[0] += 5
        console.print_long_phase()  # the console's thread does this: the phase itself reports nothing
    console.note("start", "loading weights")
    console.phase_ended("start")
    console.phase_started("evaluate")
    clock[0] += 70
    console.progress("evaluate", 300, 1319, "")
    console.phase_ended("evaluate")
    console.step(1, 8, {}, None)
    console.phase_started("rollout")  # after the first step only long phases are printed
    console.note("rollout", "batch 2")
    assert stream.getvalue().splitlines() == [
        "[0.0s] start",
        "[0.0s] start: starting 2 SGLang servers",
        "[60.0s] start for 60.0s: starting 2 SGLang servers",
        "[2min] start for 2min: starting 2 SGLang servers",
        "[2min] start: loading weights",
        "[2min] evaluate",
        "[4min] evaluate for 70.0s: 300/1319",
        "step 1/8",
    ]


def test_the_plain_console_prints_a_long_phase_from_its_own_thread(monkeypatch):
    printed = threading.Event()
    monkeypatch.setattr(PlainConsole, "CHECK_EVERY", 0.001)
    monkeypatch.setattr(PlainConsole, "HEARTBEAT", 0.0)

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            if "update for" in text:
                printed.set()
            return super().write(text)

    console = PlainConsole(Stream())
    console.phase_started("update")
    assert printed.wait(timeout=60), "nothing was printed while the main thread was busy"
    console.close("finished")


def test_phases_pass_notes_to_the_console(tmp_path, capsys):
    watched = observer(tmp_path, ObserveConfig(console="plain", report=False))
    with watched.phase("start") as phase:
        phase.note("loading weights")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("] ")[1] for line in lines] == ["start", "start: loading weights"]


def test_the_rich_console_shows_phases_progress_and_steps():
    stream = io.StringIO()
    console = RichConsole("a [run]", Console(file=stream, force_terminal=True, width=160, color_system=None))
    console.phase_started("rollout")
    console.sampling(SamplerProgress(3, 64, 12, {"all-wrong": 5}, 5, 80, 100, 9000, 3.0))
    console.phase_started("start")
    console.note("start", "loading [weights]")
    console._live.refresh()
    console.phase_ended("start")
    console.phase_started("update")
    console.progress("update", 3, 16, "updates [of 16]")
    console._live.refresh()
    console.step(3, 20, {"reward/mean": 0.5, "train/entropy": 0.25}, remaining=7200)
    console.phase_ended("update")
    console.warn("entropy [fell]")
    console.line("a [gap]")
    console.close("finished")
    shown = stream.getvalue()
    for text in (
        "a [run]", "loading [weights]", "12/64 groups, 5 all-wrong, 80 running, 3000 tok/s",
        "3/16 updates [of 16]",
        "reward (trained)  entropy\n",
        "       3             0.500    0.250\n", "ETA 2h00", "entropy [fell]", "a [gap]", "finished",
    ):  # fmt: skip
        assert text in shown, text


class BrokenTerminal(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_closed_terminal_does_not_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", BrokenTerminal())
    for kind in ("plain", "rich"):
        watched = observer(tmp_path / kind, ObserveConfig(console=kind, report=False))
        with watched.phase("update") as phase:
            phase.update(1, 2)
        watched.step(1, {"reward/mean": 0.5})
        watched.warn("x")
        watched.close("finished")
        assert len(read_records(tmp_path / kind / "metrics.jsonl")) == 1


def test_the_null_observer_has_every_method_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    silent = NullObserver()
    public = {name for name in vars(Observer) if not name.startswith("_")}
    assert public <= set(vars(NullObserver)), "each public method is overridden"
    with silent.phase("rollout") as phase:
        phase.update(1, 2)
    silent.sampling(SamplerProgress(1, 1, 0, {}, 0, 0, 0, 0, 0.0))
    silent.step(1, {"a": 1.0}, make_groups(1))
    silent.evaluation(1, {})
    assert silent.evaluation_of(1) == {}
    silent.warn("x")
    silent.log("x")
    silent.rewind(0)
    silent.restore(silent.state())
    silent.close("finished")
    assert list(tmp_path.iterdir()) == []


def test_a_warning_is_printed_once_logged_and_not_repeated_after_a_resume(tmp_path, capsys):
    config = ObserveConfig(console="plain", report=False)
    watched = observer(tmp_path, config)
    for step, entropy in enumerate([1, 1, 1, 0.1, 0.1, 0.1, 0.1], start=1):
        watched.step(step, {"train/entropy": entropy})
    assert capsys.readouterr().out.count("docs/diagnosis.md#entropy-collapse") == 1
    log = (tmp_path / "logs" / "warnings.log").read_text()
    assert log.count("step 6: entropy is 0.1, 10% of what it was at the start") == 1
    resumed = observer(tmp_path, config)
    resumed.rewind(7)
    for step in range(8, 12):
        resumed.step(step, {"train/entropy": 0.1})
    assert "WARNING" not in capsys.readouterr().out
    resumed = observer(tmp_path, config)
    resumed.rewind(4)
    for step in (5, 6):
        resumed.step(step, {"train/entropy": 0.1})
    assert capsys.readouterr().out.count("#entropy-collapse") == 1, "the start values are kept across a resume"
    silent = observer(tmp_path / "off", config.model_copy(update={"warnings": False}))
    for step, entropy in enumerate([1, 1, 1, 0.1, 0.1, 0.1, 0.1], start=1):
        silent.step(step, {"train/entropy": entropy})
    assert "WARNING" not in capsys.readouterr().out


def test_close_writes_the_report_and_a_failing_report_is_a_warning(tmp_path, monkeypatch, capsys):
    config = ObserveConfig(console="plain")
    good = observer(tmp_path / "good", config)
    good.step(1, {"reward/mean": 0.5})
    good.close("finished")
    assert "<svg" not in (tmp_path / "good" / "report.html").read_text()[:200]
    assert (tmp_path / "good" / "report.html").stat().st_size > 10_000

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("no matplotlib")

    monkeypatch.setattr("megatron_dapo.observe.report.write_report", fail)
    bad = observer(tmp_path / "bad", config)
    bad.step(1, {"reward/mean": 0.5})
    bad.close("finished")
    assert "WARNING: no report: RuntimeError: no matplotlib" in capsys.readouterr().out
