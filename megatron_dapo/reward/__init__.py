"""Graders and the processes they run in. Imports no torch, so that grading processes start quickly.

- `grader`       the graders: built in or the user's function; `GraderError`
- `extract`      the final answer of a response
- `equivalence`  whether two answers are equivalent
- `dapo`         the published run's rules
- `pool`         `RewardPool`: grades from asyncio, in this process or in grading processes
- `responses`    `ResponseGrader`: decodes tokens, here or in a grading process
- `process`      one grading process as the pool sees it
- `worker`       what runs in a grading process
- `supervisor`   runs the worker and kills everything that it leaves behind
"""

from megatron_dapo.reward.grader import Grader, GraderError, load_grader
from megatron_dapo.reward.pool import RewardPool

__all__ = ["Grader", "GraderError", "RewardPool", "load_grader"]
