"""An evaluation with a rollout function: the same conversations as in training, repeated if the engine aborts them."""

import asyncio
import re

import pytest
from conversation_engine import TOKENIZER, ConversationEngine
from simulation import run_virtually

from megatron_dapo.config.data import EvalConfig
from megatron_dapo.errors import EngineError
from megatron_dapo.evaluation import EvaluationError, evaluate_sets
from megatron_dapo.rollout.agents.functions import RolloutFunction
from megatron_dapo.types import Grade, Prompt, as_tokens

PROMPTS = [Prompt(f"p{i}", f"{i}+1=", as_tokens([20 + i, 21])) for i in range(3)]


async def two_turns(prompt, conversation, settings):
    first = await conversation.generate(max_tokens=4)
    conversation.append("<" + str(len(first.tokens)) + ">")
    second = await conversation.generate(max_tokens=settings["longest"])
    return None if prompt.id == "p0" else Grade(len(second.tokens) % 2 == 0, 1.0)


class LastTurns:
    """A grader that notes what it grades."""

    def __init__(self):
        self.seen = []

    def decode(self, tokens):
        return TOKENIZER.decode(tokens, skip_special_tokens=True)

    async def grade(self, prompt, sample):
        self.seen.append((prompt.id, self.decode(sample.final_tokens)))
        return Grade(True, 1.0)


def evaluated(aborts=()):
    async def main():
        engine, pool = ConversationEngine(), LastTurns()
        function = RolloutFunction("python:test.two_turns", two_turns, {"longest": 6}, TOKENIZER)
        config = EvalConfig(samples=2, max_response_tokens=30, concurrency=4, temperature=1.0)

        async def abort():
            for seconds in aborts:
                await asyncio.sleep(seconds)
                await engine.abort()

        _, found = await asyncio.gather(
            abort(), evaluate_sets(engine, {"": PROMPTS}, pool, config, seed=0, function=function)
        )
        return found.results[""], pool

    return run_virtually(main())


def test_responses_are_conversations():
    result, pool = evaluated()
    responses = [response for problem in result.problems for response in problem.responses]
    assert len(responses) == 6
    for response in responses:
        first, reply, last = (part.split("] ", 1)[1] for part in response.text.split("\n["))
        assert reply.startswith("<") and response.tokens <= 10
        assert response.tokens >= len(first) + len(last)  # generated tokens, without the reply
    assert [name for name, _ in pool.seen] == ["p0", "p0"]  # the function graded the others
    assert {text for _, text in pool.seen} == {r.text.rpartition("] ")[2] for r in result.problems[0].responses}


def test_aborted_turns_are_repeated_with_the_same_tokens():
    straight, _ = evaluated()
    again, _ = evaluated(aborts=[0.15, 0.3])
    assert [p.responses for p in again.problems] == [p.responses for p in straight.problems]


def test_an_engine_that_aborts_a_turn_again_and_again_ends_the_evaluation():
    with pytest.raises(EvaluationError, match=r"aborted response \d to problem p\d 3 times"):
        evaluated(aborts=[0.1, 0.3, 0.3])  # the others would be graded


@pytest.mark.parametrize("names", ["p1", "p0 p1 p2"])
def test_a_response_whose_function_raises_is_ungraded(names):
    """As in training, where its group fails: one tool that fails does not end a run."""

    async def main():
        function = RolloutFunction("python:test.broken", broken, {}, TOKENIZER)
        config = EvalConfig(samples=2, max_response_tokens=30)
        return await evaluate_sets(ConversationEngine(), {"": PROMPTS}, LastTurns(), config, seed=0, function=function)

    async def broken(prompt, conversation, settings):
        await conversation.generate(max_tokens=4)
        if prompt.id in names:
            raise ValueError("no board")

    message = r"python:test\.broken, prompt 'p\d', raised ValueError at .*: no board"
    if names == "p1":
        result = run_virtually(main()).results[""]
        assert (result.avg, result.ungraded, result.unusable) == (1.0, 2, 1)
        assert all(re.search(message, response.reason) and response.text for response in result.problems[1].responses)
    else:
        with pytest.raises(EvaluationError, match=message):
            run_virtually(main())


def test_a_failing_engine_ends_the_evaluation_whatever_the_function_makes_of_it():
    def fault(request_id):
        if "p1" in request_id:
            raise EngineError("server 2: connection refused")

    async def in_a_task_group(prompt, conversation, settings):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(conversation.generate(max_tokens=4))
        return Grade(True, 1.0)

    async def main():
        function = RolloutFunction("python:test.groups", in_a_task_group, {}, TOKENIZER)
        config, engine = EvalConfig(samples=2, max_response_tokens=30), ConversationEngine(fault=fault)
        await evaluate_sets(engine, {"": PROMPTS}, LastTurns(), config, seed=0, function=function)

    with pytest.raises(EngineError, match="server 2"):
        run_virtually(main())
