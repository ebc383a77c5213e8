"""benchmarks/mutants.yaml: every bug can still be planted, its tests exist, and the runner tells which are found."""

import ast
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import mutants  # noqa: E402

BUGS = mutants.read_bugs()
FOLDERS = {"algorithm", "rollout", "trainer", "policy", "sync", "checkpoints", "weights", "reward", "engines"}


@pytest.mark.parametrize("file", sorted({bug.file for bug in BUGS}))
def test_every_bug_occurs_once_and_is_python(file):
    for bug in (bug for bug in BUGS if bug.file == file):
        ast.parse(mutants.planted(bug))
        for test in bug.tests:
            path, _, name = test.partition("::")
            assert (ROOT / "tests" / path).exists(), f"{bug.what}: there is no tests/{path}"
            assert name in (ROOT / "tests" / path).read_text(), f"{bug.what}: there is no {test}"


def test_there_are_many_different_bugs_in_all_folders():
    assert len({(bug.file, bug.old, bug.new) for bug in BUGS}) == len(BUGS) >= 150
    assert min(Counter(bug.folder for bug in BUGS)[folder] for folder in FOLDERS) >= 4


def test_a_text_that_has_changed_is_an_error():
    with pytest.raises(ValueError, match="occurs 0 times instead of once"):
        mutants.planted(mutants.Bug("gone", "types.py", "no such text", "", ()))


def test_a_bug_is_found_or_survives(tmp_path):
    """In a copy: the project itself stays as it is."""
    before = (ROOT / "megatron_dapo" / "algorithm" / "overlong.py").read_bytes()
    found = next(bug for bug in BUGS if bug.what == "the penalty has no floor")
    equivalent = mutants.Bug("nothing", found.file, "a penalty in three stages", "a penalty in 3 stages", found.tests)
    copy = mutants.Copy(tmp_path / "copy")
    outcomes = [copy.run(bug, found.tests) for bug in (None, found, equivalent)]
    assert [outcome.found for outcome in outcomes] == [False, True, False], outcomes[0].report
    assert all(outcome.cpu_seconds > 0 for outcome in outcomes)
    assert "| algorithm | 2 | 1 | 1 |" in mutants.table(outcomes)
    assert (ROOT / "megatron_dapo" / "algorithm" / "overlong.py").read_bytes() == before
