"""Files of a run that hold valid JSON of another kind: no command ends in a traceback, and a skipped file is named."""

import json
import math
import re
import shutil

import pytest
from synthetic_runs import make_run

from megatron_dapo.cli import main
from megatron_dapo.observe import metrics_file, timeline
from megatron_dapo.observe.report import write_report
from megatron_dapo.observe.runs import overview, table
from megatron_dapo.observe.watch import RunList, WatchedRuns

STATUS = {
    "state": "running", "pid": 1, "step": 3, "total": 9, "remaining": 3.5, "updated": 1.0,
    "phases": [{"name": "rollout", "since": 1.0, "text": "", "done": 1, "total": 2}],
}  # fmt: skip
START = {"started": "today", "commit": "c", "versions": {"python": "3"}, "hardware": "x", "ranks": 1}
TRACE = {
    "traceEvents": [
        timeline.track_event(1, "trainer"), timeline.phase_event(1, "rollout", 0, 10),
        timeline.track_event(2, "engine"), timeline.running_event(2, 3, 1),
    ]
}  # fmt: skip
WRITTEN = {
    "logs/status.json": STATUS,
    "logs/heartbeat/rank_0.json": {"host": "h", "time": 1.0, "progress": 3, "gpu": {"memory": 3.0}},
    "environment.json": [START, START],
    "traces/step_2.json": TRACE,
}
OTHERS = (None, [[1]], {"a": 1}, "\ud800", True, 10**400, math.nan)


@pytest.fixture
def run(tmp_path):
    folder = make_run(tmp_path / "runs" / "run", 3)
    for name, content in WRITTEN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    metrics_file.warn_once.cache_clear()
    return folder


def changed(value):
    """The value with one part of it replaced by something else, or left out; for lists only the first two parts."""
    yield from OTHERS
    if isinstance(value, dict):
        for key, inner in value.items():
            yield {name: kept for name, kept in value.items() if name != key}
            yield from (value | {key: other} for other in changed(inner))
    elif isinstance(value, list):
        for index, inner in enumerate(value[:2]):
            yield from ([*value[:index], other, *value[index + 1 :]] for other in changed(inner))


def use_every_reader(run):
    write_report([run], run / "report.html")
    assert table(overview({"run": run}))
    one, several = WatchedRuns([run]), RunList([run.parent])
    for site in (one, several):
        json.loads(site.answer("data", {})[1])
        assert site.answer("metrics", {})
        assert site.answer("", {})
    query = {"run": "0", "step": "1", "place": "0", "prompt": "sum-1"}
    for path in ("samples", "sample", "history"):
        one.answer(path, query)


def test_a_run_that_failed_with_a_traceback_is_a_line_of_the_list(run):
    status = STATUS | {"state": "failed: GraderError:\nTraceback (most recent call last):\n  a.py\nKeyError: 'a'"}
    (run / "logs/status.json").write_text(json.dumps(status))
    (run / "logs/warnings.log").write_text("w" * 301)
    first, warning = table(overview({"run": run})).splitlines()
    assert first.endswith("failed: GraderError: Traceback (most recent call last): a.py KeyError: 'a'")
    assert warning == f"    warning: {'w' * 299}…"


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_of_another_kind_is_skipped(run, name):
    shutil.rmtree(run / "samples")
    for content in changed(WRITTEN[name]):
        (run / name).write_text(json.dumps(content))
        use_every_reader(run)


@pytest.mark.parametrize(("name", "line"), [("metrics.jsonl", 3), ("samples/step_000001.jsonl", 0),
                                            ("samples/step_000001.jsonl", 1)])  # fmt: skip
def test_a_line_of_another_kind_is_skipped(run, name, line):
    lines = (run / name).read_text().splitlines()
    whole = json.loads(lines[line])
    if "metrics" in whole:
        some = ("reward/mean", "time/step", "eval/held_out/avg@8")
        whole["metrics"] = {name: value for name, value in whole["metrics"].items() if name in some}
    if "prompts" in whole:
        whole["prompts"] = dict(list(whole["prompts"].items())[:1])
    for content in changed(whole):
        (run / name).write_text("\n".join([*lines[:line], json.dumps(content), *lines[line + 1 :]]) + "\n")
        use_every_reader(run)


@pytest.mark.parametrize("name", [*WRITTEN, "metrics.jsonl", "samples/step_000001.jsonl"])
def test_what_is_skipped_is_named_once(run, name, caplog):
    lines = (run / name).read_text().splitlines(keepends=True)
    (run / name).write_text("".join(["3\n", *lines[1:]]) if name.endswith("l") else "3")
    for _ in range(2):
        use_every_reader(run)
    assert main(["report", str(run)]) == main(["runs", str(run.parent)]) == 0
    found = [message for message in caplog.messages if name in message]
    assert found and len(set(found)) == len(found) and all(re.search("skipped", message) for message in found)


def test_a_report_that_cannot_be_embedded_is_one_message(run, capsys):
    file = run / "samples/step_000001.jsonl"
    file.write_text(file.read_text().replace('"reason": "exact"', '"reason": 1e999'))
    assert main(["report", str(run)]) == 2
    assert "the report cannot be written" in capsys.readouterr().err
