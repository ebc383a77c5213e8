"""The curriculum: prompts that are likely to be informative are preferred, none is starved, and a resume is exact."""

from itertools import product

import numpy as np
import pytest

from megatron_dapo.config.data import CurriculumConfig
from megatron_dapo.data import PromptCursor, PromptMixture
from megatron_dapo.data.history import PRIOR, PromptHistory
from megatron_dapo.types import FinishReason, Grade, Group, Prompt, Sample, as_logprobs, as_tokens

GROUP = 4
ON = CurriculumConfig(enabled=True, floor=0.2, decay=0.5)


def prompts(count=30):
    return [Prompt(f"p{i}", "", as_tokens([]), str(i)) for i in range(count)]


def history(decay=0.5, count=3):
    return PromptHistory((p.id for p in prompts(count)), GROUP, decay)


def group(prompt, right, graded=GROUP, ungraded=0):
    grades = [Grade(True, 1.0)] * right + [Grade(False, 0.0)] * (graded - right) + [Grade(None, 0.0)] * ungraded
    empty = as_tokens([]), as_logprobs([]), FinishReason.STOP
    return Group(prompt, [Sample(prompt.id, i, as_tokens([1]), *empty, grade=g) for i, g in enumerate(grades)])


# ---- the estimate ----


def integral(right, wrong):
    """P(a group is mixed) for p ~ Beta(PRIOR + right, PRIOR + wrong), summed over a fine grid."""
    p = (np.arange(400_000) + 0.5) / 400_000
    density = p ** (PRIOR + right - 1) * (1 - p) ** (PRIOR + wrong - 1)
    return float(((1 - p**GROUP - (1 - p) ** GROUP) * density).sum() / density.sum())


@pytest.mark.parametrize(("right", "wrong"), [(0, 0), (4, 0), (0, 8), (3, 1), (20, 20)])
def test_the_probability_of_an_informative_group_is_the_integral(right, wrong):
    known = history()
    known.record("p1", right, wrong)
    known.commit()
    assert known.informative("p1") == pytest.approx(integral(right, wrong), abs=2e-3)  # the grid at the singular ends
    assert known.informative("p0") == pytest.approx(integral(0, 0), abs=2e-3)


def test_results_count_from_the_next_commit_and_decay_per_epoch():
    known = history(decay=0.5)
    known.record("p0", 4, 0)
    assert not known.known("p0")
    known.commit()
    after_four_right = known.informative("p0")
    known.decay()
    assert known.informative("p0") > after_four_right  # less certain
    known.record("p0", 2, 0)
    known.commit()
    assert known.informative("p0") == pytest.approx(after_four_right)  # 4 × ½ + 2


def test_the_order_of_results_does_not_matter():
    results = [("p0", 3, 1), ("p1", 1, 3), ("p0", 0, 4)]
    states = []
    for order in (results, results[::-1]):
        known = history(decay=0.7)
        for step in range(3):
            for result in order:
                known.record(*result)
            known.commit()
            known.decay()
            assert known.known("p0") and step >= 0
        states.append(known.to_state())
    assert states[0]["right"].tobytes() == states[1]["right"].tobytes()


# ---- what is taken ----


def take_epochs(cursor, epochs, right_of):
    """Takes whole epochs; every taken prompt gets `right_of` right samples. Returns how often each was taken."""
    counts = dict.fromkeys((p.id for p in prompts()), 0)
    while cursor.epoch < epochs:
        (prompt,) = cursor.take(1)
        if cursor.epoch == epochs:
            break
        counts[prompt.id] += 1
        cursor.history.record(prompt.id, right_of(prompt), GROUP - right_of(prompt))
        cursor.history.commit()
    return counts


