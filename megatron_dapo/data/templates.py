"""Prompt templates: the DAPO text, the plain question, the tokenizer's chat template, or the user's own text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_dapo.data.sources import DataError

DAPO_TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{question}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
_TEXTS = {"dapo": DAPO_TEMPLATE, "plain": "{question}", "": "{question}"}


Message = dict[str, Any]


def to_messages(template: str, question: str, system: str = "", turns: Sequence[Message] = ()) -> list[Message]:
    """The messages that `render` puts into the chat template. The text of `template` replaces the last question."""
    text = _text(_split(template)[0], question)
    if not turns:
        own = [{"role": "system", "content": system}] if system else []
        return [*own, {"role": "user", "content": text}]
    messages = [dict(message) for message in turns]
    last = max(i for i, message in enumerate(messages) if message["role"] == "user")
    messages[last]["content"] = text
    if not system:
        return messages
    start = 1 if messages[0]["role"] == "system" else 0
    return [{"role": "system", "content": system}, *messages[start:]]


def _split(template: str) -> tuple[str, bool]:
    """The template without `chat`, and whether it had it."""
    return ("", True) if template == "chat" else (template.removesuffix("+chat"), template.endswith("+chat"))


def _text(name: str, question: str) -> str:
    return _TEXTS.get(name, name).replace("{question}", question)  # not str.format: LaTeX is full of braces


def render(
    template: str,
    question: str,
    tokenizer: Any,
    system: str = "",
    turns: Sequence[Message] = (),
    tools: Sequence[Message] = (),
) -> str:
    """The text for the model. `template` is dapo, plain or the user's text, with `+chat` for the chat template, which
    also gets `turns` and `tools`."""
    name, chat = _split(template)
    if not chat:
        text = _text(name, question)
        return f"{system}\n\n{text}" if system else text
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"data.template is {template!r}, but the tokenizer has no chat template: use "
            f"{name or 'plain'!r}, or a tokenizer that has one (tokenizer_config.json, chat_template)"
        )
    messages, more = to_messages(template, question, system, turns), {"tools": list(tools)} if tools else {}
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more))
