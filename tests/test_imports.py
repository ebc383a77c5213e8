"""Imports point one way (see docs/architecture): the rooms that must stay light or pure do."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "megatron_dapo"

# Lowest first. A room may import its own files and rooms of a strictly lower level.
LEVELS = [
    {"errors", "plugins", "types", "config", "files", "fault_points", "__init__"},
    {"algorithm", "data", "reward", "observe", "planner"},
    {"engines", "rollout"},
    {"weights", "policy"},
    {"trainer", "evaluate", "doctor", "selfcheck"},
    {"launch", "cli"},
    {"__main__"},
]
# Edges between rooms of one level that the architecture names.
ALLOWED_SIDEWAYS = {
    ("rollout", "engines"),
    ("policy", "weights"),
    ("trainer", "evaluate"),
    ("cli", "launch"),
}
NO_MEGATRON = {"algorithm", "data", "reward", "engines", "rollout"}
NO_TORCH = {"config", "types", "files", "errors", "fault_points", "planner", "launch"}


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
