"""Responses that come as tokens: the same grades and texts, wherever they are decoded."""

import asyncio

import pytest
from test_pool import HOSTILE, prompt

from megatron_dapo.config.data import RewardConfig
from megatron_dapo.data import arithmetic_tokenizer
from megatron_dapo.reward import combined as module
from megatron_dapo.reward.combined import ResponseGrader
from megatron_dapo.reward.grader import GraderError
from megatron_dapo.types import FinishReason, Sample, as_logprobs, as_tokens


def tokens_of(tokenizer, text):
    return as_tokens([*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id])


def sample(tokens):
    return Sample("p", 0, as_tokens([1, 2]), tokens, as_logprobs([-1.0] * len(tokens)), FinishReason.STOP)


def grade_all(texts, config, short, tokenizer=None):
    """(grades, metrics, samples) of responses to a prompt whose answer is 42."""
    tokenizer = tokenizer or arithmetic_tokenizer()
    grader = ResponseGrader(config, tokenizer)
    samples = [sample(tokens_of(tokenizer, text)) for text in texts]

    async def main():
        async with grader.graders:
            return await asyncio.gather(*(grader.grade(prompt("42"), s) for s in samples)), grader.graders.metrics()

    module_short, module.SHORT = module.SHORT, short
    try:
        return *asyncio.run(main()), samples
    finally:
        module.SHORT = module_short


def test_a_long_response_gets_the_grade_of_its_text():
    """Decoded in a process or here: the same grades and counts. The end-of-text token is not part of the text."""
    texts = ["42", "43", "6*7=42", "", *(str(40 + i % 5) for i in range(60))]
    config = RewardConfig(grader="exact", workers=1)
    here, counted_here, decoded = grade_all(texts, config, short=10**9)
    there, counted, left = grade_all(texts, config, short=0)
    assert there == here and {grade.correct for grade in here} == {True, False}
    names = ("reward/graded", "reward/correct", "reward/quick", "reward/ungraded")
    assert [counted[name] for name in names] == [counted_here[name] for name in names]
    assert [s.text for s in decoded] == texts
    assert {s.text for s in left} == {""}, "nothing was decoded in this process"


def test_texts_are_added_for_reading():
    tokenizer = arithmetic_tokenizer()
    shown = [sample(tokens_of(tokenizer, text)) for text in ("1+2=3", "42")]
    ResponseGrader(RewardConfig(), tokenizer).add_texts(shown)
    assert [s.text for s in shown] == ["1+2=3", "42"]


def test_a_tokenizer_that_needs_python_code_decodes_here():
    class Slow:
        is_fast = False

        def __init__(self):
            self._inner = arithmetic_tokenizer()

        def __getattr__(self, name):
            return getattr(self._inner, name)

    assert ResponseGrader(RewardConfig(), Slow()).tokenizer_json == ""
    (grade,), _, (decoded,) = grade_all(["42"], RewardConfig(grader="exact"), short=0, tokenizer=Slow())
    assert grade.correct and decoded.text == "42"


def test_an_error_of_the_grader_quotes_the_decoded_response():
    with pytest.raises(GraderError, match="with the response '6\\*7'"):
        grade_all(["6*7"] * 3, RewardConfig(grader=HOSTILE + "always_raises", workers=1, max_errors=1), short=0)
