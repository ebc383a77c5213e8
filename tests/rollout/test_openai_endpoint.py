"""The OpenAI-compatible endpoint: stock clients get replies, and their rollouts hold exactly the sampled tokens."""

import asyncio
import json
from contextlib import suppress

import aiohttp
import openai
import pytest
from conversation_engine import TOKENIZER
from scripted_conversation import TURN_END, chat, conversation_of, encode

from megatron_dapo.rollout.agents.conversation import RolloutInterrupted
from megatron_dapo.rollout.agents.functions import close_shared
from megatron_dapo.rollout.agents.openai_endpoint import BadRequest, openai_endpoint

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def run(agent, replies, **more):
    """(what the agent returned, the conversation)"""

    async def main():
        conversation = conversation_of(replies, **more)
        try:
            async with openai_endpoint(conversation) as endpoint:
                client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="any", max_retries=0)
                return await agent(client, endpoint), conversation
        finally:
            await close_shared()

    return asyncio.run(main())


def user(text):
    return {"role": "user", "content": text}


async def say(client, messages, **more):
    return (await client.chat.completions.create(model="policy", messages=messages, **more)).choices[0]


def test_a_stock_client_talks_and_the_tokens_are_those_that_were_sampled():
    async def agent(client, endpoint):
        assert [model.id async for model in client.models.list()] == ["policy"]
        first = await say(client, [user("hi")])
        assert (first.message.content, first.finish_reason) == ("a  b ", "stop")
        # Libraries strip responses and send content as parts: neither changes the history.
        history = [user("hi"), {"role": "assistant", "content": [{"type": "text", "text": "a  b"}]}, user("more")]
        return (await say(client, history)).message.content

    last, conversation = run(agent, ["a  b ", "c"])
    (sample,) = conversation.samples
    first, between, second = encode("a  b <|im_end|>"), encode("\n") + chat(("user", "more")), encode("c<|im_end|>")
    assert last == "c" and sample.prompt_tokens.tolist() == chat(("user", "hi"))
    assert sample.response_tokens.tolist() == first + between + second
    assert sample.trained.tolist() == [True] * len(first) + [False] * len(between) + [True] * len(second)


def test_other_first_messages_replace_the_prompt():
    async def agent(client, endpoint):
        await say(client, [{"role": "developer", "content": "be brief"}, user("hi")])

    _, conversation = run(agent, ["a"])
    (sample,) = conversation.samples
    assert sample.prompt_tokens.tolist() == chat(("system", "be brief"), ("user", "hi"))
    assert sample.trained is None or sample.trained.all()


def test_a_changed_history_starts_another_sample_of_the_rollout():
    async def agent(client, endpoint):
        await say(client, [user("hi")])
        await say(client, [user("hi"), {"role": "assistant", "content": "summary"}, user("more")])
        await say(client, [user("hi"), {"role": "assistant", "content": "summary"}, user("more"),
                           {"role": "assistant", "content": "c"}, user("on")])  # fmt: skip

    _, conversation = run(agent, ["a long thought", "c", "d"])
    one, two = conversation.samples
    assert one.response_tokens.tolist() == encode("a long thought<|im_end|>") and one.part == 0
    assert two.prompt_tokens.tolist() == chat(("user", "hi"), ("assistant", "summary"), ("user", "more"))
    assert two.response_tokens.tolist() == encode("c<|im_end|>\n") + chat(("user", "on")) + encode("d<|im_end|>")
    assert (two.part, two.index) == (1, one.index)


def test_tool_calls_are_parsed_and_their_results_continue_the_sample():
    async def agent(client, endpoint):
        first = await say(client, [user("hi")], tools=[TOOL])
        (call,) = first.message.tool_calls
        assert (first.finish_reason, call.function.name) == ("tool_calls", "add")
        assert json.loads(call.function.arguments) == {"a": 1} and first.message.content == "let me see"
        result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
        history = [user("hi"), first.message.model_dump(exclude_none=True), result]
        return (await say(client, history, tools=[TOOL])).message.content

    last, conversation = run(agent, ["let me see\n" + CALL, "two"])
    (sample,) = conversation.samples
    expected = encode("let me see\n" + CALL + "<|im_end|>\n") + chat(("tool", "2")) + encode("two<|im_end|>")
    assert last == "two" and sample.response_tokens.tolist() == expected


def test_stop_texts_limits_and_streams():
    async def agent(client, endpoint):
        choice = await say(client, [user("hi")], stop=["STOP"])
        assert choice.message.content == "abc"
        limited = await client.chat.completions.create(model="policy", messages=[user("x")], max_tokens=4)
        assert limited.usage.completion_tokens == 4
        stream = await client.chat.completions.create(model="policy", messages=[user("y")], stream=True)
        return "".join([chunk.choices[0].delta.content async for chunk in stream])

    assert run(agent, ["abcSTOP", "0123456789", "streamed"])[0] == "streamed"


