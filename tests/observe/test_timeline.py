"""The timeline of a step: a valid trace, every request on its engine, and the part that the report draws."""

import json

from synthetic_runs import make_run

from megatron_dapo.config.trainer import ObserveConfig
from megatron_dapo.observe.observer import Observer
from megatron_dapo.observe.runs import load_runs
from megatron_dapo.observe.timeline import Span, Trace, read_newest, running_requests, write_trace

TRACE = Trace(
    phases=[Span("rollout", 100.0, 104.0), Span("log_probs", 104.0, 104.5), Span("update", 104.5, 106.0)],
    requests={
        "http://a:1": [Span("p1/0", 100.0, 103.0, 30), Span("p1/1", 101.0, 102.0, 10), Span("p2/0", 103.0, 104.0, 5)],
        "http://b:2": [Span("p3/0", 100.5, 103.5, 31)],
    },
)


def test_running_requests_are_counted_after_each_change():
    assert running_requests(TRACE.requests["http://a:1"]) == [
        (100.0, 1),
        (101.0, 2),
        (102.0, 1),
        (103.0, 1),
        (104.0, 0),
    ]


def test_the_trace_has_phases_requests_and_a_counter_per_engine(tmp_path):
    events = json.loads(write_trace(tmp_path, 7, TRACE).read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {1: "trainer, rank 0", 2: "engine http://a:1", 3: "engine http://b:2"}
    phases = [(event["name"], event["dur"]) for event in events if event["ph"] == "X"]
    assert phases == [("rollout", 4_000_000), ("log_probs", 500_000), ("update", 1_500_000)]
    begun = {event["id"]: event for event in events if event["ph"] == "b"}
    ended = {event["id"]: event for event in events if event["ph"] == "e"}
    assert begun.keys() == ended.keys() and len(begun) == 4
    assert all(ended[key]["ts"] > begun[key]["ts"] and ended[key]["pid"] == begun[key]["pid"] for key in begun)
    assert sum(event["args"]["tokens"] for event in begun.values() if event["pid"] == 2) == 45
    counts = [event["args"]["running"] for event in events if event["ph"] == "C" and event["pid"] == 2]
    assert counts == [1, 2, 1, 1, 0]


def test_the_report_shows_the_newest_readable_trace(tmp_path):
    run = make_run(tmp_path / "run", 3)
    assert read_newest(run) is None
    write_trace(run, 9, TRACE)
    write_trace(run, 10, TRACE)
    (run / "traces" / "step_11.json.tmp").write_text("{")
    (found,) = load_runs([run])
    assert found.timeline["step"] == 10 and found.timeline["seconds"] == 6.0
    assert found.timeline["phases"][1] == ["log_probs", 4.0, 4.5]
    assert [engine["name"] for engine in found.timeline["engines"]] == ["engine http://a:1", "engine http://b:2"]
    assert found.timeline["engines"][0]["y"][:4] == [1, 2, 1, 1]
    (run / "traces" / "step_12.json").write_text("not JSON")
    assert load_runs([run])[0].timeline is None, "a damaged trace hides the timeline and nothing else"


def test_the_observer_writes_a_trace_when_one_is_due(tmp_path):
    observer = Observer(ObserveConfig(console="off", report=False, trace_every=2), tmp_path, total_steps=4, settings={})
    for step in range(1, 5):
        with observer.phase("rollout"):
            observer.request("engine-0", f"request-{step}", 0.0, 5)
        observer.step(step, {"reward/mean": 0.0})
    observer.close("finished")
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == [
        "step_1.json",
        "step_2.json",
        "step_4.json",
    ]
    events = json.loads((tmp_path / "traces" / "step_4.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "b"] == ["request-4"], "of this step only"
