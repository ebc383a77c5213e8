"""Conversations: tokens are sampled or appended and never encoded again; interruptions change nothing."""

import asyncio
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from conversation_engine import END, TOKENIZER, ConversationEngine, logprob_of, next_token
from simulation import Prompts, collect, collect_with_cuts, rollout, run_virtually, through_json

from megatron_dapo.algorithm.filtering import give_up_after
from megatron_dapo.config import parse_config
from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.protocol import Completion
from megatron_dapo.errors import EngineError, UserError
from megatron_dapo.rollout.accounting import GroupEvents
from megatron_dapo.rollout.agents.conversation import Conversation, ReplayMismatch, turn_seed
from megatron_dapo.rollout.agents.functions import RolloutFunction, load_rollout_function, rollout_function
from megatron_dapo.rollout.generation import Generation, append_completion
from megatron_dapo.rollout.pending_group import PendingGroup, new_samples
from megatron_dapo.rollout.sampler import Sampler
from megatron_dapo.types import FinishReason, Grade, Group, Prompt, Sample, TurnSpan, as_logprobs, as_tokens


def encode(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def prompt_of(text="5+7=", **meta):
    return Prompt("p", text, as_tokens(encode(text)), meta=meta)


def conversation_of(prompt, engine, room=200, stop=()):
    async def extend(sample, request):
        config = RolloutConfig(max_response_tokens=room)
        group = PendingGroup(0, 0, Group(prompt, [sample]))
        return await Generation(engine, config, GroupEvents()).generate(sample, request, group, set())

    return Conversation(prompt, new_samples(prompt, [17]), extend, TOKENIZER, max_response_tokens=room, stop=stop)


def talk(function, prompt=None, **more):
    """The conversation after `function(conversation)`."""

    async def main():
        conversation = conversation_of(prompt or prompt_of(), ConversationEngine(), **more)
        await function(conversation)
        return conversation

    return run_virtually(main())


def turn_of(seed, context, longest):
    made = []
    while len(made) < longest and (not made or made[-1] != END):
        made.append(next_token(seed, context + made))
    return made


# ---- tokens ----


def test_the_tokens_are_those_that_were_sampled_and_appended():
    async def function(conversation):
        first = await conversation.generate(max_tokens=5)
        conversation.append("higher\n")
        second = await conversation.generate(as_tokens([9, 10]), max_tokens=30)
        assert [first.index, second.index] == [0, 1] and conversation.turns == 2

    conversation = talk(function)
    (sample,) = conversation.samples
    prompt = encode("5+7=")
    first = turn_of(17, prompt, 5)
    second = turn_of(turn_seed(17, 1), prompt + first + encode("higher\n") + [9, 10], 30)
    assert sample.response_tokens.tolist() == first + encode("higher\n") + [9, 10] + second
    sampled = [True] * len(first) + [False] * 9 + [True] * len(second)
    assert sample.trained.tolist() == sampled and sample.trained_tokens == len(first) + len(second)
    expected = [logprob_of(t) if s else 0.0 for t, s in zip(sample.response_tokens, sampled, strict=True)]
    assert sample.engine_logprobs == pytest.approx(np.float32(expected))
    edges = np.cumsum([0, len(first), 7, 2, len(second)]).tolist()
    assert [(t.role, t.start, t.end) for t in sample.turns] == [
        ("assistant", edges[0], edges[1]), ("tool", edges[1], edges[2]),
        ("user", edges[2], edges[3]), ("assistant", edges[3], edges[4]),
    ]  # fmt: skip
    assert [(s.start, s.end) for s in sample.weight_spans] == [(0, edges[1]), (edges[3], edges[4])]
    assert sample.final_tokens.tolist() == second
    assert Sample.from_state(through_json(sample.to_state())).to_state().keys() == sample.to_state().keys()


def test_states_are_exact():
    async def function(conversation):
        await conversation.generate(max_tokens=3)
        conversation.append("x")
        conversation.reward(0.5)

    (sample,) = talk(function).samples
    for state in (sample.to_state(), through_json(sample.to_state())):
        again = Sample.from_state(state)
        assert again.turns == sample.turns and again.turns[0].reward == 0.5
        assert again.trained.dtype == np.bool_ and again.trained.tolist() == sample.trained.tolist()


def test_a_replayed_turn_has_its_reward_once():
    """The function is called again after an interruption, and gives every reward again."""

    async def function(conversation):
        await conversation.generate(max_tokens=3)
        conversation.reward(0.5)
        conversation.append("x")
        await conversation.generate(max_tokens=3)
        conversation.reward(0.25)
        conversation.reward(1.0, turn=0)

    async def main():
        conversation = conversation_of(prompt_of(), ConversationEngine())
        await function(conversation)
        again = conversation_of(prompt_of(), None)  # nothing is generated
        again.samples[:] = conversation.samples
        assert again.replaying
        await function(again)
        return again

    again = run_virtually(main())
    assert [turn.reward for turn in again.samples[0].turns if turn.generated] == [1.5, 0.25]
    assert again.rewards == 1.75 and not again.replaying


def test_a_rewritten_history_takes_room_and_all_samples_end_as_the_last_turn():
    async def function(conversation):
        await conversation.generate(max_tokens=3)
        conversation.new_sample([*conversation.prompt.tokens, *range(6)])
        assert conversation.room == 20 - 6
        await conversation.generate(max_tokens=1)

    conversation = talk(function, room=20)
    conversation.samples[0].finish_reason = FinishReason.ABORT
    conversation.finish()
    last = conversation.samples[-1].turns[-1].finish_reason
    assert [sample.finish_reason.value for sample in conversation.samples] == [last, last] and last != "abort"


def test_room_limits_the_whole_conversation():
    async def function(conversation):
        assert conversation.room == 20
        await conversation.generate(max_tokens=2)
        conversation.append("123456789012345")
        left = conversation.room
        assert left == 20 - conversation.length
        turn = await conversation.generate()
        assert len(turn.tokens) <= left
        conversation.append("this does not fit into what is left")
        assert conversation.room == 0
        turn = await conversation.generate()
        assert turn.truncated and not len(turn.tokens)
        conversation.finish()

    (sample,) = talk(function, room=20).samples
    assert sample.length == 20 and sample.truncated


def test_a_new_sample_that_leaves_no_room_truncates_the_conversation():
    async def function(conversation):
        await conversation.generate(max_tokens=2)
        conversation.new_sample([5] * 40)
        turn = await conversation.generate()
        assert turn.truncated and not len(turn.tokens)
        conversation.finish()

    (sample,) = talk(function, room=20).samples
    assert sample.truncated and 1 <= sample.length <= 2 and len(sample.turns) == 2


def test_a_stop_string_ends_a_turn():
    async def function(conversation):
        turn = await conversation.generate(stop=["e", "a", "3", "+", "K", "x", "Q"], max_tokens=100)
        assert turn.finish_reason is FinishReason.STOP

    talk(function)


# ---- chat templates ----

STRIPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('E')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Templated:
    """The tokenizer with another chat template."""

    def __init__(self, template):
        self.chat_template = template

    def __call__(self, *args, **more):
        return TOKENIZER(*args, **more)

    def decode(self, *args, **more):
        return TOKENIZER.decode(*args, **more)

    def apply_chat_template(self, messages, **more):
        return TOKENIZER.apply_chat_template(messages, chat_template=self.chat_template, **more)


def chat_prompt(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "5+7="}], tokenize=False, add_generation_prompt=True
    )
    return prompt_of(text, question="5+7=")


