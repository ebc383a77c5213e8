"""Prompts, samples and batches survive their state exactly: as arrays, and as JSON text."""

import json

import numpy as np
import orjson
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
    json_default,
    pack_experts,
)


def sample(**changes):
    values = {
        "prompt_id": "p", "index": 1, "prompt_tokens": as_tokens([1, 2]), "response_tokens": as_tokens([3, 4, 5]),
        "engine_logprobs": as_logprobs([-0.1, -2.5, -1e-7]), "finish_reason": FinishReason.LENGTH,
        "weight_spans": [WeightSpan(3, 0, 2), WeightSpan(4, 2, 3)], "seed": 7, "text": "x",
        "grade": Grade(True, 1.0, "5", "match"),
    }  # fmt: skip
    return Sample(**{**values, **changes})


def through_json(state):
    return json.loads(json.dumps(state, default=json_default))


def through_orjson(state):
    return orjson.loads(orjson.dumps(state, default=json_default))


# What JSON text or a binary checkpoint gives back.
ROUND_TRIPS = {"arrays": lambda state: state, "json": through_json, "orjson": through_orjson}


@pytest.mark.parametrize("round_trip", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
def test_a_batch_survives_its_state_exactly(round_trip):
    group = Group(Prompt("p", "two?", as_tokens([1, 2]), "5", "test", {"level": 2}), [sample(), sample(grade=None)])
    batch = StepBatch(4, [group], {"kept": 1.0})
    again = StepBatch.from_state(round_trip(batch.to_state()))
    assert through_json(again.to_state()) == through_json(batch.to_state())
    found, wanted = again.groups[0].samples[0], group.samples[0]
    assert found.engine_logprobs.dtype == np.float32 and found.response_tokens.dtype == np.int32
    assert found.prompt_tokens.dtype == again.groups[0].prompt.tokens.dtype == np.int32
    np.testing.assert_array_equal(found.engine_logprobs, wanted.engine_logprobs)
    assert found.grade == wanted.grade and found.weight_spans == wanted.weight_spans


def test_a_state_holds_the_arrays_themselves():
    one = sample()
    state = one.to_state()
    assert state["engine_logprobs"] is one.engine_logprobs and state["response_tokens"] is one.response_tokens
    assert state["prompt_tokens"] is one.prompt_tokens
    prompt = Prompt("p", "", as_tokens([1]))
    assert prompt.to_state()["tokens"] is prompt.tokens


@pytest.mark.parametrize("round_trip", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
def test_every_kind_of_float32_log_prob_survives_bit_for_bit(round_trip):
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 20_000, dtype=np.uint64).astype(np.uint32)  # subnormal, huge, tiny, NaN
    values = np.concatenate([bits.view(np.float32), np.float32([np.nan, np.inf, -np.inf, 0.0, -0.0, -1e-45])])
    odd = sample(response_tokens=as_tokens(range(len(values))), engine_logprobs=values)
    again = Sample.from_state(round_trip(odd.to_state())).engine_logprobs
    numbers = ~np.isnan(values)
    assert np.array_equal(np.isnan(again), ~numbers)
    assert np.array_equal(again[numbers].view(np.uint32), values[numbers].view(np.uint32))


def test_only_arrays_are_converted_to_json():
    with pytest.raises(TypeError, match="set is not a JSON value"):
        json.dumps({"a": {1}}, default=json_default)


def test_one_log_prob_per_token():
    with pytest.raises(ValueError, match="p#1: 3 response tokens but 2 log-probs"):
        sample(engine_logprobs=as_logprobs([0.0, 0.0]))


def test_properties_of_a_sample():
    one = sample()
    assert one.truncated and one.length == 3 and one.oldest_version == 3


def test_ungraded_samples_are_not_wrong_samples():
    ungraded = sample(grade=Grade(None, 0.0, reason="timeout"))
    assert ungraded.grade.ungraded
    group = Group(Prompt("p", "", as_tokens([])), [ungraded, sample(), sample(grade=Grade(False, -1.0))])
    assert group.accuracies == [True, False]


@pytest.mark.parametrize(("largest", "dtype"), [(255, np.uint8), (256, np.uint16)])
def test_experts_have_the_smallest_type_that_holds_them(largest, dtype):
    packed = pack_experts(np.array([[0, largest]]))
    assert packed.dtype == dtype and packed.tolist() == [[0, largest]]
