"""A rollout function that lets the model call a calculator or Python.

    rollout:
      generate: python:megatron_dapo.rollout.agents.tools.call_tools.generate
      generate_settings: {format: hermes, tools: [calculator, python], max_calls: 4, limits: {seconds: 10}}

`format: hermes` is Qwen's: the model calls tools by name as its chat template asks it to, and gets the results as
messages of the role `tool`. `format: marks` needs no chat template: what the model writes between `open` and `close`
goes to the only tool, and the result follows at once. The configured grader grades the last turn. A call that hits a
limit gets what was printed and the name of the limit as its result.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from megatron_dapo.errors import UserError
from megatron_dapo.rollout.agents.conversation import Conversation
from megatron_dapo.rollout.agents.functions import rollout_function
from megatron_dapo.rollout.agents.tools.sandbox import TOOLS, Sandbox, ToolLimits, ToolResult, shared_sandbox
from megatron_dapo.types import Prompt

# Finds tool calls in a response: Qwen's format (hermes), `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(slots=True, frozen=True)
class ToolCall:
    """`problem` says why a call cannot be read; the model gets it as the result."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def find_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """The text without the calls, and the calls in order."""
    calls = [_read(found) for found in _CALL.findall(text)]
    return _CALL.sub("", text).strip() if calls else text, calls


def _read(text: str) -> ToolCall:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall("", problem=f"the tool call is not JSON: {error}")
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCall("", problem="the tool call needs a name")
    arguments = found.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(found["name"], problem="the arguments of the tool call are not an object")
    return ToolCall(found["name"], arguments)


FORMATS = ("hermes", "marks")
# The argument that holds what a tool runs; a model that gives another single argument means the same.
ARGUMENTS = {"calculator": "expression", "python": "code"}


@dataclass(slots=True, frozen=True)
class ToolSettings:
    format: str = "hermes"
    tools: tuple[str, ...] = TOOLS
    max_calls: int = 4  # of a conversation
    open: str = "["
    close: str = "]"
    result: str = "{result}\n"  # what follows a call between marks
    limits: dict[str, Any] = field(default_factory=dict)
    workers: int = 2

    @classmethod
    def read(cls, settings: dict[str, Any]) -> ToolSettings:
        try:
            found = cls(**{**settings, "tools": tuple(settings.get("tools", TOOLS))})
            ToolLimits(**found.limits)
        except TypeError as error:
            raise UserError(f"rollout.generate_settings of call_tools: {error}") from None
        unknown = [tool for tool in found.tools if tool not in TOOLS]
        if found.format not in FORMATS or unknown or not found.tools:
            raise UserError(
                f"rollout.generate_settings of call_tools: format is {found.format!r}, tools are {list(found.tools)}; "
                f"expected one of {', '.join(FORMATS)} and some of {', '.join(TOOLS)}"
            )
        if found.format == "marks" and (len(found.tools) != 1 or not found.open or not found.close):
            raise UserError(
                "rollout.generate_settings of call_tools: format marks needs one tool, and open and close not empty"
            )
        return found


@rollout_function(resume="turn")
async def generate(prompt: Prompt, conversation: Conversation, settings: dict[str, Any]) -> None:
    chosen = ToolSettings.read(settings)
    sandbox = shared_sandbox(ToolLimits(**chosen.limits), chosen.workers)
    if chosen.format == "marks":
        await _between_marks(prompt, conversation, chosen, sandbox)
    else:
        await _hermes(prompt, conversation, chosen, sandbox)


async def _between_marks(prompt: Prompt, conversation: Conversation, chosen: ToolSettings, sandbox: Sandbox) -> None:
    for _ in range(chosen.max_calls):
        turn = await conversation.generate(stop=[chosen.close])
        before, closed, _ = turn.text.partition(chosen.close)  # the token that closes a call may go on: `].`
        if turn.truncated or not closed or chosen.open not in before:
            return
        result = await sandbox.run(chosen.tools[0], before.rpartition(chosen.open)[2], prompt.id)
        conversation.append(chosen.result.replace("{result}", readable(result)))
    await conversation.generate(stop=[chosen.close])


async def _hermes(prompt: Prompt, conversation: Conversation, chosen: ToolSettings, sandbox: Sandbox) -> None:
    made = 0
    while True:
        turn = await conversation.generate()
        _, calls = find_tool_calls(turn.text)
        if turn.truncated or not calls or made >= chosen.max_calls:
            return
        results = [await _call(call, number, prompt, chosen, sandbox) for number, call in enumerate(calls, made)]
        made += len(calls)
        conversation.append_messages([{"role": "tool", "content": result} for result in results])


async def _call(call: ToolCall, number: int, prompt: Prompt, chosen: ToolSettings, sandbox: Sandbox) -> str:
    if call.problem:
        return call.problem
    if call.name not in chosen.tools:
        return f"there is no tool {call.name!r}; there are {', '.join(chosen.tools)}"
    if number >= chosen.max_calls:
        return f"not run: there may be {chosen.max_calls} tool calls"
    given = call.arguments.get(ARGUMENTS[call.name])
    if given is None and len(call.arguments) == 1:
        given = next(iter(call.arguments.values()))
    if not isinstance(given, str):
        return f"{call.name} needs the argument {ARGUMENTS[call.name]!r}, a text"
    return readable(await sandbox.run(call.name, given, prompt.id))


def readable(result: ToolResult) -> str:
    text = result.text.strip()
    return f"{text} [{result.limit} limit]".strip() if result.limit else text
