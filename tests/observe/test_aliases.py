"""Metrics under other tools' names: the table in docs/monitoring.md, and what a tracker gets."""

from pathlib import Path

import pytest

from megatron_dapo.config.trainer import ObserveConfig
from megatron_dapo.observe import observer as observer_module
from megatron_dapo.observe.observer import Observer
from megatron_dapo.observe.trackers import FACTORS, NAMES, TOOLS, Tracker, with_aliases

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "monitoring.md").read_text()


def test_the_page_has_the_table():
    part = PAGE.split(f"| here | {' | '.join(TOOLS)} |\n|---|---|---|\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.splitlines()]
    assert {
        ours.strip("`"): tuple(cell.split("`")[1] if cell else "" for cell in theirs) for ours, *theirs in rows
    } == NAMES
    cells = {(tool, ours.strip("`")): cell for ours, *theirs in rows for tool, cell in zip(TOOLS, theirs, strict=True)}
    assert {key: float(cell.split("× ")[1]) for key, cell in cells.items() if "×" in cell} == FACTORS
    for theirs in zip(*NAMES.values(), strict=True):
        names = [name for name in theirs if name]
        assert len(set(names)) == len(names), "one name, one metric"


def test_aliases_are_added_and_our_names_stay():
    metrics = {"train/mfu": 0.4, "reward/mean": 0.1, "time/step": 9.0, "train/lr": 1e-6}
    assert with_aliases(metrics, []) == metrics
    found = with_aliases(metrics, ["verl", "prime-rl"])
    assert found["perf/mfu/actor"] == 0.4 and found["perf/mfu"] == pytest.approx(40.0)
    assert found["timing_s/step"] == 9.0 and found["optim/lr"] == 1e-6
    assert {name: found[name] for name in metrics} == metrics


def test_trackers_get_aliases_and_the_file_does_not(tmp_path, monkeypatch):
    sent = []

    class Recorder(Tracker):
        def log(self, record):
            sent.append(record.metrics)

    monkeypatch.setattr(observer_module, "make_trackers", lambda *_: [Recorder()])
    config = ObserveConfig(console="off", report=False, aliases=["verl"])
    observer = Observer(config, tmp_path, total_steps=1, settings={})
    observer.step(1, {"train/grad_norm": 0.5})
    observer.close("finished")
    assert sent[0]["actor/grad_norm"] == sent[0]["train/grad_norm"] == 0.5
    assert "actor/" not in (tmp_path / "metrics.jsonl").read_text()
