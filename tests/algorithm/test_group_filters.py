"""Filters return (keep, reason). They read accuracy or raw scores, and an exception is never a rejection."""

import sys
import types

import numpy as np
import pytest

from megatron_dapo.algorithm.filtering import keep_group, load_group_filter, reward_range, reward_std
from megatron_dapo.errors import UserError
from megatron_dapo.types import FinishReason, Grade, Group, Prompt, Sample, as_logprobs, as_tokens


def group(*grades: tuple[bool | None, float] | None, lengths: list[int] | None = None) -> Group:
    samples = []
    for i, grade in enumerate(grades):
        length = lengths[i] if lengths else 1
        tokens, logprobs = as_tokens([5] * length), as_logprobs([-1.0] * length)
        verdict = None if grade is None else Grade(*grade)
        samples.append(Sample("p1", i, as_tokens([1]), tokens, logprobs, FinishReason.STOP, grade=verdict))
    return Group(Prompt("p1", "?", as_tokens([1])), samples)


RIGHT, WRONG, UNGRADED = (True, 1.0), (False, -1.0), (None, 0.0)


@pytest.mark.parametrize(
    ("grades", "expected"),
    [
        ([RIGHT, WRONG, WRONG], (True, "kept")),
        ([RIGHT, RIGHT], (False, "all-correct")),
        ([WRONG, WRONG], (False, "all-wrong")),
        ([UNGRADED, UNGRADED], (False, "ungraded")),
        ([None, None], (False, "ungraded")),
        ([], (False, "ungraded")),
        ([RIGHT, RIGHT, UNGRADED, None], (False, "all-correct")),  # ungraded is not wrong
        ([RIGHT, WRONG, UNGRADED], (True, "kept")),
    ],
)
def test_accuracy_filter(grades, expected):
    assert keep_group(group(*grades)) == expected


def test_accuracy_filter_ignores_scores_and_lengths():
    """All correct, with shaped scores and different lengths: there is still no signal about correctness."""
    assert keep_group(group((True, 1.0), (True, 0.25), lengths=[10, 20])) == (False, "all-correct")


def test_reward_range():
    assert reward_range(group((True, 0.2), (True, 0.3))) == (True, "kept")
    assert reward_range(group(UNGRADED, None)) == (False, "ungraded")
    assert reward_range(group((True, 0.5), UNGRADED)) == (False, "equal-scores")  # an ungraded 0.0 is not a score
    point_seven = float(np.float32(0.7))
    assert np.full(10, 0.7, np.float32).std(ddof=1) > 0  # what "std > 0" would see
    assert reward_range(group(*[(True, point_seven)] * 10)) == (False, "equal-scores")


def test_reward_std():
    assert reward_std(group(RIGHT, WRONG)) == (True, "kept")
    assert reward_std(group((True, 0.7), (True, 0.7 + 1e-7))) == (False, "small-std")
    assert reward_std(group(RIGHT)) == (False, "small-std")
    assert reward_std(group(UNGRADED)) == (False, "ungraded")


@pytest.mark.parametrize("function", [reward_range, reward_std])
def test_a_nan_score_is_an_error(function):
    with pytest.raises(UserError, match=r"'p1': expected finite scores, found \[nan, 1.0\]"):
        function(group((True, float("nan")), RIGHT))


def test_filters_by_name():
    assert load_group_filter("accuracy") is keep_group
    assert load_group_filter("reward-range") is reward_range
    assert load_group_filter("reward-std") is reward_std
    assert load_group_filter("none")(group(WRONG, WRONG)) == (True, "kept")
    with pytest.raises(UserError, match=r"expected one of accuracy, .*, found 'acuracy'"):
        load_group_filter("acuracy")


@pytest.fixture
def own(monkeypatch):
    """A user's module whose one filter, `f`, is the function that a test passes."""
    module = types.ModuleType("own_group_filters")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def install(function):
        module.f = function
        return load_group_filter("python:own_group_filters.f")

    return install


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (True, (True, "kept")),
        (False, (False, "rejected")),
        (np.bool_(True), (True, "kept")),
        ((False, "too-easy"), (False, "too-easy")),
        ((np.bool_(True), "fine"), (True, "fine")),
    ],
)
def test_user_filter(own, returned, expected):
    got = own(lambda group: returned)(group(RIGHT))
    assert got == expected
    assert type(got[0]) is bool


@pytest.mark.parametrize("returned", [None, 1, "yes", (True,), (1, "reason"), (True, None)])
def test_a_user_filter_must_return_a_bool_or_a_pair(own, returned):
    with pytest.raises(UserError, match=r"python:own_group_filters.f must return a bool or .*on prompt 'p1'"):
        own(lambda group: returned)(group(RIGHT))


def test_an_exception_in_a_user_filter_is_an_error(own):
    def broken(group):
        raise KeyError("difficulty")

    with pytest.raises(
        UserError, match=r"own_group_filters.f, prompt 'p1', raised KeyError at test_group_filters.py:\d+: 'difficulty'"
    ) as caught:
        own(broken)(group(RIGHT, WRONG))
    assert isinstance(caught.value.__cause__, KeyError)


def test_unknown_user_filter():
    with pytest.raises(UserError, match=r"rollout\.group_filter: cannot import"):
        load_group_filter("python:no_such_module_here.f")
