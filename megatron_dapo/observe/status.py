"""logs/status.json: what the run is doing now, for `megatron-dapo watch`. Written at most once a second.

Like the consoles it never ends a run: what cannot be written is left out.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_dapo.files import write_atomically
from megatron_dapo.observe.console import Console, SamplingProgress, sampling_text

EVERY = 1.0  # seconds between two writes
NAME = "status.json"


class StatusFile(Console):
    def __init__(self, path: Path, total: int) -> None:
        self._path = path
        self._state: dict[str, Any] = {"state": "running", "pid": os.getpid(), "step": 0, "total": total}
        self._phases: dict[str, dict[str, Any]] = {}
        self._written = 0.0

    def phase_started(self, name: str) -> None:
        self._phases[name] = {"name": name, "since": time.time(), "text": ""}
        self._write()

    def phase_ended(self, name: str) -> None:
        self._phases.pop(name, None)
        self._write()

    def note(self, name: str, text: str) -> None:
        self._update(name, text=text)

    def progress(self, name: str, done: float, total: float, text: str) -> None:
        self._update(name, text=f"{done:g}/{total:g} {text}".rstrip(), done=done, total=total)

    def sampling(self, progress: SamplingProgress) -> None:
        self._update("rollout", text=sampling_text(progress), done=progress.kept, total=progress.needed)

    def step(self, step: int, total: int, metrics: Mapping[str, float], remaining: float | None) -> None:
        self._state |= {"step": step, "total": total, "remaining": remaining}
        self._write(now=True)

    def close(self, status: str) -> None:
        self._state["state"] = status
        self._phases.clear()
        self._write(now=True)

    def _update(self, name: str, **values: Any) -> None:
        self._phases[name] = {"name": name, "since": time.time(), **self._phases.get(name, {}), **values}
        self._write()

    def _write(self, *, now: bool = False) -> None:
        moment = time.time()
        if not now and 0 <= moment - self._written < EVERY:
            return
        self._written = moment
        state = {**self._state, "phases": list(self._phases.values()), "updated": moment}
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(state), fsync=False)


def read_status(run_dir: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((run_dir / "logs" / NAME).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
