"""Prompt templates: the DAPO text, the plain question, the tokenizer's chat template, or the user's own text."""

from __future__ import annotations

from typing import Any

from megatron_dapo.data.sources import DataError

DAPO_TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{question}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
_TEXTS = {"dapo": DAPO_TEMPLATE, "plain": "{question}", "": "{question}"}


def render(template: str, question: str, tokenizer: Any, system: str = "") -> str:
    """The text for the model. `template` is dapo, plain or the user's text, with `+chat` for the chat template."""
    name, chat = ("", True) if template == "chat" else (template.removesuffix("+chat"), template.endswith("+chat"))
    text = _TEXTS.get(name, name).replace("{question}", question)  # not str.format: LaTeX is full of braces
    if not chat:
        return f"{system}\n\n{text}" if system else text
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"data.template is {template!r}, but the tokenizer has no chat template: use "
            f"{name or 'plain'!r}, or a tokenizer that has one (tokenizer_config.json, chat_template)"
        )
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
