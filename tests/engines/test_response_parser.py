"""Both parsers of a reply give the same result, and both find damage."""

import base64
import json

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.engines.sglang.http import ServerFailure
from megatron_dapo.engines.sglang.response_parser import _parse_fast, _parse_general, input_logprobs, parse_completion
from megatron_dapo.types import FinishReason, WeightSpan


def reply_of(logprobs, ids, text="", reason="stop", **meta):
    entries = [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)]
    fields = {"finish_reason": {"type": reason}, "weight_version": "3", "output_token_logprobs": entries, **meta}
    return {"text": text, "output_ids": ids, "meta_info": fields}


def set_token(reply, token):
    reply["output_ids"][1] = reply["meta_info"]["output_token_logprobs"][1][1] = token


float32 = st.floats(-50, 0, width=32)
pairs = st.lists(st.tuples(float32, st.integers(0, 152_000)), min_size=1, max_size=40)
texts = st.text() | st.sampled_from(['"output_token_logprobs":[[1,2,null]]', '"output_ids":[7,8]', "]] [["])


@settings(max_examples=300)
@given(pairs, texts, st.sampled_from(["stop", "length"]))
def test_the_fast_parser_agrees_with_the_general_one(entries, text, reason):
    content = orjson.dumps(reply_of([r[0] for r in entries], [r[1] for r in entries], text, reason))
    fast, general = _parse_fast(content, "here"), _parse_general(content, "here")
    assert fast is not None, "SGLang's own form must take the fast parser"
    assert fast.tokens.tolist() == general.tokens.tolist() == [r[1] for r in entries]
    assert fast.logprobs.tobytes() == general.logprobs.tobytes() == np.float32([r[0] for r in entries]).tobytes()
    assert fast.finish_reason is general.finish_reason
    assert fast.weight_spans == general.weight_spans == [WeightSpan(3, 0, len(entries))]


def test_json_with_other_spacing_is_parsed():
    content = json.dumps(reply_of([-1.0, -2.0], [5, 6])).encode()
    assert _parse_fast(content, "here") is None
    assert parse_completion(content, "here").tokens.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lambda a: a["output_ids"].pop(), "2 tokens but 3 log-probs"),
        (lambda a: a["output_ids"].pop(1), "2 tokens but 3 log-probs"),
        (lambda a: a["output_ids"].__setitem__(2, 99), "other tokens"),
        (lambda a: a["meta_info"]["output_token_logprobs"][1].__setitem__(0, None), "log-prob 1 of 3"),
        (lambda a: a["meta_info"].pop("finish_reason"), "lacks 'finish_reason'"),
        (lambda a: a["meta_info"]["finish_reason"].update(type="bored"), "bored"),
        (lambda a: a["meta_info"].update(weight_version="updating-to-4"), "labelled 'updating-to-4'"),
        (lambda a: a["meta_info"].update(weight_versions=[{"version": "3", "end": 2}]), "lacks 'start'"),
        (lambda a: a["meta_info"].update(weight_versions=["3"]), "lacks"),
        (lambda a: a["meta_info"].update(weight_version=True), "labelled True"),
        (lambda a: a.update(meta_info=[]), "lacks"),
        (lambda a: set_token(a, 2**32), "whole number of 32 bits"),
        (lambda a: set_token(a, 6.5), "whole number of 32 bits"),
        (lambda a: set_token(a, 2**63), "whole number of 32 bits"),
        (lambda a: set_token(a, True), "whole number of 32 bits"),
        (lambda a: a["meta_info"]["finish_reason"].update(type="abort", status_code=503), "gave it up"),
    ],
)
def test_a_damaged_reply_is_a_failure_that_names_the_request_and_the_damage(spoil, cause):
    damaged = reply_of([-1.0, -2.0, -3.0], [5, 6, 7])
    spoil(damaged)
    for content in (orjson.dumps(damaged), json.dumps(damaged).encode()):
        with pytest.raises(ServerFailure, match=f"server http://a.*{cause}"):
            parse_completion(content, "server http://a, request r")


def test_versions_of_token_spans_are_kept():
    spans = [{"version": "default", "start": 0, "end": 2}, {"version": "1", "start": 2, "end": 3}]
    completion = parse_completion(orjson.dumps(reply_of([-1.0] * 3, [5, 6, 7], weight_versions=spans)), "here")
    assert completion.weight_spans == [WeightSpan(0, 0, 2), WeightSpan(1, 2, 3)]


def test_an_aborted_request_may_have_no_tokens():
    completion = parse_completion(orjson.dumps(reply_of([], [], reason="abort")), "here")
    assert completion.finish_reason is FinishReason.ABORT and len(completion.tokens) == 0
    assert completion.weight_spans == []


# ---- experts of a token ----


def with_experts(values, ids=(5, 6, 7), text=""):
    encoded = base64.b64encode(np.asarray(values, np.int32).tobytes()).decode()
    return orjson.dumps(reply_of([-1.0] * len(ids), list(ids), text, routed_experts=encoded))


def as_sglang_writes_it(content):
    return content


def with_spaces(content):
    return json.dumps(json.loads(content)).encode()


def with_escaped_slashes(content):
    return content.replace(b"/", rb"\/")


@pytest.mark.parametrize("written", [as_sglang_writes_it, with_spaces, with_escaped_slashes])
@pytest.mark.parametrize("largest", [6, 254, 255])
def test_experts_are_counted_from_one_in_the_smallest_type(written, largest):
    """4 tokens of the prompt were asked for; the last of the 3 response tokens has not been computed."""
    values = np.random.default_rng(0).integers(0, largest, (6, 2, 3))
    values[0, 0, 0], values[1, 0, 0] = largest, 252  # 252 after three zero bytes gives a slash
    content = written(with_experts(values, text='"routed_experts":"AAAA"'))
    found = parse_completion(content, "here", 4)
    assert found.routed_experts.tolist() == (values.reshape(6, 6) + 1).tolist()
    assert found.routed_experts.dtype == (np.uint8 if max(largest, 252) < 255 else np.uint16)
    assert found.tokens.tolist() == [5, 6, 7]
    assert parse_completion(content, "here").routed_experts is None  # not asked for


def test_experts_that_cannot_be_used():
    def parse(content):
        return parse_completion(content, "server a", 4)

    assert parse(with_experts(np.zeros((5, 7)))).routed_experts is None  # lost: 35 values for 6 tokens
    assert parse(orjson.dumps(reply_of([], [], reason="abort"))).routed_experts is None
    with pytest.raises(ServerFailure, match="server a: the reply lacks 'routed_experts'"):
        parse(orjson.dumps(reply_of([-1.0], [5])))
    with pytest.raises(ServerFailure, match="cannot be decoded"):
        parse(orjson.dumps(reply_of([-1.0], [5], routed_experts="?")))
    with pytest.raises(ServerFailure, match="values from -1 to"):
        parse(with_experts(np.full((6, 2), -1)))


@pytest.mark.parametrize("scored", [[5, 319, 7], [5, 0, 7], [0, 319, 7], [5, 319]])
def test_scored_tokens_are_those_that_were_sent(scored):
    """But for the last id of the vocabulary, which SGLang reports as 0."""
    reply = {"meta_info": {"input_token_logprobs": [[None, 4, None], *([-1.0, token, None] for token in scored)]}}
    if len(scored) == 3 and scored[0] == 5:
        assert input_logprobs(reply, [5, 319, 7], "here").tolist() == [-1.0] * 3
    else:
        with pytest.raises(ServerFailure, match=r"here: .*(other tokens|input_token_logprobs)"):
            input_logprobs(reply, [5, 319, 7], "here")
