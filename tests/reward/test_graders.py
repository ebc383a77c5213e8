"""Graders against hand-judged responses, the score scales, and user functions."""

import sys
import textwrap
import time

import pytest
from judged_answers import DIFFERENT, EQUAL, FORTY_TWO, JUDGED

from megatron_dapo.config import ConfigError, parse_config
from megatron_dapo.config.data import RewardConfig
from megatron_dapo.errors import UserError
from megatron_dapo.reward.equivalence import decide, last_number_matches, number
from megatron_dapo.reward.extract import final_answer
from megatron_dapo.reward.grader import load_grader
from megatron_dapo.types import Grade, Prompt, as_tokens


def prompt(answer: str) -> Prompt:
    return Prompt("p", "question", as_tokens([]), answer)


def grade(name: str, reference: str, response: str, **settings) -> Grade:
    return load_grader(RewardConfig(grader=name, **settings)).grade(prompt(reference), response)


def test_the_table_is_large_and_has_no_repeats():
    assert len(JUDGED) >= 150
    assert len({(reference, response) for reference, response, *_ in JUDGED}) == len(JUDGED)


@pytest.mark.parametrize(("reference", "response", "right", "published"), JUDGED)
def test_graders_agree_with_hand_judged_responses(reference, response, right, published):
    assert grade("math", reference, response).correct is right
    assert grade("dapo", reference, response).correct is published


def test_integer_data_never_needs_a_process():
    quick = load_grader(RewardConfig(grader="math"))
    for response in (
        "Answer: 42",
        "Answer: 41",
        r"\boxed{042}",
        "Answer: 42.0",
        "Answer: 42, 43",
        "no idea",
        "Answer: x=42",
    ):
        assert quick.quick(prompt("42"), response) is not None, response
    assert quick.quick(prompt("42"), r"Answer: \sqrt{1764}") is None


def test_scores_follow_the_configured_scale():
    for scores, wrong in (("plus-minus-one", -1.0), ("zero-one", 0.0)):
        for name in ("math", "dapo", "exact"):
            assert grade(name, "42", "Answer: 42", scores=scores).score == 1.0
            assert grade(name, "42", "Answer: 41", scores=scores).score == wrong
            assert grade(name, "42", "", scores=scores).score == wrong


def test_a_grade_says_what_was_extracted_and_why():
    right = grade("math", "42", r"thus $\boxed{42.0}$.")
    assert (right.extracted, right.reason) == ("42.0", "same number")
    missing = grade("math", "42", "")
    assert (missing.correct, missing.extracted, missing.reason) == (False, None, "no answer found")


@pytest.mark.parametrize(
    ("rule", "response", "right"),
    [
        ("answer", r"\boxed{42}", False),
        ("answer-or-box", r"\boxed{42}", True),
        ("answer-or-box", r"\boxed{42} Answer: 41", False),
        ("answer-or-box", "Answer: 42" + r" and \boxed{41}", False),  # the line counts, and reads 42and41
        ("strict-box", r"\boxed{42}", True),
        ("strict-box", "Answer: 42", False),
        ("strict-box", r"\boxed{42.}", False),
        ("strict-box", r"\boxed{42}" + " " * 100, False),  # more than 100 characters before the end
        ("strict-box", r"\boxed{41} \boxed{42}", True),
    ],
)
def test_variants_of_the_published_rules(rule, response, right):
    assert grade("dapo", "42", response, dapo_rule=rule).correct is right


def test_the_published_window_is_300_characters():
    for padding, right in ((290, True), (291, False)):  # `Answer: 42` has 10
        assert grade("dapo", "42", "Answer: 42" + "\n" * padding).correct is right


@pytest.mark.parametrize(
    ("reference", "response", "right"),
    [
        ("95", "95", True), ("95", "Answer: 95", True), ("95", r"\boxed{95}", True), ("95", "95.0", False),
        ("95", "095", False), ("new  york", "Answer: new york", True), ("New York", "Answer: new york", False),
        ("-5", "Answer: minus 5", False), (r"\frac{1}{2}", "Answer: ½", False), ("½ cup", "Answer: ½ cup", True),
    ],
)  # fmt: skip
def test_exact_compares_the_text(reference, response, right):
    assert grade("exact", reference, response).correct is right


@pytest.mark.parametrize(("reference", "answer"), [("42", answer) for answer in FORTY_TWO] + EQUAL)
def test_words_beside_a_number_are_units(reference, answer):
    assert grade("math", reference, f"Answer: {answer}").correct is True


@pytest.mark.parametrize(("reference", "answer"), DIFFERENT)
def test_variables_and_words_that_change_a_number_are_not(reference, answer):
    assert grade("math", reference, f"Answer: {answer}").correct is False


@pytest.mark.parametrize("name", ["math", "exact"])
def test_a_reference_may_be_a_solution_with_a_box(name):
    """As in MATH, whose rows have `problem` and `solution`; and an invisible character is no part of an answer."""
    solution = r"First $3+4=7$, so $x = \boxed{7}$ in all 2 cases."
    for reference in (solution, r"\boxed{7}", "\u200f7", '["7"]', r'["\\boxed{7}"]'):
        assert grade(name, reference, "Answer: 7").correct is True
        assert grade(name, reference, "Answer: 2").correct is False
    assert grade(name, "Roots: " + r"$\boxed{3}$ and $\boxed{5}$.", "Answer: 3, 5").correct is True


