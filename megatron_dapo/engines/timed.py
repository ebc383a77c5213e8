"""Reports when each request ran and on which server, for the timeline of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

from megatron_dapo.engines.protocol import Completion, Engine, SamplingParams
from megatron_dapo.types import Tokens

# server, request id, start (time.monotonic()), tokens
OnRequest = Callable[[str, str, float, int], None]


class _TimedEngine:
    """Times `generate`; everything else is the engine's own."""

    def __init__(self, engine: Engine, on_request: OnRequest) -> None:
        self._engine, self._on_request = engine, on_request

    async def generate(self, request_id: str, prompt: Tokens, params: SamplingParams) -> Completion:
        started = time.monotonic()
        completion = await self._engine.generate(request_id, prompt, params)
        self._on_request(completion.server, request_id, started, len(completion.tokens))
        return completion

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def timed(engine: Engine, on_request: OnRequest | None) -> Engine:
    """The engine, with every finished request reported. Requests that fail are not."""
    return engine if on_request is None else cast(Engine, _TimedEngine(engine, on_request))
