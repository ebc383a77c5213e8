"""The experts of a sample that was generated in parts: concatenated; zero where a part has not brought them."""

import numpy as np

from megatron_dapo.engines.protocol import Completion
from megatron_dapo.rollout.generation import append_completion, computed_tokens
from megatron_dapo.types import FinishReason, Sample, as_logprobs, as_tokens


def empty_sample():
    return Sample("p", 0, as_tokens([1, 2, 3]), as_tokens([]), as_logprobs([]), FinishReason.ABORT)


def part(count, rows, first):
    """`count` tokens with `rows` rows of experts, numbered from `first`; no rows: not brought."""
    experts = None if rows is None else np.arange(first, first + rows, dtype=np.uint8)[:, None].repeat(2, 1)
    return Completion(as_tokens(range(count)), as_logprobs([-1.0] * count), FinishReason.ABORT, routed_experts=experts)


def extend(sample, *parts):
    for count, brings, first in parts:
        start = computed_tokens(sample, sample.length)
        rows = len(sample.prompt_tokens) + sample.length + count - 1 - start if brings else None
        append_completion(sample, part(count, rows, first))
    return sample


def test_parts_are_concatenated():
    sample = extend(empty_sample(), (4, True, 1), (2, True, 50))
    # 3 + 4 − 1 rows of the first part; the second begins with the last token of the first.
    assert sample.routed_experts[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 50, 51]
    assert len(sample.routed_experts) == len(sample.prompt_tokens) + sample.length - 1


def test_what_a_part_has_not_brought_is_zero():
    sample = extend(empty_sample(), (4, False, 0), (2, True, 50))
    assert sample.routed_experts[:, 0].tolist() == [0] * 6 + [50, 51]
    sample = extend(empty_sample(), (4, True, 1), (2, False, 0), (1, True, 90))
    assert sample.routed_experts[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 0, 0, 90]
    sample = extend(empty_sample(), (4, True, 1), (2, False, 0))
    assert sample.routed_experts[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert extend(empty_sample(), (4, False, 0)).routed_experts is None


def test_a_turn_brings_the_experts_of_what_was_appended_before_it():
    sample = extend(empty_sample(), (4, True, 1))
    sample.trained = np.array([True] * 4 + [False] * 2)
    sample.response_tokens = np.concatenate([sample.response_tokens, as_tokens([8, 9])])
    sample.engine_logprobs = np.concatenate([sample.engine_logprobs, as_logprobs([0, 0])])
    assert computed_tokens(sample, sample.length) == 3 + 4 - 1  # the last generated token and the two appended are not
    extend(sample, (2, True, 50))
    assert sample.routed_experts[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 50, 51, 52, 53]
    assert len(sample.routed_experts) == len(sample.prompt_tokens) + sample.length - 1
    assert sample.trained.tolist() == [True] * 4 + [False] * 2 + [True] * 2


def test_they_survive_the_state():
    sample = extend(empty_sample(), (4, True, 1))
    again = Sample.from_state(sample.to_state())
    assert again.routed_experts.dtype == np.uint8 and np.array_equal(again.routed_experts, sample.routed_experts)
    as_lists = {**sample.to_state(), "routed_experts": sample.routed_experts.tolist()}
    assert Sample.from_state(as_lists).routed_experts.tolist() == sample.routed_experts.tolist()
