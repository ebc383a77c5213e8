"""Log-probs of a teacher for tokens that the policy generated: one prefill for each sample, nothing is generated.

A teacher is behind SGLang servers, or a small model in this process. `Teacher.score` writes `Sample.teacher_logprobs`.
A sample that cannot be scored keeps None and is counted; the trainer gives its tokens no distillation advantage.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count

import numpy as np

from megatron_dapo.config.algorithm import DistillationConfig
from megatron_dapo.config.base import key_of
from megatron_dapo.errors import EngineError
from megatron_dapo.types import LogProbs, Sample, Tokens, as_logprobs

log = logging.getLogger(__name__)

PAUSE = 0.5  # seconds before the first retry; doubled for each further one


class Teacher:
    def __init__(self, scorer: SGLangScorer | TransformersScorer, config: DistillationConfig) -> None:
        self._scorer = scorer
        self._config = config
        self._places = asyncio.Semaphore(config.concurrency)
        self._running: dict[int, asyncio.Task[None]] = {}  # by the sample's id

    def begin(self, samples: Iterable[Sample]) -> None:
        """Scores those that have no log-probs yet, in the background."""
        for sample in samples:
            if sample.teacher_logprobs is None and sample.length and id(sample) not in self._running:
                task = self._running[id(sample)] = asyncio.ensure_future(self._score(sample))
                task.add_done_callback(partial(self._running.pop, id(sample)))

    async def score(
        self, samples: Sequence[Sample], on_progress: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Scores those that have no log-probs yet; returns metrics."""
        started = time.monotonic()
        self.begin(samples)
        for scored in asyncio.as_completed([self._running[id(s)] for s in samples if id(s) in self._running]):
            await scored
            on_progress()
        return {"distillation/seconds": time.monotonic() - started}

    async def _score(self, sample: Sample) -> None:
        for failures in range(self._config.retries + 1):
            try:
                async with self._places:
                    sample.teacher_logprobs = await self._scorer.logprobs(sample.prompt_tokens, sample.response_tokens)
                return
            except EngineError as error:
                last = error
            if failures < self._config.retries:
                await asyncio.sleep(PAUSE * 2**failures)
        log.warning("sample %s#%d has no log-probs of the teacher: %s", sample.prompt_id, sample.index, last)

    async def close(self) -> None:
        for task in self._running.values():
            task.cancel()
        await self._scorer.close()


async def open_teacher(config: DistillationConfig) -> Teacher:
    if config.urls:
        return Teacher(SGLangScorer(config), config)
    return Teacher(await asyncio.to_thread(TransformersScorer, config.model), config)


class SGLangScorer:
    def __init__(self, config: DistillationConfig) -> None:
        from megatron_dapo.engines.sglang.http import Connection

        key = key_of("algorithm.distillation.api_key_env", config.api_key_env)
        self._servers = [Connection(url, api_key=key, timeout=config.timeout) for url in config.urls]
        self._turn = count()

    async def logprobs(self, prompt: Tokens, response: Tokens) -> LogProbs:
        """[response tokens]: the log-prob of each, given everything before it. Raises EngineError."""
        server = self._servers[next(self._turn) % len(self._servers)]
        body = {
            "input_ids": [*prompt.tolist(), *response.tolist()], "return_logprob": True,
            # The first entry has no log-prob; it must not be the response's.
            "logprob_start_len": max(0, len(prompt) - 2),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        }  # fmt: skip
        from megatron_dapo.engines.sglang.response_parser import input_logprobs

        reply = await server.post("/generate", body)
        return input_logprobs(reply, response.tolist(), f"teacher {server.url}")

    async def close(self) -> None:
        for server in self._servers:
            await server.close()


class TransformersScorer:
    """One forward pass for each sample, in a thread."""

    def __init__(self, model: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        try:
            self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        except Exception as error:  # of many kinds, such as SafetensorError
            raise EngineError(f"algorithm.distillation.model: cannot load a model from {model}: {error}") from error
        self._vocabulary = self._model.get_input_embeddings().num_embeddings
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="teacher")

    async def logprobs(self, prompt: Tokens, response: Tokens) -> LogProbs:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._compute, prompt, response)

    def _compute(self, prompt: Tokens, response: Tokens) -> LogProbs:
        import torch

        tokens = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        if (largest := int(tokens.max())) >= self._vocabulary:
            raise EngineError(f"the sample has token {largest}, and the teacher only {self._vocabulary} tokens")
        with torch.inference_mode():
            logits = self._model(input_ids=tokens[None]).logits[0, len(prompt) - 1 : -1]
        found = logits.log_softmax(-1).gather(1, tokens[len(prompt) :, None])[:, 0]
        return as_logprobs(found.numpy())

    async def close(self) -> None:
        self._thread.shutdown(wait=False)
