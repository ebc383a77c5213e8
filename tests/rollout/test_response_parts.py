"""Parts of a response become one sample: tokens, log-probs, versions, and what is refused."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from simulation import collect, rollout

from megatron_dapo.engines.protocol import Completion, ForeignWeightsError, SamplingParams, derive_seed
from megatron_dapo.rollout.generation import Generation, TurnRequest, append_completion, check_versions, shorten
from megatron_dapo.types import FinishReason, Grade, Prompt, Sample, WeightSpan, as_logprobs, as_tokens


def part(tokens, version, logprobs=None, reason=FinishReason.ABORT):
    logprobs = [-0.5] * len(tokens) if logprobs is None else logprobs
    spans = [WeightSpan(version, 0, len(tokens))] if tokens else []
    return Completion(as_tokens(tokens), as_logprobs(logprobs), reason, spans)


def sample():
    return Sample("p", 0, as_tokens([1, 2]), as_tokens([]), as_logprobs([]), FinishReason.ABORT)


def test_versions_keep_their_places():
    found = sample()
    for tokens, version in (([5, 6], 3), ([7], 3), ([8, 9], 4)):
        append_completion(found, part(tokens, version))
    assert found.response_tokens.tolist() == [5, 6, 7, 8, 9] and found.length == 5
    assert found.weight_spans == [WeightSpan(3, 0, 3), WeightSpan(4, 3, 5)]
    shorten(found, 4)
    assert found.response_tokens.tolist() == [5, 6, 7, 8] and len(found.engine_logprobs) == 4
    assert found.weight_spans == [WeightSpan(3, 0, 3), WeightSpan(4, 3, 4)]
    shorten(found, 3)
    assert found.weight_spans == [WeightSpan(3, 0, 3)]


def test_weights_that_were_not_sent_are_foreign():
    check_versions(part([5], 4), 4, "r")
    check_versions(part([], 9), 4, "r")
    with pytest.raises(
        ForeignWeightsError, match="weight version 5, but the newest version that this run has sent is 4"
    ):
        check_versions(part([5], 5), 4, "r")


@pytest.mark.parametrize(
    ("tokens", "changes", "wrong"),
    [
        ([5, 8], {}, None), ([], {}, None), ([5, 9], {}, "outside of the vocabulary of 9"), ([-1], {}, "outside"),
        ([5] * 3, {}, "3 tokens, but 2 were asked for"), ([], {"finish_reason": FinishReason.STOP}, "has no token"),
        ([5, 6], {"weight_spans": [WeightSpan(0, 0, 1)]}, "do not cover"),
        ([5, 6], {"weight_spans": [WeightSpan(0, 0, 1), WeightSpan(0, 0, 2)]}, "do not cover"),
        ([5, 6], {"weight_spans": []}, "do not cover"), ([5], {"logprobs": as_logprobs([])}, "1 tokens but 0"),
        *(([5, 6], {"logprobs": as_logprobs([-1.0, bad])}, "log-prob 1 of 2") for bad in (np.nan, np.inf, -np.inf)),
    ],
)  # fmt: skip
def test_what_no_engine_can_have_sampled_is_a_problem(tokens, changes, wrong):
    found = replace(part(tokens, 0), **changes).problem(SamplingParams(2, 1.0), 9)
    assert (found is None) if wrong is None else (wrong in found)


@pytest.mark.parametrize(("start", "stop", "kept"), [(0, ("##", "END"), 2), (4, ("##", "END"), 4), (0, (), 5)])
def test_a_stop_string_may_have_begun_before_an_abort(start, stop, kept):
    """The tokens of the longest one are generated again, as far as they belong to this turn."""
    removed, found = [], sample()
    append_completion(found, part([5, 6, 7, 8, 9], 0))
    generation = SimpleNamespace(_events=SimpleNamespace(removed=removed.append))
    Generation._remove_possible_stop(generation, found, TurnRequest("r", 0, start, 99, stop))
    assert found.response_tokens.tolist() == [5, 6, 7, 8, 9][:kept]
    assert sum(removed) == 5 - kept


def test_the_seed_of_a_sample_depends_on_step_prompt_and_index():
    batches, *_ = collect(rollout(samples=2, longest=20), steps=2, needed=2, seed=5)
    for step, batch in enumerate(batches):
        for group in batch.groups:
            seeds = [derive_seed(5, step, group.prompt.id, index) for index in range(2)]
            assert [sample.seed for sample in group.samples] == seeds


def test_a_prompt_that_is_drawn_twice_in_a_step_has_other_samples():
    again = Prompt("p", "", as_tokens([1]))
    (batch,), *_ = collect(rollout(samples=2, longest=20), needed=3, prompts=lambda: again)
    seeds = [sample.seed for group in batch.groups for sample in group.samples]
    assert len(set(seeds)) == len(seeds) == 6


def test_rejected_groups_fill_the_batch_in_the_order_of_their_prompts():
    async def wrong(prompt, sample):
        return Grade(False, -1.0)

    config = rollout(samples=2, longest=20, oversampling=2.0, order="prompt", max_generation_batches=1, on_limit="fill")
    (batch,), *_ = collect(config, needed=2, grade=wrong)
    assert [group.prompt.id for group in batch.groups] == ["p0", "p1"]
    assert batch.metrics["rollout/groups_submitted"] == 4


def test_restarted_groups_have_no_token_of_older_weights():
    config = rollout(samples=2, oversampling=3.0, order="completion", unfinished="restart", surplus="drop")
    batches, *_ = collect(config, steps=4, slots=60)
    assert sum(batch.metrics["rollout/interrupted_share"] for batch in batches) > 0
    for step, batch in enumerate(batches):
        versions = {span.version for group in batch.groups for sample in group.samples for span in sample.weight_spans}
        assert versions == {step}
