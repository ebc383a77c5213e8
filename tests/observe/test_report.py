"""The report: self-contained, safe with any response, and possible for any run that has a step."""

import io
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console as Terminal
from synthetic_runs import HOSTILE, make_arrays, make_groups, make_run

from megatron_dapo.cli import main
from megatron_dapo.observe import transcripts
from megatron_dapo.observe.console import PlainConsole
from megatron_dapo.observe.figures import MOST_POINTS, figures_of, thin
from megatron_dapo.observe.metrics_file import STEP, MetricsFile, Record, read_records
from megatron_dapo.observe.report import (
    SAMPLES_PER_STEP,
    STEPS_WITH_SAMPLES,
    TOKENS_SHOWN,
    embed_json,
    payload,
    write_report,
)
from megatron_dapo.observe.rich_console import RichConsole
from megatron_dapo.observe.runs import ReportError, distinct_names, load_runs
from megatron_dapo.types import as_logprobs, as_tokens


def run_of(folder, *steps: dict[str, float]):
    file = MetricsFile(folder / "metrics.jsonl")
    for number, metrics in enumerate(steps, start=1):
        file.append(Record(number, STEP, metrics))
    file.close()
    return folder


def data_of(page: str):
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(text)


def figure(runs, wanted: str):
    return next(f for figures in figures_of(runs).values() for f in figures if f.id == wanted)


def test_the_page_needs_nothing_but_itself(tmp_path):
    run = make_run(tmp_path / "run", steps=6)
    page = write_report([run], tmp_path / "report.html")
    text = page.read_text()
    code = re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.S)
    assert set(re.findall(r"https?://[^\s\"'`)]+", code)) == {"http://www.w3.org/2000/svg"}, "a name, not an address"
    assert re.findall(r'\b(?:src|href)="([^"]*)"', code) == ["data:,"]
    assert "default-src 'none'" in code and "@@" not in code
    assert not re.search(r"\b(?:fetch|XMLHttpRequest|WebSocket|import|innerHTML|eval)\b", code)


def test_the_report_has_every_required_figure(tmp_path):
    runs = load_runs([make_run(tmp_path / "run", steps=30)])
    found = {f.id: [s.label for s in f.runs[0]] for figures in figures_of(runs).values() for f in figures}
    expected = {
        "reward": ["reward"], "accuracy": ["all sampled", "trained"], "entropy": ["entropy"],
        "length": ["trained", "dropped"],
        "clip": ["high", "low", "dual"], "mismatch_kl": ["mismatch_kl"], "grad_norm": ["grad_norm"],
        "groups": ["kept", "failed", "all-correct", "all-wrong", "unfinished"],
        "phases": ["rollout", "advantages", "log_probs", "update", "sync", "checkpoint", "other"],
        "evaluation": ["held_out/avg@8", "held_out/pass@8"], "speed": ["rollout", "update"],
    }  # fmt: skip
    for name, labels in expected.items():
        assert found[name] == labels
    evaluation = figure(runs, "evaluation").runs[0][0]
    assert evaluation.x == [5, 10, 15, 20, 25, 30]
    assert evaluation.low and evaluation.high and all(
        low < y < high for low, y, high in zip(evaluation.low, evaluation.y, evaluation.high, strict=True)
    )  # fmt: skip


def test_every_metric_is_shown_somewhere_once(tmp_path):
    run = run_of(tmp_path / "r", {"reward/mean": 1.0, "my/own": 2.0, "time/step": 3.0, "time/update": 3.0})
    sections = figures_of(load_runs([run]))
    assert [f.title for f in sections["All other metrics"]] == ["my/own"]
    assert [s.label for s in figure(load_runs([run]), "phases").runs[0]] == ["update"]


def test_a_metric_is_a_percentage_by_the_end_of_its_name(tmp_path):
    run = run_of(tmp_path / "r", {"data/sharegpt/epoch": 1.5, "data/sharegpt/share": 0.5, "a/truncation_rate": 0.5})
    others = figures_of(load_runs([run]))["All other metrics"]
    assert {f.title: f.format for f in others} == {
        "data/sharegpt/epoch": "number", "data/sharegpt/share": "percent", "a/truncation_rate": "percent",
    }  # fmt: skip


