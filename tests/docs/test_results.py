"""The calculated rows of docs/results.md about 32B: from the plans in the examples' READMEs, which tests/examples
compares with `megatron-dapo plan`, and from the predictions for published runs."""

import json
import re
from pathlib import Path

import pytest
from published_models import published_runs

from megatron_dapo.config import load_config

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text()
GPUS, SAMPLES, TOKENS = 128, 512 * 16, 2700 + 256
STEPS = [item for item in published_runs().compare_all() if "× h100, step" in item.set_up]
RANGE = min(item.ratio for item in STEPS), max(item.ratio for item in STEPS)


def planned_step(example: str) -> float:
    text = (ROOT / "examples" / example / "README.md").read_text()
    first = re.findall(r"^\| TP.* \| ([\d,.]+) s \|$", text, flags=re.M)[0]
    return float(first.replace(",", ""))


def thousand_gpu_hours(step: float, steps: int) -> float:
    return step * steps * GPUS / 3600 / 1000


@pytest.mark.parametrize("example", ["qwen2.5_32b_dapo", "qwen2.5_32b_fast"])
def test_step_and_gpu_hours(example):
    config = load_config(ROOT / "examples" / example / "dapo.yaml")
    assert config.trainer.prompts_per_step * config.rollout.samples_per_prompt == SAMPLES
    step, steps = planned_step(example), config.trainer.steps
    least, most = step / RANGE[1], step / RANGE[0]
    hours = [thousand_gpu_hours(seconds, steps) for seconds in (step, least, most)]
    cells = f"| {step:,.1f} s | {least:,.0f} to {most:,.0f} s | {hours[0]:.1f} k | {hours[1]:.1f} to {hours[2]:.1f} k |"
    (row,) = [line for line in PAGE.splitlines() if line.startswith("| [") and f"/{example}/README.md)" in line]
    assert row.endswith(cells), f"calculated: {cells}"
    cost = f"| {step:,.1f} s | {SAMPLES} | {TOKENS} | {1000 * step * GPUS / SAMPLES / TOKENS:.2f} |"
    assert cost in PAGE, f"calculated: {cost}"


def test_the_range_is_that_of_the_published_steps():
    text = " ".join(PAGE.split())
    dense = [item.ratio for item in STEPS if "Qwen3-32B" in item.set_up]
    assert len(STEPS) == 11 and "the eleven step times on H100" in text
    found = [f"{ratio:.2f}" for ratio in (*RANGE, *dense)]
    assert "is {} to {} there, and {} and {} for the two of a dense 32B".format(*found) in text
    (first,) = [item for item in STEPS if item.name == "nemo-rl-32b"]
    assert f"The planner gives {first.predicted:.1f} s for NeMo-RL's first run" in text


@pytest.mark.parametrize("name", ["nemo-rl-32b", "nemo-rl-32b-1-off"])
def test_the_published_rows(name):
    runs = json.loads((ROOT / "benchmarks" / "published_runs.json").read_text())
    (run,) = [run for run in (runs if isinstance(runs, list) else runs["runs"]) if run["name"] == name]
    samples, tokens = run["prompts"] * run["samples_per_prompt"], run["mean_prompt"] + run["mean_response"]
    cost = 1000 * run["seconds"] * run["gpus"] / samples / tokens
    row = f"| {run['gpus']} H100 | {run['seconds']} s | {samples} | {tokens} | {cost:.2f} |"
    assert row in PAGE, f"calculated: {row}"


def benchmark_commands() -> set[tuple[str, tuple[str, ...]]]:
    """(file, options) of the `python benchmarks/…` commands of all pages."""
    pages = [ROOT / "README.md", ROOT / "benchmarks" / "RESULTS.md", *(ROOT / "docs").glob("*.md")]
    commands = [c for page in pages for c in re.findall(r"python (benchmarks/[^`\n]+)", page.read_text())]
    own = [command.partition(" -- ")[0].split() for command in commands]  # what follows goes to a server
    return {(words[0], tuple(word for word in words[1:] if word.startswith("--"))) for words in own}


@pytest.mark.parametrize(("file", "options"), sorted(benchmark_commands()))
def test_a_benchmark_has_the_options_that_are_quoted(file, options):
    source = (ROOT / file).read_text()
    assert not [option for option in options if f'"{option}"' not in source]
