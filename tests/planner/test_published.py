"""Predictions for published runs: benchmarks/published.py."""

from pathlib import Path

import pytest
from published_models import published_runs

FOUND = {item.name: item for item in published_runs().compare_all()}


def test_most_published_runs_are_predicted():
    assert len(FOUND) >= 11 and published_runs().WITHIN == (0.75, 1.33)
    outside = {name: round(item.ratio, 2) for name, item in FOUND.items() if not item.within}
    assert len(FOUND) - len(outside) >= 11, outside


# A change of a model or a constant must not move a prediction unnoticed; docs/planning.md quotes these.
RATIOS = {
    "nemo-rl-llama-8b": 0.87, "nemo-rl-llama-8b-1-off": 1.08, "nemo-rl-32b": 1.00, "nemo-rl-32b-1-off": 1.07,
    "nemo-rl-30b-a3b": 0.74, "nemo-rl-30b-a3b-1-off": 0.93, "nemo-rl-30b-a3b-8-off": 0.89, "nemo-rl-235b": 0.89,
    "nemo-rl-235b-256": 0.90, "nemo-rl-235b-1-off": 1.08, "megatron-bridge-30b-a3b": 1.15,
    "verl-sync-30b-a3b": 0.77, "verl-sync-235b": 1.00, "miles-sync-30b-a3b": 1.26,
}  # fmt: skip


@pytest.mark.parametrize("name", RATIOS)
def test_ratio(name):
    assert FOUND[name].ratio == pytest.approx(RATIOS[name], abs=0.02)


def test_every_run_has_a_source():
    for item in FOUND.values():
        assert item.source.startswith("https://") and item.recipe
        assert sum(item.parts.values()) >= item.predicted * 0.999


def test_the_command_prints_the_table(capsys):
    published_runs().main()
    said = " ".join(capsys.readouterr().out.split())
    within = sum(item.within for item in FOUND.values())
    assert f"{within} of {len(FOUND)} predictions are within 0.75 to 1.33" in said
    assert "nemo-rl-32b" in said and "376.0" in said


def test_the_documentation_has_the_table():
    text = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text()
    for item in FOUND.values():
        seconds = f"{item.published:.1f} s | {item.predicted:.1f} s | {item.ratio:.2f}"
        assert f"| {item.name} | {item.set_up} | {seconds} |" in text
    assert f"{sum(item.within for item in FOUND.values())} of {len(FOUND)} are within 0.75 to 1.33" in text
