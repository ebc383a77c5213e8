"""`algorithm`: what DAPO computes. The defaults are the published recipe without its length penalty, which depends on
the longest response: `overlong.penalty: soft` turns it on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from megatron_dapo.config.base import Address, PathText, Section
from megatron_dapo.plugins import is_plugin

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
ADVANTAGES = ("group-std", "group-mean", "rloo", "reinforce++", "reinforce++-baseline", "gae")
ObjectiveOption = bool | int | float | str
# Settings that an objective has by default, where they differ from DAPO's. GSPO: as published (arXiv 2507.18071).
# CISPO: no lower bound (arXiv 2506.13585, which does not publish its upper one), weights up to 5 (arXiv 2510.13786).
OBJECTIVE_DEFAULTS: dict[str, dict[str, Any]] = {
    "cispo": {"clip_low": 1.0, "clip_high": 4.0, "dual_clip": None},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None, "aggregation": "seq-mean-token-mean"},
}
_PPO_CLIP = {"objective": "dapo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
_NO_KL = {"kl": {"coefficient": 0.0}}
_ALL_GROUPS = {"rollout": {"dynamic_sampling": False}}
# Published methods as plain keys; docs/algorithms.md has paper, formula and a table for each.
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "dapo": {
        "algorithm": {
            "objective": "dapo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0, "aggregation": "token-mean",
            "advantage": "group-std", **_NO_KL,
        },
        "rollout": {"dynamic_sampling": True},
    },
    "vapo": {
        "algorithm": {
            "objective": "dapo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": None, "aggregation": "token-mean",
            "advantage": "gae", "positive_coefficient": 0.1, **_NO_KL,
            "gae": {"lambda_policy": "adaptive", "alpha": 0.05, "lambda_critic": 1.0, "gamma": 1.0},
        },
        "critic": {"pretraining": {"steps": 50}},
        **_ALL_GROUPS,
    },
    "ppo": {
        "algorithm": {
            **_PPO_CLIP, "aggregation": "token-mean", "advantage": "gae", **_NO_KL,
            "gae": {"lambda_policy": 0.95, "lambda_critic": 0.95, "gamma": 1.0},
        },
        **_ALL_GROUPS,
    },
    "grpo": {
        "algorithm": {
            **_PPO_CLIP, "aggregation": "seq-mean-token-mean", "advantage": "group-std",
            "kl": {"coefficient": 0.04, "estimator": "k3"},
        },
        **_ALL_GROUPS,
    },
    "dr-grpo": {
        "algorithm": {**_PPO_CLIP, "aggregation": "seq-mean-token-sum-norm", "advantage": "group-mean", **_NO_KL},
        **_ALL_GROUPS,
    },
    "gspo": {"algorithm": {"objective": "gspo", "advantage": "group-std", **_NO_KL}, **_ALL_GROUPS},
    "cispo": {
        "algorithm": {"objective": "cispo", "aggregation": "token-mean", "advantage": "group-std", **_NO_KL},
        "rollout": {"dynamic_sampling": True},
    },
    "rloo": {
        "algorithm": {**_PPO_CLIP, "aggregation": "seq-mean-token-sum", "advantage": "rloo", **_NO_KL}, **_ALL_GROUPS,
    },
    "reinforce++": {
        "algorithm": {**_PPO_CLIP, "aggregation": "token-mean", "advantage": "reinforce++", **_NO_KL}, **_ALL_GROUPS,
    },
}  # fmt: skip
LARGEST_SEQUENCE_CLIP = 0.02  # the ratio of a sequence is a mean over its tokens and stays much closer to 1
OBJECTIVE_FILES = Path(__file__).resolve().parents[1] / "algorithm" / "objectives"


def built_in_objectives() -> list[str]:
    """Their file names: the modules themselves import torch, which the configuration must not."""
    return sorted(path.stem for path in OBJECTIVE_FILES.glob("[!_]*.py"))


class KLConfig(Section):
    """A KL penalty against the frozen reference policy. DAPO uses none."""

    coefficient: float = Field(0.0, ge=0)
    """0 turns the term off; no reference model is kept then."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = log π_ref − log π. k1: −d. k2: d²/2. k3: exp(d) − 1 − d, never negative."""


