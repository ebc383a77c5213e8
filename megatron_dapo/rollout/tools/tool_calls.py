"""Finds tool calls in a response: Qwen's format (hermes), `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

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
    except ValueError as error:
        return ToolCall("", problem=f"the tool call is not JSON: {error}")
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCall("", problem="the tool call needs a name")
    arguments = found.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(found["name"], problem="the arguments of the tool call are not an object")
    return ToolCall(found["name"], arguments)