def test_a_rollout_is_found_by_its_key_and_bad_requests_are_refused():
    async def agent(client, endpoint):
        root = endpoint.base_url.split("/rollouts/")[0] + "/v1"
        by_key = openai.AsyncOpenAI(base_url=root, api_key=endpoint.api_key, max_retries=0)
        assert (await say(by_key, [user("hi")])).message.content == "a"
        stranger = openai.AsyncOpenAI(base_url=root, api_key="guess", max_retries=0)
        with pytest.raises(openai.NotFoundError, match="no such rollout"):
            await say(stranger, [user("hi")])
        for bad, message in (({"n": 2}, "n must be 1"), ({"messages": []}, "messages is empty"),
                             ({"messages": [{"content": "x"}]}, "needs a role")):  # fmt: skip
            with pytest.raises(openai.BadRequestError, match=message):
                await client.chat.completions.create(**{"model": "policy", "messages": [user("hi")], **bad})
        return (await say(client, [user("hi"), {"role": "assistant", "content": "a"}, user("b")])).message.content

    assert run(agent, ["a", "still here"])[0] == "still here"


@pytest.mark.parametrize(
    "bad",
    [
        b"{", b"\xff", b"[" * 100_000, b"[]", {"messages": 3}, {"messages": [{"role": ["user"]}]}, {"stop": 7},
        {"stop": [7]}, {"stop": [""]}, {"max_tokens": "many"}, {"max_tokens": -4}, {"max_tokens": 1.5},
        {"tools": {"a": 1}}, {"tools": [3]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [7]}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": 7}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": "f"}]}]},
        {"messages": [{"role": "refused by the template", "content": "x"}]},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"},
                      {"role": "refused by the template", "content": "x"}]},
    ],
    ids=lambda bad: str(bad)[:40],
)  # fmt: skip
def test_a_malformed_request_fails_alone_and_changes_nothing(bad, monkeypatch):
    template = TOKENIZER.chat_template
    refusal = "{% for m in messages %}{% if 'refused' in m.role %}{{ raise_exception('no such role') }}{% endif %}"
    monkeypatch.setattr(TOKENIZER, "chat_template", refusal + "{% endfor %}" + template)

    async def agent(client, endpoint):
        await say(client, [user("hi")])
        body = bad if isinstance(bad, bytes) else json.dumps({"messages": [user("hi")], **bad})
        async with aiohttp.ClientSession() as session:
            async with session.post(endpoint.base_url + "/chat/completions", data=body) as reply:
                assert reply.status == 400 and (await reply.json())["error"]["message"]
        return (await say(client, [user("hi"), {"role": "assistant", "content": "a"}, user("b")])).message.content

    last, conversation = run(agent, ["a", "c"])
    (sample,) = conversation.samples
    between = encode("\n") + chat(("user", "b"))
    assert last == "c" and sample.response_tokens.tolist() == encode("a<|im_end|>") + between + encode("c<|im_end|>")


@pytest.mark.parametrize("error", [None, TimeoutError])
def test_a_turn_whose_client_gave_up_is_part_of_the_rollout_and_no_turn_begins_after_it(error):
    """The agent goes away while its first request is answered and the second waits."""

    async def main():
        conversation, started = conversation_of(["a", "b"]), asyncio.Event()
        extend = conversation._extend

        async def slowly(sample, request):
            started.set()
            await asyncio.sleep(0.05)
            return await extend(sample, request)

        conversation._extend = slowly
        try:
            with suppress(TimeoutError):
                async with openai_endpoint(conversation) as endpoint:
                    requests = [asyncio.ensure_future(endpoint.complete({"messages": [user("hi")]})) for _ in range(2)]
                    await started.wait()
                    if error:
                        raise error
            assert conversation.turns == 1 and not conversation.generating
            return conversation, await asyncio.gather(*requests, return_exceptions=True)
        finally:
            await close_shared()

    conversation, (first, second) = asyncio.run(main())
    assert first["choices"][0]["message"]["content"] == "a"
    assert isinstance(second, BadRequest) and "has ended" in str(second)
    assert conversation.samples[0].response_tokens.tolist() == encode("a<|im_end|>")


def test_an_interrupted_rollout_ends_its_function_whatever_the_agent_does():
    async def agent(client, endpoint):
        for _ in range(3):
            with pytest.raises(openai.BadRequestError):
                await say(client, [user("hi")])

    with pytest.raises(RolloutInterrupted):
        run(agent, [None])


def test_an_agent_library_runs_unchanged():
    """smolagents in a thread: its tool-calling agent calls a tool and gives a final answer."""
    import smolagents

    @smolagents.tool
    def multiply(a: int, b: int) -> int:
        """Multiplies.

        Args:
            a: one number
            b: another number
        """
        return a * b

    def work(endpoint):
        model = smolagents.OpenAIServerModel("policy", api_base=endpoint.base_url, api_key=endpoint.api_key)
        agent = smolagents.ToolCallingAgent(tools=[multiply], model=model, max_steps=4, verbosity_level=0)
        return agent.run("What is 12*34?")

    async def agent(client, endpoint):
        return await asyncio.to_thread(work, endpoint)

    replies = [
        '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 34}}</tool_call>',
        '<tool_call>{"name": "final_answer", "arguments": {"answer": "408"}}</tool_call>',
    ]
    answer, conversation = run(agent, replies, room=60000)
    assert str(answer) == "408"
    generated = [
        sample.response_tokens[turn.start : turn.end].tolist()
        for sample in conversation.samples for turn in sample.turns if turn.generated
    ]  # fmt: skip
    assert generated == [encode(reply + TURN_END) for reply in replies]
    assert all(
        sample.engine_logprobs[sample.trained_mask].tolist() == [-0.5] * sample.trained_tokens
        for sample in conversation.samples
    )
