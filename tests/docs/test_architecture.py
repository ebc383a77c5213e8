"""docs/architecture.md: its functions exist, a traced run calls them in its order, its threads and rooms are ours."""

import ast
import importlib.util
import re
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_dapo"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
REFERENCE = re.compile(r"`([\w/]+\.py)(?::([\w.]+))?`")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


WALK = [(path, name) for path, name in REFERENCE.findall(section("From a prompt in a file to a weight update")) if name]


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


def trace_first_calls(wanted: list[tuple[str, str]], output: Path) -> None:
    """Writes each wanted function to `output` at its first call in this process, in any thread."""
    seen: set[tuple[str, str]] = set()
    known = {(str(PACKAGE / path), name) for path, name in wanted}

    def profile(frame, event, argument):
        key = (frame.f_code.co_filename, frame.f_code.co_qualname)
        if event == "call" and key in known and key not in seen:
            seen.add(key)
            with output.open("a") as file:
                file.write(f"{Path(key[0]).relative_to(PACKAGE)} {key[1]}\n")

    threading.setprofile(profile)
    sys.setprofile(profile)


def test_a_run_calls_the_functions_of_the_walk_in_this_order(tmp_path):
    from forked import run
    from tiny_run import raw_config

    assert len(WALK) >= 20
    raw = raw_config(tmp_path / "model", tmp_path / "run", trainer__steps=1)
    calls = tmp_path / "calls.txt"
    assert run(raw, lambda: trace_first_calls(WALK, calls)) == 0
    called = [tuple(line.split()) for line in calls.read_text().splitlines()]
    functions = [item for item in WALK if not is_class(*item)]
    assert called == functions


def is_class(path: str, name: str) -> bool:
    return name.split(".")[-1][0].isupper()


def test_the_threads_of_the_table_are_those_of_the_code():
    sources = "\n".join(
        path.read_text() for path in PACKAGE.rglob("*.py") if path.parent.name not in ("doctor", "cpu_stubs")
    )
    started = set(re.findall(r"(?:Thread\(.*?name|thread_name_prefix)=f?\"([\w-]+)", sources))
    rows = re.findall(r"^\| (`[^|]+`) \|", section("Processes and threads"), re.M)
    listed = {name.removesuffix("-N") for row in rows for name in re.findall(r"`([\w-]+)`", row)}
    assert {name.rstrip("-") for name in started} == listed


def test_the_rooms_of_the_table_are_those_of_the_import_test():
    spec = importlib.util.spec_from_file_location("import_rules", ROOT / "tests" / "test_imports.py")
    rules = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rules)
    levels: dict[int, set[str]] = {}
    for level, rooms in re.findall(r"^\| (\d) \| ([^|]+) \|", section("Rooms"), re.M):
        levels.setdefault(int(level) - 1, set()).update(re.findall(r"`(\w+)`", rooms))
    expected = {i: rooms - {"__init__", "__main__"} for i, rooms in enumerate(rules.LEVELS)}
    assert levels == {i: rooms for i, rooms in expected.items() if rooms}
    text = section("Rooms").split("\n\n")[-1]
    sentences = [set(re.findall(r"`(\w+)`", sentence)) for sentence in text.split("never import")]
    assert sentences[0] == rules.NO_TORCH
    assert sentences[1] == rules.NO_MEGATRON
