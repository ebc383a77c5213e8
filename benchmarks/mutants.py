"""How many bugs would the tests find? Each bug of mutants.yaml is planted on its own, and its nearest tests run.

    make mutants                                          # all of them; exit code 1 if fewer than 98 % are found
    python benchmarks/mutants.py --only advantages.py     # bugs whose file or description matches
    python benchmarks/mutants.py --tests                  # the tests without a bug: do they pass, and how long

A bug is a text of one file of the package and what replaces it. It is planted in a copy of the project, in which a
forked child runs pytest until the first failure. The parent has imported torch, Megatron and transformers, so that a
child starts at once; bytecode of the other files is that of the project. First every test file runs without a bug: a
test that fails anyway would find everything.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
BUGS = ROOT / "benchmarks" / "mutants.yaml"
COPIED = ("megatron_dapo", "tests", "examples", "tools", "benchmarks", "docs")
FOUND_SHARE = 0.98
SECONDS = 240  # of one bug; a test that hangs has found it
IMPORTED = (
    "pytest", "hypothesis", "torch", "torch.distributed", "transformers", "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3", "megatron.core", "megatron.core.optimizer", "megatron.core.distributed",
    "megatron.core.models.gpt", "megatron.core.pipeline_parallel", "megatron.core.dist_checkpointing", "pydantic",
    "aiohttp.web", "rich.console", "rich.table", "orjson", "safetensors.torch", "jinja2", "psutil", "yaml", "sympy",
)  # fmt: skip


@dataclass(frozen=True)
class Bug:
    what: str
    file: str  # relative to megatron_dapo/
    old: str
    new: str
    tests: tuple[str, ...]  # relative to tests/

    @property
    def folder(self) -> str:
        return self.file.partition("/")[0]


@dataclass(frozen=True)
class Outcome:
    bug: Bug | None  # None: the tests without a bug
    tests: tuple[str, ...]
    found: bool
    cpu_seconds: float
    report: str


def read_bugs(path: Path = BUGS) -> list[Bug]:
    """Entries are grouped by file; a bug may name other tests than its file's."""
    bugs = []
    for file, entry in yaml.safe_load(path.read_text()).items():
        for bug in entry["bugs"]:
            tests = bug.get("tests", entry["tests"])
            bugs.append(Bug(bug["what"], file, bug["old"], bug["new"], tuple(tests.split())))
    return bugs


def planted(bug: Bug) -> str:
    """The file's text with the bug. An error if its text is not there exactly once."""
    text = (ROOT / "megatron_dapo" / bug.file).read_text()
    if text.count(bug.old) != 1 or bug.old == bug.new:
        raise ValueError(
            f"{bug.file}, {bug.what}: its text occurs {text.count(bug.old)} times instead of once: {bug.old}"
        )
    return text.replace(bug.old, bug.new)