def test_hostile_responses_are_shown_unchanged_as_text(tmp_path):
    run = make_run(tmp_path / "<script>alert(1)</script>", steps=1, hostile=True)
    page = write_report([run], tmp_path / "report.html")
    text = page.read_text()
    assert text.count("</script>") == 2 and "<img" not in text and "<!--" not in text and "\x00" not in text
    assert "<title>script&gt;" in text or "<title>&lt;script&gt;" in text
    texts = {item["text"] for item in data_of(text)["runs"][0]["samples"]}
    assert texts == {HOSTILE}


def test_embedded_json_cannot_end_its_element():
    text = embed_json({"a": "</script><!--&\u2028\ud800"})
    assert not set("<>&\u2028") & set(text) and text.isascii()
    assert json.loads(text) == {"a": "</script><!--&\u2028\ud800"}


def test_a_running_run_with_an_incomplete_last_line_can_be_reported(tmp_path):
    run = make_run(tmp_path / "run", steps=3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "kind": "st')
    page = write_report([run], tmp_path / "report.html")
    assert data_of(page.read_text())["runs"][0]["last_step"] == 3


def test_a_damaged_line_is_skipped_by_the_command_and_named_in_one_line(tmp_path, capsys, caplog):
    run = make_run(tmp_path / "run", steps=3)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join([lines[0], b"\xff\x00\n", *lines[1:]]))
    assert main(["report", str(run)]) == 0
    assert data_of((run / "report.html").read_text())["runs"][0]["steps"] == 3
    assert len(caplog.messages) == 1 and "metrics.jsonl: skipped line 2: not a record" in caplog.messages[0]


def test_nan_is_a_gap_and_a_metric_that_is_always_nan_is_left_out(tmp_path):
    run = run_of(
        tmp_path / "r",
        {"train/entropy": 0.5, "train/loss": math.nan, "time/update": math.nan, "time/rollout": 2.0},
        {"train/entropy": math.inf, "train/loss": math.nan, "time/update": 1.0, "time/rollout": 2.0},
        {"train/entropy": 0.3},
    )
    runs = load_runs([run])
    assert figure(runs, "entropy").runs[0][0].y == [0.5, None, 0.3]
    assert "loss" not in {f.id for figures in figures_of(runs).values() for f in figures}
    assert {s.label: s.y for s in figure(runs, "phases").runs[0]} == {"rollout": [2, 2, 0], "update": [0, 1, 0]}
    summary = {item["label"]: item for item in payload(runs)["runs"][0]["summary"]}
    assert (summary["Entropy"]["start"], summary["Entropy"]["end"]) == (0.5, 0.3)
    assert [f["rule"] for f in payload(runs)["runs"][0]["findings"]] == ["not-finite"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "no such directory"),
        (lambda folder: folder.mkdir(), "not a run directory, it has no metrics.jsonl"),
        (lambda folder: run_of(folder), "holds no finished step yet"),
    ],
)
def test_a_directory_without_a_run_is_a_clear_error(tmp_path, make, message, capsys):
    make(tmp_path / "run")
    with pytest.raises(ReportError, match=message):
        write_report([tmp_path / "run"], tmp_path / "report.html")
    assert main(["report", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "report.html").exists()


def test_the_output_may_not_be_a_directory(tmp_path):
    with pytest.raises(ReportError, match=r"is a directory: name the HTML file"):
        write_report([make_run(tmp_path / "run", steps=1)], tmp_path)


def test_the_command_writes_beside_the_run_or_where_it_is_told(tmp_path, capsys):
    one, two = make_run(tmp_path / "one", steps=1), make_run(tmp_path / "two", steps=70, seed=1)
    assert main(["report", str(one)]) == 0
    assert main(["report", str(one), str(two), "--output", str(tmp_path / "out" / "both.html")]) == 0
    written = [one / "report.html", tmp_path / "out" / "both.html"]
    assert capsys.readouterr().out.split() == [str(path) for path in written]
    assert [run["name"] for run in data_of(written[1].read_text())["runs"]] == ["one", "two"]


def test_comparison_shows_what_differs_and_only_that(tmp_path):
    runs = [make_run(tmp_path / "a", 2), make_run(tmp_path / "b", 3, seed=1, clip_higher=False)]
    found = {row["key"]: row["values"] for row in payload(load_runs(runs))["differences"]}
    assert found == {"algorithm.clip_high": ["0.28", "0.2"], "trainer.steps": ["2", "3"], "trainer.seed": ["0", "1"]}
    (runs[1] / "config.yaml").unlink()
    found = {row["key"]: row["values"] for row in payload(load_runs(runs))["differences"]}
    assert found["algorithm.objective"] == ["dapo", "—"]


def test_run_names_have_as_many_parents_as_needed(tmp_path):
    paths = [tmp_path / "seed1" / "run", tmp_path / "seed2" / "run"]
    assert distinct_names(paths) == ["seed1/run", "seed2/run"]
    assert distinct_names([paths[0], paths[0]]) == ["run", "run (2)"]
    assert distinct_names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]


