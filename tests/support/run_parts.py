"""Runs the parts of `make test`: `python -m tests.support.run_parts NUMBER "NAME ARGUMENT…"…`, that many at a time.

Parts are forks of one process that has imported what nearly all tests import: seven CPU seconds for each part. A test
that failed beside other parts runs once more, alone: what fails twice is broken, and the rest is printed.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import warnings
from pathlib import Path


def main(at_once: int, parts: dict[str, list[str]]) -> int:
    import_once()
    waiting, running, codes, here = [*parts], {}, {}, os.getpid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                name = waiting.pop(0)
                running[start(name, ["--durations=40", *parts[name]], log(name))] = name
            process, status = os.wait()
            if name := running.pop(process, ""):
                codes[name] = os.waitstatus_to_exitcode(status)
                print(log(name).read_text(errors="replace"), end="", flush=True)
    finally:  # ctrl-C or SIGTERM: the parts end their servers
        left = running if os.getpid() == here else {}  # a part leaves by this way, too
        for process in left:
            os.kill(process, signal.SIGINT)
        for process in left:
            os.waitpid(process, 0)
    for name, code in codes.items():
        if code == 1:  # tests failed; anything else: pytest could not run them
            print(f"these failed beside other parts ({name}); once more, alone:", flush=True)
            again = ["-v", "--last-failed", "--last-failed-no-failures", "none", *parts[name]]
            codes[name] = os.waitstatus_to_exitcode(os.waitpid(start(name, again), 0)[1])
    broken = {name: code for name, code in codes.items() if code}
    if broken:
        print(f"pytest's exit code by part: {broken}", file=sys.stderr)
    return bool(broken)


def import_once() -> None:
    gc.disable()  # as tests/conftest.py
    sys.path.append(str(Path(__file__).parent))
    with warnings.catch_warnings(action="ignore"):
        for module in ("forked", "joined_ranks", "workplace"):
            importlib.import_module(module)
    sys.path.pop()
    gc.freeze()
    gc.enable()


def log(name: str) -> Path:
    return Path(f".pytest-part-{name}.log")


def start(name: str, arguments: list[str], output: Path | None = None) -> int:
    """The process that runs the part. It ends as any other, so that pytest removes its temporary folders."""
    sys.stdout.flush()
    if process := os.fork():
        return process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if output:
        file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
    import pytest

    rewriting = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"  # of plugins, which are not ours
    sys.exit(pytest.main(["-o", f"cache_dir=.pytest_cache/{name}", "-W", rewriting, *arguments]))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), {name: rest for name, *rest in map(str.split, sys.argv[2:])}))
