"""The rollout function that calls tools: what is run, what follows in the conversation, what a model can do wrong."""

import asyncio

import pytest
from scripted_conversation import chat, conversation_of, encode

from megatron_dapo.errors import UserError
from megatron_dapo.rollout.agents.functions import close_shared, shared, take_shared_metrics
from megatron_dapo.rollout.agents.tools.call_tools import ToolCall, ToolSettings, find_tool_calls, generate


def talk(replies, settings, **more):
    """(the conversation, metrics of the tools)"""

    async def main():
        conversation = conversation_of(replies, **more)
        try:
            await generate(conversation.prompt, conversation, settings)
            return conversation, take_shared_metrics()
        finally:
            await close_shared()

    return asyncio.run(main())


MARKS = {"format": "marks", "tools": ["calculator"], "max_calls": 2}


def test_what_is_between_the_marks_is_computed_and_follows_untrained():
    conversation, metrics = talk(["so [12*34]", "[1/0]", "408"], MARKS, end="")
    (sample,) = conversation.samples
    parts = ["so [12*34]", "408\n", "[1/0]", "ZeroDivisionError: division by zero\n", "408"]
    assert sample.response_tokens.tolist() == encode("".join(parts))
    expected = [i % 2 == 0 for i, part in enumerate(parts) for _ in part]
    assert sample.trained.tolist() == expected
    assert metrics["tools/calculator/calls"] == 2 and metrics["tools/seconds"] > 0


def test_a_token_that_goes_on_after_the_closing_mark_ends_a_call():
    """Engines stop on the token that contains the stop text, such as `].`; what was sampled stays."""
    conversation, _ = talk(["so [12*34].\n", "408"], MARKS, end="")
    (sample,) = conversation.samples
    assert sample.response_tokens.tolist() == encode("so [12*34].\n408\n408")


def test_a_response_without_a_call_ends_the_conversation():
    for reply in ("408", "12*34]", "[12*34", "12*34] ["):
        conversation, metrics = talk([reply], MARKS, end="")
        assert conversation.turns == 1 and not metrics.get("tools/calls")


def call(name, arguments):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_calls_in_qwens_format_get_their_results_as_messages():
    replies = [
        call("calculator", '{"expression": "2+3"}') + call("python", '{"code": "print(1)"}'),
        call("shell", "{}") + call("python", '{"a": 1, "b": 2}') + "<tool_call>{</tool_call>",
        "done",
    ]
    conversation, _ = talk(replies, {"limits": {"seconds": 60}})
    (sample,) = conversation.samples
    not_json = "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    first, second = chat(("tool", "5"), ("tool", "1")), chat(
        ("tool", "there is no tool 'shell'; there are calculator, python"),
        ("tool", "python needs the argument 'code', a text"),
        ("tool", f"the tool call is not JSON: {not_json}"),
    )  # fmt: skip
    end = encode("<|im_end|>\n")
    assert sample.response_tokens.tolist() == [
        *encode(replies[0]), *end, *first, *encode(replies[1]), *end, *second, *encode("done<|im_end|>"),
    ]  # fmt: skip


def test_calls_beyond_the_most_are_not_run_also_in_one_turn():
    conversation, metrics = talk([call("calculator", '{"expression": "2+3"}') * 9, "done"], {"max_calls": 3})
    assert metrics["tools/calls"] == 3
    results = [message["content"] for message in conversation.messages[-10:-1]]
    assert results == ["5"] * 3 + ["not run: there may be 3 tool calls"] * 6


def test_a_limit_is_part_of_the_result_and_the_conversation_goes_on():
    code = '{"code": "print(7); x = bytearray(10**11)"}'
    conversation, metrics = talk([call("python", code), "done"], {})
    assert metrics["tools/python/limit/memory"] == 1
    assert conversation.messages[-2] == {"role": "tool", "content": "7 [memory limit]"}


def test_tool_calls_are_found_in_a_text():
    assert find_tool_calls("no call") == ("no call", [])
    text, calls = find_tool_calls("first " + call("add", '{"a": 1}'))
    assert (text, calls) == ("first", [ToolCall("add", {"a": 1})])
    for bad in ("<tool_call>[1]</tool_call>", call("add", "3"), "<tool_call>{", "<tool_call>" + "[" * 10**5):
        assert find_tool_calls(bad)[1][0].problem


@pytest.mark.parametrize(
    "settings",
    [
        {"format": "xml"},
        {"tools": ["shell"]},
        {"tools": []},
        {"format": "marks"},
        {"limit": {}},
        {"limits": {"cpu": 1}},
    ],
)
def test_wrong_settings_are_named(settings):
    with pytest.raises(UserError, match=r"generate_settings of call_tools"):
        ToolSettings.read(settings)


class Opened:
    def __init__(self):
        self.closed = 0

    async def close(self):
        self.closed += 1

    def take_metrics(self):
        return {"tools/calls": 2.0}


def test_what_rollout_functions_open_is_shared_in_an_event_loop_and_closed_once():
    async def main():
        one, other = shared("one", Opened), shared("other", Opened)
        assert shared("one", Opened) is one and other is not one
        assert take_shared_metrics() == {"tools/calls": 4.0}
        for _ in range(2):
            await close_shared()
        assert (one.closed, other.closed) == (1, 1) and take_shared_metrics() == {}
        again = shared("one", Opened)
        await close_shared()
        return one, again

    one, again = asyncio.run(main())
    assert again is not one and asyncio.run(main())[0] is not one
