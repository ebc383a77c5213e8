"""Both ways of reading an answer give the same; whatever is odd about it is found on either."""

import json

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.engines.sglang.http import ServerFailure
from megatron_dapo.engines.sglang.response_parser import _parse_fast, _parse_general, parse_completion
from megatron_dapo.types import FinishReason, WeightSpan


def answer(logprobs, ids, text="", reason="stop", **meta):
    rows = [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)]
    fields = {"finish_reason": {"type": reason}, "weight_version": "3", "output_token_logprobs": rows, **meta}
    return {"text": text, "output_ids": ids, "meta_info": fields}


float32 = st.floats(-50, 0, width=32)
pairs = st.lists(st.tuples(float32, st.integers(0, 152_000)), min_size=1, max_size=40)
texts = st.text() | st.sampled_from(['"output_token_logprobs":[[1,2,null]]', '"output_ids":[7,8]', "]] [["])


@settings(max_examples=300, deadline=None)
@given(pairs, texts, st.sampled_from(["stop", "length"]))
def test_the_short_way_reads_what_the_plain_way_reads(rows, text, reason):
    content = orjson.dumps(answer([r[0] for r in rows], [r[1] for r in rows], text, reason))
    short, plain = _parse_fast(content, "here"), _parse_general(content, "here")
    assert short is not None, "SGLang's own form must take the short way"
    assert short.tokens.tolist() == plain.tokens.tolist() == [r[1] for r in rows]
    assert short.logprobs.tobytes() == plain.logprobs.tobytes() == np.float32([r[0] for r in rows]).tobytes()
    assert (short.text, short.finish_reason, short.weight_spans) == (
        plain.text,
        plain.finish_reason,
        plain.weight_spans,
    )
    assert short.text == text and short.weight_spans == [WeightSpan(3, 0, len(rows))]


def test_other_json_writers_are_understood():
    content = json.dumps(answer([-1.0, -2.0], [5, 6])).encode()
    assert _parse_fast(content, "here") is None
    assert parse_completion(content, "here").tokens.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lambda a: a["output_ids"].pop(), "2 tokens but 3 log-probs"),
        (lambda a: a["output_ids"].__setitem__(2, 99), "other tokens"),
        (lambda a: a["meta_info"]["output_token_logprobs"][1].__setitem__(0, None), "log-prob 1 of 3"),
        (lambda a: a["meta_info"].pop("finish_reason"), "lacks 'finish_reason'"),
        (lambda a: a["meta_info"]["finish_reason"].update(type="bored"), "bored"),
        (lambda a: a["meta_info"].update(weight_version="updating-to-4"), "labelled 'updating-to-4'"),
        (lambda a: a["meta_info"].update(weight_versions=[{"version": "3", "start": 0, "end": 2}]), "do not cover"),
        (lambda a: a["meta_info"]["finish_reason"].update(type="abort", status_code=503), "gave it up"),
    ],
)
def test_an_odd_answer_is_a_failure_that_names_its_place(spoil, cause):
    damaged = answer([-1.0, -2.0, -3.0], [5, 6, 7])
    spoil(damaged)
    for content in (orjson.dumps(damaged), json.dumps(damaged).encode()):
        with pytest.raises(ServerFailure, match=f"server http://a.*{cause}"):
            parse_completion(content, "server http://a, request r")


def test_versions_of_token_spans_are_kept():
    spans = [{"version": "default", "start": 0, "end": 2}, {"version": "1", "start": 2, "end": 3}]
    completion = parse_completion(orjson.dumps(answer([-1.0] * 3, [5, 6, 7], weight_versions=spans)), "here")
    assert completion.weight_spans == [WeightSpan(0, 0, 2), WeightSpan(1, 2, 3)]


def test_an_aborted_request_may_have_no_tokens():
    completion = parse_completion(orjson.dumps(answer([], [], reason="abort")), "here")
    assert completion.finish_reason is FinishReason.ABORT and len(completion.tokens) == 0
    assert completion.weight_spans == []
