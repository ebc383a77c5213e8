"""What the algorithm computes, as pure functions on tensors: no process groups, no megatron, no training loop.

- `loss`          the policy loss: sums of token losses, and metrics; loads the objective
- `value_loss`    the critic's loss, in the same form
- `objective`     what an objective is, and the records it reads: `TokenBatch` and `Scores`
- `objectives/`   dapo, gspo, cispo: one file each
- `off_policy`    importance weights, token masks and sequence masks
- `aggregation`   token weights and counts: how token losses become one number
- `advantages`    advantage estimators: from rewards to a number for each rollout or token
- `gae`           the estimator that reads a critic's values, and how good those are
- `advantage_input`  what an estimator reads
- `overlong`      length penalties, and which samples carry loss
- `filtering`     group filters of dynamic sampling

Exported here is what an objective or a training script of your own needs.
"""

from megatron_dapo.algorithm.advantage_input import AdvantageInput
from megatron_dapo.algorithm.advantages import group_advantages
from megatron_dapo.algorithm.aggregation import positive_weights, token_weights
from megatron_dapo.algorithm.filtering import keep_group
from megatron_dapo.algorithm.loss import LossOutputs, PolicyLoss
from megatron_dapo.algorithm.objective import Needs, Objective, Proximal, Scores, TokenBatch, TokenMetrics
from megatron_dapo.algorithm.overlong import soft_overlong_penalty

__all__ = [
    "AdvantageInput", "LossOutputs", "Needs", "Objective", "PolicyLoss", "Proximal", "Scores", "TokenBatch",
    "TokenMetrics", "group_advantages", "keep_group", "positive_weights", "soft_overlong_penalty", "token_weights",
]  # fmt: skip
