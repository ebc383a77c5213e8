"""Graders and the processes they run in. Imports no torch, so that grading processes start quickly.

- `grader`       `Graders`, the interface; the graders built in, or the user's function; `GraderError`
- `extract`      the final answer of a response
- `equivalence`  whether two answers are equivalent
- `dapo`         the published run's rules
- `combined`     `ResponseGrader`: what a run grades samples with; `open_graders`: one grader, or several with weights
- `remote`       graders behind a server: the user's, or a model behind an OpenAI-compatible server
- `pool`         `RewardPool`: grades from asyncio, in this process or in grading processes
- `worker`       what runs in a grading process
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_dapo.reward.combined import open_graders
    from megatron_dapo.reward.grader import Grader, GraderError, Graders, load_grader
    from megatron_dapo.reward.pool import RewardPool

__all__ = ["Grader", "GraderError", "Graders", "RewardPool", "load_grader", "open_graders"]

_MODULES = {
    "Grader": "grader", "GraderError": "grader", "load_grader": "grader", "Graders": "grader",
    "open_graders": "combined", "RewardPool": "pool",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports when asked: a grading process needs neither the pool nor the configuration."""
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