class DistillationConfig(Section):
    """On-policy distillation: a teacher scores the tokens that the policy generated, and each token's advantage is
    weight · (log π_teacher − log π_engine), whose mean is −KL(π‖π_teacher). Added to DAPO's advantages, or alone. Set
    `urls` or `model` to turn it on."""

    urls: list[Address] = Field(default_factory=list)
    """SGLang servers of the teacher, which must have the policy's tokenizer; they are used in turn."""
    model: PathText = ""
    """Instead of urls: HF directory of a small teacher, computed with transformers on rank 0's CPU."""
    weight: float = Field(1.0, gt=0)
    """Multiplies the advantage of every token."""
    alone: bool = False
    """Without DAPO's advantages: grades are only reported, ungraded responses are trained on as well."""
    max_gap: float = Field(10.0, gt=0)
    """Bound of |log π_teacher − log π_engine| of a token, so that none dominates."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the servers' bearer token; null: none is sent."""
    timeout: float = Field(300.0, gt=0)
    """Seconds for one request."""
    retries: int = Field(3, ge=0)
    """How often a request is repeated; then the response is not scored."""
    concurrency: int = Field(32, ge=1)
    """Requests at a time."""

    @property
    def enabled(self) -> bool:
        return bool(self.urls or self.model)

    def check(self) -> None:
        if self.urls and self.model:
            raise ValueError("urls and model name two teachers: remove one of them")
        if self.alone and not self.enabled:
            raise ValueError("alone is true, but there is no teacher: set urls or model")


class GAEConfig(Section):
    """Generalised advantage estimation, from the values of a critic (`advantage: gae`). The defaults are VAPO's."""

    lambda_policy: Annotated[float, Field(ge=0, le=1)] | Literal["adaptive"] = "adaptive"
    """λ of the policy's advantages. adaptive: 1 − 1/(alpha·length) of each response, at least 0."""
    alpha: float = Field(0.05, gt=0)
    """For lambda_policy: adaptive. Responses below 1/alpha tokens have λ = 0."""
    lambda_critic: float = Field(1.0, ge=0, le=1)
    """λ of the critic's targets. 1: the reward-to-go."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of later rewards, per token; also of reinforce++."""
    whitening: Literal["none", "batch"] = "batch"
    """batch: advantages have mean 0 and std 1 over all tokens in the loss of a step."""
    bootstrap_truncated: bool = False
    """The critic's value of the last token replaces the final reward of a truncated response."""


class OffPolicyConfig(Section):
    """Corrections for responses that were not sampled from the policy being trained: the weights have changed since, or
    the engine computes other log-probs. w is π_old/π_engine of a token: the proximal policy, recomputed by the trainer
    before the first update of a step, over the behaviour policy, as the engine reported it. The clipped objective
    compares π with π_old, so a weight w makes it the decoupled objective. docs/concepts.md lists the published methods
    in these keys, and says which removed tokens still count in the denominator of the loss."""

    importance_weight: Literal["off", "token", "sequence"] = "off"
    """Multiplies the loss by w. token: one weight per token. sequence: one per response, the product over its
    tokens."""
    weight_cap: float = Field(2.0, gt=0)
    """Upper bound of the importance weight (truncation)."""
    normalize_weights: bool = False
    """Divide importance weights by their mean over the mini-batch (self-normalised weights)."""
    token_mask: list[float] | None = None
    """[low, high]: a token whose w is outside carries no gradient; it still counts."""
    geometric_mask: list[float] | None = None
    """[low, high]: a response whose geometric mean of w is outside is excluded; it does not count."""
    product_mask: list[float] | None = None
    """[low, high]: a response whose product of w is outside is excluded; it does not count."""
    veto: float | None = Field(None, gt=0, le=1)
    """A response with a token whose w is below this is excluded; it does not count. Published: 1e-4."""
    opsm_delta: float | None = Field(None, ge=0)
    """Off-policy sequence masking: a response with a negative advantage carries no gradient if the mean of log π_engine
    − log π over its tokens is above this; it still counts."""

    @field_validator("token_mask", "geometric_mask", "product_mask")
    @classmethod
    def _bounds(cls, bounds: list[float] | None) -> list[float] | None:
        if bounds is not None and not (len(bounds) == 2 and 0 <= bounds[0] <= 1 <= bounds[1]):
            raise ValueError(
                f"expected [low, high] with 0 ≤ low ≤ 1 ≤ high, found {bounds}: w is 1 where engine and trainer agree"
            )
        return bounds

    def check(self) -> None:
        if self.normalize_weights and self.importance_weight == "off":
            raise ValueError("normalize_weights is true, but importance_weight is off: set it to token or sequence")

    @property
    def reads_old_logprobs(self) -> list[str]:
        """The keys in use that compare π_old with π_engine: without π_old of the trainer's own they do nothing."""
        masks = ["token_mask"] if self.token_mask is not None else []
        masks += self.sequence_masks
        return ["importance_weight", *masks] if self.importance_weight != "off" else masks

    @property
    def sequence_masks(self) -> list[str]:
        """The keys in use that exclude whole responses."""
        return [name for name in ("geometric_mask", "product_mask", "veto") if getattr(self, name) is not None]


