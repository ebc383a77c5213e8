"""Diagnosis: checks the metrics of every step and warns about unhealthy ones, with likely causes.

A rule warns after it has held for `patience` steps in a row, and then not again until it has not held for five steps in
a row, so a metric that hovers around a limit does not fill the log. Findings depend only on the metrics, not on time:
replaying metrics.jsonl gives the same findings.

Each rule is explained in the section of docs/diagnosis.md that has its name.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from megatron_dapo.observe.metrics_file import dropped_groups, filter_yield

PAGE = "docs/diagnosis.md"
REARM = 5
BASELINE = 3
WINDOW = 20


@dataclass(slots=True, frozen=True)
class Finding:
    step: int
    rule: str
    seen: str
    causes: str

    @property
    def message(self) -> str:
        return f"{self.seen}. Likely: {self.causes}. See {PAGE}#{self.rule}"


class History:
    """The input of the rules: the metrics of this step, of the first steps, and of the last steps before this one."""

    def __init__(self) -> None:
        self.now: dict[str, float] = {}
        self._start: dict[str, list[float]] = {}
        self._recent: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))

    def advance(self, metrics: Mapping[str, float]) -> None:
        for name, value in self.now.items():
            if math.isfinite(value):
                self._recent[name].append(value)
        self.now = dict(metrics)
        for name, value in self.now.items():
            start = self._start.setdefault(name, [])
            if len(start) < BASELINE and math.isfinite(value):
                start.append(value)

    def get(self, name: str) -> float | None:
        """The value of this step, if it is finite."""
        value = self.now.get(name)
        return value if value is not None and math.isfinite(value) else None

    def start(self, name: str) -> float | None:
        """Mean over the first steps; None until there are enough."""
        values = self._start.get(name, [])
        return fmean(values) if len(values) == BASELINE else None

    def recent(self, name: str) -> Sequence[float]:
        return self._recent.get(name, ())


Check = Callable[[History], str | None]


@dataclass(slots=True, frozen=True)
class Rule:
    name: str  # the section of docs/diagnosis.md
    check: Check  # says what is wrong at this step, or None
    causes: str
    patience: int = 3


@dataclass(slots=True)
class _Alarm:
    held: int = 0
    clear: int = 0
    on: bool = False

    def update(self, holds: bool, patience: int) -> bool:
        """True if a warning is due."""
        self.held, self.clear = (self.held + 1, 0) if holds else (0, self.clear + 1)
        if self.on and self.clear >= REARM:
            self.on = False
        if not self.on and self.held >= patience:
            self.on = True
            return True
        return False


class Watch:
    """Takes the metrics of each step, in order, and returns the new findings."""

    def __init__(self) -> None:
        self._history = History()
        self._alarms: dict[str, _Alarm] = {}

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        self._history.advance(metrics)
        found = []
        for rule in RULES:
            seen = rule.check(self._history)
            if self._alarms.setdefault(rule.name, _Alarm()).update(seen is not None, rule.patience):
                found.append(Finding(step, rule.name, seen or "", rule.causes))
        return found


def _entropy_collapse(history: History) -> str | None:
    now, start = history.get("train/entropy"), history.start("train/entropy")
    if now is None or start is None or start < 1e-3 or now >= 0.25 * start:
        return None
    return f"entropy is {now:.3g}, {now / start:.0%} of what it was at the start ({start:.3g})"


def _entropy_explosion(history: History) -> str | None:
    now, start = history.get("train/entropy"), history.start("train/entropy")
    if now is None or start is None or now < max(3 * start, 1.0):
        return None
    return f"entropy is {now:.3g}, {now / max(start, 1e-9):.1f} times what it was at the start ({start:.3g})"


def _mismatch(history: History) -> str | None:
    now, before = history.get("train/mismatch_kl"), history.recent("train/mismatch_kl")
    if now is None:
        return None
    if now > 0.1:
        return f"the engine's and the trainer's log-probs disagree: mismatch_kl is {now:.3g}"
    if len(before) >= 5 and now > 0.01 and now > 5 * median(before):
        return f"mismatch_kl jumped to {now:.3g}, from about {median(before):.2g}"
    return None


def _importance_cap(history: History) -> str | None:
    share = history.get("train/mismatch_over_cap")
    return f"{share:.1%} of the importance weights are above the cap" if share is not None and share > 0.05 else None


def _clip_fraction(history: History) -> str | None:
    total = sum(history.get(f"train/clip_fraction_{side}") or 0.0 for side in ("high", "low"))
    return f"{total:.0%} of the tokens are clipped and have no gradient" if total > 0.2 else None


def _policy_shift(history: History) -> str | None:
    kl = history.get("train/approx_kl")
    return f"one step moved the policy by approx_kl {kl:.3g}" if kl is not None and kl > 0.1 else None


def _filter_yield(history: History) -> str | None:
    share = filter_yield(history.now)
    if not share or share >= 0.1:  # 0: see nothing-kept
        return None
    dropped = dropped_groups(history.now)
    reason = max(dropped, key=lambda name: dropped[name])
    return f"only {share:.1%} of the judged groups were kept; most were {reason}"


def _nothing_kept(history: History) -> str | None:
    if history.get("rollout/groups_kept") != 0:
        return None
    reasons = ", ".join(f"{count:g} {reason}" for reason, count in dropped_groups(history.now).items())
    return f"every group was dropped ({reasons or 'there were none'})"


def _truncated(history: History) -> str | None:
    now, start = history.get("rollout/truncated_share"), history.start("rollout/truncated_share")
    if now is None or not (now > 0.5 or (start is not None and now > max(0.15, start + 0.1))):
        return None
    return f"{now:.0%} of the responses are truncated by the length limit" + (
        f" ({start:.0%} at the start)" if start is not None else ""
    )


def _length_collapse(history: History) -> str | None:
    now, start = history.get("rollout/length_trained"), history.start("rollout/length_trained")
    if now is None or start is None or now >= 0.3 * start:
        return None
    return f"responses shrank to {now:.0f} tokens, from {start:.0f} at the start"


def _grad_norm(history: History) -> str | None:
    now, before = history.get("train/grad_norm"), history.recent("train/grad_norm")
    if now is None or len(before) < 5 or now <= 10 * median(before) or median(before) <= 0:
        return None
    return f"the gradient norm jumped to {now:.3g}, from about {median(before):.2g}"


def _flat_reward(history: History) -> str | None:
    now = history.get("reward/accuracy_all")  # dynamic sampling keeps that of trained responses off 0 and 1
    if now is None or 0.01 < now < 0.99:
        return None
    return f"accuracy is {now:.0%}"


def _accuracy_drop(history: History) -> str | None:
    now, before = history.get("reward/accuracy_all"), list(history.recent("reward/accuracy_all"))
    # Not the best single step: where few groups are sampled, that is chance.
    best = max((fmean(before[i : i + 5]) for i in range(len(before) - 4)), default=0.0)
    if now is None or now <= 0.01 or now >= 0.5 * best:  # 0: see flat-reward
        return None
    return f"accuracy is {now:.1%}, less than half of what it was a few steps ago ({best:.1%})"


def _ungraded(history: History) -> str | None:
    kept, dropped = history.get("rollout/groups_kept") or 0.0, dropped_groups(history.now).get("ungraded", 0.0)
    ungraded = (history.get("reward/ungraded_share") or 0.0) * kept + dropped
    if not kept or ungraded <= 0.02 * (kept + dropped):  # 0: see nothing-kept
        return None
    return f"{ungraded / (kept + dropped):.1%} of the responses are ungraded"


def _not_finite(history: History) -> str | None:
    bad = sorted(name for name, value in history.now.items() if not math.isfinite(value))
    if bad:
        return f"not a finite number: {', '.join(bad[:4])}"
    tokens = history.get("train/nonfinite_tokens")
    return f"{tokens:g} tokens had a NaN or infinite log-prob" if tokens else None


def _skipped(history: History) -> str | None:
    share = history.get("train/update_skipped")
    return "an update was skipped: none of its tokens had a loss" if share else None


def _failed_groups(history: History) -> str | None:
    failed, submitted = history.get("rollout/groups_failed"), history.get("rollout/groups_submitted")
    if not failed or failed <= 0.02 * (submitted or 0.0):
        return None
    return f"{failed:g} of {submitted or 0:g} groups failed in the engine or the grader"


def _useless_critic(history: History) -> str | None:
    explained = history.get("critic/explained_variance")
    if explained is None or explained >= 0 or len(history.recent("critic/explained_variance")) < WINDOW:
        return None
    return f"the critic predicts returns worse than their mean would: explained variance {explained:.2f}"


RULES: tuple[Rule, ...] = (
    Rule("entropy-collapse", _entropy_collapse, "algorithm.clip_high too small, learning rate too high, too many "
         "updates per batch, or prompts that are too easy"),
    Rule("entropy-explosion", _entropy_explosion, "learning rate too high, an entropy bonus that is too strong, or a "
         "mismatch between engine and trainer"),
    Rule("mismatch", _mismatch, "the engine serves old weights, or it computes in another precision, temperature, "
         "RoPE base or expert routing than the trainer", patience=1),
    Rule("importance-cap", _importance_cap, "a large mismatch, or samples that are many weight versions old"),
    Rule("clip-fraction", _clip_fraction, "learning rate too high, too many updates per batch, or stale samples"),
    Rule("policy-shift", _policy_shift, "learning rate too high, or too many updates per batch"),
    Rule("nothing-kept", _nothing_kept, "the grader fails or reads the wrong answer field, or the prompts are all too "
         "hard or all too easy for this model", patience=1),
    Rule("filter-yield", _filter_yield, "prompts too hard (all-wrong) or too easy (all-correct) for this model, or "
         "a grader that fails (ungraded)"),
    Rule("truncated", _truncated, "responses that keep growing, a length limit that is too low, or a stop token "
         "that the engine does not know"),
    Rule("length-collapse", _length_collapse, "a length penalty that is too strong, or a grader that accepts guesses"),
    Rule("grad-norm", _grad_norm, "a batch with very few tokens, a mismatch, or a learning rate that is too high",
         patience=1),
    Rule("flat-reward", _flat_reward, "at 0 %: a wrong template, a wrong answer field or a model that is too weak; at "
         "100 %: nothing is left to learn, or the grader is fooled", patience=5),
    Rule("accuracy-drop", _accuracy_drop, "learning rate too high, a mismatch between engine and trainer, responses "
         "that the grader no longer reads, or harder prompts", patience=5),
    Rule("ungraded", _ungraded, "a grader that fails, hits its time limit or cannot read the references"),
    Rule("not-finite", _not_finite, "overflow in the model, a broken checkpoint, or a learning rate that is far too "
         "high", patience=1),
    Rule("skipped-update", _skipped, "algorithm.overlong.filter masked every truncated sample, or nothing was graded",
         patience=1),
    Rule("useless-critic", _useless_critic, "critic.optimizer.lr too low or too high, too little "
         "critic.pretraining.steps, or returns that hardly differ", patience=5),
    Rule("failed-groups", _failed_groups, "a server that died or ran out of memory, timeouts (see the servers' logs), "
         "or a rollout function that raises", patience=1),
)  # fmt: skip
