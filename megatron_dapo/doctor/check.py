"""A check: a small function that looks at one thing and says ok, warn or fail, with the remedy.

A check has its own time limit: a file system or driver that hangs makes that check fail, never the doctor hang. A
check that raises has found something, too: it fails with the error.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """`found` is what is there, `remedy` what to do about it (empty when ok)."""

    name: str
    status: Status
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """A check to be made. `look` returns its result; the name is filled in here."""

    name: str
    look: Callable[[], Check]
    seconds: float = 10.0


def examine(probe: Probe, seconds: float | None = None) -> Check:
    """Runs the probe in a thread of its own, which is left behind if the time is up."""
    limit = probe.seconds if seconds is None else seconds
    results: list[Check] = []

    def look() -> None:
        try:
            results.append(probe.look())
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            results.append(Check(probe.name, "fail", f"the check itself failed: {reason}", "read the error; if it is "
                                 "none of this machine's doing, report it"))  # fmt: skip

    thread = threading.Thread(target=look, name=f"doctor-{probe.name}", daemon=True)
    thread.start()
    thread.join(limit)
    if results:
        return results[0]
    remedy = "something it looks at hangs (a network file system, a driver, a controller): look there first"
    return Check(probe.name, "fail", f"no answer within {limit:g} s", remedy)


@dataclass(frozen=True, slots=True)
class Answer:
    """How a command ended; `code` is None when it is not there or did not end in time."""

    code: int | None
    out: str
    err: str = ""

    @property
    def missing(self) -> bool:
        return self.code is None and self.err == "not found"


def ask(command: Sequence[str], seconds: float = 10.0, environment: Mapping[str, str] | None = None) -> Answer:
    """Runs a command and waits at most `seconds`; then it is ended. Only processes started here are ended."""
    try:
        done = subprocess.run(
            list(command), capture_output=True, text=True, timeout=seconds, env=None if environment is None else
            dict(environment), stdin=subprocess.DEVNULL, errors="replace",
        )  # fmt: skip
    except FileNotFoundError:
        return Answer(None, "", "not found")
    except subprocess.TimeoutExpired:
        return Answer(None, "", f"no answer within {seconds:g} s")
    except OSError as error:
        return Answer(None, "", str(error))
    return Answer(done.returncode, done.stdout, done.stderr)


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def version_tuple(text: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" is (2, 13, 0); what is no number ends it."""
    numbers = []
    for part in text.split("+")[0].split("."):
        digits = "".join(c for c in part if c.isdigit())
        if not digits or not part[0].isdigit():
            break
        numbers.append(int(digits if part.isdigit() else part[: len(part) - len(part.lstrip("0123456789"))]))
    return tuple(numbers)
