"""The engine protocol: what the sampler and the evaluation need of anything that generates text.

An engine answers one request at a time and many at once (asyncio); it never invents a token or a log-prob.
`generate` either returns a whole `Completion` (possibly with finish reason ABORT and what was made so far) or
raises `EngineError`, which names the server and the cause.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from megatron_dapo.errors import UserError
from megatron_dapo.types import FinishReason, LogProbs, Tokens, WeightSpan


class EngineError(UserError):
    """An engine failed; the message says which one, doing what, and why."""


@dataclass(slots=True, frozen=True)
class SamplingParams:
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(slots=True)
class Completion:
    """`tokens` and `logprobs` have the same length; `weight_spans` cover every token, relative to `tokens`."""

    tokens: Tokens
    logprobs: LogProbs
    finish_reason: FinishReason
    text: str = ""
    weight_spans: list[WeightSpan] = field(default_factory=list)


class Engine(Protocol):
    async def generate(self, request_id: str, prompt: Tokens, params: SamplingParams) -> Completion: ...

    async def abort(self, request_id: str | None = None) -> None:
        """Ends one request, or all; each then returns its partial completion with finish reason ABORT."""
        ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...
