"""Rollout functions: `rollout.generate: python:module.function`, the user's own way to make a response.

    @rollout_function(resume="turn")
    async def generate(prompt, conversation, settings):
        turn = await conversation.generate()
        conversation.append(answer_of_the_tool(turn.text))
        await conversation.generate()
        return None                      # the configured grader grades the last turn; or return a grade

`resume` declares what happens to a conversation that is interrupted. `turn`: the function is called again and the
conversation replays its completed turns, so the function must do the same again. `restart`: it starts from the prompt.

What functions share during a run, such as the sandbox of their tools, is opened by `shared` and closed by the run.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar, cast, get_args

from megatron_dapo.config.schema import Config
from megatron_dapo.errors import EngineError, UserError
from megatron_dapo.plugins import in_one_line, load_function, log_once
from megatron_dapo.reward.grader import Scores
from megatron_dapo.rollout.agents.conversation import Conversation, ReplayMismatch, RolloutInterrupted
from megatron_dapo.types import Grade, Prompt

Resume = Literal["turn", "restart"]
Generate = Callable[[Prompt, Conversation, dict[str, Any]], Awaitable[Any]]  # None, or what `Scores.read` reads
F = TypeVar("F", bound=Callable[..., Any])


class RolloutFunctionError(EngineError):
    """A rollout function raised; its group failed. The message names the function, the prompt and the line."""


def rollout_function(resume: Resume = "turn") -> Callable[[F], F]:
    """A decorator that declares what happens when a conversation is interrupted."""

    def declare(function: F) -> F:
        function.resume = resume  # type: ignore[attr-defined]
        return function

    return declare


@dataclass(slots=True, frozen=True)
class RolloutFunction:
    name: str
    function: Generate
    settings: dict[str, Any]
    tokenizer: Any
    resume: Resume = "restart"
    scale: str = "plus-minus-one"  # reward.scores
    logged: set[str] = field(default_factory=set)  # its errors

    async def __call__(self, conversation: Conversation) -> Grade | None:
        """Calls the function to its end. The grade includes the turns' rewards; None: the grader decides."""
        prompt = conversation.prompt
        try:
            returned = await self.function(prompt, conversation, self.settings)
            conversation.finish()
        except EngineError:
            raise
        except Exception as error:
            text = in_one_line(error, self.function)
            name = f"rollout.generate: {self.name}"
            log_once(self.logged, name, text, "".join(traceback.format_exception(error)))
            raise RolloutFunctionError(f"{name}, prompt {prompt.id!r}, raised {text}") from error
        except BaseExceptionGroup as group:  # raised inside a task group
            if group.subgroup(ReplayMismatch):
                raise ReplayMismatch from None
            raise
        finally:
            if conversation.interrupted:  # whatever the function made of it
                raise RolloutInterrupted from None
        try:
            return None if returned is None else Scores(self.scale).read(returned)
        except TypeError as error:
            raise UserError(f"rollout.generate: {self.name} on prompt {prompt.id!r}: {error}") from None


def load_rollout_function(config: Config, tokenizer: Any = None) -> RolloutFunction | None:
    """The function that `rollout.generate` names; None: a response is one turn."""
    name = config.rollout.generate
    if name is None:
        return None
    function = load_function(name, "rollout.generate")
    if not inspect.iscoroutinefunction(function):
        raise UserError(f"rollout.generate: {name} must be an `async def` function")
    resume = getattr(function, "resume", "restart")
    if resume not in get_args(Resume):
        raise UserError(f"rollout.generate: {name} declares resume={resume!r}, expected turn or restart")
    return RolloutFunction(
        name, cast(Generate, function), dict(config.rollout.generate_settings), tokenizer, cast(Resume, resume),
        config.reward.scores,
    )  # fmt: skip


def with_rewards(grade: Grade, conversation: Conversation) -> Grade:
    """The grade with the rewards of the turns added to its score: those of the function and those of the grader."""
    for turn, value in enumerate(grade.turns[: conversation.turns]):
        conversation.reward(value, turn)
    if conversation.invalid_reward:
        return Grade.invalid(conversation.invalid_reward)
    rewards = conversation.rewards
    return grade if rewards is None else replace(grade, score=grade.score + rewards)


class Shared(Protocol):
    """What rollout functions share. It may have `take_metrics`, a method that returns metrics since its last call."""

    async def close(self) -> None: ...


S = TypeVar("S", bound=Shared)
_shared: dict[asyncio.AbstractEventLoop, dict[Hashable, Any]] = {}


def shared(key: Hashable, make: Callable[[], S]) -> S:
    """The object of this event loop under this key, made by the first call: rollout functions have no state of their
    own. `close_shared` closes it."""
    objects = _shared.setdefault(asyncio.get_running_loop(), {})
    if key not in objects:
        objects[key] = make()
    return cast(S, objects[key])


async def close_shared() -> None:
    """Closes what the rollout functions of this event loop have opened."""
    for opened in _shared.pop(asyncio.get_running_loop(), {}).values():
        await opened.close()


def take_shared_metrics() -> dict[str, float]:
    """Of this event loop, since the last call; empty if the rollout functions share nothing that has metrics."""
    total = Counter[str]()
    for opened in _shared.get(asyncio.get_running_loop(), {}).values():
        if hasattr(opened, "take_metrics"):
            total.update(opened.take_metrics())
    return dict(total)
