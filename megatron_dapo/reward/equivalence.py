r"""Whether two answers are equivalent: string rules where both are plain, math-verify where they are not.

`decide` takes a few microseconds, imports nothing heavy, and decides most cases of integer data: `007`, `42.0`,
`1,234` and `\$42` are numbers, `42, 43` is a list and not a number. Where it returns None, `equivalent` decides; that
may take seconds or never end, so it runs in a process with limits (`reward.pool`).
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import accumulate
from string import ascii_lowercase
from typing import Any
from unicodedata import normalize, numeric

from megatron_dapo.reward.extract import CHANGE_VALUE

MAX_ANSWER_CHARS = 1000
MAX_DIGITS = 400
MAX_DEPTH = 20  # of brackets; parsers take exponential time for deeper nesting

_GROUP = r"(?:,|\{,\}|\\,|,\\!|\\ |\\;|\s)"
_PLAIN = rf"(?:[+-]?\s?(?:\d{{1,3}}(?:{_GROUP}\d{{3}})+|\d+)(?:\.\d*)?|[+-]?\.\d+)(?:[eE][+-]?\d{{1,3}})?"
_TIMES_TEN = re.compile(r"(?<=\d)\s?(?:\\times|\\cdot|[×·*])\s?10\s?\^\s?\{?\s?([+-]?\d{1,3})(?!\d)\s?\}?")
_NUMBER = re.compile(rf"(?:\\?[$€£]\s?)?({_PLAIN})")
_RATIO = re.compile(
    r"([+-]?)\s?(?:(\d+)\s+(?=\d))?(?:(\d+)\s?/\s?(\d+)|\\[dtc]?frac\s?(?:\{\s?([+-]?\d+)\s?\}|(\d))\s?(?:\{\s?(\d+)\s?\}|(\d)))"
)
_RATIO_PERCENT = re.compile(r"([+-]?[\d\s]{0,20}(?:/|\\[dtc]?frac)[{}\d\s]{1,20}?)\s?(?:\\?%|per ?cent)")
# A dash between two numbers may be a range.
_SIGN = re.compile(r"(?i)(^|[=([{,;]\s?)(?:[‒–—]\s?|(?:minus|negative)\s)(?=[\d.$\\¼-¾⅐-⅞])")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴-⁹⁻]+")
_SMALL_FRACTION = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3}){1,9}|\d{1,30})?\s?([¼-¾⅐-⅞])")
_REPEATING = re.compile(r"(?<![\d.,])(\d{0,30}\.\d{0,30})\\(?:overline|bar|dot)\s?(?:\{\s?(\d{1,30})\s?\}|(\d))")
_MIXED = re.compile(r"\d\s+\d+\s?/\s?\d")
_UNIT = re.compile(
    rf"({_PLAIN})(?:\s*\\?%)?(?:\s*\\(?:text|mathrm|mbox|textbf|operatorname)\s?\{{\s?[A-Za-z][A-Za-z\s./-]*\}}|"
    r"(\s*[A-Za-z][A-Za-z\s./-]+))(?:\^\{?[23]\}?|²|³)?"
)
# Other words of up to three letters are variables: `2xy`, `3n-k` and `5 x/y` are not numbers with a unit.
_SHORT_UNITS = re.compile(
    r"(?i)\s?(?:[ghlms]|[ap]\.?m|cc|cm|cup|day|dm|eur|ft|hrs?|in|k[gjmw]|lbs?|m[gilms]|min|mph|nd|oz|rd|sec|sq|st|th|usd|yd|"
    r"yr)|\s(?:[a-z]{3}|an?|at|by|cu|db|ha|hz|kn|mo|of|on|pa|pt|qt|rs|us|wk|[gkmt]b)"
)
_DEGREES = re.compile(r"\s?(?:\^\s?\{?\s?\\circ\s?\}?|°\s?[CF]?)$")
# Words that change the value or join two answers: a number followed by one of them is not a number with a unit.
_NOT_UNITS = re.compile(
    rf"(?i){CHANGE_VALUE}|half|quarter|score|pair|pi\b|sqrt|log|ln\b|sin|cos|tan|frac|choose|infinity|multiplied|"
    r"\bor\b|\band\b|\bmod\b|\bto\b|\btimes\b|\bplus\b|\bminus\b|\bover\b|\bi\b|\be\b|\bnot\b|\bless\b|\bmore\b|"
    r"\binf\b|squared$|cubed$|\broot\b|(?:fif|six|seven|eigh|nin|ten)ths?$|\bout of\b"
)
_MAYBE_A_NUMBER = re.compile(r"[\d\\^π√]")
_SEPARATOR = re.compile(r"\s*(?:[,;]|\\text\s?\{\s?,?\s?(?:and|or)\s?\}|\band\b|\bor\b)\s*")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*[A-Za-z]")
_SHORT_WORDS = {"yes", "no", "odd", "even", "true", "false", "none", "red", "all"}
_LETTER = re.compile(r"(?:\\text\s?\{)?\(?([A-Za-z])\)?\}?")
_NUMBERS_IN_A_ROW = re.compile(r"\d(?:\s|\\[,;: ]|\\quad)+\d")
_ASSIGNMENT = re.compile(r"\\?[A-Za-z][A-Za-z_0-9{}()]{0,20}\s*=\s*")
_SPACE = re.compile(r"(?:\s|\\[,;:! ])+")
_ANY_NUMBER = re.compile(r"(?<![\d.])-?\d{1,40}(?:,\d{3})*(?:\.\d{1,40})?(?:[eE][+-]?\d{1,3})?")
_TIME_OF_DAY = re.compile(r"[\d:.,~\\\s]+(?:(?:text|mathrm)\s?\{)?\s?([ap])\.?m\b[^-+*/^]*")
_IN_BASE = re.compile(r"(?:\w+\s*=\s*)?[\da-f.]+_\{?(\d+)\}?")  # 101_2
_SCALE = re.compile(r".*°\s?([cf])")
_QUANTITY = re.compile(  # |A ∪ B|, P(…), \dim V, \#S, or nothing: never a word, a relation or arithmetic
    r"(?:(?:\\left\s?)?\|[^|=]+\||(?:[A-Za-z]|\\?Pr|\\?Var|\\mathbb\s?\{?[A-Z]\}?)\s?(?:\\left\s?)?"
    r"[(\[](?:[^=()\[\]]|\([^=()]*\))*[)\]]|\\(?:dim|deg|det|#)\s?[A-Za-z]+)?\s*"
)
LENIENT_WINDOW = 2000  # characters at the end of a response


def decide(reference: str, answer: str) -> tuple[bool, str] | None:
    """(correct, reason) if string rules are enough; None if it takes mathematics."""
    if not answer:
        return False, "empty answer"
    if reference.isdecimal() and answer.isdecimal() and max(len(reference), len(answer)) <= MAX_DIGITS:  # most cases
        same = int(reference) == int(answer)
        return same, "same number" if same else "different number"
    if same_text(reference, answer):
        return True, "same text"
    reference, answer = _with_signs(reference), _with_signs(answer)
    if len(answer) > max(MAX_ANSWER_CHARS, 2 * len(reference)):
        return False, f"too long for an answer ({len(answer)} characters)"
    if max(accumulate((character in "([{") - (character in ")]}") for character in answer)) > MAX_DEPTH:
        return False, f"nested deeper than {MAX_DEPTH} levels"
    if is_words(reference):
        return False, "different words"
    for pattern, reason in ((_TIME_OF_DAY, "am is not pm"), (_IN_BASE, "different base"), (_SCALE, "°C is not °F")):
        if len({match[1] for text in (reference, answer) if (match := pattern.fullmatch(text.lower()))}) > 1:
            return False, reason
    expected, found = number(reference), number(answer)
    if expected is not None and found is not None:
        if expected == found:
            return True, "same number"
        exact = not re.search("/|frac", reference + answer)  # 0.333333 for 1/3 is left to math-verify's rounding
        return (False, "different number") if exact else None
    letter, chosen = _LETTER.fullmatch(reference), _LETTER.fullmatch(answer)
    if letter and chosen:
        return letter[1].lower() == chosen[1].lower(), "choice letter"
    if expected is not None and not _MAYBE_A_NUMBER.search(answer):
        return False, "no number where one is expected"
    if expected is not None and _is_number_list(answer):
        return False, "several numbers where one is expected"
    if found is None and _NUMBERS_IN_A_ROW.search(answer) and not _MIXED.search(answer):
        return False, "several numbers in a row"
    return None


def equivalent(reference: str, answer: str) -> tuple[bool, str]:
    """What math-verify says about the two as LaTeX. Takes unbounded time: call it only in a process with limits."""
    reference, answer = _with_signs(reference), _with_signs(answer)
    expected, found = _read(reference), _read(answer)
    if not expected:
        return False, "the reference cannot be read as mathematics, and the text differs"
    if not found:
        return False, "the answer cannot be read as mathematics"
    from math_verify import verify

    same = verify(expected, found, timeout_seconds=None)
    return same, "equivalent" if same else "not equivalent"


def _with_signs(text: str) -> str:
    """A leading dash or `minus` as a minus sign; `2½` and `0.\\overline{3}` as fractions; `x²` with `^`."""
    text = _SUPERSCRIPT.sub(lambda found: f"^{{{normalize('NFKC', found[0])}}}".replace("−", "-"), text)
    text = re.sub(r"(?<=\w)~(?=[A-Za-z\\])", " ", text)
    return _REPEATING.sub(_repeating, _SMALL_FRACTION.sub(_mixed, _SIGN.sub(r"\1-", text)))


def _mixed(found: re.Match[str]) -> str:
    return _frac(int((found[1] or "0").replace(",", "")) + Fraction(numeric(found[2])).limit_denominator(10))


def _repeating(found: re.Match[str]) -> str:
    head, digits = found[1], found[2] or found[3]
    start = Fraction(head + "0")
    return _frac(start + (Fraction(head + digits) - start) / (1 - Fraction(1, 10 ** len(digits))))


def _frac(value: Fraction) -> str:
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def number(text: str) -> Fraction | None:
    """The exact value of a plain number, fraction or amount with a unit; None for everything else."""
    text = _ASSIGNMENT.sub("", text.strip(), count=1) if "=" in text[:24] else text.strip()
    if len(text) > MAX_DIGITS:
        return None
    text = _TIMES_TEN.sub(r"e\1", _DEGREES.sub("", text))
    plain = _NUMBER.fullmatch(text)
    if plain is None:
        unit = _UNIT.fullmatch(text)
        plain = unit if unit and "%" not in text and _is_unit(unit[2] or "") and not _NOT_UNITS.search(text) else None
    if plain is not None:
        return Fraction(re.sub(r"[^\d.+\-eE]", "", plain[1].replace("\\!", "")).removesuffix("."))
    ratio = _RATIO.fullmatch(text)
    if ratio is None:
        return None
    top, bottom = ratio[3] or ratio[5] or ratio[6], ratio[4] or ratio[7] or ratio[8]
    if not int(bottom):
        return None
    return (int(ratio[2] or 0) + Fraction(int(top), int(bottom))) * (-1 if ratio[1] == "-" else 1)


def _is_unit(text: str) -> bool:
    """Letters after a number, with the space before them, are words. Consecutive ones without a space (`abcd`) are a
    product."""
    words = re.findall(r"\s?(?:[AaPp]\.[Mm]|[A-Za-z]+)", text)
    long = [word for word in words if len(word.strip()) > 3 and word.lower() not in ascii_lowercase]
    return bool(long and text[0].isspace()) or all(word in long or _SHORT_UNITS.fullmatch(word) for word in words)


def last_number_matches(reference: str, response: str) -> bool | None:
    """Whether the last number anywhere in the response is the reference; None if the reference is not a number.

    The lenient score of a benchmark: it ignores whether the response marks its final answer as it was asked to.
    """
    expected = number(reference)
    if expected is None:
        return None
    numbers = _ANY_NUMBER.findall(_TIMES_TEN.sub(r"e\1", response[-LENIENT_WINDOW:]))
    return bool(numbers) and number(numbers[-1]) == expected


def same_text(reference: str, answer: str) -> bool:
    if is_words(reference):
        return " ".join(_unwrapped(reference).lower().split()) == " ".join(_unwrapped(answer).lower().split())
    return _compact(reference) == _compact(answer)


def is_words(reference: str) -> bool:
    """Whether the reference is text such as `Monday` or `\\text{even}`, never read as a product of letters."""
    plain = _unwrapped(reference)
    if not _WORDS.fullmatch(plain):
        return False
    return plain != reference.strip() or len(plain) >= 4 or plain.lower() in _SHORT_WORDS


def _unwrapped(text: str) -> str:
    match = re.fullmatch(r"\\(?:text|textbf|mathrm|mbox)\s?\{([^{}]*)\}", text.strip())
    return (match[1] if match else text).strip().rstrip(".")


def _compact(text: str) -> str:
    """Without meaningless space (but `3 4` is not 34), bracket sizes and fraction styles."""

    def space(match: re.Match[str]) -> str:
        before, after = text[max(match.start() - 1, 0) : match.start()], text[match.end() : match.end() + 1]
        return " " if before.isdigit() and after.isdigit() else ""

    text = re.sub(r"\\(?:left|right)(?![a-z])", "", text)
    return _SPACE.sub(space, text).replace("dfrac", "frac").replace("tfrac", "frac")


def _is_number_list(answer: str) -> bool:
    parts = [part for part in _SEPARATOR.split(answer.strip("()[]{}\\ ")) if part]
    return len(parts) > 1 and all(number(part.strip("$ ")) is not None for part in parts)


def _latex(text: str) -> str:
    """LaTeX that math-verify reads: no stray dollar signs; units and plain-text operators as LaTeX commands."""
    text = re.sub(r"\\?\$", "", text)
    percent = _RATIO_PERCENT.fullmatch(text)
    if percent and (value := number(percent[1])) is not None:  # math-verify divides by the denominator in percent
        text = f"{float(value):.12f}%"
    text = re.sub(r"(?<!\\)%", r"\\%", text).replace("π", r"\pi ").replace("×", r"\times ")
    text = text.replace("∞", r"\infty ").replace(r"\varnothing", "∅")
    text = re.sub(r"√\s?(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-z]))", r"\\sqrt{\1\2}", text)
    text = re.sub(r"(?<![\\A-Za-z])sqrt\s?\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![\\A-Za-z])(pi|sqrt)\b", r"\\\1 ", text).replace("**", "^")
    text = re.sub(r"(\d)\s*\\?%", r"\1\\%", text)
    end = re.search(r"(?<=[\d})\s])(?!i$)[A-Za-z]{1,2}$", text)  # math-verify would drop t, ab and others as units
    if end:
        before = text[: end.start()]
        alone = number(before) or (before[-1].isspace() and not re.search(r"(?<![\\A-Za-z])[A-Za-z]", before))
        text = text if _SHORT_UNITS.fullmatch(end[0]) and (len(end[0]) > 1 or alone) else f"{before}{{{end[0]}}}"
    return re.sub(r"(?<=\d)\s+(?:cm|mm|km|m|ft|in|units?)\s?(?:\^\{?[23]\}?)?$", "", text)


def _read(text: str) -> list[Any]:
    """As mathematics; of an equation that is none, such as `P(\\text{heads}) = 1/2`, the right side."""
    found, (left, equals, right) = _parse(_latex(text)), text.rpartition("=")
    if found or not equals or right[:1] == ">" or not _QUANTITY.fullmatch(left):
        return found
    return _parse(_latex(right))


def _parse(latex: str) -> list[Any]:
    import logging

    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return parse(f"${latex}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
