"""The grader of benchmarks/head_to_head.py, one rule behind the three signatures that the systems call.

A response is right if the last number after its last `Answer:` (or in all of it, where it has none) has the value of
the reference. It needs nothing but Python, so that each system can import it in its own environment.
"""

from __future__ import annotations

import re
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def score(response: str, answer: str) -> float:
    """1 or −1."""
    found = NUMBER.findall(response.rpartition("Answer:")[2])
    return 1.0 if found and _value(found[-1]) == _value(answer) else -1.0


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def grade(prompt: Any, response: str) -> float:
    """megatron-dapo: `reward.grader: python:grader.grade`."""
    return score(response, prompt.answer)


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """TRL: an element of `reward_funcs`."""
    return [score(text, right) for text, right in zip(completions, answer, strict=True)]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """verl: `reward.custom_reward_function`."""
    return score(solution_str, ground_truth)