def chat(template, sampled, *new):
    """The conversation of responses with the given tokens, each followed by a user's message."""
    tokenizer = Templated(template)
    prompt, turns = chat_prompt(tokenizer), iter(sampled)

    async def extend(sample, request):
        tokens = next(turns)
        append_completion(sample, Completion(as_tokens(tokens), as_logprobs([-1.0] * len(tokens)), FinishReason.STOP))
        return True

    async def main():
        conversation = Conversation(prompt, new_samples(prompt, [17]), extend, tokenizer, max_response_tokens=200)
        await conversation.generate()
        for text in new:
            await conversation.generate([{"role": "user", "content": text}])
        conversation.finish()
        return conversation

    return asyncio.run(main())


TURN_END = encode("<|im_end|>")


def test_a_template_is_applied_to_the_new_messages_only():
    # The model writes "12" as no tokenizer would: with a token that decodes to nothing (padding) in the middle.
    odd = [*encode("1"), TOKENIZER.pad_token_id, *encode("2"), *TURN_END]
    (sample,) = chat(TOKENIZER.chat_template, [odd, encode("ok"), encode("bye")], "again", "more").samples
    text = "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    more = "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    # The first turn ended itself; the second one was not closed by the model, so the template closes it.
    assert sample.response_tokens.tolist() == odd + encode(text) + encode("ok") + encode(more) + encode("bye")
    assert [turn.role for turn in sample.turns] == ["assistant", "user", "assistant", "user", "assistant"]


