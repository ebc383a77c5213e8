"""The cursor: every prompt once an epoch, the same order for the same seed, and exact resume."""

import json

import pytest

from megatron_dapo.data import DataError, PromptCursor
from megatron_dapo.types import Prompt, as_tokens


def prompts(count=7, prefix="p"):
    return [Prompt(f"{prefix}{i}", "", as_tokens([]), str(i)) for i in range(count)]


def ids(taken):
    return [p.id for p in taken]


def test_every_epoch_holds_every_prompt_once_in_another_order():
    cursor = PromptCursor(prompts(), seed=1)
    epochs = [ids(cursor.take(7)) for _ in range(4)]
    assert all(sorted(epoch) == sorted(ids(prompts())) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_the_order_depends_on_the_seed_and_not_on_batch_sizes_or_file_order():
    whole = ids(PromptCursor(prompts(), seed=1).take(21))
    portions = PromptCursor(prompts(), seed=1)
    assert ids([p for n in (3, 1, 9, 8) for p in portions.take(n)]) == whole  # 9 crosses an epoch
    assert ids(PromptCursor(prompts()[::-1], seed=1).take(21)) == whole
    assert ids(PromptCursor(prompts(), seed=2).take(21)) != whole
    # Stated in full: another version of anything must not change the order of a run that is resumed.
    assert whole[:7] == ORDER_OF_SEED_1


ORDER_OF_SEED_1 = ["p1", "p0", "p3", "p5", "p6", "p2", "p4"]


def test_one_take_may_span_several_epochs():
    cursor = PromptCursor(prompts(3), seed=0)
    taken = ids(cursor.take(8))
    assert sorted(taken[:3]) == sorted(taken[3:6]) == ["p0", "p1", "p2"]
    assert cursor.epochs == 2 + 2 / 3
    assert cursor.take(0) == []


@pytest.mark.parametrize("before", [0, 1, 6, 7, 8, 20])
def test_resume_is_exact(before):
    cursor = PromptCursor(prompts(), seed=3)
    cursor.take(before)
    state = json.loads(json.dumps(cursor.state_dict()))
    expected = ids(cursor.take(30))
    resumed = PromptCursor(prompts(), seed=99)  # the state's seed counts
    resumed.take(5)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert ids(resumed.take(30)) == expected


def test_a_state_of_other_prompts_is_refused():
    state = PromptCursor(prompts(), seed=0).state_dict()
    for other in (prompts(8), prompts(prefix="q"), [*prompts(6), Prompt("p6", "", as_tokens([]), "another answer")]):
        with pytest.raises(DataError, match="the saved position belongs to a set of 7 prompts"):
            PromptCursor(other, seed=0).load_state_dict(state)
    with pytest.raises(DataError, match="at least one prompt"):
        PromptCursor([], seed=0)
