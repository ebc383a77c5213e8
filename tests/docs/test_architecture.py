"""docs/architecture.md: its functions exist, a traced run calls them in its order, its threads and folders are ours.
And the way of a run does not grow."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_dapo"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
REFERENCE = re.compile(r"`([\w/]+\.py)(?::([\w.]+))?`")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def journey(title: str) -> list[tuple[str, str]]:
    """The functions of the numbered list at the beginning of a section."""
    steps = section(title).split("\n\n1. ")[1].split("\n\n")[0]
    return [(path, name) for path, name in REFERENCE.findall(steps) if name and not name.split(".")[-1][0].isupper()]


JOURNEY = journey("The journey of a prompt") + journey("The journey of a weight")


def defined(tree: ast.Module | ast.ClassDef, names: list[str]) -> bool:
    """Whether a class or function of this (dotted) name is defined there."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == names[0]:
            return len(names) == 1 or (isinstance(node, ast.ClassDef) and defined(node, names[1:]))
    return False


@pytest.mark.parametrize(("path", "name"), sorted(set(REFERENCE.findall(PAGE))), ids=lambda part: part or "file")
def test_every_named_file_and_function_exists(path, name):
    file = next((folder / path for folder in (PACKAGE, ROOT) if (folder / path).exists()), None)
    assert file is not None, f"architecture.md names {path}, which does not exist"
    if name:
        found = defined(ast.parse(file.read_text()), name.split("."))
        assert found, f"architecture.md names {path}:{name}, which is not defined there"


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    found = tmp_path_factory.mktemp("trace") / "trace.json"
    command = [sys.executable, "-W", "ignore", str(ROOT / "tools" / "trace_run.py"), "--json", str(found)]
    subprocess.run(command, check=True, capture_output=True, timeout=250)
    return json.loads(found.read_text())


def test_a_run_calls_the_functions_of_the_journeys_in_this_order(trace):
    assert len(JOURNEY) >= 30
    in_a_thread = ("files.py", "publish_directory")  # sooner or later
    called = [tuple(item) for item in trace["functions"] if tuple(item) in JOURNEY]
    assert [item for item in called if item != in_a_thread] == [item for item in JOURNEY if item != in_a_thread]


# Lower a number when the way has become shorter. A higher one needs a reason in the commit.
LIMITS = {
    "package lines": 52_390,
    "package files": 271,
    "files entered by the run": 96,
    "file → file call edges": 240,  # 235; under load another order of the threads may add a few
    "pairs of files that call each other both ways": 0,
    "files from taking a prompt to the optimizer step": 50,
}


def test_the_way_of_a_run_does_not_grow(trace):
    assert trace["table"].keys() == LIMITS.keys()
    grown = {name: (found, LIMITS[name]) for name, found in trace["table"].items() if found > LIMITS[name]}
    assert not grown, f"found and limit: {grown}; both ways: {trace['pairs']}"


def test_the_threads_of_the_table_are_those_of_the_code():
    sources = "\n".join(
        path.read_text() for path in PACKAGE.rglob("*.py") if path.parent.name not in ("doctor", "cpu_stubs")
    )
    started = set(re.findall(r"(?:Thread\(.*?name|thread_name_prefix)=f?\"([\w-]+)", sources))
    rows = re.findall(r"^\| (`[^|]+`) \|", section("Processes and threads"), re.M)
    listed = {name.removesuffix("-N") for row in rows for name in re.findall(r"`([\w-]+)`", row)}
    assert {name.rstrip("-") for name in started} == listed


def test_the_folders_of_the_table_are_those_of_the_import_test():
    spec = importlib.util.spec_from_file_location("import_rules", ROOT / "tests" / "test_imports.py")
    rules = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rules)
    levels: dict[int, set[str]] = {}
    for level, rooms in re.findall(r"^\| (\d) \| ([^|]+) \|", section("Folders"), re.M):
        levels.setdefault(int(level) - 1, set()).update(re.findall(r"`(\w+)`", rooms))
    expected = {i: rooms - {"__init__", "__main__"} for i, rooms in enumerate(rules.LEVELS)}
    assert levels == {i: rooms for i, rooms in expected.items() if rooms}
    text = next(part for part in section("Folders").split("\n\n") if "never import torch" in part)
    sentences = [set(re.findall(r"`(\w+)`", sentence)) for sentence in text.split("never import")]
    assert sentences[0] == rules.NO_TORCH
    assert sentences[1] == rules.NO_MEGATRON
