"""The conversation of one rollout: what a rollout function generates and appends, token by token.

Tokens are sampled by the engine or appended by the function; nothing is decoded and encoded again. The conversation
writes them into the samples of its rollout, with log-probs, weight versions, turns and the mask of trained tokens.
Messages are added under the chat template: `ChatHistory` finds the text after the last response. A template that
rewrites the history starts another sample of the same rollout.

A rollout that was interrupted is continued by calling its function again. The conversation then returns the recorded
turns without the engine, and checks that the function appends the same tokens as before. A turn that was aborted is
continued.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from megatron_dapo import fault_points
from megatron_dapo.errors import UserError
from megatron_dapo.rollout.generation import TurnRequest, shorten
from megatron_dapo.types import ASSISTANT, FinishReason, LogProbs, Prompt, Sample, Tokens, TurnSpan, as_tokens, score_of

Message = Mapping[str, Any]
Content = str | Sequence[int] | NDArray[Any]
Extend = Callable[[Sample, TurnRequest], Awaitable[bool]]  # generates a turn; False: interrupted


class RolloutInterrupted(BaseException):
    """The engine was asked to stop in mid-conversation. Not an Exception: a rollout function need not catch it."""


class ReplayMismatch(BaseException):
    """A rollout function does not repeat the recorded turns; the rollout is restarted."""


@dataclass(slots=True, frozen=True)
class Turn:
    """One generated turn. `text` has everything that was sampled but special tokens."""

    index: int
    text: str
    tokens: Tokens
    logprobs: LogProbs
    finish_reason: FinishReason

    @property
    def truncated(self) -> bool:
        """It ended at `max_tokens` or at the end of the room, not by itself."""
        return self.finish_reason is FinishReason.LENGTH


class Conversation:
    def __init__(
        self,
        prompt: Prompt,
        samples: list[Sample],
        extend: Extend,
        tokenizer: Any,
        *,
        max_response_tokens: int,
        stop: Sequence[str] = (),
        name: str = "rollout",
        on_new_sample: Callable[[Sample], None] = lambda sample: None,
    ) -> None:
        """`samples` are the rollout's so far: an empty one, or those of an interrupted conversation.
        `max_response_tokens` limits the whole conversation after its prompt, appended tokens included."""
        self.prompt = prompt
        self.samples = samples
        self.generating = False
        self.interrupted = False
        self.invalid_reward = ""
        self._extend = extend
        self._tokenizer = tokenizer
        self._max_response_tokens = max_response_tokens
        self._stop = tuple(stop)
        self._name = name
        self._on_new_sample = on_new_sample
        self._history = ChatHistory(prompt, tokenizer)
        self._waiting: list[Message] = []  # added, not yet rendered
        self._part = 0  # the current sample
        self._turns = 0  # how many of its turns have happened in this call
        self._generated: list[tuple[int, int]] = []  # (part, turn) of every generated turn
        self._cut = False
        self._last = time.monotonic()

    # ---- what a rollout function uses ----

    @property
    def seed(self) -> int:
        """Of this rollout: an environment with chance takes its random numbers from it, and repeats exactly."""
        return self.samples[0].seed

    @property
    def room(self) -> int:
        """Tokens that may still be generated or appended."""
        if self._cut:
            return 0
        before = len(self._sample.prompt_tokens) - len(self.prompt.tokens)
        return self._max_response_tokens - before - self.length

    @property
    def length(self) -> int:
        """Response tokens of the current sample."""
        return self._sample.turns[self._turns - 1].end if self._turns else 0

    @property
    def tokens(self) -> Tokens:
        """Prompt and response tokens of the current sample."""
        return np.concatenate([self._sample.prompt_tokens, self._sample.response_tokens[: self.length]])

    @property
    def messages(self) -> list[Message]:
        """The prompt's messages, every generated turn and every message that was added."""
        return [*self._history.messages, *self._waiting]

    @property
    def turns(self) -> int:
        """Turns that were generated."""
        return len(self._generated)

    @property
    def replaying(self) -> bool:
        """The function is called again after an interruption, and has not reached the place where it was."""
        return self._part < len(self.samples) - 1 or self._turns < len(self._sample.turns)

    async def generate(
        self,
        content: Content | Sequence[Message] | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Turn:
        """Appends `content` (text, tokens or messages) and samples the next turn from the current weights.

        The turn ends at an end token, at one of `stop` (besides rollout.stop), after `max_tokens`, or where there is no
        room left; without room it is empty and truncated."""
        if self.generating:
            raise UserError("a conversation generates one turn at a time: await the first one")
        if _is_messages(content):
            self.append_messages(content)
        elif content is not None:
            self.append(content, role="user")  # type: ignore[arg-type]
        self.write_messages()
        span = self._recorded(ASSISTANT)
        if span is None:
            span = await self._sample_turn(max_tokens, tuple(stop))
        else:
            span = self._sample.turns[self._turns] = replace(span, reward=None)  # the function gives it again
        self._generated.append((self._part, self._turns))
        self._turns += 1
        self._last = time.monotonic()
        tokens = self._sample.response_tokens[span.start : span.end]
        logprobs = self._sample.engine_logprobs[span.start : span.end]
        text = str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        self._history.messages.append({"role": ASSISTANT, "content": text})
        return Turn(len(self._generated) - 1, text, tokens, logprobs, FinishReason(span.finish_reason))

    def append(self, content: Content, *, role: str = "tool") -> None:
        """Appends a tool's result or a user's turn, which is not trained on: it has no log-probs. What does not fit
        into `room` is left out."""
        self.write_messages()
        self._append(self._encode(content), role)

    def append_messages(self, messages: Sequence[Message]) -> None:
        """Adds messages under the chat template. They are written when the next turn is generated."""
        self._waiting += messages

    def new_sample(
        self, content: Content | Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Starts another sample of this rollout, with `content` as its prompt; it gets the rollout's grade. Before the
        first turn, it replaces the prompt instead. `tools` are for the chat template."""
        with self._history.unless_refused():
            if _is_messages(content):
                self._waiting = []
                content = self._history.replace(content, tools)
            tokens = self._encode(content)  # type: ignore[arg-type]
        self._start_sample(tokens)

    def reward(self, value: float, turn: int | None = None) -> None:
        """Adds an environment's reward for a generated turn (default: the last). Rewards are added to the score."""
        if not self._generated:
            raise UserError("conversation.reward: no turn has been generated")
        part, index = self._generated[-1 if turn is None else turn]
        span = self.samples[part].turns[index]
        try:
            self.samples[part].turns[index] = replace(span, reward=(span.reward or 0.0) + score_of(value))
        except ValueError as error:  # NaN, infinite: it is not stored, and the rollout is ungraded
            self.invalid_reward = f"reward of turn {index}: {error}"

    # ---- what the runner uses ----

    def finish(self) -> None:
        """The function has returned: its last turn decides how all samples of the rollout ended."""
        if self.generating:
            raise UserError("it returned while a turn was being generated")
        if self.replaying or self._sample.length > self.length:  # without a turn that was generated in part
            raise ReplayMismatch
        if not self._generated or any(not sample.length for sample in self.samples):
            raise UserError("it returned without generating a turn")
        part, index = self._generated[-1]
        reason = FinishReason.LENGTH if self._cut else FinishReason(self.samples[part].turns[index].finish_reason)
        for sample in self.samples:
            sample.finish_reason = reason

    @property
    def rewards(self) -> float | None:
        """The sum of the turns' rewards; None if there are none."""
        values = [turn.reward for sample in self.samples for turn in sample.turns if turn.reward is not None]
        return sum(values) if values else None

    # ---- inside ----

    @property
    def _sample(self) -> Sample:
        return self.samples[self._part]

    def _recorded(self, role: str) -> TurnSpan | None:
        """The next turn of an earlier call of the function, which must have the same role."""
        turns = self._sample.turns
        if self._turns == len(turns):
            if self._part < len(self.samples) - 1:
                raise ReplayMismatch
            return None
        if (turns[self._turns].role == ASSISTANT) != (role == ASSISTANT):
            raise ReplayMismatch
        return turns[self._turns]

    async def _sample_turn(self, max_tokens: int | None, stop: tuple[str, ...]) -> TurnSpan:
        sample, start, began = self._sample, self.length, time.monotonic()
        end = start + max(0, self.room if max_tokens is None else min(self.room, max_tokens))
        number = len(self._generated)
        request = TurnRequest(
            f"{self._name}-turn{number}", turn_seed(sample.seed, number), start, end, (*self._stop, *stop)
        )
        sample.finish_reason, self.generating = FinishReason.ABORT, True
        try:
            self.interrupted = not await self._extend(sample, request)
        except asyncio.CancelledError:
            if not self.interrupted:  # the function has given the turn up
                shorten(sample, start)
            raise
        finally:
            self.generating = False
        if self.interrupted:
            raise RolloutInterrupted
        span = TurnSpan(ASSISTANT, start, sample.length, time.monotonic() - began, sample.finish_reason.value)
        sample.turns.append(span)
        fault_points.reach("rollouts/after_turn")
        return span

    def _encode(self, content: Content) -> Tokens:
        if isinstance(content, str):
            return as_tokens(self._tokenizer(content, add_special_tokens=False)["input_ids"])
        tokens = as_tokens(content)
        limit = len(self._tokenizer) if hasattr(self._tokenizer, "__len__") else np.iinfo(np.int32).max
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < limit:
            raise UserError(f"token ids from {tokens.min()} to {tokens.max()}, but the vocabulary has {limit}")
        return tokens

    def write_messages(self) -> None:
        """Writes the messages that were added. Those that template or tokenizer refuse are forgotten."""
        if not self._waiting:
            return
        new, self._waiting = self._waiting, []
        with self._history.unless_refused():
            text = self._history.add(new)
            tokens = self._encode(self._history.rendered() if text is None else text)
        if text is None:
            self._start_sample(tokens)
            return
        before = self._sample.response_tokens[: self.length]
        if len(before) and len(tokens) and before[-1] == tokens[0] and self._sample.turns[self._turns - 1].generated:
            tokens = tokens[1:]  # the model has sampled the end of its turn itself
        self._append(tokens, str(new[-1]["role"]))

    def _append(self, tokens: Tokens, role: str) -> None:
        if len(tokens) > max(0, self.room):
            tokens, self._cut = tokens[: max(0, self.room)], True
        if not len(tokens):
            return
        sample, start, now = self._sample, self.length, time.monotonic()
        span = self._recorded(role)
        if span is not None:
            if not np.array_equal(sample.response_tokens[start : span.end], tokens):
                raise ReplayMismatch
        else:
            if sample.length > start:  # of a turn that was aborted: it has been generated in another place before
                raise ReplayMismatch
            sample.trained = np.concatenate([sample.trained_mask, np.zeros(len(tokens), np.bool_)])
            sample.response_tokens = np.concatenate([sample.response_tokens, tokens])
            sample.engine_logprobs = np.concatenate([sample.engine_logprobs, np.zeros(len(tokens), np.float32)])
            sample.turns.append(TurnSpan(role, start, sample.length, now - self._last))
        self._turns += 1
        self._last = now

    def _start_sample(self, prompt: Tokens) -> None:
        """Unless the prompt leaves no room for a response: then the conversation is truncated where it is. Before the
        first turn, the prompt replaces that of the first sample."""
        if len(prompt) - len(self.prompt.tokens) >= self._max_response_tokens:
            self._cut = True
            return
        if self._part == 0 and len(self.samples) == 1 and not self._sample.turns and not self._sample.length:
            self._sample.prompt_tokens = prompt
            return
        if self._part == self._turns == 0 and np.array_equal(prompt, self._sample.prompt_tokens):  # called again
            return
        if self._turns < len(self._sample.turns):
            raise ReplayMismatch
        if self._part == len(self.samples) - 1:
            if self._sample.length > self.length:
                raise ReplayMismatch
            last = self._sample
            new = Sample(
                last.prompt_id, last.index, prompt, last.response_tokens[:0], last.engine_logprobs[:0],
                FinishReason.ABORT, seed=last.seed, part=last.part + 1,
            )  # fmt: skip
            self.samples.append(new)
            self._on_new_sample(new)
        elif not np.array_equal(self.samples[self._part + 1].prompt_tokens, prompt):
            raise ReplayMismatch
        self._part, self._turns = self._part + 1, 0


def turn_seed(seed: int, turn: int) -> int:
    """The first turn has the sample's seed: it is the response of a rollout without a function."""
    if turn == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/turn{turn}".encode(), digest_size=8).digest(), "little") >> 1


def _is_messages(content: object) -> TypeGuard[Sequence[Message]]:
    return isinstance(content, list | tuple) and bool(content) and isinstance(content[0], dict)


MARK = "response-0f6cb1d7"  # any text that no template treats in a special way


class ChatHistory:
    """The messages of a conversation, and the text that a chat template adds for new ones."""

    def __init__(self, prompt: Prompt, tokenizer: Any) -> None:
        """`prompt.meta` may hold the `messages` and `tools` that `prompt.text` was rendered from. Without them the
        prompt must be its question under the chat template."""
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._tools = prompt.meta.get("tools") or None
        asked = prompt.meta.get("messages") or [{"role": "user", "content": prompt.question}]
        self.messages: list[Message] = list(asked)
        self._checked = False

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

    @contextmanager
    def unless_refused(self) -> Iterator[None]:
        """After an error inside, the messages are those of before."""
        before = self.messages, self._tools, self._checked
        try:
            yield
        except Exception:
            self.messages, self._tools, self._checked = before
            raise

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
        first = list(self._prompt.meta.get("messages") or self.messages[:1])
        if not self._checked and _squeezed(self._render(first, start=True)) != _squeezed(self._prompt.text):
            raise UserError(
                f"the rollout function adds messages, but prompt {self._prompt.id!r} is not its messages under the "
                "chat template: set data.template to chat, or use a messages column"
            )
        self._checked = True


def _squeezed(text: str) -> str:
    return "".join(text.split())
