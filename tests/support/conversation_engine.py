"""An engine for conversations: each token depends on the seed and on everything before it, so that a conversation that
was interrupted and continued equals the whole one only if no token was lost, doubled or changed."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

from simulation import SimulatedEngine

from megatron_dapo.data import arithmetic_tokenizer
from megatron_dapo.engines.protocol import Completion, SamplingParams
from megatron_dapo.types import FinishReason, WeightSpan, as_logprobs, as_tokens

TOKENIZER = arithmetic_tokenizer()
END = TOKENIZER.eos_token_id


def next_token(seed: int, context: list[int]) -> int:
    number = int.from_bytes(hashlib.blake2b(f"{seed}/{context}".encode(), digest_size=4).digest(), "little")
    return END if number % 7 == 0 else 6 + number % 90


def logprob_of(token: int) -> float:
    return -token / 100


class ConversationEngine(SimulatedEngine):
    def __init__(self, slots: int = 8, **more: Any) -> None:
        super().__init__(slots, **more)
        self.contexts: list[list[int]] = []  # of every request

    async def _run(self, request_id: str, prompt: Any, params: SamplingParams, aborted: asyncio.Event) -> Completion:
        self._fault(request_id)
        context, made = prompt.tolist(), []
        self.contexts.append(list(context))
        assert params.seed is not None
        version = self.weight_version
        reason = FinishReason.LENGTH
        while len(made) < params.max_new_tokens:
            try:
                await asyncio.wait_for(aborted.wait(), self.token_seconds)
            except TimeoutError:
                pass
            else:
                reason = FinishReason.ABORT
                break
            made.append(next_token(params.seed, context + made))
            if made[-1] == END or any(TOKENIZER.decode(made).endswith(stop) for stop in params.stop):
                reason = FinishReason.STOP
                break
        spans = [WeightSpan(version, 0, len(made))] if made else []
        return Completion(as_tokens(made), as_logprobs(map(logprob_of, made)), reason, spans)
