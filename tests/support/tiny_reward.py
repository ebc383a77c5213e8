"""Rewards that a random model sometimes earns: cheap and deterministic."""

import os
import time
from pathlib import Path

from megatron_dapo.types import Grade


def even_characters(prompt, response):
    """Correct if at least three of the first four characters have even codes."""
    head = response[:4]
    return sum(ord(c) % 2 == 0 for c in head) >= 3


def sometimes_ungraded(prompt, response):
    """The same, without a verdict on one response in eight: these are counted."""
    return Grade(None, 0.0) if sum(map(ord, response)) % 8 == 0 else even_characters(prompt, response)


def paced(prompt, response):
    """The same, after the number of seconds in the file PACE: a test can slow a run down and speed it up."""
    time.sleep(float(Path(os.environ["PACE"]).read_text()))
    return even_characters(prompt, response)


def breakable(prompt, response):
    """The same until the file BREAK exists: with `raise` in it the grader fails, else every response is wrong."""
    file = Path(os.environ["BREAK"])
    if file.exists():
        if file.read_text() == "raise":
            raise RuntimeError("the grader is broken")
        return False
    return even_characters(prompt, response)
