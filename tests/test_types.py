"""What travels between rooms survives a trip through JSON, exactly."""

import json

import numpy as np
import pytest

from megatron_dapo.types import (
    FinishReason,
    Grade,
    Group,
    Prompt,
    Sample,
    StepBatch,
    WeightSpan,
    as_logprobs,
    as_tokens,
    count_tokens,
)


def sample(**changes):
    values = {
        "prompt_id": "p", "index": 1, "prompt_tokens": as_tokens([1, 2]), "response_tokens": as_tokens([3, 4, 5]),
        "engine_logprobs": as_logprobs([-0.1, -2.5, -1e-7]), "finish_reason": FinishReason.LENGTH,
        "weight_spans": [WeightSpan(3, 0, 2), WeightSpan(4, 2, 3)], "seed": 7, "text": "x",
        "grade": Grade(True, 1.0, "5", "match"),
    }  # fmt: skip
    return Sample(**{**values, **changes})


def test_a_batch_survives_json():
    group = Group(Prompt("p", "two?", as_tokens([1, 2]), "5", "test", {"level": 2}), [sample(), sample(grade=None)])
    batch = StepBatch(4, [group], {"kept": 1.0})
    again = StepBatch.from_record(json.loads(json.dumps(batch.to_record())))
    assert again.to_record() == batch.to_record()
    found, wanted = again.groups[0].samples[0], group.samples[0]
    assert found.engine_logprobs.dtype == np.float32 and found.response_tokens.dtype == np.int32
    np.testing.assert_array_equal(found.engine_logprobs, wanted.engine_logprobs)
    assert found.grade == wanted.grade and found.weight_spans == wanted.weight_spans


def test_non_finite_log_probs_survive_json():
    odd = sample(engine_logprobs=as_logprobs([float("nan"), float("-inf"), 0.0]))
    again = Sample.from_record(json.loads(json.dumps(odd.to_record())))
    np.testing.assert_array_equal(again.engine_logprobs, odd.engine_logprobs)


def test_one_log_prob_per_token():
    with pytest.raises(ValueError, match="p#1: 3 response tokens but 2 log-probs"):
        sample(engine_logprobs=as_logprobs([0.0, 0.0]))


def test_a_sample_says_what_it_is():
    one = sample()
    assert one.truncated and one.length == 3 and one.oldest_version == 3
    assert count_tokens([one, one]) == 10


def test_ungraded_samples_are_not_wrong_samples():
    ungraded = sample(grade=Grade(None, 0.0, reason="timeout"))
    assert ungraded.grade.ungraded
    group = Group(Prompt("p", "", as_tokens([])), [ungraded, sample(), sample(grade=Grade(False, -1.0))])
    assert group.accuracies == [True, False]
