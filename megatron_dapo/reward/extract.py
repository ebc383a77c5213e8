r"""The final answer of a response: the last `Answer:` line or the last `\boxed{}`, whichever comes later.

Every function takes time linear in the length of its input, because a policy may generate anything. Special tokens,
control characters, Markdown and math delimiters are removed from the result.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import lru_cache

_SPECIAL_TOKEN = re.compile(r"<\|[^|<>\s]{1,40}\|>|</?s>")
_INVISIBLE = re.compile(
    "\x1b\\[[0-9;]{0,20}[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ud800-\udfff\ufeff]"
)
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x2212: "-", 0x3000: " ", 0x00A0: " "}
_MARKER = re.compile(r"(?i)answer[\s*_]{0,20}[::][\s*_]{0,200}")
_BRACE = re.compile(r"\\boxed\s{0,20}\{|\\framebox\s{0,20}\{|\\fbox\s{0,20}\{|\\.|[{}]", re.DOTALL)
_BETWEEN_BOXES = re.compile(r"[\s$,;]*(?:(?:and|or|\\text\s?\{\s?(?:and|or)\s?\})[\s$,;]*)?")
_PREAMBLE = re.compile(r"(?i)(?:so,?\s+|thus,?\s+|therefore,?\s+)?(?:the\s+)?(?:final\s+)?answer\s+is\s*:?\s*")
_WRAPPERS = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\$\$([^$]*)\$\$", r"\$([^$]*)\$", r"\\\((.*)\\\)", r"\\\[(.*)\\\]", r"`+([^`]*)`+", r'"([^"]*)"',
        r"\\(?:boxed|fbox|framebox)\s?\{(.*)\}",
        r"\\(?:text|textbf|mathbf|mathrm|mathit|textit|mbox|bm|boldsymbol|displaystyle|textstyle|underline)\s?\{([^{}]*)\}",
    )
]  # fmt: skip
_ONE_FORMULA = re.compile(r"([^$\d]*)(?<!\\)\$([^$]+)(?<!\\)\$([^$\d]*)")
# Beside a formula these belong to the answer: `-$42$`, `$42$%`, `$42$ million`, `not $42$`, but not a list's dash.
_CHANGES_BEFORE = re.compile(
    r"(?i)(?:[-‒–+±√]|(?:^|[=(\[{,;])\s?—|[=(]\s?[-‒–—]\s|(?:[<≤≥≠]|(?<![=-])>|\b(?:minus|negative|not|than|half|twice|sqrt|"
    r"(?:square|cube|[a-z]{2,6}th) root(?: of)?|at (?:least|most)))\s?)$"
)
CHANGE_VALUE = r"hundred|thousand|(?:m|b|tr)illion|dozen|lakh|crore|percent|per cent\b|divided|factorial|third|halves"
_CHANGES_AFTER = re.compile(
    rf"(?i)\s?(?:\\?%|[+^<>≤≥≠]|\\(?![,;:! (])|(?:(?:{CHANGE_VALUE})(?:th)?s?|or|plus|minus|times|"
    r"(?:fif|six|seven|eigh|nin|ten)ths?|pi|at (?:least|most)|(?:squared|cubed)(?!\s[a-z]))\b)"
)
SHORT_LINE = 60
WINDOW = 1000  # characters at the end, searched first: most answers are there


def final_answer(response: str) -> str | None:
    """The answer as written, cleaned; None if there is none. A response of one short line is its own answer."""
    found = _find(_visible(response[-WINDOW:]))
    if found is None and len(response) > WINDOW:
        found = _find(_visible(response))
    if found is not None:
        return clean(found)
    lone = _visible(response[: 2 * WINDOW]).strip() if len(response) <= 2 * WINDOW else ""
    return clean(lone) if lone and len(lone) <= SHORT_LINE and "\n" not in lone else None


@lru_cache(maxsize=65536)
def reference_answer(answer: str) -> str:
    """A data set's answer, cleaned; of a solution with a box, what is in the box; of a JSON list of one text, as verl's
    files may have it, the text. Cached for a prompt's samples."""
    with suppress(ValueError):
        (answer,) = json.loads(answer) if answer.startswith('["') else [answer]
    text = _visible(answer)
    box = _last_boxes(text)
    return clean(text if box is None else box[1])


