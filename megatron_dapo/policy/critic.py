"""The critic: a value model beside the policy, on the same ranks and in the same layout.

It is a `Policy` with another head, loss and optimizer. Where the two take turns on the GPU (`critic.offload`), the
critic is in host memory except in `turn`, and the policy is there instead meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron_dapo.config import Config
from megatron_dapo.policy.policy import Policy
from megatron_dapo.weights.value_weights import ValueWeights, value_shape


class Critic(Policy):
    def __init__(self, config: Config, policy: Policy) -> None:
        """The policy must be on the GPU, and is there afterwards."""
        own = config.of_critic
        wanted = policy.runtime.device.type == "cuda" if config.critic.offload is None else config.critic.offload
        self.takes_turns = wanted or config.rollout.shares_gpus
        self._policy = policy
        if self.takes_turns:
            policy.offload()
        super().__init__(own, value_shape(own.policy.model), policy.runtime)
        if self.takes_turns:
            self.offload()
            policy.onload()

    def load_start(self) -> None:
        """Collective. What `critic.model` names; call it within `turn`."""
        self.load_hf(ValueWeights(self.config.policy.model, self.shape))

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """The critic is on the GPU. The policy was there before, and is there again afterwards."""
        if self.takes_turns:
            self._policy.offload()
            self.onload()
        try:
            yield
        finally:
            if self.takes_turns:
                self.offload()
                self._policy.onload()
