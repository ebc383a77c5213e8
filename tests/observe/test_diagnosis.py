"""Diagnosis: each rule warns once, at the right step, names its section, and is silent on a healthy run."""

import math
import re
from pathlib import Path

import pytest
from synthetic_runs import step_metrics

from megatron_dapo.config.load import known_keys
from megatron_dapo.observe.diagnosis import RULES, Watch

PAGE = (Path(__file__).parents[2] / "docs" / "diagnosis.md").read_text()


def findings(*steps: dict[str, float]) -> list[tuple[int, str]]:
    watch = Watch()
    return [(f.step, f.rule) for i, metrics in enumerate(steps, start=1) for f in watch.observe(i, metrics)]


def series(metric: str, *values: float) -> list[dict[str, float]]:
    return [{metric: value} for value in values]


def groups(kept: int, **dropped: int) -> dict[str, float]:
    return {"rollout/groups_kept": kept, **{f"rollout/dropped/{k.replace('_', '-')}": v for k, v in dropped.items()}}


# rule, the steps of a run, the step at which the rule warns
CASES = [
    ("entropy-collapse", series("train/entropy", 0.8, 1.0, 1.2, 0.24, 0.24, 0.24), 6),
    ("entropy-explosion", series("train/entropy", 0.4, 0.4, 0.4, 1.3, 1.3, 1.3), 6),
    ("mismatch", series("train/mismatch_kl", 1e-3, 0.11), 2),
    ("mismatch", series("train/mismatch_kl", *[1e-3] * 5, 0.02), 6),
    ("importance-cap", series("train/mismatch_over_cap", 0.06, 0.06, 0.06), 3),
    ("clip-fraction", [{"train/clip_fraction_high": 0.15, "train/clip_fraction_low": 0.06}] * 3, 3),
    ("policy-shift", series("train/approx_kl", 0.2, 0.2, 0.2), 3),
    ("nothing-kept", [groups(0, all_wrong=8)], 1),
    ("filter-yield", [groups(1, all_wrong=15, all_correct=1)] * 3, 3),
    ("truncated", series("rollout/truncated_share", 0.05, 0.05, 0.05, 0.2, 0.2, 0.2), 6),
    ("truncated", series("rollout/truncated_share", 0.6, 0.6, 0.6), 3),
    ("length-collapse", series("rollout/length_trained", 100, 100, 100, 29, 29, 29), 6),
    ("grad-norm", series("train/grad_norm", *[0.1] * 5, 1.1), 6),
    ("flat-reward", series("reward/accuracy_all", *[0.0] * 5), 5),
    ("flat-reward", series("reward/accuracy_all", *[1.0] * 5), 5),
    ("flat-reward", [{"reward/accuracy": 0.5, "reward/accuracy_all": 0.995}] * 5, 5),
    ("accuracy-drop", series("reward/accuracy_all", *[0.6] * 5, *[0.29] * 5), 10),
    ("ungraded", [{"reward/ungraded_share": 0.03, **groups(9)}] * 3, 3),
    ("ungraded", [{"reward/ungraded_share": 0.0, **groups(30, ungraded=1)}] * 3, 3),
    ("not-finite", series("train/loss", 0.1, math.nan), 2),
    ("not-finite", series("train/nonfinite_tokens", 0, 3), 2),
    ("skipped-update", series("train/update_skipped", 0, 1), 2),
    ("useless-critic", series("critic/explained_variance", *[-0.1] * 25), 25),
    ("failed-groups", [{"rollout/groups_failed": 3, "rollout/groups_submitted": 64}], 1),
]


@pytest.mark.parametrize(("rule", "steps", "when"), CASES)
def test_a_rule_warns_at_its_step_and_no_other_rule_does(rule, steps, when):
    assert findings(*steps, steps[-1], steps[-1]) == [(when, rule)]


def test_every_rule_has_a_case():
    assert {rule.name for rule in RULES} == {rule for rule, _, _ in CASES}


NEAR_MISSES = [
    series("train/entropy", 1.0, 1.0, 1.0, *[0.26] * 6),
    series("train/entropy", 0.1, 0.1, 0.1, *[0.9] * 6),  # a rise from a low start, still below 1 nat
    series("train/entropy", 1.0, 1.0, 1.0, 0.1, 0.1, 1.0, 0.1, 0.1, 1.0),  # never three in a row
    series("train/mismatch_kl", *[2e-4] * 8, 9e-3),  # a jump, but small
    series("train/clip_fraction_high", *[0.19] * 6),
    series("rollout/truncated_share", *[0.3] * 8),  # high, but not higher than at the start
    series("train/grad_norm", 5.0, 0.1, 0.1, 0.1),  # too early to know what is normal
    series("train/grad_norm", *[0.1] * 6, 0.9),
    [groups(2, all_wrong=17, surplus=400)] * 4,  # surplus is not the filter's verdict
    series("reward/accuracy_all", *[0.02] * 9),
    [{"rollout/groups_failed": 1, "rollout/groups_submitted": 64}] * 9,
    series("reward/accuracy_all", *[0.6] * 5, *[0.31] * 9),
    series("reward/accuracy_all", *[0.6] * 5, *[0.2] * 4, 0.6, *[0.2] * 4),  # never five in a row
    series("reward/accuracy_all", *[0.1] * 4, 0.5, *[0.1] * 9),  # one good step is no level to fall from
    [{"reward/ungraded_share": 0.01, **groups(99, ungraded=1)}] * 9,
]


@pytest.mark.parametrize("steps", NEAR_MISSES)
def test_values_just_within_the_limits_give_no_warning(steps):
    assert findings(*steps) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_gives_no_warning(seed):
    steps = [step_metrics(step, 200, seed=10 + seed) for step in range(1, 201)]
    assert findings(*steps) == []


def test_a_warning_is_repeated_only_after_five_healthy_steps():
    bad, good = {"train/mismatch_kl": 0.5}, {"train/mismatch_kl": 1e-3}
    assert findings(bad, bad, good, bad, *[good] * 4, bad) == [(1, "mismatch")]
    assert findings(bad, *[good] * 5, bad) == [(1, "mismatch"), (7, "mismatch")]


def test_the_message_names_finding_causes_and_section():
    (finding,) = Watch().observe(7, groups(0, ungraded=12))
    assert re.match(
        r"every .* dropped \(12 ungraded\)\. Likely: .*grader.* See docs/diagnosis\.md#nothing-kept", finding.message
    )


def test_rules_still_work_after_a_nan():
    steps = series("train/entropy", 1.0, math.nan, 1.0, 1.0, 0.1, 0.1, 0.1)
    assert findings(*steps) == [(2, "not-finite"), (7, "entropy-collapse")]


def test_the_page_explains_every_rule_and_its_links_lead_somewhere():
    sections = re.findall(r"^## (\S+)$", PAGE, re.M)
    assert sorted(sections) == sorted(rule.name for rule in RULES)
    assert set(re.findall(r"\]\(#([\w-]+)\)", PAGE)) <= set(sections)
    for name in sections:
        body = PAGE.split(f"## {name}\n")[1]
        assert body.startswith("*"), f"{name}: a section begins with its condition"


def test_the_page_and_the_rules_name_real_settings():
    keys = set(known_keys())
    text = PAGE + " ".join(rule.causes for rule in RULES)
    named = set(re.findall(r"\b((?:algorithm|policy|rollout|trainer|observe)\.[a-z_.]+[a-z_])", text))
    assert named and named <= keys, f"unknown settings: {sorted(named - keys)}"
