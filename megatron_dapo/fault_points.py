"""Named moments of a run at which a test may kill the process, raise an error or wait.

Production code calls `reach(name)` at the moment it names. Without a registered action this is one test of an empty
dictionary. A test registers an action with `on(name, …)` in the process under test, usually after a fork and before
the run starts. Every name is declared in `POINTS` with what has and has not happened at that moment; a test compares
the declarations with the calls in the source.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

POINTS = {
    "checkpoint/before_stage": "the save was decided; nothing is copied or written",
    "checkpoint/before_write": "the state is in host memory; this rank has written no file of the checkpoint",
    "checkpoint/write_file": "one of several threads is about to create the next file of the checkpoint",
    "checkpoint/after_write": "this rank has written and synced all of its files; the checkpoint has no final name",
    "checkpoint/before_publish": "all ranks have written everything; the checkpoint has no final name",
    "loop/before_log_probs": "the batch of a step is on every rank; its old log-probs are not computed",
    "loop/before_critic_update": "the critic's next update has not begun; the policy's are done",
    "loop/before_update": "the next update has not begun",
    "loop/before_await_ahead": "the step is recorded; the batch generated ahead is not complete",
    "loop/before_sync": "the policy's updates are done; without a critic the step is also saved where that is due",
    "rollouts/before_collect": "in the rollout thread: sampling of a batch has not begun",
    "rollouts/before_grade": "in the rollout thread: a response is generated and not graded",
    "rollouts/after_turn": "in the rollout thread: a turn of a conversation is generated; its function waits",
    "rollouts/sampling": "in the rollout thread: a sample of a batch is graded, or a group decided",
    "sync/before_bucket": "the engines wait for weights; the next bucket is not produced",
    "sync/before_serve": "the engines have all weights and do not serve them; a colocated trainer holds none",
    "rollouts/after_collect": "in the rollout thread: the batch is complete and has left the sampler",
    "rollouts/evaluating": "in the rollout thread: a response of an evaluation is graded",
    "checkpoint/before_prune": "the checkpoint has its final name; older ones still exist",
}

_lock = threading.Lock()
_actions: dict[str, list[tuple[int, Callable[[], None]]]] = {}
_counts: dict[str, int] = {}


def reach(name: str) -> None:
    """Called by production code, from any thread. Runs the actions registered for this arrival."""
    if not _actions:
        return
    with _lock:
        _counts[name] = count = _counts.get(name, 0) + 1
        due = [action for at, action in _actions.get(name, []) if at == count]
    for action in due:
        action()


def on(name: str, action: Callable[[], None], *, count: int = 1) -> None:
    """For tests. Runs `action` at the `count`-th arrival at `name`, in the thread that arrives."""
    if name not in POINTS:
        raise KeyError(f"there is no fault point {name!r}; declared are {', '.join(POINTS)}")
    _actions.setdefault(name, []).append((count, action))


def clear() -> None:
    """For tests. Forgets all actions and counts."""
    _actions.clear()
    _counts.clear()


def kill() -> None:
    """An action: this process ends as with kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)
