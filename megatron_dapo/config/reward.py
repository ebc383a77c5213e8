"""`reward`: which grader scores the answers, and the processes it runs in."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_dapo.config.base import Section


class RewardConfig(Section):
    grader: str = Field("math", description="dapo, math, exact, or python:module.function for your own.")
    scores: Literal["plus-minus-one", "zero-one"] = "plus-minus-one"