def test_a_template_that_rewrites_history_starts_another_sample():
    thinking, later = encode("thinkE12"), encode("13")
    conversation = chat(STRIPS_THINKING, [[*thinking, *TURN_END], [*later, *TURN_END], later], "again", "more")
    first, second = conversation.samples
    assert first.response_tokens.tolist() == [*thinking, *TURN_END] and first.trained is None
    assert TOKENIZER.decode(second.prompt_tokens).endswith(
        "<|im_start|>assistant\n12<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    )
    # "13" has no thinking to strip: the third turn continues the second sample.
    assert second.response_tokens[: len(later)].tolist() == later and len(second.turns) == 3
    assert (first.index, first.part, second.index, second.part) == (0, 0, 0, 1)


def test_messages_need_a_prompt_that_was_rendered_from_messages():
    async def function(conversation):
        await conversation.generate([{"role": "user", "content": "x"}])

    with pytest.raises(UserError, match=r"set data\.template to chat"):
        talk(function)


# ---- through the sampler ----


async def guess_until_even(prompt, conversation, settings):
    """Up to four turns; it ends at a turn of even length. Tools take time."""
    for number in range(4):
        turn = await conversation.generate(max_tokens=12)
        if len(turn.tokens) % 2 == 0:
            break
        await asyncio.sleep(settings.get("seconds", 0.3))
        if number == 1:
            conversation.new_sample([3, len(turn.tokens)])
        else:
            conversation.append(f"<{number}:{len(turn.tokens)}>")
        conversation.reward(0.25)
    return Grade(len(turn.tokens) % 3 == 0, float(len(turn.tokens) % 3 == 0))


def function_of(function, resume="turn", **settings):
    return RolloutFunction("python:test.function", function, settings, TOKENIZER, resume)


def expected_rollout(prompt, seed):
    """[(prompt, response, trained)] of guess_until_even without interruption."""
    samples = [(prompt, [], [])]
    for number in range(4):
        context, response, trained = samples[-1]
        tokens = turn_of(turn_seed(seed, number), context + response, 12)
        response += tokens
        trained += [True] * len(tokens)
        if len(tokens) % 2 == 0:
            break
        if number == 1:
            samples.append(([3, len(tokens)], [], []))
        else:
            response += encode(f"<{number}:{len(tokens)}>")
            trained += [False] * len(encode(f"<{number}:{len(tokens)}>"))
    return samples


def assert_expected(group: Group):
    for rollout_samples in group.rollouts:
        expected = expected_rollout(rollout_samples[0].prompt_tokens.tolist(), rollout_samples[0].seed)
        found = [
            (s.prompt_tokens.tolist(), s.response_tokens.tolist(), s.trained_mask.tolist()) for s in rollout_samples
        ]
        assert found == expected
        assert len({id(sample.grade) for sample in rollout_samples}) == 1 and rollout_samples[0].grade is not None


def sampler_of(config, engine, source, function, group_filter=None):
    async def grade(prompt, sample):
        raise AssertionError("the function grades")

    sampler = Sampler(engine, grade, source, config, groups_per_step=4, function=function)
    sampler.group_filter = group_filter or sampler.group_filter
    return sampler


@pytest.mark.parametrize("resume", ["turn", "restart"])
@pytest.mark.parametrize("reload", [False, True])
def test_an_interrupted_conversation_loses_nothing(resume, reload):
    """Cancelled at several moments, in turns and between them, the batch is that of an uninterrupted step."""
    config, function = rollout(samples=4, longest=80), function_of(guess_until_even, resume)

    async def collected(cuts):
        engine, source = ConversationEngine(slots=5), Prompts()
        sampler = sampler_of(config, engine, source, function)
        make = lambda: sampler_of(config, engine, source, function)  # noqa: E731
        return (await collect_with_cuts(sampler, make, 0, cuts, reload))[0]

    straight = run_virtually(collected([]))
    cut = run_virtually(collected([0.35, 0.5, 1.0, 0.7, 2.0]))
    assert any(len(rollout_samples) > 1 for group in straight.groups for rollout_samples in group.rollouts)
    for group in (*straight.groups, *cut.groups):
        assert_expected(group)
    assert [g.prompt.id for g in cut.groups] == [g.prompt.id for g in straight.groups]
    assert ("rollout/restarted" in cut.metrics) == (resume == "restart")
    assert cut.metrics["rollout/samples_trained"] == 16


def test_a_function_interrupted_inside_a_task_group_loses_nothing():
    async def in_a_task_group(prompt, conversation, settings):
        async with asyncio.TaskGroup() as tasks:
            rollout_task = tasks.create_task(guess_until_even(prompt, conversation, settings))
            tasks.create_task(asyncio.sleep(0.05))
        return rollout_task.result()

    config = rollout(samples=3, longest=80, oversampling=3.0, order="completion", unfinished="continue")
    more = {"function": function_of(in_a_task_group), "engine": lambda: ConversationEngine(slots=30)}
    batches, *_ = collect(config, steps=4, **more)
    assert all(batch.metrics.get("rollout/groups_failed", 0) == 0 for batch in batches)
    assert any(batch.metrics["rollout/interrupted_share"] for batch in batches)
    for batch in batches:
        for group in batch.groups:
            assert_expected(group)


def test_a_function_may_not_return_while_a_turn_is_generated():
    async def hasty(prompt, conversation, settings):
        await conversation.generate(max_tokens=2)
        if prompt.id == "p1":
            tasks.append(asyncio.ensure_future(conversation.generate(max_tokens=50)))
            await asyncio.sleep(0)
        return Grade(conversation.samples[0].index == 0, 1.0)

    tasks = []
    config = rollout(samples=2, longest=80)
    (batch,), *_ = collect(config, engine=ConversationEngine, function=function_of(hasty))
    assert tasks and batch.metrics["rollout/groups_failed"] == 1 and "p1" not in {g.prompt.id for g in batch.groups}


def swallow(error):
    return Grade(False, -1.0)


def fail(error):
    raise ValueError("the agent's library wraps every error") from error


@pytest.mark.parametrize("then", [swallow, fail])
def test_a_function_that_catches_its_interruption_is_continued_like_others(then):
    async def guarded(prompt, conversation, settings):
        try:
            return await guess_until_even(prompt, conversation, settings)
        except BaseException as error:
            return then(error)

    config = rollout(samples=3, longest=80, oversampling=3.0, order="completion", unfinished="continue")
    engine, steps = lambda: ConversationEngine(slots=30), 4
    batches, *_ = collect(config, steps=steps, engine=engine, function=function_of(guarded, seconds=0))
    assert any(batch.metrics["rollout/interrupted_share"] for batch in batches)
    for batch in batches:
        assert not batch.metrics.get("rollout/groups_failed")
        for group in batch.groups:
            assert_expected(group)


def test_a_function_that_leaves_out_a_turn_it_had_begun_starts_again():
    """It has a time limit, which has passed when it is called again."""

    async def main():
        conversation = conversation_of(prompt_of(), ConversationEngine(), room=12)
        await conversation.generate()
        conversation.samples[0].turns = [TurnSpan("assistant", 0, 1, finish_reason="stop")]
        again = conversation_of(prompt_of(), None)
        again.samples[:] = conversation.samples
        await again.generate()
        with pytest.raises(ReplayMismatch):
            again.finish()

    run_virtually(main())


def test_a_turn_that_the_function_gives_up_leaves_no_tokens():
    """It has a time limit of its own. Weights have changed during the turn, so that a part of it was there."""

    async def impatient(conversation):
        first = await conversation.generate(max_tokens=4)
        extend = conversation._extend

        async def half(sample, request):
            await extend(sample, replace(request, end=request.start + 2))
            await asyncio.sleep(60)

        conversation._extend = half
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await conversation.generate()
        conversation.finish()
        assert conversation.samples[0].response_tokens.tolist() == first.tokens.tolist()

    talk(impatient)


def test_a_turn_that_the_run_cancels_keeps_its_tokens():
    """The next step, or a resume, continues it."""

    async def main():
        conversation = conversation_of(prompt_of(), ConversationEngine())
        extend = conversation._extend

        async def cancelled(sample, request):
            await extend(sample, replace(request, end=request.start + 2))
            conversation.interrupted = True  # by the runner, before it cancels
            raise asyncio.CancelledError

        conversation._extend = cancelled
        with pytest.raises(asyncio.CancelledError):
            await conversation.generate()
        return conversation.samples[0].response_tokens.tolist()

    assert run_virtually(main()) == turn_of(17, encode("5+7="), 2)


def test_partial_conversations_are_carried_over_to_the_next_step():
    config = rollout(samples=3, longest=80, oversampling=3.0, order="completion", unfinished="continue")
    batches, *_ = collect(
        config, steps=4, engine=lambda: ConversationEngine(slots=30), function=function_of(guess_until_even)
    )
    mixed = 0
    for batch in batches:
        for group in batch.groups:
            assert_expected(group)
            mixed += len({span.version for s in group.samples for span in s.weight_spans}) > 1
    assert mixed  # some conversations began in one step and ended in the next


@pytest.mark.parametrize("resume", ["turn", "restart"])
def test_a_rollout_that_waits_for_its_grade_is_not_made_again_in_the_next_step(resume):
    """Not even by a function that starts again after an interruption: it has returned."""
    calls, graded = Counter(), Counter()

    async def once(prompt, conversation, settings):
        calls[prompt.id] += 1
        turn = await conversation.generate(max_tokens=9)
        conversation.reward(0.25)
        assert turn.tokens.tolist() == conversation.samples[0].response_tokens.tolist()

    async def slow(prompt, sample):
        graded[prompt.id] += 1
        await asyncio.sleep(1000 if prompt.id == "p0" else 10)
        return Grade(sample.index == 0, 1.0)

    config = rollout(samples=2, longest=80, oversampling=2, order="completion", unfinished="continue")
    batches, *_ = collect(
        config, 2, engine=lambda: ConversationEngine(50), grade=slow, function=function_of(once, resume)
    )
    assert "p0" in {group.prompt.id for group in batches[1].groups}
    assert set(calls.values()) == set(graded.values()) == {2} and "rollout/restarted" not in batches[1].metrics
    assert all(sample.grade.score == 1.25 for batch in batches for sample in batch.samples)


def test_a_function_that_does_something_else_when_it_is_called_again_starts_again():
    calls = {}

    async def different(prompt, conversation, settings):
        key = (prompt.id, conversation.samples[0].index)
        calls[key] = calls.get(key, 0) + 1
        await conversation.generate(max_tokens=3)
        conversation.append(f"call {calls[key]}")
        await conversation.generate(max_tokens=30)
        return Grade(True, 1.0)

    async def main():
        config, engine, source = rollout(samples=2, longest=80), ConversationEngine(slots=3), Prompts()
        make = lambda: sampler_of(config, engine, source, function_of(different), group_filter=lambda g: (True, ""))  # noqa: E731
        return (await collect_with_cuts(make(), make, 0, [1.0], False))[0]

    batch = run_virtually(main())
    assert batch.metrics["rollout/restarted"] >= 1
    for sample in batch.samples:
        appended = TOKENIZER.decode(sample.response_tokens[~sample.trained_mask])
        assert appended == f"call {calls[sample.prompt_id, sample.index]}"


def test_a_grader_reads_the_last_sample_of_a_rollout():
    async def function(prompt, conversation, settings):
        await conversation.generate(max_tokens=4)
        conversation.new_sample([3, 4])
        await conversation.generate(max_tokens=4)

    async def grade(prompt, sample):
        return Grade(sample.index % 2 == 0, float(sample.part))

    (batch,), *_ = collect(
        rollout(samples=2, longest=80), grade=grade, function=function_of(function), engine=ConversationEngine
    )
    assert {s.grade.score for group in batch.groups for s in group.samples} == {1.0}
    assert {len(samples) for group in batch.groups for samples in group.rollouts} == {2}


def test_rewards_of_turns_are_added_to_the_score():
    (batch,), *_ = collect(
        rollout(samples=4, longest=80), engine=ConversationEngine, function=function_of(guess_until_even)
    )
    for group in batch.groups:
        for samples in group.rollouts:
            rewarded = sum(turn.reward is not None for s in samples for turn in s.turns)
            assert samples[0].grade.score == float(samples[0].grade.correct) + 0.25 * rewarded


def test_a_function_may_return_what_a_grader_may():
    given = {"p0": np.True_, "p1": np.float32(-0.5), "p2": {"score": torch.tensor(0.25), "acc": False}}

    async def function(prompt, conversation, settings):
        await conversation.generate(max_tokens=2)
        return given.get(prompt.id, "right")

    config = rollout(samples=1).model_copy(update={"dynamic_sampling": False})
    (batch,), *_ = collect(config, needed=3, engine=ConversationEngine, function=function_of(function))
    found = {group.prompt.id: group.samples[0].grade for group in batch.groups}
    assert found == {"p0": Grade(True, 1.0), "p1": Grade(False, -0.5), "p2": Grade(False, 0.25)}
    with pytest.raises(UserError, match=r"python:test.function on prompt 'p3': expected a Grade.*found 'right'"):
        collect(config, engine=ConversationEngine, function=function_of(function))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e308])
