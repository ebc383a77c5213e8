r"""The grading rules of the published DAPO run, so that a reproduction can be compared with it.

They are unchanged, mistakes included: `42.`, `42.0`, `**42**`, `\dfrac`, `007` and an answer more than 300 characters
before the end are wrong, and `42, 43` is read as 4243. The `math` grader does not make these mistakes.
"""

from __future__ import annotations

import re

WINDOW = 300
STRICT_WINDOW = 100

_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
# The order matters: each rule applies to the result of the earlier ones.
_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), ("\\ ", ""), (" ", ""),
    ("mbox", "text"), (r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}"),
)  # fmt: skip
_DROPPED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}",
    r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots",
)  # fmt: skip
_REWRITTEN = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),  # the first formula is the answer
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def published_answer(response: str, rule: str) -> str | None:
    """The answer that the published rules compare with the reference; None if they find none."""
    if rule == "strict-box":
        return _last_box(response[-STRICT_WINDOW:])
    tail = response[-WINDOW:]
    answers = _ANSWER.findall(tail)
    if answers:
        return normalise(answers[-1])
    box = _last_box(tail) if rule == "answer-or-box" else None
    return None if box is None else normalise(box)


def published_verdict(reference: str, answer: str, rule: str) -> bool:
    return answer == (reference if rule == "strict-box" else normalise(reference))


def normalise(answer: str) -> str:
    answer = answer.rpartition("=")[2]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for word in _DROPPED:
        answer = answer.replace(word, "")
    for pattern, template in _REWRITTEN:
        answer = pattern.sub(template, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return digits if digits.isdigit() else answer.strip()


def _last_box(text: str) -> str | None:
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth = 0
    for position in range(start + 6, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + 7 : position]
    return None
