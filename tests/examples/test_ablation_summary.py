"""examples/ablations/summary.py: the tables and the figure of a grid, from runs whose effects are known."""

import importlib.util
import json
from pathlib import Path

import pytest

from megatron_dapo.ablation.designs import effects, variants
from megatron_dapo.ablation.results import make_table
from megatron_dapo.config import parse_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def summary():
    spec = importlib.util.spec_from_file_location("summary", ROOT / "examples" / "ablations" / "summary.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def results(tmp_path):
    """Clip-higher adds 0.2 to the entropy, 0.3 with all other changes; nothing else has an effect. Seeds differ. One
    run of the grid is missing."""
    config = parse_config({})
    rows = variants(config, "grid")

    def curves(changes, seed):
        on = "clip_higher" in changes
        entropy = 1 + 0.01 * seed + on * (0.2 + 0.1 * (len(changes) == 5)) + 0.001 * seed * on
        return {"entropy": {"x": [1, 2], "y": [1.0, entropy]}, "held_out": {"x": [2], "y": [0.5 + 0.01 * seed]}}

    runs = {row.folder: {seed: curves(row.changes, seed) for seed in range(3)} for row in rows}
    del runs["token_loss"][2]
    table = make_table("entropy", "grid", rows, effects("grid", config), runs, 48, 60.0 * 47)
    (tmp_path / "entropy").mkdir()
    (tmp_path / "entropy" / "table.json").write_text(json.dumps(table))
    return tmp_path


def test_tables_have_both_effects_with_their_seeds(summary, results, monkeypatch, capsys):
    """Grid: (7 · 0.2 + 0.3)/8 = 0.2125, plus 0.001 per seed, over the two seeds that all runs have. Leave-one-out: 0.3
    plus 0.001 per seed, over three."""
    figure = results / "grid.png"
    monkeypatch.setattr("sys.argv", ["summary.py", str(results), "--figure", str(figure)])
    assert summary.main() == 0
    lines = capsys.readouterr().out.splitlines()
    (entropy,) = [line for line in lines if line.startswith("| entropy | clip-higher | entropy")]
    assert "| 0.213 [" in entropy and "(2 seeds)" in entropy, entropy
    assert "| 0.301 [" in entropy and "(3 seeds)" in entropy and entropy.endswith("| higher |")
    (score,) = [line for line in lines if line.startswith("| entropy | clip-higher | held-out score")]
    assert score.endswith("| no visible effect |") and "| 50.5% → 50.5% |" in score
    assert "47 of 48 runs, 47 minutes of one core in all." in lines
    assert figure.stat().st_size > 5000


def test_one_task_with_all_changes_is_summarised_leave_one_out(summary, tmp_path, monkeypatch, capsys):
    """One seed, naive GRPO has not run. Without dynamic sampling 20 of 32 groups have a signal; without clip-higher the
    entropy is 0.3 instead of 0.5."""
    config = parse_config({})
    rows = variants(config, "leave-one-out")

    def curves(changes):
        steps = {
            "entropy": 0.5 if "clip_higher" in changes else 0.3, "length_wrong": 300.0, "length": 250.0, "score": 0.5,
            "effective_batch": 32.0 if "dynamic_sampling" in changes else 20.0,
        }  # fmt: skip
        found = {name: {"x": [1, 2], "y": [value, value]} for name, value in steps.items()}
        return found | {"held_out": {"x": [0, 2], "y": [0.55, 0.65]}}

    runs = {row.folder: {0: curves(row.changes)} if row.changes else {} for row in rows}
    table = make_table("gsm8k", "leave-one-out", rows, effects("leave-one-out", config), runs, 6, 600.0)
    (tmp_path / "table.json").write_text(json.dumps(table))
    figure = tmp_path / "gsm8k.png"
    monkeypatch.setattr("sys.argv", ["summary.py", str(tmp_path), "--figure", str(figure)])
    assert summary.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| gsm8k | clip-higher | entropy | 0.3 → 0.5 | 0.2 (1 seed) | one seed: no interval |" in lines
    assert "| gsm8k | dynamic sampling | effective batch | 20 → 32 | 12 (1 seed) | one seed: no interval |" in lines, (
        lines
    )
    assert "| gsm8k | overlong handling | reward noise | 0 → 0 | 0 (1 seed) | one seed: no interval |" in lines
    assert "| without clip-higher | 1 | 55.0% → 65.0% | 0.3 | 250 | 32 | 300 | 0.5 | 0 |" in lines
    assert not any(line.startswith("| naive GRPO") for line in lines)
    assert "5 of 6 runs, 10.0 minutes in all." in lines and figure.stat().st_size > 5000


def test_a_folder_without_results_is_named(summary, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["summary.py", str(tmp_path)])
    assert summary.main() == 2 and str(tmp_path / "signal") in capsys.readouterr().err


def test_tables_are_put_between_the_marks_of_a_page(summary, results, monkeypatch, capsys):
    page = results / "page.md"
    page.write_text("before\n<!-- grid: begin -->\nold\n<!-- grid: end -->\nafter\n")
    monkeypatch.setattr("sys.argv", ["summary.py", str(results), "--into", str(page)])
    assert summary.main() == 0
    printed = capsys.readouterr().out
    assert page.read_text() == f"before\n<!-- grid: begin -->\n\n{printed}\n<!-- grid: end -->\nafter\n"
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="grid: begin"):
        summary.main()
    assert page.read_text() == "no marks"


@pytest.mark.parametrize("page", ["examples/ablations/README.md", "benchmarks/RESULTS.md"])
def test_the_pages_have_the_marks(summary, page):
    assert (ROOT / page).read_text().count(summary.BEGIN) == (ROOT / page).read_text().count(summary.END) == 1
