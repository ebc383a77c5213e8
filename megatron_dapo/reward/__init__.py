"""Graders and the processes they run in. Imports no torch, so that grading processes start quickly.

- `grader`       the graders: built in or the user's function; `GraderError`
- `extract`      the final answer of a response
- `equivalence`  whether two answers are equivalent
- `dapo`         the published run's rules
- `combined`     `open_graders`: the grader of a run, or several with weights; `Graders`, their interface
- `remote`       requests to servers that grade
- `http_reward`  a server of the user's
- `judge`        a model behind an OpenAI-compatible server
- `pool`         `RewardPool`: grades from asyncio, in this process or in grading processes
- `responses`    `ResponseGrader`: decodes tokens, here or in a grading process
- `process`      one grading process as the pool sees it
- `worker`       what runs in a grading process
- `supervisor`   runs the worker and kills everything that it leaves behind
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_dapo.reward.combined import Graders, open_graders
    from megatron_dapo.reward.grader import Grader, GraderError, load_grader
    from megatron_dapo.reward.pool import RewardPool

__all__ = ["Grader", "GraderError", "Graders", "RewardPool", "load_grader", "open_graders"]

_MODULES = {
    "Grader": "grader", "GraderError": "grader", "load_grader": "grader", "Graders": "combined",
    "open_graders": "combined", "RewardPool": "pool",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports when asked: a grading process needs neither the pool nor the configuration."""
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
