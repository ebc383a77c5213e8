"""Adds what an engine generated to a sample, and checks it first."""

from __future__ import annotations

import numpy as np

from megatron_dapo.engines.protocol import Completion, EngineError, ForeignWeightsError
from megatron_dapo.types import Sample, WeightSpan


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
    if sample.trained is not None:
        sample.trained = np.concatenate([sample.trained, np.ones(len(completion.tokens), np.bool_)])
    for span in completion.weight_spans:
        last = sample.weight_spans[-1] if sample.weight_spans else None
        if last is not None and last.version == span.version and last.end == span.start + offset:
            sample.weight_spans[-1] = WeightSpan(last.version, last.start, span.end + offset)
        else:
            sample.weight_spans.append(WeightSpan(span.version, span.start + offset, span.end + offset))
    sample.text += completion.text
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
