"""How metrics of updates combine into the metrics of a step."""

import json

import pytest

from megatron_dapo.policy.loss_func import StepMetrics

FIRST = {"loss": 1.0, "ratio_max": 3.0, "mismatch_max": -2.0, "tokens": 10.0, "micro_batches": 2.0, "grad_norm": 0.5}
SECOND = {"loss": 4.0, "ratio_max": 2.0, "mismatch_max": -1.0, "tokens": 30.0, "micro_batches": 3.0, "grad_norm": 1.5}
# A mini-batch without an active token still reports every metric, as zeros.
MASKED = {"loss": 0.0, "ratio_max": 9.0, "tokens": 0.0, "micro_batches": 1.0, "grad_norm": 0.0, "update_skipped": 1.0}
NON_FINITE = {"update_skipped": 1.0}


def combined(*updates):
    metrics = StepMetrics()
    for update in updates:
        metrics.add(update)
    return metrics


def test_totals_are_added_maxima_are_maxima_and_the_rest_are_means():
    assert combined(FIRST, SECOND).result() == {
        "tokens": 40.0, "micro_batches": 5.0, "loss": 2.5, "grad_norm": 1.0, "ratio_max": 3.0, "mismatch_max": -1.0,
    }  # fmt: skip


@pytest.mark.parametrize("skipped", [MASKED, NON_FINITE], ids=["masked", "non-finite"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_skipped_updates_enter_only_the_totals(skipped, position):
    updates = [FIRST, SECOND]
    updates.insert(position, skipped)
    found, without = combined(*updates).result(), combined(FIRST, SECOND).result()
    assert found.pop("update_skipped") == 1.0
    assert found.pop("micro_batches") == 5.0 + skipped.get("micro_batches", 0.0)
    without.pop("micro_batches")
    assert found == without


def test_a_step_whose_updates_were_all_skipped_has_totals_alone():
    assert combined(MASKED, NON_FINITE).result() == {"tokens": 0.0, "micro_batches": 1.0, "update_skipped": 2.0}


def test_a_metric_that_some_updates_lack_is_the_mean_of_those_that_have_it():
    assert combined(FIRST, SECOND | {"reference_kl": 3.0}).result()["reference_kl"] == 3.0


def test_no_update_gives_no_metric():
    assert combined().result() == {}


def test_the_prefix_is_put_before_every_name():
    assert set(combined(FIRST).result("train/")) == {f"train/{name}" for name in FIRST}


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_saving_between_two_updates_changes_nothing(after):
    updates = [FIRST, MASKED, SECOND]
    before = combined(*updates[:after])
    restored = StepMetrics.from_state(json.loads(json.dumps(before.to_state())))
    for update in updates[after:]:
        restored.add(update)
    assert restored.result() == combined(*updates).result()
    assert before.result() == combined(*updates[:after]).result()  # the two share no dictionary