def _find(text: str) -> str | None:
    marker = _last_marker(text)
    box = _last_boxes(text) if "box" in text else None
    if box is not None and (marker is None or box[0] >= marker.start()):
        return box[1]
    return None if marker is None else _line_after(text, marker.end())


def _last_marker(text: str) -> re.Match[str] | None:
    """The last `Answer:`. Searches from the end, which is several times faster than finding all of them."""
    if not text.isascii():  # lower() may change the length
        return max(_MARKER.finditer(text), key=re.Match.start, default=None)
    lower = text.lower()
    position = lower.rfind("answer")
    while position >= 0:
        marker = _MARKER.match(text, position)
        if marker:
            return marker
        position = lower.rfind("answer", 0, position)
    return None


def _visible(text: str) -> str:
    if "<" in text:
        text = _SPECIAL_TOKEN.sub("", text)
    if not text.replace("\n", "").isprintable():
        text = _INVISIBLE.sub("", text)
    return text if text.isascii() else text.translate(_FULL_WIDTH)


def clean(answer: str) -> str:
    """The answer without delimiters, emphasis, a final full stop and "the answer is"."""
    if answer.isdigit():
        return answer
    answer = _PREAMBLE.sub("", answer.strip(), count=1) if answer[:40].lower().count("answer") else answer.strip()
    for _ in range(8):
        before = answer
        answer = answer.strip().rstrip(".,;:").rstrip() if not answer.endswith(("\\,", "\\;", "\\!")) else answer[:-2]
        answer = answer.removesuffix("\\\\").strip().strip("*_")  # emphasis; the marker may have consumed half of it
        for wrapper in _WRAPPERS:
            whole = wrapper.fullmatch(answer)
            if whole and _balanced(whole[1]):
                answer = whole[1].strip()
        formula = _ONE_FORMULA.fullmatch(answer)
        if formula and not _CHANGES_BEFORE.search(formula[1]) and not _CHANGES_AFTER.match(formula[3]):
            answer = formula[2].strip()
        if answer == before:
            break
    return answer


def _line_after(text: str, start: int) -> str:
    """The rest of the line; if a display formula starts there, all of it."""
    for opening, closing in (("\\[", "\\]"), ("$$", "$$")):
        if text.startswith(opening, start):
            end = text.find(closing, start + 2)
            if end != -1:
                return text[start : end + 2]
    end = text.find("\n", start)
    return text[start:] if end == -1 else text[start:end]


def _last_boxes(text: str) -> tuple[int, str] | None:
    """Start and content of the last balanced box; different adjacent boxes (`and`, commas) are a list."""
    open_braces: list[tuple[int, int] | None] = []  # a box's start and the start of its content; None: another brace
    boxes: list[tuple[int, int, int]] = []  # start, start of the content, end of the content
    for match in _BRACE.finditer(text):
        token = match[0]
        if token == "}":
            if open_braces and (box := open_braces.pop()):
                boxes.append((*box, match.start()))
        elif token.endswith("{") and token != "\\{":
            open_braces.append(match.span() if len(token) > 1 else None)
    if not boxes:
        return None
    start, content, end = boxes[-1]
    parts = [text[content:end]]
    for earlier in reversed(boxes[:-1]):
        if earlier[0] > start:  # inside the box we already have
            continue
        if start - earlier[2] > 40 or not _BETWEEN_BOXES.fullmatch(text, earlier[2] + 1, start):
            break
        start, part = earlier[0], text[earlier[1] : earlier[2]]
        short, long = sorted((p.replace(" = ", "=").strip() for p in (part, parts[-1])), key=len)
        if not f"={long}".endswith(f"={short}"):  # `x = 5` repeats `5`
            parts.append(part)
    return start, ", ".join(reversed(parts))


def _balanced(text: str) -> bool:
    """Whether braces and delimiters close what they open, in order: `1$ or $2` and `a}{b` do not."""
    depth = 0
    for match in re.finditer(r"\\[()\[\]]|\\.|[{}]", text):
        if match[0] in ("\\(", "\\)", "\\[", "\\]"):
            return False
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth < 0:
            return False
    return depth == 0
