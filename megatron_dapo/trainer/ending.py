"""How a run ends before its last step: what was saved, or why nothing was, and how to continue. For the user."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_dapo.errors import CheckpointError, GateError, LockLost, UserError
from megatron_dapo.trainer.collectives import DriverError
from megatron_dapo.trainer.train_step import TooManySkippedUpdates

CONTINUE = "start the same command again to continue"
REASONS: dict[type[BaseException], str] = {
    GateError: "no update was made",
    TooManySkippedUpdates: "the weights, the optimizer state or the data may be the cause",
    CheckpointError: "the checkpoint is what failed",
    LockLost: "the run directory belongs to another run now",
}


class RunEnded(UserError):
    """The run has ended on an error; the message says what was saved."""


def saved(path: Path) -> str:
    return f"Saved first: {path}; {CONTINUE}."


def nothing_new(newest: Path | None) -> str:
    return f"Everything is in {newest}; {CONTINUE}." if newest else f"Nothing was trained yet; {CONTINUE}."


def not_saved(error: BaseException, newest: Path | None) -> str:
    """`newest`: the checkpoint that this process saved or loaded last."""
    kinds = [type(error), error.kind if isinstance(error, DriverError) else type(error.__cause__)]
    found = [reason for kind, reason in REASONS.items() if any(issubclass(known, kind) for known in kinds)]
    reason = found[0] if found else "the ranks may not agree about the weights after this error"
    where = f"The last checkpoint of this run is {newest}; {CONTINUE} from it" if newest else "There is no checkpoint"
    return f"Not saved: {reason}. {where}."


def say(text: str) -> None:
    print(f"megatron-dapo: {text}", file=sys.stderr, flush=True)
