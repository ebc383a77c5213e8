"""What an objective is, and the two records it reads: `TokenBatch`, known before the forward pass, and `Scores`, from
the model.

An objective is a class derived from `Objective`: it declares what it needs and computes the loss of each token.
`algorithm.objective` names it: `gspo` is the class that `objectives/gspo.py` calls `objective`; `python:module.name` is
the class `name` of your own module. Nothing else has to know it: the loss, the fused head, the validation of
mini-batches and the metrics ask the object. `PolicyLoss` adds what all objectives share: off-policy corrections, the KL
term, the entropy bonus, aggregation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, expm1

from megatron_dapo.config.algorithm import AlgorithmConfig, ObjectiveOption
from megatron_dapo.config.base import ConfigError

# Per-token estimates of a KL divergence from the log-probs of sampled tokens.


Estimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: larger than any meaningful ratio, far below overflow


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: Estimator = "k3") -> Tensor:
    """Elementwise estimate of KL(π‖ref) from π's and ref's log-probs of tokens sampled from π.

    Differentiable in both. k3 bounds d by 20 from above, beyond which its gradient is zero; it needs no lower bound.
    """
    if logprobs.shape != ref_logprobs.shape:
        raise ValueError(
            f"ref_logprobs: expected the shape of logprobs {tuple(logprobs.shape)}, found {tuple(ref_logprobs.shape)}"
        )
    difference = ref_logprobs - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        bounded = difference.clamp(max=MAX_LOG_RATIO)
        return expm1(bounded) - bounded  # expm1 keeps the digits that exp(d) − 1 loses near d = 0
    raise ValueError(f"KL estimator: expected k1, k2 or k3, found {estimator!r}")


# Where the log-probs of the proximal policy are: the trainer's, before the first update of a step. "old": old_logprobs.
# "current": the scores, because no weight has changed since. "unknown": nowhere; old_logprobs are the engine's.
Proximal = Literal["old", "current", "unknown"]


class Scores(NamedTuple):
    """What the model says about each token. Both are differentiable and fp32."""

    logprobs: Tensor  # the policy's log-prob of the token
    entropy: Tensor | None = None  # of the policy's distribution at the token

    def part(self, chunk: slice) -> Scores:
        return Scores(self.logprobs[chunk], None if self.entropy is None else self.entropy[chunk])


@dataclass(slots=True)
class TokenBatch:
    """What is known of each token before the forward pass. Nothing here has a gradient.

    Positions that belong to no sequence (padding) have mask False and any id within 0..sequences−1.
    """

    old_logprobs: Tensor  # of the policy that the ratio compares with
    advantages: Tensor
    mask: Tensor  # bool: tokens that carry loss; truncated and ungraded samples are already masked out
    weights: Tensor  # from token_weights()
    counts: Tensor  # integer, from token_weights()
    sequence_ids: Tensor  # int64, 0..sequences−1
    sequences: int
    ref_logprobs: Tensor | None = None  # of the frozen reference policy
    engine_logprobs: Tensor | None = None  # as the inference engine reported them
    old_values: Tensor | None = None  # of the critic before the first update of the step
    returns: Tensor | None = None  # what the critic learns to predict
    positive: Tensor | None = None  # from positive_weights(): multiplies −log π
    proximal: Proximal = "old"
    mean_weight: float = 1.0  # from OffPolicy.mean_weight(): divides importance weights

    def proximal_logprobs(self, scores: Scores) -> Tensor | None:
        return {"old": self.old_logprobs, "current": scores.logprobs, "unknown": None}[self.proximal]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that the batch has, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def part(self, chunk: slice) -> TokenBatch:
        """These tokens alone. Only losses of single tokens may be computed on a part."""
        return replace(self, **{name: tensor[chunk] for name, tensor in self.tensors.items()})  # type: ignore[arg-type]

    def double(self) -> TokenBatch:
        """In fp64."""
        floats = {name: tensor.double() for name, tensor in self.tensors.items() if tensor.is_floating_point()}
        return replace(self, **floats)  # type: ignore[arg-type]

    def blanked(self) -> TokenBatch:
        """Zero at every masked position."""
        kept = ("mask", "sequence_ids")
        zeroed = {name: blank(tensor, self.mask) for name, tensor in self.tensors.items() if name not in kept}
        return replace(self, **zeroed)  # type: ignore[arg-type]


def blank(tensor: Tensor, mask: Tensor) -> Tensor:
    """`tensor` with zeros where `mask` is False. A product would not do: 0·NaN is NaN, and so is its gradient."""
    return torch.where(mask, tensor, torch.zeros_like(tensor))


INTEGERS = (torch.int64, torch.int32)
FLOATS = (torch.float32, torch.float64)  # a bf16 log-prob of −10 is off by up to 0.03
DTYPES = {"mask": (torch.bool,), "counts": INTEGERS, "sequence_ids": (torch.int64,)}


def check_shapes(scores: Scores, batch: TokenBatch) -> None:
    """Raises a ValueError that names the tensor. Reads shapes and types only, never values on the device."""
    tokens = scores.logprobs.numel()
    entropy = {} if scores.entropy is None else {"entropy": scores.entropy}
    for name, tensor in ({"logprobs": scores.logprobs} | batch.tensors | entropy).items():
        if tuple(tensor.shape) != (tokens,):
            raise ValueError(f"{name}: expected shape ({tokens},) like logprobs, found {tuple(tensor.shape)}")
        allowed = DTYPES.get(name, FLOATS)
        if tensor.dtype not in allowed:
            expected = " or ".join(str(dtype) for dtype in allowed)
            raise ValueError(f"{name}: expected {expected}, found {tensor.dtype}")


Sums = Mapping[str, Tensor]  # [tokens]: each token's value is the total of its sequence


@dataclass(frozen=True, slots=True)
class Needs:
    """What a loss reads beyond log-probs, old log-probs and advantages."""

    whole_sequences: bool = False  # sums over each sequence; the head then makes two passes instead of one
    entropy: bool = False
    reference: bool = False  # log-probs of the reference policy
    engine: bool = False  # log-probs that the inference engine reported
    right: bool = False  # which responses the grader found right

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
        """[tokens] values to add up over the active tokens of each whole sequence, on all ranks that share it; called
        without gradient, and on each rank with its tokens alone.

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