def difficulty(prompt):
    """p0–p9: always right. p10–p19: half. p20–p29: never."""
    return (GROUP, GROUP // 2, 0)[int(prompt.id[1:]) // 10]


def test_informative_prompts_are_preferred_and_no_prompt_is_starved():
    epochs, certain = 200, ON.model_copy(update={"decay": 1.0})  # in the end the probabilities are below the floor
    cursor = PromptCursor(prompts(), 1, curriculum=certain, group_size=GROUP)
    counts = list(take_epochs(cursor, epochs, difficulty).values())
    assert cursor.history.informative("p0") < 0.1
    easy, medium, hard = sum(counts[:10]), sum(counts[10:20]), sum(counts[20:])
    assert medium > 3 * easy and medium > 3 * hard
    for count in counts:  # at least `floor`: four standard deviations below 200 × 0.2
        assert 40 - 4 * (200 * 0.2 * 0.8) ** 0.5 < count <= epochs


def test_an_epoch_takes_a_prompt_at_most_once():
    cursor = PromptCursor(prompts(), 1, curriculum=ON, group_size=GROUP)
    seen = set()
    while cursor.epoch < 5:
        (prompt,) = cursor.take(1)
        assert (cursor.epoch, prompt.id) not in seen
        seen.add((cursor.epoch, prompt.id))
        cursor.history.record(prompt.id, difficulty(prompt), GROUP - difficulty(prompt))
        cursor.history.commit()
    assert cursor.passed_over > 0


def test_unknown_prompts_are_always_taken():
    cursor = PromptCursor(prompts(), 1, curriculum=ON, group_size=GROUP)
    assert len({p.id for p in cursor.take(30)}) == 30 and cursor.passed_over == 0


def test_without_a_curriculum_the_order_is_unchanged():
    plain = PromptCursor(prompts(), 1)
    off = PromptCursor(prompts(), 1, curriculum=CurriculumConfig(), group_size=GROUP)
    floor_of_one = PromptCursor(prompts(), 1, curriculum=ON.model_copy(update={"floor": 1.0}), group_size=GROUP)
    for prompt in prompts():
        floor_of_one.history.record(prompt.id, GROUP, 0)
    floor_of_one.history.commit()
    expected = [p.id for p in plain.take(100)]
    assert [p.id for p in off.take(100)] == expected and "history" not in off.state_dict()
    assert [p.id for p in floor_of_one.take(100)] == expected


# ---- steps, metrics and resume ----


def mixture(several=False, curriculum=ON, weights=None):
    found = prompts()
    sources = {"all": found}
    if several:
        sources = {"easy": found[:10], "medium": found[10:20], "hard": found[20:]}
        for name, part in sources.items():
            for prompt in part:
                prompt.meta["file"] = name
    return PromptMixture(sources, 3, weights=weights, curriculum=curriculum, group_size=GROUP)


def train(mixed, steps, per_step=7):
    """Takes and records; returns the ids taken."""
    taken = []
    for step in steps:
        mixed.begin_step(step)
        for prompt in mixed.take(per_step):
            taken.append(prompt.id)
            mixed.record(group(prompt, difficulty(prompt)))
    return taken


def test_within_a_step_results_change_nothing():
    """So it does not matter which groups finish first."""
    early, late = mixture(), mixture()
    for mixed in (early, late):
        train(mixed, range(8))
        mixed.begin_step(8)
    first = early.take(4)
    for prompt in first:
        early.record(group(prompt, 0))
    assert [p.id for p in first + early.take(30)] == [p.id for p in late.take(34)]


@pytest.mark.parametrize(("several", "steps", "into"), product([False, True], [0, 1, 9], [0, 3]))
def test_resume_is_exact_also_in_the_middle_of_a_step(several, steps, into):
    straight = mixture(several)
    train(straight, range(steps))
    straight.begin_step(steps)
    for prompt in straight.take(into):
        straight.record(group(prompt, difficulty(prompt)))
    resumed = mixture(several)
    train(resumed, range(3))  # whatever it had done before
    resumed.load_state_dict(straight.state_dict())
    resumed.begin_step(steps)  # a step that continues; it does not begin again
    for mixed in (straight, resumed):
        mixed.take(3)
    assert resumed.metrics(batch_of([])) == straight.metrics(batch_of([]))
    assert [p.id for p in resumed.take(40)] == [p.id for p in straight.take(40)]
    assert train(resumed, range(steps + 1, steps + 20)) == train(straight, range(steps + 1, steps + 20))
    assert resumed.metrics(batch_of([])) == straight.metrics(batch_of([]))


def batch_of(groups):
    from megatron_dapo.types import StepBatch

    return StepBatch(0, groups)


def test_metrics_tell_what_was_passed_over_and_predicted():
    mixed = mixture()
    train(mixed, range(5), per_step=30)
    found = mixed.metrics(batch_of([]))
    assert 0 < found["data/passed_over_share"] < 1 and 0 < found["data/predicted_yield"] < 1
    assert found["data/epoch"] > 5
    assert mixture(curriculum=None).metrics(batch_of([])).keys() == {"data/epoch"}


def test_ungraded_samples_are_not_counted():
    mixed = mixture()
    mixed.begin_step(0)
    (prompt,) = mixed.take(1)
    mixed.record(group(prompt, 0, graded=0, ungraded=GROUP))
    mixed.record(group(prompt, 1, graded=2, ungraded=2))
    state = mixed.state_dict()
    assert state["history"]["pending"].tolist() == [[sorted(p.id for p in prompts()).index(prompt.id), 1, 1]]


def test_a_curriculum_can_be_switched_on_and_off_when_a_run_is_resumed():
    off, on = mixture(curriculum=None), mixture()
    train(off, range(3))
    on.load_state_dict(off.state_dict())
    train(on, range(3, 30))
    assert on.metrics(batch_of([]))["data/passed_over_share"] > 0
    off.load_state_dict(on.state_dict())
    assert len(train(off, range(30, 33))) == 21
