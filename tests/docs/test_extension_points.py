"""The number of files that an extension needs is the one in docs/architecture.md."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_dapo"
TABLE = {
    name: (int(count), re.findall(r"`([\w/]+\.py)(?::\w+)?`", files))
    for name, count, files in re.findall(
        r"^\| an? ([\w ]+) \| (\d) \| (.+) \|$", (ROOT / "docs" / "architecture.md").read_text(), re.M
    )
}
# These mention engines, transports and families, but need no change for a new one.
NOT_NEEDED = ("planner/", "selfcheck/", "launch/", "cli.py", "config/importing.py")


def mentioning(pattern: str) -> set[str]:
    """Files of the package with this text, without those that need no change."""
    files = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if re.search(pattern, path.read_text())}
    return {file for file in files if not file.startswith(NOT_NEEDED)}


@pytest.mark.parametrize(
    ("what", "pattern", "own_folder"),
    [
        ("engine", r'"embedded"|EmbeddedEngine', "engines/embedded/"),
        ("weight transport", r'"tensor"', ""),
        ("model family", r"(?i)qwen3_?moe", ""),
    ],
)
def test_the_files_of_an_existing_example_are_those_in_the_table(what, pattern, own_folder):
    count, files = TABLE[what]
    found = {file for file in mentioning(pattern) if not own_folder or not file.startswith(own_folder)}
    listed = set(files) - {"engines/protocol.py"}  # what a new file implements
    if what == "model family":
        listed -= {"weights/mapping.py", "policy/model/gpt.py"}  # for what no family had before
    assert found == listed
    assert count == len(listed) + bool(own_folder)


def test_a_plugin_is_one_file():
    for what in ("loss", "advantage", "grader", "group filter", "rollout", "metric"):
        assert TABLE[what][0] == 1


GRADER = """
def long_enough(prompt, response):
    return float(len(response) > 2)
"""
FILTER = """
def not_all_alike(group):
    scores = {sample.grade.score for sample in group.samples}
    return len(scores) > 1, "alike"
"""


OBJECTIVE = """
from megatron_dapo.algorithm import Objective, TokenMetrics

class Reinforce(Objective):
    def token_losses(self, scores, batch, sums):
        return -scores.logprobs * batch.advantages

    def metrics(self, scores, batch, sums):
        return TokenMetrics(means={"surprise": -scores.logprobs.detach()})
"""


def test_a_run_with_an_objective_a_grader_and_a_filter_of_one_file_each(tmp_path, monkeypatch):
    from forked import run, steps_of
    from tiny_run import raw_config

    (tmp_path / "own_grader.py").write_text(GRADER)
    (tmp_path / "own_filter.py").write_text(FILTER)
    (tmp_path / "own_loss.py").write_text(OBJECTIVE)
    monkeypatch.chdir(tmp_path)  # plugins are found beside the configuration
    raw = raw_config(
        tmp_path / "model", tmp_path / "run", trainer__steps=1, reward__grader="python:own_grader.long_enough",
        rollout__group_filter="python:own_filter.not_all_alike", algorithm__objective="python:own_loss.Reinforce",
    )  # fmt: skip
    assert run(raw) == 0
    (metrics,) = steps_of(tmp_path / "run")
    assert metrics["rollout/groups_kept"] == 4
    assert metrics["rollout/dropped/alike"] > 0, "the reason of the filter is a metric, without another file"
    assert metrics["train/surprise"] > 0, "a metric of the objective is recorded, without another file"
