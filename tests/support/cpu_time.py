"""CPU seconds of each test, its child processes included: `pytest --cpu-times=FILE` writes one JSON line per test.

Wall time depends on what else the machine does; CPU time hardly does. A test pays for the fixtures that it is the
first to use. A process that outlives the test, such as a shared server, is charged to the tests during which it ran.
`python tests/support/cpu_time.py FILE…` prints the total, the folders and the most expensive tests.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections import Counter
from pathlib import Path

import pytest

TICK = os.sysconf("SC_CLK_TCK")


class CpuTimes:
    """A pytest plugin that measures around setup, call and teardown together."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._write("(imports before the first test)", cpu_seconds())

    def _write(self, test: str, seconds: float) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"test": test, "seconds": round(seconds, 3)}) + "\n")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self):
        before = cpu_seconds()
        result = yield
        self._write("(collection)", cpu_seconds() - before)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        before = cpu_seconds()
        result = yield
        self._write(item.nodeid, cpu_seconds() - before)
        return result


def cpu_seconds() -> float:
    """Of this process, the children that it has waited for, and the descendants that run now."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in used) + sum(map(_with_reaped, _children("self")))


def _children(process: str) -> list[str]:
    try:
        return [
            child
            for thread in os.listdir(f"/proc/{process}/task")
            for child in Path(f"/proc/{process}/task/{thread}/children").read_text().split()
        ]
    except OSError:
        return []


def _with_reaped(process: str) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICK + sum(map(_with_reaped, _children(process)))


def _main(paths: list[str]) -> None:
    seconds: Counter[str] = Counter()
    for path in paths:
        for line in Path(path).read_text().splitlines():
            record = json.loads(line)
            seconds[record["test"]] += record["seconds"]
    folders, files = Counter(), Counter()
    for test, used in seconds.items():
        file = test.partition("::")[0]
        files[file] += used
        folders["/".join(file.split("/")[:2])] += used
    print(f"{sum(seconds.values()) / 60:.1f} CPU minutes in {len(seconds)} tests")
    for title, table, count in (("folder", folders, 40), ("file", files, 30), ("test", seconds, 60)):
        print(f"\nCPU s  {title}")
        print("\n".join(f"{used:5.0f}  {name}" for name, used in table.most_common(count)))


if __name__ == "__main__":
    _main(sys.argv[1:])
