"""Generates a response, or one turn of it, with one engine: continues what was aborted, and counts what runs.

An aborted sample has finish reason ABORT and the tokens it has so far. To continue it, prompt and tokens so far are
sent with the same seed. Each part keeps its own weight version.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

import numpy as np

from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.protocol import Completion, ForeignWeightsError, Generator, SamplingParams
from megatron_dapo.errors import EngineError
from megatron_dapo.rollout.accounting import GroupEvents
from megatron_dapo.rollout.pending_group import PendingGroup
from megatron_dapo.types import FinishReason, Sample, WeightSpan


def check_versions(completion: Completion, current: int, request_id: str) -> None:
    """No token may come from weights that the trainer has not sent yet."""
    newest = max((span.version for span in completion.weight_spans), default=current)
    if newest > current:
        raise ForeignWeightsError(
            f"server {completion.server or 'unknown'}: request {request_id} was generated with weight version "
            f"{newest}, but the newest version that this run has sent is {current}. Another program updates this "
            "server's weights: give each run its own servers, or protect them with rollout.servers.api_key_env"
        )


def append_completion(sample: Sample, completion: Completion) -> None:
    """Adds one part."""
    offset = sample.length
    _append_experts(sample, completion)
    sample.response_tokens = np.concatenate([sample.response_tokens, completion.tokens])
    sample.engine_logprobs = np.concatenate([sample.engine_logprobs, completion.logprobs])
    if sample.trained is not None:
        sample.trained = np.concatenate([sample.trained, np.ones(len(completion.tokens), np.bool_)])
    for span in completion.weight_spans:
        last = sample.weight_spans[-1] if sample.weight_spans else None
        if last is not None and last.version == span.version and last.end == span.start + offset:
            sample.weight_spans[-1] = WeightSpan(last.version, last.start, span.end + offset)
        else:
            sample.weight_spans.append(WeightSpan(span.version, span.start + offset, span.end + offset))
    sample.finish_reason = completion.finish_reason


def shorten(sample: Sample, kept: int) -> None:
    """Removes the response tokens from `kept` on."""
    computed = computed_tokens(sample, kept)
    sample.response_tokens = sample.response_tokens[:kept]
    sample.engine_logprobs = sample.engine_logprobs[:kept]
    if sample.trained is not None:
        sample.trained = sample.trained[:kept]
    if sample.routed_experts is not None:
        sample.routed_experts = sample.routed_experts[:computed]
    spans = (WeightSpan(s.version, s.start, min(s.end, kept)) for s in sample.weight_spans)
    sample.weight_spans = [span for span in spans if span.start < span.end]
    sample.text = ""


def computed_tokens(sample: Sample, response: int) -> int:
    """Tokens that an engine has computed for the first `response` tokens of the response: those before the last one
    that it generated. Tokens appended after that one have not been computed."""
    if sample.trained is not None:
        generated = np.flatnonzero(sample.trained[:response])
        response = int(generated[-1]) + 1 if len(generated) else 0
    return len(sample.prompt_tokens) + response - 1 if response else 0


def _append_experts(sample: Sample, completion: Completion) -> None:
    """A part brings the experts of its tokens but the last, and of the tokens before it that were not computed yet.
    What a part has not brought is zero: not known."""
    found, before = completion.routed_experts, sample.routed_experts
    if found is None:
        return
    start = computed_tokens(sample, sample.length)
    if before is None:
        before = np.zeros((0, found.shape[1]), found.dtype)
    lost = np.zeros((max(0, start - len(before)), found.shape[1]), found.dtype)
    sample.routed_experts = np.concatenate([before[:start], lost, found])


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

    `foreign_weights` receives the first ForeignWeightsError as soon as it happens: the step must end before the other
    samples do.
    """

    def __init__(self, engine: Generator, config: RolloutConfig, events: GroupEvents) -> None:
        self._engine = engine
        self._config = config
        self._events = events
        self._params = SamplingParams(
            max_new_tokens=config.max_response_tokens, temperature=config.temperature, stop=tuple(config.stop),
            stop_token_ids=tuple(config.stop_token_ids),
        )  # fmt: skip
        self.stopping = False
        self.running = 0
        self.foreign_weights: asyncio.Future[ForeignWeightsError] = asyncio.get_running_loop().create_future()

    def whole_response(self, sample: Sample, name: str) -> TurnRequest:
        return TurnRequest(name, sample.seed, 0, self._config.max_response_tokens, self._params.stop)

    async def generate(self, sample: Sample, request: TurnRequest, group: PendingGroup, requests: set[str]) -> bool:
        """Whether the turn is complete; False after `stop`, or when the group is rejected early. `requests` holds the
        names of the requests that are in the engine."""
        empty = piece = 0
        while sample.finish_reason is FinishReason.ABORT:
            if group.rejected:
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
                if empty and not group.rejected:
                    await _wait_after_empty_abort(request.name, empty)
        return True

    async def _extend(self, sample: Sample, request: TurnRequest, request_id: str, room: int) -> None:
        routed = computed_tokens(sample, sample.length) if self._config.servers.demands.returns_experts else None
        params = replace(
            self._params, max_new_tokens=room, seed=request.seed, stop=request.stop, routed_experts_from=routed
        )
        context = np.concatenate([sample.prompt_tokens, sample.response_tokens]) if sample.length else None
        self.running += 1
        started = time.monotonic()
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
        if not completion.server and (problem := completion.problem(params, None)):  # a server's were checked before
            raise EngineError(f"request {request_id}: {problem}")
        append_completion(sample, completion)
        self._events.request(completion.server, request_id, started, len(completion.tokens), completion.rejected)

    def _remove_possible_stop(self, sample: Sample, request: TurnRequest) -> None:
        """Removes the last tokens of an aborted turn, in which a stop string may have begun.

        Engines search for stop strings in what they generate, not in the prompt they are given.
        """
        if request.stop and sample.length > request.start and sample.finish_reason is FinishReason.ABORT:
            kept = max(request.start, sample.length - max(map(len, request.stop)))
            self._events.removed(sample.length - kept)
            shorten(sample, kept)


async def _wait_after_empty_abort(name: str, empty: int) -> None:
    if empty > MAX_EMPTY_ABORTS:
        raise EngineError(f"{name}: the engine aborted it {empty} times without adding a token")
    await asyncio.sleep(EMPTY_ABORT_PAUSE)
