"""Generates a response, or one turn of it, with one engine: continues what was aborted, and counts what runs.

An aborted sample has finish reason ABORT and the tokens it has so far. To continue it, prompt and tokens so far are
sent with the same seed. Each part keeps its own weight version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.protocol import Engine, EngineError, ForeignWeightsError, SamplingParams
from megatron_dapo.rollout.completion import append_completion, check_versions, computed_tokens, shorten
from megatron_dapo.types import FinishReason, Sample

# An engine that repeatedly aborts a sample without adding a token, although nobody asked for it, is broken.
MAX_EMPTY_ABORTS = 20
EMPTY_ABORT_PAUSE = 0.5


@dataclass(slots=True, frozen=True)
class TurnRequest:
    """One turn of a sample: its response tokens from `start` to at most `end`."""

    name: str  # of the requests, for the engine and for error messages
    seed: int
    start: int
    end: int
    stop: tuple[str, ...]


class Generation:
    """Shared by all groups of one step. After `stop`, aborted samples stay unfinished instead of being continued.

    `on_piece(tokens, finished)` is called for each generated part. `foreign_weights` receives the first
    ForeignWeightsError as soon as it happens: the step must end before the other samples do.
    """

    def __init__(self, engine: Engine, config: RolloutConfig, on_piece: Callable[[int, bool], None]) -> None:
        self._engine, self._config, self._on_piece = engine, config, on_piece
        self._params = SamplingParams(
            max_new_tokens=config.max_response_tokens, temperature=config.temperature, top_p=config.top_p,
            top_k=config.top_k, min_p=config.min_p, stop=tuple(config.stop),
            stop_token_ids=tuple(config.stop_token_ids),
        )  # fmt: skip
        self.stopping = False
        self.running = 0
        self.foreign_weights: asyncio.Future[ForeignWeightsError] = asyncio.get_running_loop().create_future()

    def whole_response(self, sample: Sample, name: str) -> TurnRequest:
        return TurnRequest(name, sample.seed, 0, self._config.max_response_tokens, self._params.stop)

    async def generate(
        self, sample: Sample, request: TurnRequest, requests: set[str], rejected: Callable[[], object]
    ) -> bool:
        """Whether the turn is complete; False after `stop`, or when `rejected()` says so. `requests` holds the names
        of the requests that are in the engine."""
        empty = piece = 0
        while sample.finish_reason is FinishReason.ABORT:
            if rejected():
                return False
            self._remove_possible_stop(sample, request)
            room = request.end - sample.length
            if room <= 0:
                sample.finish_reason = FinishReason.LENGTH
                break
            before, request_id = sample.length, f"{request.name}-at{sample.length}-piece{piece}"
            requests.add(request_id)
            try:
                await self._extend(sample, request, request_id, room)
            finally:
                requests.discard(request_id)
            if sample.finish_reason is FinishReason.ABORT:
                if self.stopping:
                    return False
                piece += 1
                empty = empty + 1 if sample.length == before else 0
                if empty and not rejected():
                    await _wait_after_empty_abort(request.name, empty)
        return True

    async def _extend(self, sample: Sample, request: TurnRequest, request_id: str, room: int) -> None:
        routed = computed_tokens(sample, sample.length) if self._config.servers.routed_experts else None
        params = replace(
            self._params, max_new_tokens=room, seed=request.seed, stop=request.stop, routed_experts_from=routed
        )
        context = np.concatenate([sample.prompt_tokens, sample.response_tokens]) if sample.length else None
        self.running += 1
        try:
            completion = await self._engine.generate(
                request_id, sample.prompt_tokens if context is None else context, params
            )
            check_versions(completion, self._engine.weight_version, request_id)
        except ForeignWeightsError as error:
            if not self.foreign_weights.done():
                self.foreign_weights.set_result(error)
            raise
        finally:
            self.running -= 1
        append_completion(sample, completion)
        self._on_piece(len(completion.tokens), False)

    def _remove_possible_stop(self, sample: Sample, request: TurnRequest) -> None:
        """Removes the last tokens of an aborted turn, in which a stop string may have begun.

        Engines search for stop strings in what they generate, not in the prompt they are given.
        """
        if request.stop and sample.length > request.start and sample.finish_reason is FinishReason.ABORT:
            kept = max(request.start, sample.length - max(map(len, request.stop)))
            self._on_piece(kept - sample.length, False)  # they are counted again when they are generated again
            shorten(sample, kept)


async def _wait_after_empty_abort(name: str, empty: int) -> None:
    if empty > MAX_EMPTY_ABORTS:
        raise EngineError(f"{name}: the engine aborted it {empty} times without adding a token")
    await asyncio.sleep(EMPTY_ABORT_PAUSE)
