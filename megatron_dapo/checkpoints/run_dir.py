"""What a run directory has besides good files: things that are in the way, and what a killed run has left.

`heal` is called by whoever has taken the lock of the directory. It deletes nothing of the user's: what is in the way
gets another name. `in_the_way` and `left_memory` only look, for `megatron-dapo doctor RUN_DIR`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path

from megatron_dapo.checkpoints.folder import SETTINGS
from megatron_dapo.files import set_aside

FOLDERS = ("logs", "logs/heartbeat", "checkpoints", "samples", "evaluations", "traces")
FILES = (
    "config.yaml", SETTINGS, "metrics.jsonl", "metrics.jsonl.damaged", "environment.json", "report.html",
    "logs/status.json", "logs/warnings.log", "logs/trainer.log",
)  # fmt: skip
SHARED_MEMORY = Path("/dev/shm")


def heal(run_dir: Path) -> list[str]:
    """One line for each thing that was changed."""
    lines = clear_the_way(run_dir)
    for path in left_memory(run_dir):
        with contextlib.suppress(OSError):
            path.unlink()
            lines.append(f"{path}, shared memory of a run that was killed, was removed")
    return lines


def clear_the_way(run_dir: Path) -> list[str]:
    """As `heal`, also without the lock: a run that is alive has the right kinds of files."""
    lines = []
    for path in in_the_way(run_dir):
        with contextlib.suppress(OSError):  # who needs it says why it cannot be used
            lines.append(f"{path} was in the way: it is now {set_aside(path).name}")
    return lines


def in_the_way(run_dir: Path) -> list[Path]:
    """Files with the names of our folders; folders, pipes and broken links with the names of our files."""
    folders = [*(run_dir / name for name in FOLDERS), *(run_dir / "evaluations").glob("step_*[0-9]")]
    wrong = [path for path in folders if os.path.lexists(path) and not path.is_dir()]
    return wrong + [path for name in FILES if os.path.lexists(path := run_dir / name) and not path.is_file()]


def left_memory(run_dir: Path) -> list[Path]:
    """Blocks by which torch shared tensors with the servers, of ranks on this host that have ended. Their heartbeats
    are still there, so they were killed; torch's own cleaning was, too, if a whole job was."""
    found = []
    for heartbeat in (run_dir / "logs").glob("**/heartbeat/rank_*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            rank = json.loads(heartbeat.read_text())
            pid, here = int(rank["pid"]), rank["host"] == socket.gethostname()
            if here and not Path(f"/proc/{pid}").exists():
                found += [path for path in SHARED_MEMORY.glob(f"torch_{pid}_*") if path.stat().st_uid == os.getuid()]
    return found
