"""What the algorithm computes, as pure functions on tensors: no process groups, no megatron, no training loop.

- `loss`          the policy loss: sums of token losses, and metrics
- `objective`     what an objective is, and how the configuration names one
- `objectives/`   dapo, gspo, cispo: one file each
- `off_policy`    importance weights, token masks and sequence masks
- `token_batch`   the records that a loss reads: `TokenBatch` and `Scores`
- `aggregation`   token weights and counts: how token losses become one number
- `advantages`    group-relative advantages
- `kl`            estimators of a KL divergence
- `overlong`      length penalties, and which samples carry loss
- `filtering`     group filters of dynamic sampling
"""

from megatron_dapo.algorithm.advantages import group_advantages
from megatron_dapo.algorithm.aggregation import token_weights
from megatron_dapo.algorithm.filtering import (
    EarlyRejection,
    GroupFilter,
    give_up_after,
    keep_all,
    keep_group,
    load_group_filter,
    reward_range,
    reward_std,
)
from megatron_dapo.algorithm.kl import kl_estimate
from megatron_dapo.algorithm.loss import LossOutputs, PolicyLoss, policy_loss
from megatron_dapo.algorithm.objective import (
    Needs,
    Objective,
    Proximal,
    Scores,
    TokenBatch,
    TokenMetrics,
    load_objective,
)
from megatron_dapo.algorithm.overlong import (
    carries_loss,
    length_penalty,
    linear_overlong_penalty,
    relative_overlong_penalty,
    soft_overlong_penalty,
)

__all__ = [
    "EarlyRejection",
    "GroupFilter",
    "LossOutputs",
    "Needs",
    "Objective",
    "PolicyLoss",
    "Proximal",
    "Scores",
    "TokenBatch",
    "TokenMetrics",
    "carries_loss",
    "give_up_after",
    "group_advantages",
    "keep_all",
    "keep_group",
    "kl_estimate",
    "length_penalty",
    "linear_overlong_penalty",
    "load_group_filter",
    "load_objective",
    "policy_loss",
    "relative_overlong_penalty",
    "reward_range",
    "reward_std",
    "soft_overlong_penalty",
    "token_weights",
]