class OverlongConfig(Section):
    """Overlong responses. Masking them and penalising their length are independent switches."""

    filter: bool = False
    """Mask the loss of truncated samples (overlong filtering)."""
    group_statistics: Literal["all", "in_loss"] = "all"
    """With filter: whose rewards make the mean and std of a group. all: also those of masked responses, as published;
    the others then look better than they are. in_loss: only those of responses in the loss."""
    penalty: Literal["none", "soft", "linear", "relative"] = "none"
    """soft: the paper's three stages. linear: λ·clamp((L−L_thresh)/(L_max−L_thresh), 0, 1) with L_thresh = max_length −
    cache_length. relative: weight·(L−L_max)/L_max beyond L_max, without a floor."""
    max_length: int | None = Field(None, gt=0)
    """L_max in tokens; null means rollout.max_response_tokens."""
    cache_length: int = Field(4096, gt=0)
    """L_cache: the penalty grows over the last L_cache tokens."""
    factor: float = Field(1.0, ge=0)
    """The largest penalty (soft, linear) or the weight (relative)."""

    def check(self) -> None:
        if self.group_statistics == "in_loss" and not self.filter:
            raise ValueError("group_statistics is in_loss, but filter is false: all responses are in the loss")


class AlgorithmConfig(Section):
    preset: Literal[tuple(PRESETS)] | None = None  # type: ignore[valid-type]
    """A published method: sets keys of algorithm and rollout as in docs/algorithms.md. Keys that you
    set yourself take precedence."""
    objective: str = "dapo"
    """dapo: token ratio, decoupled clip. gspo: sequence-level ratio. cispo: clipped weight. python:module.name: a
    custom class, derived from megatron_dapo.algorithm.Objective."""
    objective_options: dict[str, ObjectiveOption] = Field(default_factory=dict)
    """Options of a custom objective; the built-in ones have none."""
    clip_low: float = Field(0.2, ge=0)
    """ε_low: the lower bound of the ratio is 1 − clip_low. Default of gspo: 0.0003; of cispo: 1 (none)."""
    clip_high: float = Field(0.28, ge=0)
    """ε_high: the upper bound of the ratio is 1 + clip_high. Default of gspo: 0.0004; of cispo: 4."""
    dual_clip: float | None = 10.0
    """c: for negative advantages a token's loss is at most −c·Â. null turns it off; gspo's default."""
    aggregation: Aggregation = "token-mean"
    """token-mean: every token of the mini-batch counts the same (the paper's token-level loss). seq-mean-token-mean:
    every response counts the same (GRPO). seq-mean-token-sum: the mean of the responses' sums. seq-mean-token-sum-norm:
    the same divided by a constant length (Dr. GRPO). gspo's default: seq-mean-token-mean."""
    aggregation_length: int | None = Field(None, gt=0)
    """The constant of seq-mean-token-sum-norm; null means rollout.max_response_tokens."""
    advantage: str = "group-std"
    """group-std: (R − mean)/std of the group. group-mean: R − mean. rloo: R − mean of the others. reinforce++: R,
    whitened over the batch. reinforce++-baseline: R − mean, whitened over the batch. gae: from a critic.
    python:module.function: a custom estimator (docs/algorithms.md)."""
    gae: GAEConfig = GAEConfig()
    turn_credit: Literal["rollout", "turn"] = "rollout"
    """Rewards of single turns (docs/grading.md). rollout: all are part of the score. turn: the tokens of a turn are not
    credited with rewards of earlier turns."""
    advantage_eps: float = Field(1e-6, ge=0)
    """Added to the std of a group or batch, not to its variance."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Bonus on the policy's entropy."""
    positive_coefficient: float = Field(0.0, ge=0)
    """μ of VAPO's positive-example loss: adds μ · the mean of −log π over the tokens of the responses that the grader
    found right. VAPO: 0.1."""
    kl: KLConfig = KLConfig()
    distillation: DistillationConfig = DistillationConfig()
    off_policy: OffPolicyConfig = OffPolicyConfig()
    overlong: OverlongConfig = OverlongConfig()

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_objective(cls, values: Any) -> Any:
        own = OBJECTIVE_DEFAULTS.get(str(values.get("objective")), {}) if isinstance(values, dict) else {}
        return {**own, **values} if own else values

    @property
    def warnings(self) -> list[str]:
        """Settings that are possible but do not belong together, one line each."""
        if self.objective != "gspo":
            return []
        found = [
            f"algorithm.{name} is {getattr(self, name):g}, which is meant for the ratio of a token: gspo clips the "
            f"ratio of a sequence, which hardly ever gets there (published: {OBJECTIVE_DEFAULTS['gspo'][name]:g})"
            for name in ("clip_low", "clip_high")
            if getattr(self, name) > LARGEST_SEQUENCE_CLIP
        ]
        if self.aggregation != "seq-mean-token-mean":
            found.append(
                f"algorithm.aggregation is {self.aggregation}: with gspo every sequence should count the same "
                "(published: seq-mean-token-mean)"
            )
        if self.dual_clip is not None:
            found.append(f"algorithm.dual_clip is {self.dual_clip:g}: gspo as published has no dual clip (null)")
        return found

    @field_validator("objective", "advantage")
    @classmethod
    def _known(cls, name: str, info: ValidationInfo) -> str:
        known, kind = (ADVANTAGES, "function") if info.field_name == "advantage" else (built_in_objectives(), "name")
        if name not in known and not is_plugin(name):
            raise ValueError(f"expected {', '.join(known)}, or python:module.{kind} for a custom one; found {name!r}")
        return name

    @property
    def compares_groups(self) -> bool:
        """Whether a response is compared with the others of its prompt; then there must be others."""
        return self.advantage in ("group-std", "group-mean", "rloo", "reinforce++-baseline")

    def check(self) -> None:
        if self.clip_low > 1:
            raise ValueError(
                f"clip_low is {self.clip_low}, but 1 − clip_low must not be negative: set it between 0 and 1"
            )
        if self.turn_credit == "turn" and self.advantage not in ("group-std", "group-mean"):
            raise ValueError(
                f"turn_credit is turn, but advantage is {self.advantage}: it is computed with group-std and group-mean "
                "only; reinforce++ and gae credit every token with the rewards that follow it. Remove turn_credit"
            )
        if self.turn_credit == "turn" and self.overlong.group_statistics == "in_loss":
            raise ValueError(
                "turn_credit is turn and overlong.group_statistics is in_loss: the rewards of turns are compared over "
                "all graded rollouts of a group; set one of the two to its default"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(
                f"dual_clip is {self.dual_clip}, but must be greater than 1: use the paper script's 10, or null for off"
            )
