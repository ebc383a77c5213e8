"""A check is a small function that tests one thing and returns `ok`, `warn` or `fail`, the last two with a remedy.

Each check has a time limit: a hanging file system or driver fails that check and does not hang the doctor. A check that
raises fails with the error.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """`found` describes the machine, `remedy` says what to change (empty when ok). `examine` knows the name."""

    name: str
    status: Status
    found: str
    remedy: str = ""


def ok(found: str) -> Check:
    return Check("", "ok", found)


def warn(found: str, remedy: str) -> Check:
    return Check("", "warn", found, remedy)


def fail(found: str, remedy: str) -> Check:
    return Check("", "fail", found, remedy)


@dataclass(frozen=True, slots=True)
class Probe:
    """A check to run: `look` returns its result within `seconds`."""

    name: str
    look: Callable[[], Check]
    seconds: float = 10.0


def examine(probe: Probe, seconds: float | None = None) -> Check:
    """Runs the probe in a thread; a thread that exceeds the time limit is abandoned."""
    limit = probe.seconds if seconds is None else seconds
    results: list[Check] = []

    def look() -> None:
        try:
            results.append(probe.look())
        except Exception as error:
            found = f"the check itself failed: {type(error).__name__}: {error}"
            results.append(fail(found, "read the error; if this machine is not the cause, report it"))

    thread = threading.Thread(target=look, name=f"doctor-{probe.name}", daemon=True)
    thread.start()
    thread.join(min(limit, threading.TIMEOUT_MAX))
    if not results:
        remedy = "what it tests hangs (a network file system, a driver, a controller): look there first"
        results.append(fail(f"no result within {limit:g} s", remedy))
    return replace(results[0], name=probe.name)


@dataclass(frozen=True, slots=True)
class CommandResult:
    """`code` is None when the command is not installed (`missing`) or did not end in time."""

    code: int | None
    out: str
    err: str = ""
    missing: bool = False


NOT_INSTALLED = CommandResult(None, "", "not installed", missing=True)
CommandRunner = Callable[..., CommandResult]


def run_command(
    command: Sequence[str], seconds: float = 10.0, environment: Mapping[str, str] | None = None
) -> CommandResult:
    """Runs a command and kills it after `seconds`."""
    try:
        done = subprocess.run(
            list(command), capture_output=True, text=True, timeout=seconds, env=environment,
            stdin=subprocess.DEVNULL, errors="replace",
        )  # fmt: skip
    except FileNotFoundError:
        return NOT_INSTALLED
    except subprocess.TimeoutExpired:
        return CommandResult(None, "", f"no result within {seconds:g} s")
    except OSError as error:
        return CommandResult(None, "", str(error))
    return CommandResult(done.returncode, done.stdout, done.stderr)


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
