"""The messages of a conversation, and the text that a chat template adds for new ones.

The tokens of a conversation are never made from its messages. A template is rendered twice, with the last response and
with a mark in its place, to find what it writes after that response: the end of the turn, the new messages, the start
of the next turn. The two renderings also show whether the template has changed what was there before, for example
removed the thinking of an earlier turn. White space is not compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dapo.errors import UserError
from megatron_dapo.types import ASSISTANT, Prompt

Message = Mapping[str, Any]
MARK = "response-0f6cb1d7"  # any text that no template treats in a special way


class ChatHistory:
    def __init__(self, prompt: Prompt, tokenizer: Any) -> None:
        """`prompt.meta` may hold the `messages` and `tools` that `prompt.text` was rendered from. Without them the
        prompt must be its question under the chat template."""
        self._prompt, self._tokenizer = prompt, tokenizer
        self._tools = prompt.meta.get("tools") or None
        question = str(prompt.meta.get("question", prompt.text))
        self.messages: list[Message] = list(prompt.meta.get("messages") or [{"role": "user", "content": question}])
        self._checked = False

    def add_response(self, text: str) -> None:
        self.messages.append({"role": ASSISTANT, "content": text})

    def add(self, new: Sequence[Message]) -> str | None:
        """Adds messages. Returns the text to append to the tokens, up to where the next response starts; None if the
        template has rewritten the history."""
        self._check_prompt()
        before, last = self.messages, self.messages[-1]
        self.messages = [*before, *new]
        if last["role"] != ASSISTANT:
            old, text = self._render(before, start=False), self.rendered()
            return text[len(old) :] if text.startswith(old) else None
        earlier = before[:-1]
        marked = self._render([*earlier, {**last, "content": MARK}, *new], start=True)
        head, mark, tail = marked.partition(MARK)
        if not mark or _squeezed(head) != _squeezed(self._render(earlier, start=True)):
            return None
        return tail if _squeezed(self.rendered()) == _squeezed(head + last["content"] + tail) else None

    def replace(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Other messages instead of all; returns them under the template. `tools` None: those of before."""
        self.messages, self._checked = list(messages), True
        if tools is not None:
            self._tools = list(tools) or None
        return self.rendered()

    def rendered(self) -> str:
        """All messages, and the start of the next response."""
        return self._render(self.messages, start=True)

    def _render(self, messages: Sequence[Message], start: bool) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise UserError(
                "the rollout function adds messages, but the tokenizer has no chat template: append text or tokens, "
                "or use a tokenizer that has one (tokenizer_config.json, chat_template)"
            )
        return str(
            self._tokenizer.apply_chat_template(
                list(messages), tools=self._tools, tokenize=False, add_generation_prompt=start
            )
        )

    def _check_prompt(self) -> None:
        """Whether the messages are those of the prompt."""
        if self._checked:
            return
        first = list(self._prompt.meta.get("messages") or self.messages[:1])
        if _squeezed(self._render(first, start=True)) != _squeezed(self._prompt.text):
            raise UserError(
                f"the rollout function adds messages, but prompt {self._prompt.id!r} is not its messages under the "
                "chat template: set data.template to chat, or use a messages column"
            )
        self._checked = True


def _squeezed(text: str) -> str:
    return "".join(text.split())