def test_long_runs_keep_their_spikes():
    values = [0.0] * 50_000
    values[12_345], values[33_333] = 9.0, -9.0
    kept = thin(values)
    assert {0, 12_345, 33_333, 49_999} <= set(kept) and len(kept) <= MOST_POINTS + 2
    assert kept == sorted(kept) and thin([1.0, 2.0]) == [0, 1]


def test_samples_of_a_long_run_are_spread_and_bounded(tmp_path, monkeypatch):
    run = run_of(tmp_path / "r", {"reward/mean": 1.0})
    groups = [group for n in range(4) for group in make_groups(n)]  # 72 samples
    for step in range(10, 1010, 10):
        transcripts.write(run / "samples", transcripts.choose(step, groups, 0, 0, make_arrays(groups)))
    read, read_arrays = [], transcripts.read_arrays
    monkeypatch.setattr(transcripts, "read_arrays", lambda *step: read.append(step) or read_arrays(*step))
    (found,) = payload(load_runs([run]))["runs"]
    assert len(read) == len(set(read)) > 1, "the file of a step is read once"
    steps = sorted({item["step"] for item in found["samples"]})
    assert (steps[0], steps[-1], len(steps)) == (10, 1000, STEPS_WITH_SAMPLES)
    assert len(found["samples"]) == STEPS_WITH_SAMPLES * SAMPLES_PER_STEP and len(found["sample_steps"]) == 100
    assert sum(len(item["values"]["text"]) for item in found["samples"] if item["values"]) <= TOKENS_SHOWN
    assert found["histories"]["sum-1"] == [[step, 3, 6, 6, 5.0] for step in range(10, 1010, 10)]
    live = payload(load_runs([run], running=True), live=True)["runs"][0]
    assert "samples" not in live and live["sample_steps"] == found["sample_steps"], "asked for when they are shown"


def test_the_values_of_a_token_are_those_of_its_sample(tmp_path):
    groups = make_groups(1)
    groups[0].samples[1] = replace(
        groups[0].samples[1], response_tokens=as_tokens([7]), engine_logprobs=as_logprobs([0])
    )
    arrays = make_arrays(groups)
    transcripts.write(tmp_path, transcripts.choose(1, groups, 0, 0, arrays))
    read = transcripts.read_arrays(tmp_path, 1)
    first, short, third = (transcripts.token_values(read, place) for place in range(3))
    assert short["text"] == [" word7"] and third["text"] == [f" word{i}" for i in range(5)] == first["text"]
    assert short["log-prob gap"] == [pytest.approx(arrays["old_logprobs"][5] - arrays["engine_logprobs"][5], abs=1e-4)]
    assert third["log-prob"][0] == pytest.approx(arrays["new_logprobs"][6], abs=1e-4)
    assert third["ratio"] == pytest.approx([math.exp(0.1)] * 5, rel=1e-3)
    assert short["advantage"] == [pytest.approx(0.8)] and third["advantage"][0] == pytest.approx(-1.1)
    places = {(item.prompt_id, item.index): item.place for item in transcripts.read(tmp_path)}
    assert places["sum-1", 2] == 2 and places["sum-2", 0] == 6 and transcripts.token_values({}, 0) is None


def test_restarts_and_axes_come_from_the_records(tmp_path):
    (found,) = payload(load_runs([make_run(tmp_path / "run", steps=50)]))["runs"]
    assert found["restarts"] == [41], "the first start is none"
    axes = found["axes"]
    assert axes["steps"] == list(range(1, 51)) and axes["hours"] == sorted(axes["hours"]) and axes["hours"][-1] > 0.5
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert axes["tokens"][-1] == pytest.approx(sum(r.metrics.get("train/tokens", 0) for r in records), rel=1e-5)
    assert not figure(load_runs([tmp_path / "run"]), "lr").smooth


