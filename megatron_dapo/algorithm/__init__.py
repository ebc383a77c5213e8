"""What DAPO computes, as pure functions on tensors: no process groups, no megatron, nothing of the loop."""

from megatron_dapo.algorithm.aggregation import token_weights
from megatron_dapo.algorithm.kl import kl_estimate
from megatron_dapo.algorithm.loss import LossInputs, LossOutputs, policy_loss, token_loss

__all__ = ["LossInputs", "LossOutputs", "kl_estimate", "policy_loss", "token_loss", "token_weights"]
