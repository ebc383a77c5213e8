"""Micro-batches: every sample exactly once, within the budget, balanced over ranks, deterministic."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.policy.schedule import first_fit_decreasing, partition, schedule_micro_batches

lengths_and_layout = st.tuples(
    st.lists(st.integers(1, 100), max_size=60), st.integers(1, 5), st.integers(100, 300), st.integers(1, 4)
)


@given(lengths_and_layout)
def test_every_sample_exactly_once_and_within_budget(case):
    lengths, ranks, budget, multiple = case
    assigned = schedule_micro_batches(lengths, ranks, budget, multiple)
    assert sorted(i for bins in assigned for micro in bins for i in micro) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in micro) <= budget for bins in assigned for micro in bins)


@given(lengths_and_layout)
def test_all_ranks_run_the_same_number_of_micro_batches(case):
    lengths, ranks, budget, multiple = case
    counts = {len(bins) for bins in schedule_micro_batches(lengths, ranks, budget, multiple)}
    assert len(counts) == 1
    assert counts.pop() % multiple == 0


@given(lengths_and_layout)
def test_the_same_lengths_give_the_same_micro_batches(case):
    assert schedule_micro_batches(*case) == schedule_micro_batches(*case)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 5))
def test_ranks_differ_by_at_most_the_longest_sample(lengths, ranks):
    loads = [sum(lengths[i] for i in share) for share in partition(lengths, ranks)]
    assert max(loads) - min(loads) <= max(lengths)


def test_long_tailed_lengths_are_balanced_and_dense():
    lengths = np.random.default_rng(0).lognormal(7, 1, 2048).clip(16, 20480).astype(int).tolist()
    assigned = schedule_micro_batches(lengths, 16, 32768)
    loads = [sum(lengths[i] for micro in bins for i in micro) for bins in assigned]
    assert max(loads) / (sum(loads) / 16) < 1.02


def test_first_fit_decreasing_by_hand():
    # 7 | 6 4 | 5 3 2: sorted 7 6 5 4 3 2, budget 10: 7 opens a, 6 opens b, 5 opens c, 4 joins b, 3 joins a, 2 joins c
    assert first_fit_decreasing(range(6), [7, 6, 5, 4, 3, 2], 10) == [[0, 4], [1, 3], [2, 5]]


def test_fewer_samples_than_ranks_leaves_empty_micro_batches():
    assert schedule_micro_batches([5, 9], 3, 10) == [[[1]], [[0]], [[]]]


def test_extra_micro_batches_come_from_the_fullest():
    # interleaved pipelines need an even number, so one micro-batch of three samples becomes two
    assert sorted(map(sorted, schedule_micro_batches([4, 3, 2], 1, 10, multiple=2)[0])) == [[0], [1, 2]]


def test_a_sample_beyond_the_budget_is_an_error():
    with pytest.raises(Exception, match="sample 1 has 11 tokens, more than the micro-batch budget of 10"):
        schedule_micro_batches([3, 11], 1, 10)
