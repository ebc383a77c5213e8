"""What DAPO computes, as pure functions on tensors: no process groups, no megatron, nothing of the loop."""

from megatron_dapo.algorithm.advantages import group_advantages
from megatron_dapo.algorithm.aggregation import token_weights
from megatron_dapo.algorithm.filtering import (
    GroupFilter,
    keep_all,
    keep_group,
    load_group_filter,
    reward_range,
    reward_std,
)
from megatron_dapo.algorithm.kl import kl_estimate
from megatron_dapo.algorithm.loss import LossInputs, LossOutputs, policy_loss, policy_loss_sum, token_loss
from megatron_dapo.algorithm.overlong import (
    carries_loss,
    length_penalty,
    linear_overlong_penalty,
    relative_overlong_penalty,
    soft_overlong_penalty,
)

__all__ = [
    "GroupFilter",
    "LossInputs",
    "LossOutputs",
    "carries_loss",
    "group_advantages",
    "keep_all",
    "keep_group",
    "kl_estimate",
    "length_penalty",
    "linear_overlong_penalty",
    "load_group_filter",
    "policy_loss",
    "policy_loss_sum",
    "relative_overlong_penalty",
    "reward_range",
    "reward_std",
    "soft_overlong_penalty",
    "token_loss",
    "token_weights",
]