def test_a_very_long_response_is_shortened_in_the_report_and_complete_in_samples(tmp_path):
    run = run_of(tmp_path / "r", {"reward/mean": 1.0})
    transcripts.write(run / "samples", transcripts.choose(1, make_groups(1, "a" * 50_000 + "END"), 1, 1))
    (item,) = payload(load_runs([run]))["runs"][0]["samples"]
    assert (
        len(item["text"]) < 21_000 and item["text"].endswith("END") and "30003 characters are left out" in item["text"]
    )
    assert "a" * 50_000 + "END" in (run / "samples" / "step_000001.txt").read_text()


def test_transcripts_alternate_right_and_wrong_responses():
    chosen = transcripts.choose(1, make_groups(1), prompts=2, responses=3).transcripts
    assert [(item.prompt_id, item.verdict, item.index) for item in chosen] == [
        (f"sum-{n}", verdict, index) for n in (1, 2) for verdict, index in (("right", 1), ("wrong", 0), ("right", 3))
    ]
    assert [step for step in range(1, 31) if transcripts.is_due(step, 10)] == [1, 10, 20, 30]
    assert not transcripts.is_due(10, 0)


def test_rejected_groups_are_shown_after_the_trained_ones(tmp_path):
    *trained, dropped = make_groups(1)
    arrays = make_arrays(trained)
    samples = transcripts.choose(1, trained, 1, 2, arrays, {"all-wrong": dropped})
    first, _, *rejected = samples.transcripts
    assert first.advantage is not None and not first.group.endswith("all-wrong")
    assert [(t.prompt_id, t.advantage, t.group) for t in rejected] == [
        (dropped.prompt.id, None, "3 of 6 right, dropped: all-wrong")
    ] * 2
    places = [t.place for t in rejected]
    assert min(places) >= sum(len(group.samples) for group in trained) and len(set(places)) == 2
    assert all(transcripts.token_values(arrays, place) is None for place in places)
    assert dropped.prompt.id not in samples.prompts, "its history is of steps that trained on it"


def test_samples_to_read_have_score_and_advantage_and_no_empty_fields(tmp_path):
    group = make_groups(1)[0]
    group.samples[0].grade = replace(group.samples[0].grade, extracted=None, reason="")
    group.samples[1].grade = None
    transcripts.write(tmp_path, transcripts.choose(1, [group], 0, 2, {"advantages": np.array([-1.25, 0.5])}))
    group.prompt.answer = ""
    transcripts.write(tmp_path, transcripts.choose(2, [group], 0, 2))
    shown, later = ((tmp_path / f"step_00000{step}.txt").read_text().splitlines() for step in (1, 2))
    assert shown[1] == "step 1 · prompt sum-1 · 2 of 6 right · reference 2"
    assert later[1] == "step 2 · prompt sum-1 · 2 of 6 right"
    assert [line for line in shown if line.startswith("response")] == [
        "response 3: right (exact), score 1, 5 tokens, stop, extracted: 2",
        "response 0: wrong, score -1, advantage -1.25, 5 tokens, stop",
    ]


def test_a_response_cannot_control_the_terminal(tmp_path, capsys):
    hostile = "a\x1b]0;owned\x07b\x1b[2Jc\rd\x9b31me\u202ef\x7fg\th\nü"
    transcripts.write(tmp_path, transcripts.choose(1, make_groups(1, hostile), 1, 9))
    shown = "a\\x1b]0;owned\\x07b\\x1b[2Jc\\rd\\x9b31me\\u202ef\\x7fg\th\nü"
    assert shown in (tmp_path / "step_000001.txt").read_text()
    assert hostile in {item.text for item in transcripts.read(tmp_path)}, "the report has the text as it is"
    console = PlainConsole()
    console.warn(hostile)
    console.close(hostile)
    screen = Terminal(file=io.StringIO(), width=200)
    rich = RichConsole(hostile, screen)
    rich.line(hostile)
    rich.close("finished")
    for printed in (capsys.readouterr().out, screen.file.getvalue()):
        assert "\\x1b]0;owned\\x07" in printed and not set("\x1b\x07\r\x9b\u202e\x7f") & set(printed)
