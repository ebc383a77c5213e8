"""Imports point one way (docs/architecture.md), some rooms import neither torch nor megatron, rooms stay small."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "megatron_dapo"

# Lowest first. A room may import its own files and rooms of a lower level.
LEVELS = [
    {"errors", "arguments", "plugins", "tables", "types", "config", "files", "fault_points", "__init__"},
    {"algorithm", "data", "reward", "observe", "evaluation_statistics"},
    {"engines", "rollout"},
    {"weights", "policy", "planner", "simulation"},
    {"trainer", "evaluate", "doctor", "selfcheck"},
    {"launch", "cli"},
    {"__main__"},
]
# Imports between rooms of one level.
ALLOWED_SIDEWAYS = {
    ("rollout", "engines"),
    ("policy", "weights"),
    ("simulation", "planner"),
    ("trainer", "evaluate"),
    ("cli", "launch"),
}
NO_MEGATRON = {"algorithm", "data", "reward", "engines", "rollout"}
NO_TORCH = {"config", "files", "types", "errors", "fault_points", "planner", "launch"}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def level(room: str) -> int:
    return next(i for i, rooms in enumerate(LEVELS) if room in rooms)


FILES = sorted(ROOT.rglob("*.py"))


def test_every_file_has_a_room():
    rooms = set().union(*LEVELS)
    assert {room_of(f) for f in FILES} <= rooms


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    room, names = room_of(path), imported(path)
    for name in names:
        parts = name.split(".")
        if parts[0] == "megatron_dapo" and len(parts) > 1 and parts[1] != "__version__":
            other = parts[1]
            if other == room:
                continue
            sideways = level(other) == level(room) and ((room, other) in ALLOWED_SIDEWAYS or level(room) == 0)
            assert level(other) < level(room) or sideways, f"{path}: {room} must not import {other}"
        if room in NO_MEGATRON:
            assert parts[0] != "megatron", f"{path}: {room} never imports megatron"
        if room in NO_TORCH:
            assert parts[0] != "torch", f"{path}: {room} never imports torch"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def imported_modules(path: Path) -> set[str]:
    """Modules of the package that a file imports, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return (found & set(MODULES)) - {module_name(path)}


def test_no_module_imports_itself_indirectly():
    imports = {name: imported_modules(path) for name, path in MODULES.items()}
    finished: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            pytest.fail("import cycle: " + " → ".join([*path[path.index(name) :], name]))
        if name not in finished:
            for other in sorted(imports[name]):
                visit(other, [*path, name])
            finished.add(name)

    for name in MODULES:
        visit(name, [])


def test_the_two_engines_do_not_import_each_other():
    for path in FILES:
        here, names = str(path.relative_to(ROOT)), imported(path)
        for one, other in (("embedded", "sglang"), ("sglang", "embedded")):
            if here.startswith(f"engines/{one}/"):
                assert not any(name.startswith(f"megatron_dapo.engines.{other}") for name in names), here


LARGEST_ROOM, LONGEST_FILE = 0.13, 450


def lines_by_room() -> dict[str, int]:
    """Lines of each folder; a sub-folder is a room of its own."""
    found: dict[str, int] = {}
    for path in FILES:
        room = str(path.relative_to(ROOT).parent)
        found[room] = found.get(room, 0) + len(path.read_text().splitlines())
    return found


def test_no_room_holds_more_than_its_share_of_the_lines():
    lines = lines_by_room()
    total = sum(lines.values())
    shares = {room: count / total for room, count in lines.items()}
    large = {room: f"{share:.1%}" for room, share in shares.items() if share > LARGEST_ROOM}
    assert not large, f"more than {LARGEST_ROOM:.0%} of {total} lines: {large}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_is_too_long(path):
    lines = len(path.read_text().splitlines())
    assert lines <= LONGEST_FILE, f"{path}: {lines} lines; at most {LONGEST_FILE}"


@pytest.mark.parametrize("path", [f for f in FILES if f.name == "__init__.py"], ids=lambda p: str(p.relative_to(ROOT)))
def test_a_room_opens_with_what_lives_there(path):
    """The docstring of a folder's `__init__` names every module of the folder."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    others = [other.stem for other in path.parent.glob("*.py") if not other.stem.startswith("__")]
    missing = [name for name in others if not re.search(rf"\b{name}\b", text)]
    assert not missing, f"{path}: the docstring does not mention {', '.join(missing)}"