class Copy:
    """The project in a folder of its own, where one file at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            shutil.copytree(ROOT / name, folder / name, copy_function=_link, symlinks=True)
        for path in ROOT.iterdir():
            if path.is_file():
                _link(path, folder / path.name)

    def run(self, bug: Bug | None, tests: tuple[str, ...]) -> Outcome:
        target = self.folder / "megatron_dapo" / bug.file if bug else None
        report = self.folder / "report.txt"
        if bug and target:
            text = planted(bug)
            target.unlink()
            target.write_text(text)
        try:
            code, seconds = self._in_child(tests, report)
        finally:
            if bug and target:
                target.unlink()
                _link(ROOT / "megatron_dapo" / bug.file, target)
        return Outcome(bug, tests, code != 0, seconds, report.read_text(errors="replace"))

    def _in_child(self, tests: tuple[str, ...], report: Path) -> tuple[int, float]:
        """pytest's exit code (−1: not in time), and the CPU seconds of the child and its children."""
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                _test(self.folder, tests, report)
            finally:
                os._exit(99)
        deadline = time.monotonic() + SECONDS
        while True:
            pid, status, usage = os.wait4(child, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                _, _, usage = os.wait4(child, 0)
                return -1, usage.ru_utime + usage.ru_stime
            time.sleep(0.02)
        return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime


def _test(folder: Path, tests: tuple[str, ...], report: Path) -> None:
    """In the child: runs the tests in the copy, and exits with pytest's code."""
    output = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    sys.path[:] = [str(folder), *(p for p in sys.path if Path(p or ".").resolve() not in (ROOT, ROOT / "benchmarks"))]
    sys.dont_write_bytecode = True
    os.environ |= {
        "PYTHONPATH": f"{folder}:{folder / 'tests' / 'support'}", "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    for name, module in list(sys.modules.items()):  # the project's own, if the parent has imported any
        if str(getattr(module, "__file__", None) or "").startswith(f"{ROOT}{os.sep}") and ".venv" not in str(
            module.__file__
        ):
            del sys.modules[name]
    import pytest
    from hypothesis.configuration import set_hypothesis_home_dir

    set_hypothesis_home_dir(report.with_suffix(f".{os.getpid()}"))  # what failed with another bug is not repeated
    arguments = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--hypothesis-seed=0",
        "--rootdir",
        str(folder),
        *(f"tests/{test}" for test in tests),
    ]
    code = pytest.main(arguments)
    sys.stdout.flush()
    os._exit(int(code))


def _link(source: Any, target: Any) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def run_all(bugs: Sequence[Bug], jobs: int, *, tests_only: bool = False) -> Iterator[Outcome]:
    """First the tests without a bug, one file after the other; those of bugs only if they pass."""
    everything = sorted({test for bug in bugs for test in bug.tests})
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPool(jobs) as pool:
        # Not an executor: a process forked from one of its threads fails at its end. And a test becomes another user.
        os.chmod(folder, 0o755)
        copies = [Copy(Path(folder) / str(index)) for index in range(jobs)]

        def run(task: tuple[Bug | None, tuple[str, ...]]) -> Outcome:
            copy = copies.pop()
            try:
                return copy.run(*task)
            finally:
                copies.append(copy)

        healthy = True
        for outcome in pool.imap(run, [(None, (test,)) for test in everything]):
            healthy &= not outcome.found
            yield outcome
        if healthy and not tests_only:
            yield from pool.imap(run, [(bug, bug.tests) for bug in bugs])


def table(outcomes: Sequence[Outcome]) -> str:
    lines = ["| folder | bugs | found | survived |", "|---|---|---|---|"]
    of_bugs = [outcome for outcome in outcomes if outcome.bug]
    for folder in [*sorted({o.bug.folder for o in of_bugs if o.bug}), "all"]:
        some = [o for o in of_bugs if o.bug and folder in (o.bug.folder, "all")]
        found = sum(o.found for o in some)
        lines.append(f"| {folder} | {len(some)} | {found} | {len(some) - found} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="bugs whose file or description matches")
    parser.add_argument("--jobs", type=int, default=2, help="bugs at a time (default 2)")
    parser.add_argument("--tests", action="store_true", help="run the tests without a bug, then exit")
    parser.add_argument("--verbose", action="store_true", help="print pytest's report of each survivor")
    arguments = parser.parse_args()
    bugs = [bug for bug in read_bugs() if re.search(arguments.only, f"{bug.file} {bug.what}")]
    for bug in bugs:
        planted(bug)
    for name in IMPORTED:
        importlib.import_module(name)
    outcomes = []
    for outcome in run_all(bugs, arguments.jobs, tests_only=arguments.tests):
        outcomes.append(outcome)
        if outcome.bug is None:
            print(
                f"{'FAILS' if outcome.found else 'passes':8} {outcome.cpu_seconds:5.1f} s  {' '.join(outcome.tests)}",
                flush=True,
            )
        else:
            verdict = "found" if outcome.found else "SURVIVED"
            print(f"{verdict:8} {outcome.cpu_seconds:5.1f} s  {outcome.bug.file}: {outcome.bug.what}", flush=True)
        if outcome.found == (outcome.bug is None) and (arguments.verbose or outcome.bug is None):
            print(outcome.report, flush=True)
    of_bugs = [outcome for outcome in outcomes if outcome.bug]
    found = sum(outcome.found for outcome in of_bugs)
    minutes = (time.process_time() + sum(outcome.cpu_seconds for outcome in outcomes)) / 60
    print(f"\n{table(outcomes)}\n\n{found} of {len(of_bugs)} bugs found; {minutes:.1f} CPU minutes")
    healthy = not any(outcome.found for outcome in outcomes if outcome.bug is None)
    return 0 if healthy and found >= FOUND_SHARE * len(of_bugs) else 1


if __name__ == "__main__":
    sys.exit(main())
