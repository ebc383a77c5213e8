"""The embedded engine: transformers' Qwen in this process, for machines without SGLang and for most tests.

Continuous batching: a worker thread runs one forward pass after another. Each pass computes the next token of every
running request and fills the rest of the batch with prompt tokens. The same request with the same seed and the same
weights gives the same tokens and log-probs, bit for bit, whatever else runs and wherever the sample was interrupted;
exact resume depends on this. (`batch_tokens` and the number of torch threads must be the same too.)

A weight update waits for the forward pass that runs, and no other pass starts until the new version is served. Requests
that arrive meanwhile wait. `pause_mode` says what happens to the running ones (`rollout.weights.pause_mode`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_dapo.batch_invariant import PAGE
from megatron_dapo.config.rollout import EmbeddedConfig, PauseMode
from megatron_dapo.engines.embedded.batch_invariant_model import (
    BatchInvariantModel,
    PromptCache,
    WeightLoader,
    sample_tokens,
    uniform,
)
from megatron_dapo.engines.protocol import Completion, SamplingParams, WeightReport, WeightUpdateError
from megatron_dapo.errors import EngineError
from megatron_dapo.sync.bucket import Bucket
from megatron_dapo.sync.bucket_stream import BucketStream
from megatron_dapo.types import FinishReason, Tokens, WeightSpan, as_logprobs, as_tokens

PADDING = SamplingParams(max_new_tokens=1, temperature=0.0)
STOP_TIMEOUT = 60.0


@dataclass(slots=True, eq=False)
class _Request:
    id: str
    sequence: list[int]  # prompt and generated tokens
    prompt_length: int
    prompt_key: bytes
    params: SamplingParams
    seed: int
    future: concurrent.futures.Future[Completion]
    logprobs: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    computed: int = 0  # positions whose keys and values are in the cache
    aborted: bool = False
    versions: list[tuple[int, int]] = field(default_factory=list)  # (earlier version, tokens when it was replaced)

    @property
    def generated(self) -> int:
        return len(self.sequence) - self.prompt_length


class EmbeddedEngine:
    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        config: EmbeddedConfig | None = None,
        *,
        pause_mode: PauseMode = "abort",
    ) -> None:
        """`model` is a transformers Qwen*ForCausalLM on the CPU; the engine owns it from now on."""
        config = config or EmbeddedConfig()
        self._model = BatchInvariantModel(model, config.batch_tokens, exact=config.exact)
        self.tokenizer = tokenizer
        self._version = 0
        self.max_running = config.batch_tokens
        self._eos = _eos_token_ids(model, tokenizer)
        self._prompts = PromptCache(config.prompt_cache, self._model.cache)
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []
        self._closed = False
        self._pause_mode: PauseMode = pause_mode
        self._updating = False  # from the start of `load_weights` until the version is served: no forward pass
        self._computing = False  # a forward pass runs
        self._broken = ""  # why it can serve nothing
        self._loaded: tuple[int, WeightLoader, float] | None = None  # version, tensors, start: for serve_weights
        self._random_seeds = np.random.default_rng()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="embedded-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_directory(
        cls, path: str | Path, config: EmbeddedConfig | None = None, *, pause_mode: PauseMode = "abort"
    ) -> EmbeddedEngine:
        """An engine for the model and tokenizer of an HF directory, in fp32."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(path)
        except Exception as error:  # of many kinds, such as SafetensorError
            raise EngineError(f"embedded engine: cannot load a model and its tokenizer from {path}: {error}") from error
        return cls(model, tokenizer, config, pause_mode=pause_mode)

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self._model.model

    @property
    def weight_version(self) -> int:
        return self._version

    async def generate(self, request_id: str, prompt: Tokens, params: SamplingParams) -> Completion:
        if not len(prompt):
            raise EngineError(f"embedded engine, request {request_id}: the prompt is empty")
        if len(prompt) + params.max_new_tokens > self._model.max_tokens:
            raise EngineError(
                f"embedded engine, request {request_id}: {len(prompt)} prompt tokens + max_new_tokens "
                f"{params.max_new_tokens} exceed the model's {self._model.max_tokens} positions"
            )
        if params.stop and self.tokenizer is None:
            raise EngineError(f"embedded engine, request {request_id}: stop strings need a tokenizer")
        seed = params.seed if params.seed is not None else int(self._random_seeds.integers(2**63))
        tokens = prompt.tolist()
        request = _Request(request_id, tokens, len(tokens), prompt.tobytes(), params, seed, concurrent.futures.Future())
        request.future.set_running_or_notify_cancel()
        with self._changed:
            self._refuse_when_unable()
            self._waiting.append(request)
            self._changed.notify()
        try:
            return await asyncio.wrap_future(request.future)
        except asyncio.CancelledError:
            request.aborted = True
            raise

    async def abort(self, request_id: str | None = None) -> None:
        with self._changed:
            for request in (*self._waiting, *self._running):
                if request_id is None or request.id == request_id:
                    request.aborted = True
            self._changed.notify()

    def _any_aborted(self) -> bool:
        return any(request.aborted for request in (*self._waiting, *self._running))

    async def _until(self, stopped: Callable[[], bool]) -> None:
        deadline = time.monotonic() + STOP_TIMEOUT
        while not stopped():
            if time.monotonic() > deadline:
                raise EngineError(f"embedded engine: waited {STOP_TIMEOUT:.0f} s for running requests to stop")
            await asyncio.sleep(0.001)

    async def load_weights(self, version: int, buckets: Iterable[Bucket] | BucketStream) -> None:
        started = time.monotonic()
        with self._changed:
            self._updating, self._broken = True, ""
        if self._pause_mode == "abort":
            await self.abort()
            await self._until(lambda: not self._any_aborted())
        await self._until(lambda: not self._computing)
        loader, failure, cause = WeightLoader(self._model.model), "", None
        try:
            async with BucketStream.of(buckets).open() as stream:  # reads to the end after an error, too
                async for bucket, _ in stream:
                    failure = failure or loader.load(bucket)
        except Exception as error:
            failure, cause = f"{type(error).__name__}: {error}", error
        failure = failure or loader.missing()
        if failure:
            with self._changed:
                self._updating, self._broken = False, f"the update to weight version {version} failed: {failure}"
                self._fail_all(EngineError(f"embedded engine: {self._broken}"))
            why = f"embedded engine: {self._broken}; it serves nothing until an update succeeds"
            raise WeightUpdateError(why) from cause
        self._loaded = (version, loader, started)

    async def serve_weights(self, version: int) -> WeightReport:
        if self._loaded is None or self._loaded[0] != version:
            raise WeightUpdateError(f"embedded engine: weight version {version} has not been loaded")
        _, loader, started = self._loaded
        self._loaded = None
        with self._changed:
            self._prompts.clear()
            for request in self._running:
                self._keep_over_update(request)
            self._version, self._updating = version, False
            self._changed.notify()
        seconds = time.monotonic() - started
        proof = f"all {loader.count} tensors of the model were set"
        return WeightReport(version, ("embedded",), {}, loader.count, loader.bytes, seconds, proof)

    def _keep_over_update(self, request: _Request) -> None:
        """in_place: its keys and values stay, computed with older weights. retract: they are computed again. Those of a
        prompt without a token are always computed again: the prompt cache gets them."""
        request.versions.append((self._version, request.generated))
        if self._pause_mode == "retract" or not request.generated:
            self._model.cache.release(request.pages)
            request.pages, request.computed = [], 0

    async def update_weights(self, version: int, buckets: Iterable[Bucket]) -> WeightReport:
        await self.load_weights(version, buckets)
        return await self.serve_weights(version)

    async def release_memory(self) -> None:
        """Nothing to do: all of its memory is on the host."""

    async def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join, STOP_TIMEOUT)

    def _refuse_when_unable(self) -> None:
        if self._broken:
            raise EngineError(f"embedded engine: {self._broken}")
        if self._closed or not self._thread.is_alive():
            raise EngineError("embedded engine: it has been closed")

    # ---- the worker thread ----

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._has_work():
                    self._changed.wait()
                if self._closed:
                    self._fail_all(EngineError("embedded engine: closed while the request was running"))
                    return
                self._drop_aborted()
                self._admit()
                self._computing = bool(self._running) and not self._updating
            try:
                if self._computing:
                    self._step()
            except Exception as error:
                with self._changed:
                    self._broken = f"the forward pass failed: {type(error).__name__}: {error}"
                    self._fail_all(EngineError(f"embedded engine: {self._broken}"))
            finally:
                self._computing = False

    def _has_work(self) -> bool:
        if self._closed or self._any_aborted():
            return True
        return not self._updating and bool(self._running or self._waiting)

    def _fail_all(self, error: EngineError) -> None:
        for request in (*self._running, *self._waiting):
            self._model.cache.release(request.pages)
            request.future.set_exception(error)
        self._running, self._waiting = [], []

    def _drop_aborted(self) -> None:
        for request in [r for r in self._running if r.aborted]:
            self._finish(request, FinishReason.ABORT)
        for request in [r for r in self._waiting if r.aborted]:
            self._waiting.remove(request)
            request.future.set_result(self._completion(request, FinishReason.ABORT))

    def _admit(self) -> None:
        """Starts waiting requests. Samples of one prompt wait until the first of them has computed it."""
        if self._updating or not self._waiting:
            return
        computing = {r.prompt_key for r in self._running if not r.generated} if self._prompts.size else set()
        kept: list[_Request] = []
        for request in self._waiting:
            full = len(self._running) >= self._model.batch_tokens
            key = request.prompt_key
            if full or key in computing:
                kept.append(request)
                continue
            request.pages = self._prompts.copy(key)
            # The last prompt token is computed again, for its logits.
            request.computed = request.prompt_length - 1 if request.pages else 0
            if not request.pages and self._prompts.size:
                computing.add(key)
            self._running.append(request)
        self._waiting = kept

    def _step(self) -> None:
        """One forward pass, and one sampled token for each request whose sequence it computed to the end."""
        size = self._model.batch_tokens
        pieces = self._next_pieces()
        tokens, positions = np.zeros(size, np.int64), np.zeros(size, np.int64)
        pages = np.zeros((size, max(len(request.pages) for request, _, _ in pieces)), np.int64)
        last: list[tuple[int, _Request]] = []
        index = 0
        for request, start, end in pieces:
            here = slice(index, index + end - start)
            tokens[here] = request.sequence[start:end]
            positions[here] = range(start, end)
            pages[here, : len(request.pages)] = request.pages
            index = here.stop
            request.computed = end
            if end == len(request.sequence):
                last.append((index - 1, request))
        logits = self._model.forward(*(torch.from_numpy(a) for a in (tokens, positions, pages)))
        self._sample(logits, last)

    def _next_pieces(self) -> list[tuple[_Request, int, int]]:
        """(request, first position, end) of what each running request computes: one token, and more for prompts."""
        spare = self._model.batch_tokens - len(self._running)
        pieces = []
        for request in self._running:
            more = min(spare, len(request.sequence) - request.computed - 1)
            spare -= more
            end = request.computed + 1 + more
            while len(request.pages) * PAGE < end:
                request.pages.append(self._model.cache.allocate())
            pieces.append((request, request.computed, end))
        return pieces

    def _sample(self, logits: torch.Tensor, last: list[tuple[int, _Request]]) -> None:
        """`last`: index in the batch of each request's last token."""
        size = self._model.batch_tokens
        params = [PADDING] * size
        seeds, positions = np.zeros(size, np.uint64), np.zeros(size, np.uint64)
        for index, request in last:
            params[index], seeds[index], positions[index] = request.params, request.seed, len(request.sequence)
        tokens, logprobs = sample_tokens(logits, params, uniform(seeds, positions), exact=self._model.exact)
        token_list, logprob_list = tokens.tolist(), logprobs.tolist()
        for index, request in last:
            if not request.generated:
                self._prompts.store(request.prompt_key, request.pages)
            request.sequence.append(token_list[index])
            request.logprobs.append(logprob_list[index])
            reason = self._finish_reason(request)
            if reason is not None:
                self._finish(request, reason)

    def _finish_reason(self, request: _Request) -> FinishReason | None:
        params, token = request.params, request.sequence[-1]
        if params.stop and self._stopped(request):
            return FinishReason.STOP
        if not params.ignore_eos and (token in self._eos or token in params.stop_token_ids):
            return FinishReason.STOP
        return FinishReason.LENGTH if request.generated >= params.max_new_tokens else None

    def _stopped(self, request: _Request) -> bool:
        """Whether a stop string is in the text of the last tokens."""
        last = min(request.generated, max(len(stop.encode()) for stop in request.params.stop) + 4)
        text = self.tokenizer.decode(request.sequence[-last:])
        return any(stop in text for stop in request.params.stop)

    def _finish(self, request: _Request, reason: FinishReason) -> None:
        self._running.remove(request)
        self._model.cache.release(request.pages)
        request.future.set_result(self._completion(request, reason))

    def _completion(self, request: _Request, reason: FinishReason) -> Completion:
        tokens = request.sequence[request.prompt_length :]
        spans, start = [], 0
        for version, end in (*request.versions, (self._version, len(tokens))):
            if end > start:
                spans.append(WeightSpan(version, start, end))
                start = end
        return Completion(as_tokens(tokens), as_logprobs(request.logprobs), reason, spans)


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends a sample, from the places SGLang reads: model, generation and tokenizer configuration."""
    found: set[int] = set()
    for source in (model.config, getattr(model, "generation_config", None), tokenizer):
        value = getattr(source, "eos_token_id", None)
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return frozenset(found)