@pytest.mark.parametrize("by", ["reward", "turns", "score", "parts"])
def test_an_invalid_reward_leaves_a_rollout_ungraded_and_is_not_saved(by, value):
    async def function(prompt, conversation, settings):
        await conversation.generate(max_tokens=4)
        hit = conversation.samples[0].index == 1
        if by == "reward":
            conversation.reward(value if hit else 0.5)
        grades = {"turns": Grade(True, 1.0, turns=(value,)), "score": Grade(True, value)}
        grades |= {"parts": Grade(True, 1.0, parts={"a": value})}
        return grades[by] if hit and by in grades else Grade(conversation.samples[0].index == 0, 1.0)

    (batch,), *_ = collect(rollout(samples=3), engine=ConversationEngine, function=function_of(function))
    assert batch.metrics["rollout/rejected_grades"] == len(batch.groups)
    for group in batch.groups:
        assert [sample.grade.correct for sample in group.samples] == [True, None, False]
        assert "is not a number of at most 1e+09" in group.samples[1].grade.reason
        assert group.samples[1].turns[0].reward is None and group.samples[1].grade.score == 0


@pytest.mark.parametrize("token", [-1, len(TOKENIZER), 2**31])
def test_appended_tokens_outside_of_the_vocabulary_fail_the_group(token):
    async def function(prompt, conversation, settings):
        await conversation.generate(max_tokens=4)
        conversation.append([7, token if prompt.id == "p1" else 7])

    (batch,), *_ = collect(
        rollout(samples=2), engine=ConversationEngine, function=function_of(function), group_filter=lambda g: (True, "")
    )
    assert batch.metrics["rollout/groups_failed"] == 1 and {g.prompt.id for g in batch.groups} == {
        "p0",
        "p2",
        "p3",
        "p4",
    }


