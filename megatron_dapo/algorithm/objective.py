"""What an objective is: it declares what it needs and computes the loss of each token.

An objective is a class derived from `Objective`. `algorithm.objective` names it: `gspo` is the class that
`objectives/gspo.py` calls `objective`; `python:module.name` is the class `name` of your own module. Nothing else has to
know it: the loss, the fused head, the validation of mini-batches and the metrics ask the object.

`PolicyLoss` adds what all objectives share: off-policy corrections, the KL term, the entropy bonus, aggregation.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from torch import Tensor

from megatron_dapo.algorithm.kl import MAX_LOG_RATIO
from megatron_dapo.algorithm.token_batch import Scores, TokenBatch
from megatron_dapo.config.algorithm import AlgorithmConfig, ObjectiveOption
from megatron_dapo.config.base import ConfigError
from megatron_dapo.plugins import is_plugin, load_function

Sums = Mapping[str, Tensor]  # [tokens]: each token's value is the total of its sequence


@dataclass(frozen=True, slots=True)
class Needs:
    """What a loss reads beyond log-probs, old log-probs and advantages."""

    whole_sequences: bool = False  # sums over each sequence; the head then makes two passes instead of one
    entropy: bool = False
    reference: bool = False  # log-probs of the reference policy
    engine: bool = False  # log-probs that the inference engine reported

    def __or__(self, other: Needs) -> Needs:
        return Needs(*(getattr(self, f.name) or getattr(other, f.name) for f in fields(self)))


@dataclass(slots=True)
class TokenMetrics:
    """Values [tokens], without gradient. `means` are averaged over active tokens; names in `maxima` end in `_max`."""

    means: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


class Objective:
    """Base class. A subclass defines `token_losses`, and whatever of the rest it needs.

    Masked positions arrive as zeros in every tensor, and the loss there must be finite. No method may read a value on
    the host (`.item()`, `if` on a tensor): that would make the host wait for the device in every micro-batch.
    """

    needs: ClassVar[Needs] = Needs()
    default_options: ClassVar[Mapping[str, ObjectiveOption]] = {}  # the names that `objective_options` may set

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config
        for name, value in config.objective_options.items():
            self._check_option(name, value)
        self.options: dict[str, Any] = {**self.default_options, **config.objective_options}

    def _check_option(self, name: str, value: ObjectiveOption) -> None:
        if name not in self.default_options:
            known = ", ".join(self.default_options) or "none"
            raise ConfigError(
                f"algorithm.objective_options: {self.config.objective} has no option {name!r}; its options: {known}"
            )
        default = self.default_options[name]
        if any(isinstance(value, kind) != isinstance(default, kind) for kind in (bool, str)):
            raise ConfigError(
                f"algorithm.objective_options.{name}: expected a value like its default {default!r}, found {value!r}"
            )

    def sequence_values(self, scores: Scores, batch: TokenBatch) -> dict[str, Tensor]:
        """[tokens] values to add up over each whole sequence, on all ranks that share it; called without gradient.

        Only called where `needs.whole_sequences` is set. `token_losses` and `metrics` get the totals as `sums`.
        """
        return {}

    def token_losses(self, scores: Scores, batch: TokenBatch, sums: Sums) -> Tensor:
        """The loss [tokens] before importance weights and aggregation; differentiable in `scores`.

        Elementwise over any slice of tokens: apart from `sums`, a token's loss depends on that token alone.
        """
        raise NotImplementedError

    def metrics(self, scores: Scores, batch: TokenBatch, sums: Sums) -> TokenMetrics:
        """Called once per micro-batch, without gradient."""
        return ratio_metrics(bounded_exp(scores.logprobs - batch.old_logprobs))


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio) with the log-ratio held within ±20; beyond it the gradient is zero."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def ratio_metrics(ratio: Tensor) -> TokenMetrics:
    return TokenMetrics(means={"ratio_mean": ratio}, maxima={"ratio_max": ratio})


def load_objective(config: AlgorithmConfig) -> Objective:
    """The objective that the configuration names, made from the configuration."""
    name = config.objective
    if is_plugin(name):
        make = load_function(name, "algorithm.objective")
    else:
        make = importlib.import_module(f"megatron_dapo.algorithm.objectives.{name}").objective
    objective = make(config)
    if not isinstance(objective, Objective):
        raise ConfigError(
            f"algorithm.objective: {name} must be a class derived from megatron_dapo.algorithm.Objective, "
            f"but it made a {type(objective).__name__}"
        )
    return objective
