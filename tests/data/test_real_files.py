"""The real prompt files, where they are present: beside the repository or where MEGATRON_DAPO_DATA points."""

import os
from functools import cache
from pathlib import Path

import pytest

from megatron_dapo.config.data import DataConfig, RewardConfig
from megatron_dapo.data import load_prompts
from megatron_dapo.reward.grader import load_grader

BESIDE = Path(__file__).resolve().parents[2].parent / "shared" / "data"
FOLDER = Path(os.environ.get("MEGATRON_DAPO_DATA", BESIDE))
pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="the real data files are absent: put them in ../shared/data or set MEGATRON_DAPO_DATA"
)


class Lengths:
    """Counts characters as tokens: the real tokenizer takes ten seconds for DAPO-Math-17k and changes nothing here."""

    chat_template = None

    def __call__(self, texts, add_special_tokens):
        return {"input_ids": [list(text.encode()) for text in texts]}


@cache
def load(name):
    return load_prompts(DataConfig(path=str(FOLDER / name)), Lengths())


def test_dapo_math_17k():
    prompts = load("dapo_math_17k.parquet")
    report = prompts.report
    assert (report.rows, report.kept, report.duplicates, len(report.conflicts)) == (17917, 17176, 729, 12)
    assert report.bad == [] and report.kept + report.duplicates + report.in_conflict == report.rows
    (powers,) = [
        answers for q, answers in report.conflicts.values() if q.startswith("Determine the greatest power of $2$")
    ]
    assert powers == {"64": [36], "6": [180]}
    first = prompts[0]
    assert first.answer == "34" and first.source == "DAPO-17k" and first.text.startswith("Solve the following math")
    assert first.meta["question"].startswith("In triangle $ABC$")
    assert all(p.answer.lstrip("-").isdigit() for p in prompts)


def test_aime_2024_is_the_same_in_both_files():
    once, often = load("aime_2024.jsonl"), load("aime_2024_x32.parquet")
    assert len(once) == len(often) == 30
    assert (often.report.rows, often.report.duplicates) == (960, 930)
    assert sorted(p.answer.lstrip("0") for p in once) == sorted(p.answer.lstrip("0") for p in often)
    assert len({p.id for p in once} & {p.id for p in often}) == 29  # one problem is worded differently
    assert all(p.text.count("Solve the following math problem") == 1 for p in often)


def test_aime_2025_and_gsm8k():
    assert len(load("aime_2025.jsonl")) == 30  # the last line has no line break
    for name, rows in (("gsm8k_test.jsonl", 1319), ("gsm8k_train.jsonl", 7473)):
        prompts = load(name)
        assert len(prompts) == prompts.report.rows == rows
        assert all(p.answer.replace(",", "").replace(".", "").lstrip("-").isdigit() for p in prompts), name


def test_every_reference_is_graded_right_by_every_grader():
    for name in ("aime_2024.jsonl", "aime_2025.jsonl", "gsm8k_test.jsonl", "dapo_math_17k.parquet"):
        prompts = load(name)
        for grader in (load_grader(RewardConfig(grader=g)) for g in ("math", "dapo", "exact")):
            assert all(grader.quick(p, f"Thus.\nAnswer: {p.answer}").correct for p in prompts)
            wrong = [grader.quick(p, f"Thus.\nAnswer: {p.answer}.5") for p in prompts]
            assert not any(grade.correct for grade in wrong if grade is not None)


def test_the_qwen_tokenizer_and_its_chat_template():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "qwen2.5_tokenizer")
    config = DataConfig(path=str(FOLDER / "aime_2025.jsonl"), template="dapo+chat")
    prompts = load_prompts(config, tokenizer, 200)
    assert prompts.report.kept + len(prompts.report.too_long) == 30 and prompts.report.too_long
    for prompt in prompts:
        assert tokenizer.decode(prompt.tokens) == prompt.text and len(prompt.tokens) <= 200
        assert prompt.text.endswith('after "Answer:".<|im_end|>\n<|im_start|>assistant\n')