def test_the_grader_grades_the_last_sample_if_the_function_does_not():
    seen = []

    async def plain(prompt, conversation, settings):
        await conversation.generate(max_tokens=4)
        conversation.append("!!")
        await conversation.generate(max_tokens=4)

    async def grade(prompt, sample):
        seen.append(sample.final_tokens.tolist())
        return Grade(sample.index % 2 == 0, 1.0)

    (batch,), *_ = collect(rollout(samples=2), engine=ConversationEngine, function=function_of(plain), grade=grade)
    assert sorted(seen) == sorted(s.response_tokens[s.turns[-1].start :].tolist() for s in batch.samples)


def test_an_early_rejection_ends_conversations_also_between_their_turns():
    async def slow(prompt, conversation, settings):
        await conversation.generate(max_tokens=2)
        if conversation.samples[0].index > 1:
            await asyncio.sleep(10_000)
        return Grade(False, 0.0)

    config = rollout(samples=4, max_generation_batches=2, on_limit="stop")

    async def main():
        engine = ConversationEngine(slots=30)
        sampler = sampler_of(config, engine, Prompts(), function_of(slow), group_filter=rejecting)
        with pytest.raises(UserError, match="early-all-wrong"):
            await sampler.collect(0)
        return asyncio.get_running_loop().time()

    def rejecting(group):
        return True, ""

    rejecting.reject_early = give_up_after(2)
    assert run_virtually(main()) < 1000


