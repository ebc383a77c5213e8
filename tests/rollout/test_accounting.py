"""The accuracy of all sampled responses, which dynamic sampling hides from that of trained ones."""

import pytest

from megatron_dapo.rollout.accounting import STALE, UNFINISHED, StepAccounting
from megatron_dapo.types import FinishReason, Grade, Group, Prompt, Sample, as_logprobs, as_tokens


def group(*correct: bool | None) -> Group:
    """None: ungraded."""
    prompt = Prompt("p", "1+1", as_tokens([1]), "2")
    samples = [
        Sample(
            "p", index, prompt.tokens, as_tokens([1, 2]), as_logprobs([-0.1, -0.1]), FinishReason.STOP,
            grade=Grade(right, 1.0 if right else -1.0, "", ""),
        )
        for index, right in enumerate(correct)
    ]  # fmt: skip
    return Group(prompt, samples)


def accuracy_all(accounting: StepAccounting) -> float | None:
    return accounting.metrics([], 1.0).get("reward/accuracy_all")


def test_every_graded_sample_of_a_decided_group_counts_once():
    accounting = StepAccounting()
    assert accuracy_all(accounting) is None
    trained, easy, hard = group(True, False, None), group(True, True, True), group(False, False, False)
    accounting.drop(easy, "all-correct")
    accounting.drop(hard, "all-wrong")
    accounting.drop(group(True, True, True), UNFINISHED)
    accounting.drop(group(True, True, True), STALE)
    accounting.train([trained])
    assert accuracy_all(accounting) == pytest.approx(4 / 8), "1 of 2 trained, 3 of 3 easy, 0 of 3 hard"
    restored = StepAccounting.from_state(accounting.to_state())
    assert accuracy_all(restored) == accuracy_all(accounting)


def test_a_rejected_group_that_fills_the_batch_counts_once():
    accounting = StepAccounting()
    easy, hard = group(True, True), group(False, False)
    for rejected in (easy, hard):
        accounting.drop(rejected, "flat")
    accounting.undrop(easy, "flat")
    accounting.train([easy])
    assert accuracy_all(accounting) == pytest.approx(2 / 4)
