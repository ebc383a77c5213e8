"""Runs one group: generates the samples of one prompt, continues those that were aborted, and grades each at once.

A sample is finished when it is graded. An aborted sample has finish reason ABORT and the tokens it has so far. To
continue it, the runner sends prompt and tokens so far with the same seed. Each part keeps its own weight version.
When the group filter rejects a group early, its remaining samples are aborted and stay unfinished.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_dapo.algorithm import EarlyRejection
from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.protocol import Completion, Engine, EngineError, ForeignWeightsError, SamplingParams
from megatron_dapo.rollout.pending_group import PendingGroup
from megatron_dapo.types import FinishReason, Grade, Prompt, Sample, WeightSpan

Grader = Callable[[Prompt, Sample], Awaitable[Grade]]

# An engine that repeatedly aborts a sample without adding a token, although nobody asked for it, is broken.
MAX_EMPTY_ABORTS = 20
EMPTY_ABORT_PAUSE = 0.5


class GroupRunner:
    """Shared by all groups of one step. After `stop`, aborted samples stay unfinished instead of being continued.

    `on_piece(tokens, finished)` is called for each generated part and for each graded sample, `on_generated()` when a
    sample needs the engine no longer. `foreign_weights` receives the first ForeignWeightsError as soon as it happens:
    the step must end before the other samples do.
    """

    def __init__(
        self,
        engine: Engine,
        grade: Grader,
        config: RolloutConfig,
        reject_early: EarlyRejection | None,
        on_piece: Callable[[int, bool], None],
        on_generated: Callable[[], None],
    ) -> None:
        self._engine, self._grade, self._config = engine, grade, config
        self._reject_early, self._on_piece, self._on_generated = reject_early, on_piece, on_generated
        self._params = SamplingParams(
            max_new_tokens=config.max_response_tokens, temperature=config.temperature, top_p=config.top_p,
            top_k=config.top_k, min_p=config.min_p, stop=tuple(config.stop),
            stop_token_ids=tuple(config.stop_token_ids),
        )  # fmt: skip
        self._stopping = False
        self._request_ids: dict[int, set[str]] = {}  # in the engine, by the group's serial
        self.requests = 0  # samples that have not been generated completely, of all groups that were started
        self.running = self.finished_samples = 0
        self.foreign_weights: asyncio.Future[ForeignWeightsError] = asyncio.get_running_loop().create_future()

    def stop(self) -> None:
        self._stopping = True

    def early_rejection(self, pending: PendingGroup) -> str | None:
        """Why the filter rejects the group although it may have unfinished samples; None if it does not."""
        return self._reject_early(pending.group) if self._reject_early and pending.group.samples else None

    def run(self, pending: PendingGroup) -> Coroutine[Any, Any, None]:
        """Finishes every sample of the group, or leaves some unfinished after `stop` or an early rejection. Raises the
        first error. The samples count as requests at once, before the coroutine starts."""
        todo = pending.unfinished_samples
        self.requests += len(todo)
        return self._run(pending, todo)

    async def _run(self, pending: PendingGroup, todo: list[Sample]) -> None:
        self._request_ids[pending.serial] = set()
        results = await asyncio.gather(*(self._run_sample(pending, s) for s in todo), return_exceptions=True)
        del self._request_ids[pending.serial]
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _run_sample(self, pending: PendingGroup, sample: Sample) -> None:
        try:
            complete = await self._generate(pending, sample)
        finally:
            self.requests -= 1
            self._on_generated()
        if not complete:
            return
        sample.grade = await self._grade(pending.group.prompt, sample)
        self.finished_samples += 1
        self._on_piece(0, True)
        if not pending.finished and self.early_rejection(pending):
            await asyncio.gather(*(self._engine.abort(name) for name in self._request_ids[pending.serial]))

    async def _generate(self, pending: PendingGroup, sample: Sample) -> bool:
        """Whether the response is complete."""
        sample_id = f"step{pending.step}-group{pending.serial}-sample{sample.index}"
        empty = piece = 0
        while sample.finish_reason is FinishReason.ABORT:
            if self.early_rejection(pending):
                return False
            self._remove_possible_stop(sample)
            room = self._config.max_response_tokens - sample.length
            if room <= 0:
                sample.finish_reason = FinishReason.LENGTH
                break
            before, request_id = sample.length, f"{sample_id}-at{sample.length}-piece{piece}"
            self._request_ids[pending.serial].add(request_id)
            try:
                await self._extend(sample, request_id, room)
            finally:
                self._request_ids[pending.serial].discard(request_id)
            if sample.finish_reason is FinishReason.ABORT:
                if self._stopping:
                    return False
                piece += 1
                empty = empty + 1 if sample.length == before else 0
                if empty and not self.early_rejection(pending):
                    await self._wait_after_empty_abort(sample_id, empty)
        return True

    async def _extend(self, sample: Sample, request_id: str, room: int) -> None:
        routed = _routed_tokens(sample, sample.length) if self._config.servers.routed_experts else None
        params = replace(self._params, max_new_tokens=room, seed=sample.seed, routed_experts_from=routed)
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

    def _remove_possible_stop(self, sample: Sample) -> None:
        """Removes the last tokens of an aborted sample, in which a stop string may have begun.

        Engines search for stop strings in what they generate, not in the prompt they are given.
        """
        if self._params.stop and sample.length and sample.finish_reason is FinishReason.ABORT:
            kept = max(0, sample.length - max(map(len, self._params.stop)))
            self._on_piece(kept - sample.length, False)  # they are counted again when they are generated again
            sample.response_tokens = sample.response_tokens[:kept]
            sample.engine_logprobs = sample.engine_logprobs[:kept]
            if sample.routed_experts is not None:
                sample.routed_experts = sample.routed_experts[: _routed_tokens(sample, kept)]
            spans = (WeightSpan(s.version, s.start, min(s.end, kept)) for s in sample.weight_spans)
            sample.weight_spans = [span for span in spans if span.start < span.end]
            sample.text = ""

    async def _wait_after_empty_abort(self, sample_id: str, empty: int) -> None:
        if empty > MAX_EMPTY_ABORTS:
            raise EngineError(f"{sample_id}: the engine aborted it {empty} times without adding a token")
        await asyncio.sleep(EMPTY_ABORT_PAUSE)


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
    """Adds one part. Log-probs must be finite: a NaN would otherwise show up only in the loss."""
    if not np.isfinite(completion.logprobs).all():
        where = int(np.flatnonzero(~np.isfinite(completion.logprobs))[0])
        raise EngineError(
            f"sample {sample.prompt_id}#{sample.index}: log-prob {where} of {len(completion.logprobs)} is "
            f"{completion.logprobs[where]}; the engine's weights are probably not finite"
        )
    offset = sample.length
    _append_experts(sample, completion)
    sample.response_tokens = np.concatenate([sample.response_tokens, completion.tokens])
    sample.engine_logprobs = np.concatenate([sample.engine_logprobs, completion.logprobs])
    for span in completion.weight_spans:
        last = sample.weight_spans[-1] if sample.weight_spans else None
        if last is not None and last.version == span.version and last.end == span.start + offset:
            sample.weight_spans[-1] = WeightSpan(last.version, last.start, span.end + offset)
        else:
            sample.weight_spans.append(WeightSpan(span.version, span.start + offset, span.end + offset))
    sample.text += completion.text
    sample.finish_reason = completion.finish_reason


def _routed_tokens(sample: Sample, response: int) -> int:
    """Tokens that an engine has computed to generate a response of this length: all but the last."""
    return len(sample.prompt_tokens) + response - 1 if response else 0


def _append_experts(sample: Sample, completion: Completion) -> None:
    """A part brings the experts of its tokens but the last, and of the last token before it. What a part has not
    brought is zero: not known."""
    found, before = completion.routed_experts, sample.routed_experts
    if found is None:
        return
    start = _routed_tokens(sample, sample.length)
    if before is None:
        before = np.zeros((0, found.shape[1]), found.dtype)
    lost = np.zeros((max(0, start - len(before)), found.shape[1]), found.dtype)
    sample.routed_experts = np.concatenate([before[:start], lost, found])
