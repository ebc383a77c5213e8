"""A tiny task family for the quickstart and the tests: sums and products whose answers are known.

`37+58=` is a question and `95` a complete response, which every built-in grader reads. Questions are drawn from a
seed, each at most once. Whether a question is held out depends on the question alone, so the training and held-out
splits never overlap, whatever the seeds and counts.
"""

from __future__ import annotations

import hashlib
import json
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megatron_dapo.data.columns import DataError
from megatron_dapo.data.prompts import prompt_id
from megatron_dapo.types import Prompt, as_tokens

Split = Literal["train", "held-out"]
HELD_OUT_PERCENT = 20


@dataclass(slots=True, frozen=True)
class ArithmeticProblem:
    question: str
    answer: str
    level: int


def _sum(first: range, second: range, rng: random.Random) -> tuple[str, int]:
    a, b = rng.choice(first), rng.choice(second)
    return f"{a}+{b}=", a + b


def _two_digit_sum_or_difference(rng: random.Random) -> tuple[str, int]:
    a, b = rng.randrange(10, 100), rng.randrange(10, 100)
    return (f"{a}+{b}=", a + b) if rng.random() < 0.5 else (f"{max(a, b)}-{min(a, b)}=", abs(a - b))


def _product(rng: random.Random) -> tuple[str, int]:
    a, b = rng.randrange(10, 100), rng.randrange(2, 10)
    return f"{a}*{b}=", a * b


def _three_terms(rng: random.Random) -> tuple[str, int]:
    a, b, c = (rng.randrange(10, 100) for _ in range(3))
    plus, minus = rng.random() < 0.5, rng.random() < 0.5
    return f"{a}{'+' if plus else '-'}{b}{'-' if minus else '+'}{c}=", a + (b if plus else -b) + (-c if minus else c)


# Each level is harder than the one before. Level 2 suits a quickstart: a model of 0.75 M parameters answers 30 % of its
# held-out questions after 150 supervised updates of 128 examples, and 90 % after 250.
LEVELS: dict[int, Callable[[random.Random], tuple[str, int]]] = {
    1: partial(_sum, range(10), range(10)),
    2: partial(_sum, range(10, 100), range(10)),
    3: partial(_sum, range(10, 100), range(10, 100)),
    4: _two_digit_sum_or_difference,
    5: _product,
    6: _three_terms,
}


def arithmetic_problems(
    levels: int | Sequence[int], count: int, seed: int, split: Split = "train"
) -> list[ArithmeticProblem]:
    """`count` different problems, spread evenly over the levels; the same arguments give the same problems."""
    levels = [levels] if isinstance(levels, int) else list(levels)
    unknown = [level for level in levels if level not in LEVELS]
    if unknown or not levels:
        raise DataError(f"arithmetic levels are {', '.join(map(str, LEVELS))}; found {levels}")
    rng = random.Random(f"{seed}:{split}:{levels}")
    problems: dict[str, ArithmeticProblem] = {}
    tries = 0
    while len(problems) < count:
        level = levels[tries % len(levels)]
        question, value = LEVELS[level](rng)
        if split_of(question) == split:
            problems.setdefault(question, ArithmeticProblem(question, str(value), level))
        tries += 1
        if tries > 200 * count + 20_000:
            raise DataError(
                f"arithmetic levels {levels} have only about {len(problems)} different {split} problems, not {count}: "
                "ask for fewer, or add a level"
            )
    return list(problems.values())


def split_of(question: str) -> Split:
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return "held-out" if int.from_bytes(digest, "big") % 100 < HELD_OUT_PERCENT else "train"


def arithmetic_prompts(problems: Sequence[ArithmeticProblem], tokenizer: Any) -> list[Prompt]:
    """The prompts that `load_prompts` makes of a file of `write_arithmetic` with the plain template."""
    token_lists = tokenizer([p.question for p in problems], add_special_tokens=False)["input_ids"]
    return [
        Prompt(prompt_id(p.question), p.question, as_tokens(tokens), p.answer, "arithmetic", {"level": p.level})
        for p, tokens in zip(problems, token_lists, strict=True)
    ]


def write_arithmetic(path: str | Path, problems: Sequence[ArithmeticProblem]) -> None:
    """Writes a jsonl file for `data.path`."""
    lines = [json.dumps({"question": p.question, "answer": p.answer, "level": p.level}) for p in problems]
    Path(path).write_text("\n".join(lines) + "\n")


# The character-level tokenizer of the arithmetic tasks: a regular HF tokenizer directory with 100 tokens.


END, PAD, TURN_START, TURN_END = "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIAL = [PAD, END, TURN_START, TURN_END]
# Byte-level BPE writes a line break as Ċ and a space as Ġ.
CHARACTERS = ["Ċ", "Ġ", *sorted(c for c in string.printable if c.isprintable() and c != " ")]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def arithmetic_tokenizer() -> Any:
    """The tokenizer as a `transformers` fast tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD,
        additional_special_tokens=[TURN_START, TURN_END], chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False, model_max_length=32768,
    )  # fmt: skip


def save_arithmetic_tokenizer(directory: str | Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template into `directory`."""
    arithmetic_tokenizer().save_pretrained(str(directory))
    file = Path(directory) / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"tokenizer_class": "Qwen2Tokenizer"}
    file.write_text(json.dumps(settings, indent=2) + "\n")
