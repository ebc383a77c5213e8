"""(R − mean)/(std + eps) per group, unbiased, uneven groups, ungraded samples left out."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.algorithm import group_advantages


def test_uneven_groups_by_hand():
    # Group 7: 1, −1, −1, 1 → mean 0, unbiased var 4/3, std 1.154701 → ±0.866025.
    # Group 3: 1, −1, −1 → mean −1/3, var (16/9 + 4/9 + 4/9)/2 = 4/3, std 1.154701 → 1.154700, −0.577350 twice.
    # Over the whole batch instead: mean −1/7 and one std for both groups.
    rewards = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, -1.0, 1.0])
    advantages = group_advantages(rewards, torch.tensor([7, 3, 7, 3, 7, 3, 7]))
    expected = [0.866025, 1.154700, -0.866025, -0.577350, -0.866025, -0.577350, 0.866025]
    torch.testing.assert_close(advantages, torch.tensor(expected), atol=2e-6, rtol=0)
    assert advantages.dtype == torch.float32


def test_without_std():
    advantages = group_advantages([1.0, -1.0, -1.0, 5.0], [0, 0, 0, 1], normalize_std=False)
    torch.testing.assert_close(advantages, torch.tensor([4 / 3, -2 / 3, -2 / 3, 0.0]))


def test_eps_is_added_to_the_std_and_not_to_the_variance():
    # 0 and 2e-6: mean 1e-6, std √2·1e-6; 1e-6 / (2.414214e-6) = 0.414214.
    # Inside the variance: 1e-6 / √(2e-12 + 1e-6) = 0.001.
    advantages = group_advantages(torch.tensor([0.0, 2e-6]), [0, 0], eps=1e-6)
    torch.testing.assert_close(advantages, torch.tensor([-0.414214, 0.414214]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("eps", [1e-6, 0.0])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_rewards_and_singletons_give_exactly_zero(eps, normalize_std):
    # The std of ten equal rewards may come out above zero: it does on x86-64, where the mean of ten 0.7 is rounded.
    rewards = torch.tensor([0.7] * 10 + [0.3])
    advantages = group_advantages(rewards, [0] * 10 + [1], eps=eps, normalize_std=normalize_std)
    assert advantages.tolist() == [0.0] * 11


def test_ungraded_samples_are_left_out():
    # The graded three are group 3 above; counting the NaN, or a 0 in its place, would change all of them.
    rewards, valid = torch.tensor([1.0, math.nan, -1.0, -1.0, 9.0]), torch.tensor([True, False, True, True, False])
    advantages = group_advantages(rewards, [0, 0, 0, 0, 1], valid=valid)
    torch.testing.assert_close(advantages, torch.tensor([1.1547, 0, -0.57735, -0.57735, 0]), atol=2e-6, rtol=0)


def test_an_ungraded_sample_does_not_hide_that_the_others_are_equal():
    assert group_advantages([0.7, 0.7, -5.0], [0, 0, 0], valid=[True, True, False]).tolist() == [0, 0, 0]


def test_empty():
    assert group_advantages([], []).tolist() == []


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_missing_rewards_are_an_error(missing):
    with pytest.raises(ValueError, match=r"found (nan|inf) for sample 2 of group 5 \(1 such samples\).*valid=False"):
        group_advantages([1.0, 0.0, missing], [4, 4, 5])


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"group_ids: expected one entry per reward \(2,\), found \(3,\)"):
        group_advantages([1.0, 0.0], [0, 0, 0])
    with pytest.raises(ValueError, match=r"valid: expected one entry per reward \(2,\), found \(1,\)"):
        group_advantages([1.0, 0.0], [0, 0], valid=[True])
    with pytest.raises(ValueError, match=r"valid: expected torch.bool"):
        group_advantages([1.0, 0.0], [0, 0], valid=torch.tensor([1, 0]))


samples = st.lists(st.tuples(st.sampled_from([-1.0, -0.5, 0.0, 1.0]), st.integers(0, 3), st.booleans()), min_size=1)


@given(samples, st.randoms(use_true_random=False))
def test_order_and_other_groups_do_not_matter(batch, random):
    def advantages(items):
        rewards, ids, valid = zip(*items, strict=True)
        return group_advantages(rewards, ids, valid=list(valid)).tolist()

    whole = advantages(batch)
    order = random.sample(range(len(batch)), len(batch))
    assert advantages([batch[i] for i in order]) == pytest.approx([whole[i] for i in order], abs=1e-6)
    for group in {item[1] for item in batch}:
        members = [i for i, item in enumerate(batch) if item[1] == group]
        assert advantages([batch[i] for i in members]) == pytest.approx([whole[i] for i in members], abs=1e-6)
        assert sum(whole[i] for i in members) == pytest.approx(0, abs=1e-5)


def test_large_rewards_keep_their_differences():
    """In fp32, 10⁹ and 10⁹ + 1 are equal."""
    rewards = torch.tensor([1e9, 1e9 + 1], dtype=torch.float64)
    for values in (rewards, rewards.tolist()):
        found = group_advantages(values, [0, 0])
        assert found.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)
