"""Processes that share one conversion, for example the tasks of an `srun` over several nodes.

Every task computes the same list of files and writes its part of them. They meet in the unfinished directory, which
all of them must see: rank 0 creates it, each rank leaves a note when its files are written, and rank 0 completes the
directory when it has all notes. There are no sockets and no collectives.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.files import write_atomically
from megatron_dapo.weights.mapping import WeightsError

_POLL_SECONDS = 0.2
_START_SECONDS = 600.0  # how long ranks wait for the first one to start


@dataclass(frozen=True, slots=True)
class CopyGroup:
    """This process among those that convert together. `token` is the same in all, and new for every start."""

    rank: int = 0
    size: int = 1
    token: str = ""

    @classmethod
    def from_environment(cls) -> CopyGroup:
        """The tasks of an srun step, or the ranks of torchrun; alone otherwise (also in a batch script itself)."""
        env = os.environ
        if int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and "SLURM_PROCID" in env:
            token = f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}.{env.get('SLURM_RESTART_COUNT', 0)}"
            return cls(int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"]), token)
        if "TORCHELASTIC_RUN_ID" in env and int(env.get("WORLD_SIZE", 1)) > 1:
            return cls(int(env["RANK"]), int(env["WORLD_SIZE"]), f"{env['TORCHELASTIC_RUN_ID']}.{env['MASTER_PORT']}")
        return cls()

    def owns(self, file: int) -> bool:
        return file % self.size == self.rank

    def start(self, notes: Path) -> None:
        """Rank 0, when the directory is ready: the others may write."""
        for note in notes.glob("rank_*.json"):
            note.unlink()
        if self.size > 1:
            write_atomically(notes / "start", self.token)

    def wait_for_start(self, notes: Path) -> None:
        def started() -> bool:
            try:
                return (notes / "start").read_text() == self.token
            except OSError:
                return False

        if not _wait(started, _START_SECONDS):
            raise WeightsError(f"rank 0 has not created {notes.parent} within {_START_SECONDS:.0f} s; see its messages")

    def hand_in(self, notes: Path, found: list[str], kept: int = 0, error: str | None = None) -> None:
        """Every rank but the first: its files are written, or why not."""
        content = {"token": self.token, "not_finite": found, "kept": kept, "error": error}
        write_atomically(notes / f"rank_{self.rank}.json", json.dumps(content))

    def collect(self, notes: Path) -> tuple[list[str], int]:
        """Rank 0: waits for the notes of all others and joins them. A failure of one is an error."""
        joined: list[str] = []
        kept = 0
        for rank in range(1, self.size):
            note = notes / f"rank_{rank}.json"
            _wait(note.exists)
            content = json.loads(note.read_text())
            if content["error"]:
                raise WeightsError(f"rank {rank}: {content['error']}")
            joined += content["not_finite"]
            kept += content["kept"]
        return joined, kept

    def wait_for_end(self, temporary: Path, path: Path) -> None:
        """Every rank but the first: waits until rank 0 has published or given up."""
        _wait(lambda: not temporary.exists())
        if not path.exists():
            raise WeightsError(f"{path} was not written; rank 0's message says why")


def _wait(condition: Callable[[], bool], seconds: float = float("inf")) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
