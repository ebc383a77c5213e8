"""Graders and the processes they run in. Imports no torch, so that grading processes start quickly."""

from megatron_dapo.reward.grader import Grader, GraderError, load_grader
from megatron_dapo.reward.pool import RewardPool

__all__ = ["Grader", "GraderError", "RewardPool", "load_grader"]
