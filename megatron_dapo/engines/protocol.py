"""The engine protocol: what the sampler, the evaluation and weight sync need of anything that generates text.

`generate` handles one request; many run at once (asyncio). It returns a whole `Completion`, possibly with finish reason
ABORT and the tokens so far, or raises `EngineError`, which names the server and the cause. It never invents a token
or a log-prob.

A log-prob is that of the sampled token under softmax(logits / temperature), over the whole vocabulary: top-p and
top-k restrict what may be sampled but do not renormalise what is reported. At temperature 0 (greedy) it is that of
softmax(logits). SGLang reports this, and so does the embedded engine.

An engine serves a weight version only after all of it has arrived; every token carries its version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from megatron_dapo.errors import EngineError
from megatron_dapo.types import FinishReason, LogProbs, RoutedExperts, Tokens, WeightSpan

if TYPE_CHECKING:
    from megatron_dapo.sync.bucket import Bucket
    from megatron_dapo.sync.bucket_stream import BucketStream


# Log-probs that a sampled token can have; the margin above 0 is rounding.
LOGPROBS = (-1000.0, 1e-2)


class WeightUpdateError(EngineError):
    """No server holds the new version. Nothing is served until an update succeeds; sending it again may succeed."""


class ForeignWeightsError(EngineError):
    """A server generated with a weight version that this run has not sent: another program updates its weights. The
    batch must not be used; sampling ends at once."""


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """`temperature` 0 is greedy. `top_k` -1 means the whole vocabulary. `seed` fixes the sample, if the engine can."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    routed_experts_from: int | None = None  # ask for the experts of the tokens from this position of the prompt on


@dataclass(slots=True)
class Completion:
    """`tokens` and `logprobs` have the same length; `weight_spans` cover every token, relative to `tokens`.

    The token that ended the sample (EOS, a stop token, the end of a stop string) is one of the `tokens`.
    """

    tokens: Tokens
    logprobs: LogProbs
    finish_reason: FinishReason
    weight_spans: list[WeightSpan] = field(default_factory=list)
    server: str = ""  # which server generated it, for error messages
    # Of the tokens from SamplingParams.routed_experts_from on, the last one excepted; None: not asked for, or lost.
    routed_experts: RoutedExperts | None = None
    rejected: int = 0  # replies to this request that made no sense, before this one
    moved: bool = False  # aborted by the engine itself: the same request continues on another server

    def problem(self, params: SamplingParams, vocabulary: int | None) -> str | None:
        """Why an engine cannot have sampled this, or None. Whatever fails here would poison a batch: it is generated
        again and never stored. `vocabulary` None: not known."""
        count, limit = len(self.tokens), vocabulary or np.iinfo(np.int32).max
        if count != len(self.logprobs):
            return f"{count} tokens but {len(self.logprobs)} log-probs"
        if count > params.max_new_tokens:
            return f"{count} tokens, but {params.max_new_tokens} were asked for"
        if not count:
            return None if self.finish_reason is FinishReason.ABORT else "it is complete, but has no token"
        if self.tokens.view(np.uint32).max() >= limit:  # negative ones, too
            return f"token ids from {self.tokens.min()} to {self.tokens.max()}, outside of the vocabulary of {limit}"
        if not (LOGPROBS[0] <= self.logprobs.min() and self.logprobs.max() <= LOGPROBS[1]):  # False with a NaN
            where = int(np.flatnonzero(~((self.logprobs >= LOGPROBS[0]) & (self.logprobs <= LOGPROBS[1])))[0])
            return f"log-prob {where} of {count} is {self.logprobs[where]}; are the engine's weights finite?"
        edges = [0, *(span.end for span in self.weight_spans)]
        if [span.start for span in self.weight_spans] != edges[:-1] or edges[-1] != count:
            return f"its weight versions {self.weight_spans} do not cover its {count} tokens"
        return None


@dataclass(slots=True, frozen=True)
class WeightReport:
    """The result of a weight update. `failed` maps a server's name to the reason why it does not serve `version`."""

    version: int
    served_by: tuple[str, ...]
    failed: dict[str, str] = field(default_factory=dict)
    tensors: int = 0
    bytes: int = 0
    seconds: float = 0.0
    proof: str = ""
    # Parts of `seconds`: pause, transfer, labels and proof follow each other; memory, taken back for weights and KV
    # cache, is a part of pause and labels.
    parts: dict[str, float] = field(default_factory=dict)


class Generator(Protocol):
    """What the sampler and the evaluation use of an engine."""

    @property
    def weight_version(self) -> int:
        """The version that `generate` samples from."""
        ...

    @property
    def max_running(self) -> int:
        """Requests that it runs at a time, over all of its servers; more of them queue."""
        ...

    async def generate(self, request_id: str, prompt: Tokens, params: SamplingParams) -> Completion: ...

    async def abort(self, request_id: str | None = None) -> None:
        """Ends one request, or all; each then returns its partial completion with finish reason ABORT."""
        ...


class Engine(Generator, Protocol):
    async def load_weights(self, version: int, buckets: Iterable[Bucket] | BucketStream) -> None:
        """First half of a weight update: every server receives all weights. Running requests are aborted first, and
        nothing is served until `serve_weights`. When this returns, the buckets' memory may be reused or freed.

        `buckets` is read to its end exactly once, even when a server fails, because producing a bucket is a collective
        of the training ranks. A `BucketStream` is filled by the caller, anything else in a thread. A server that fails
        here is recovered or given up by `serve_weights`; an error means that no server has the weights."""
        ...

    async def serve_weights(self, version: int) -> WeightReport:
        """Second half: takes memory for the KV cache, labels and checks the version, and serves it. A trainer on the
        same GPUs has offloaded its weights before this call. A server that restarted since `load_weights` does not
        hold the weights: it must get them again or serve nothing. Raises WeightUpdateError when no server can serve."""
        ...

    async def update_weights(self, version: int, buckets: Iterable[Bucket]) -> WeightReport:
        """`load_weights`, then `serve_weights`: for callers whose memory the engine does not share."""
        ...

    async def release_memory(self) -> None:
        """Aborts all requests and frees the GPU memory of weights and KV cache, for a trainer on the same GPUs.
        `load_weights` takes the memory of the weights again, `serve_weights` that of the KV cache. What is released
        already stays so: the trainer calls this again when a weight update failed half-way."""
        ...

    async def close(self) -> None: ...


def derive_seed(run_seed: int, step: int, prompt_id: str, index: int, repeat: int = 0) -> int:
    """The seed of one sample, in [0, 2^63). `repeat`: how often this step has used the same prompt before."""
    key = f"{run_seed}/{step}/{repeat}/{index}/{prompt_id}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