def test_a_function_that_raises_fails_its_group_and_names_the_line(caplog):
    async def broken(prompt, conversation, settings):
        await conversation.generate(max_tokens=2)
        if prompt.id == "p1":
            raise KeyError("no such tool")
        return Grade(conversation.samples[0].index == 0, 1.0)

    (batch,), *_ = collect(rollout(samples=2), engine=ConversationEngine, function=function_of(broken))
    assert batch.metrics["rollout/groups_failed"] == 1 and "p1" not in {g.prompt.id for g in batch.groups}

    (record,) = caplog.records
    assert "Traceback" in record.getMessage() and "no such tool" in record.getMessage(), "both samples raised"

    async def always(prompt, conversation, settings):
        json.loads("[")

    message = r"python:test.function, prompt 'p\d+', raised JSONDecodeError at test_conversation.py:\d+: Expecting"
    with pytest.raises(EngineError, match=message):
        collect(rollout(samples=2), engine=ConversationEngine, function=function_of(always))


def test_a_function_is_checked_when_it_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "own_rollout.py").write_text(
        "from megatron_dapo.rollout.agents.functions import rollout_function\n"
        "@rollout_function(resume='turn')\n"
        "async def good(prompt, conversation, settings): ...\n"
        "def plain(prompt, conversation, settings): ...\n"
        "@rollout_function(resume='sometimes')\n"
        "async def odd(prompt, conversation, settings): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    raw = {"rollout": {"generate": "python:own_rollout.good", "generate_settings": {"n": 3}}}
    good = load_rollout_function(parse_config(raw | {"reward": {"scores": "zero-one"}}))
    assert (good.resume, good.settings, good.scale) == ("turn", {"n": 3}, "zero-one")
    assert load_rollout_function(parse_config({})) is None
    for name, message in (("plain", "async def"), ("odd", "resume='sometimes'"), ("none", "no function 'none'")):
        with pytest.raises(UserError, match=message):
            load_rollout_function(parse_config({"rollout": {"generate": f"python:own_rollout.{name}"}}))
    assert rollout_function()(good.function) is good.function