def test_extraction_is_linear_in_the_response():
    """Each of these is 100 000 characters; a quadratic pattern would take a minute."""
    for hostile in ("answer ", "answer" + " " * 500, r"\boxed{", r"\boxed{}", "}{", "Answer:*", "$", r"\(", "\\", "{",
                    "–", "½", r".\bar"):  # fmt: skip
        text = hostile * (100_000 // len(hostile))
        for response in (text, "Answer: " + text, r"\boxed{" + text):
            started = time.process_time()
            for name in ("math", "dapo", "exact"):
                load_grader(RewardConfig(grader=name)).quick(prompt("42"), response)
            assert time.process_time() - started < 5.0, hostile
    assert final_answer(r"\boxed{" * 20_000 + "42" + "}" * 20_000) is not None
    assert grade("math", "42", "Answer: 1" + ",000" * 2000 + "½").correct is False, "too many digits for int()"


USER_MODULE = """
    import numpy as np
    import torch

    from megatron_dapo.types import Grade

    def a_bool(prompt, response):
        return response == prompt.answer

    def a_float(prompt, response):
        return len(response) / 10

    def a_grade(prompt, response):
        return Grade(True, 7.5, response, "mine")

    async def an_async(prompt, response):
        return response == prompt.answer

    def nothing(prompt, response):
        return None

    def not_finite(prompt, response):
        return float("nan")

    def several(prompt, response):
        return np.zeros(3)

    def scalar(prompt, response):
        return np.float32(0.25)

    def verl(prompt, response):
        return {"score": torch.tensor(-0.5), "acc": np.True_, "pred": response}

    def verl_number(prompt, response):
        return {"score": np.bool_(True), "acc": 0.0, "reason": "why"}

    def a_numpy_grade(prompt, response):
        return Grade(np.True_, np.float32(0.5), 42, turns=np.ones(2, np.float32))

    def no_score(prompt, response):
        return {"score": None, "reason": "no idea"}

    def only_accuracy(prompt, response):
        return {"acc": True}

    def text_as_verdict(prompt, response):
        return {"score": 1.0, "correct": "no"}
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "my_grading.py").write_text(textwrap.dedent(USER_MODULE))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "python:my_grading."
    sys.modules.pop("my_grading", None)


def test_user_functions_may_return_a_grade_a_bool_a_number_or_a_dict(user_module):
    assert grade(user_module + "a_bool", "x", "x") == Grade(True, 1.0)
    assert grade(user_module + "a_bool", "x", "y") == Grade(False, -1.0)
    assert grade(user_module + "a_bool", "x", "y", scores="zero-one") == Grade(False, 0.0)
    assert grade(user_module + "an_async", "x", "x") == Grade(True, 1.0)
    assert grade(user_module + "a_grade", "x", "y") == Grade(True, 7.5, "y", "mine")
    # A float is the score; correct means above the middle of the scale, 0 or 0.5.
    assert grade(user_module + "a_float", "x", "abc") == Grade(True, 0.3)
    assert grade(user_module + "a_float", "x", "abc", scores="zero-one") == Grade(False, 0.3)
    assert grade(user_module + "scalar", "x", "y") == Grade(True, 0.25)
    assert grade(user_module + "scalar", "x", "y", scores="zero-one") == Grade(False, 0.25)
    assert grade(user_module + "verl", "x", "y") == Grade(True, -0.5)
    assert grade(user_module + "verl_number", "x", "y") == Grade(False, 1.0, None, "why")
    assert grade(user_module + "no_score", "x", "y") == Grade(None, 0.0, None, "no idea")
    found = grade(user_module + "a_numpy_grade", "x", "y")
    assert (found, type(found.correct), type(found.score)) == (Grade(True, 0.5, "42", turns=(1.0, 1.0)), bool, float)
    for broken in ("nothing", "several", "only_accuracy", "text_as_verdict"):
        with pytest.raises(TypeError, match="expected a Grade, a bool, a number or a dict with 'score'"):
            grade(user_module + broken, "x", "y")
    with pytest.raises(ValueError, match="nan is not a number"):
        grade(user_module + "not_finite", "x", "y")


def test_unknown_graders_are_refused_early(user_module):
    with pytest.raises(ConfigError, match="must be one of math, dapo, exact"):
        parse_config({"reward": {"grader": "maths"}})
    with pytest.raises(UserError, match="has no function 'missing'"):
        load_grader(RewardConfig(grader=user_module + "missing"))


@pytest.mark.parametrize(
    "reference, response, expected",
    [
        ("18", "She makes 9 * 2 = $18 every day.", True),
        ("18", "9 * 2 = 18. That is 2 less than 20.", False),
        ("18", "no number at all", False),
        ("1,000", "In total 1000 eggs", True),
        ("2.5", "so 2.50 hours", True),
        ("5", "10-5", True),
        ("-5", "the change is -5.", True),
        ("blue", "blue 5", None),
        ("2e3", "the answer is 2e3", True),
        (r"3 \times 10^8", r"so $c = 3 \times 10^{8}$ m/s", True),
        ("3e8", "3 * 10^7", False),
    ],
)
def test_the_lenient_score_compares_the_last_number(reference, response, expected):
    assert last_number_matches(reference, response) is expected


@pytest.mark.parametrize(
    ("text", "value"),
    [("-1/2", -0.5), (r"-\frac{3}{4}", -0.75), ("1 1/2", 1.5), ("-2 1/4", -2.25), ("50 apples", 50), ("50% off", None)],
)
def test_numbers_are_read_exactly(text, value):
    found = number(text)
    assert (found is None) if value is None else (float(found) == value)


def test_plain_numbers_that_differ_need_no_mathematics():
    assert decide("42.5", "42.50") == (True, "same number") and decide("42.5", "43") == (False, "different number")
    assert decide("1/3", "0.33") is None  # rounding is math-verify's decision


def test_a_reference_with_thousands_of_digits_is_compared_as_text():
    assert decide("9" * 5000, "9" * 5000) == (True, "same text")
    assert decide("9" * 5000, "42") is None
