"""Imports point one way (docs/architecture.md), without cycles; some folders import neither torch nor megatron; the
docstring of a folder names its modules."""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "megatron_dapo"
FILES = sorted(ROOT.rglob("*.py"))

# Lowest first. A folder may import its own files and folders of a lower level.
LEVELS = [
    {"errors", "arguments", "plugins", "types", "config", "files", "fault_points", "batch_invariant", "__init__"},
    {"processes", "weights", "algorithm", "data", "observe"},
    {"reward", "sync"},
    {"engines", "rollout"},
    {"policy", "planner"},
    {"checkpoints"},
    {"trainer", "evaluation", "doctor", "selfcheck"},
    {"launch", "ablation", "cli", "api"},
    {"__main__"},
]
LEVEL = {folder: index for index, folders in enumerate(LEVELS) for folder in folders}
# Imports between folders of one level, beside those of the lowest.
ALLOWED_SIDEWAYS = {
    ("rollout", "engines"),
    ("trainer", "evaluation"),
    ("selfcheck", "trainer"),
    ("cli", "launch"),
    ("cli", "ablation"),
    ("ablation", "launch"),
}
NO_MEGATRON = {"algorithm", "data", "reward", "engines", "rollout"}
NO_TORCH = {"config", "files", "types", "errors", "fault_points", "planner", "launch"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in FILES}


def imported(path: Path) -> set[str]:
    """Modules that a file imports, also inside functions: those of the package by their own name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return found - {module_name(path)}


IMPORTS = {name: imported(path) for name, path in MODULES.items()}


def folder_of(module: str) -> str:
    """The folder below the package that a module is in, or the module itself."""
    return [*module.split("."), "__init__"][1]


def reasons_against(module: str, other: str) -> list[str]:
    """Why `module` must not import `other`."""
    package = other.split(".")[0]
    here, there = folder_of(module), folder_of(other)
    found = []
    if package == "torch" and here in NO_TORCH:
        found.append(f"{here} never imports torch")
    if package == "megatron" and here in NO_MEGATRON:
        found.append(f"{here} never imports megatron")
    if package == "megatron_dapo" and other != package and here != there:
        lower, sideways = LEVEL[there] < LEVEL[here], LEVEL[there] == LEVEL[here]
        if not (lower or (sideways and (LEVEL[here] == 0 or (here, there) in ALLOWED_SIDEWAYS))):
            found.append(f"{here} must not import {there}")
    engines = [
        name.split(".")[2] for name in (module, other) if re.match(r"megatron_dapo\.engines\.(embedded|sglang)", name)
    ]
    if len(set(engines)) == 2:
        found.append("the two engines do not import each other")
    return found


def test_imports_point_one_way():
    without = sorted({folder_of(module) for module in MODULES} - LEVEL.keys())
    assert not without, f"no level in LEVELS: {without}"
    pairs = [(module, other) for module in IMPORTS for other in sorted(IMPORTS[module])]
    wrong = [f"{one} imports {other}: {why}" for one, other in pairs for why in reasons_against(one, other)]
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_indirectly():
    finished: set[str] = set()
    cycles: list[str] = []

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            cycles.append(" → ".join([*path[path.index(name) :], name]))
        elif name not in finished:
            for other in sorted(IMPORTS[name] & MODULES.keys()):
                visit(other, [*path, name])
            finished.add(name)

    for name in MODULES:
        visit(name, [])
    assert not cycles, "\n".join(cycles)


def test_the_docstring_of_a_folder_names_its_modules():
    missing = []
    for path in (path for path in FILES if path.name == "__init__.py"):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        modules = sorted(other.stem for other in path.parent.glob("*.py") if not other.stem.startswith("__"))
        missing += [f"{module_name(path)}: {name}" for name in modules if not re.search(rf"\b{name}\b", text)]
    assert not missing, "\n".join(missing)


LIGHT = ("cli", "config", "files", "types", "planner.command", "observe.report", "observe.observer", "weights.locate")


def test_light_modules_import_nothing_heavy():
    """Also indirectly: a command starts at once, and reports need no trainer."""
    script = (
        f"import sys, {', '.join(f'megatron_dapo.{name}' for name in LIGHT)}\n"
        "heavy = {'torch', 'megatron', 'wandb', 'tensorboard', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
