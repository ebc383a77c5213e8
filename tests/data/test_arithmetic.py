"""The arithmetic tasks: known answers, splits that never overlap, and a tokenizer that HF reads like any other."""

import json

import pytest
from transformers import AutoTokenizer

from megatron_dapo.config.data import DataConfig, RewardConfig
from megatron_dapo.data import (
    DataError,
    arithmetic_problems,
    arithmetic_prompts,
    arithmetic_tokenizer,
    load_prompts,
    save_arithmetic_tokenizer,
    write_arithmetic,
)
from megatron_dapo.data.arithmetic import LEVELS
from megatron_dapo.reward.grader import load_grader


def evaluate_by_hand(question: str) -> int:
    """Left to right, with its own reading of the digits: no two levels mix products and sums."""
    total, number, operator = 0, "", "+"
    for character in question:
        if character.isdigit():
            number += character
            continue
        total = {"+": total + int(number), "-": total - int(number), "*": total * int(number)}[operator]
        number, operator = "", character
    assert operator == "="
    return total


@pytest.mark.parametrize("level", LEVELS)
def test_answers_are_right_and_short(level):
    problems = arithmetic_problems(level, 60, seed=0)
    assert all(int(p.answer) == evaluate_by_hand(p.question) and p.level == level for p in problems)
    assert max(len(p.question) + len(p.answer) for p in problems) <= 16
    assert len({p.question for p in problems}) == 60


def test_problems_depend_only_on_the_arguments():
    assert arithmetic_problems([2, 4], 50, seed=5) == arithmetic_problems([2, 4], 50, seed=5)
    assert arithmetic_problems(2, 50, seed=5) != arithmetic_problems(2, 50, seed=6)
    assert arithmetic_problems(2, 3, seed=0)[0].question == "62+3="  # in every process, on every machine
    levels = [p.level for p in arithmetic_problems([2, 4], 200, seed=0)]
    assert 80 < levels.count(2) < 120


def test_splits_never_overlap():
    for level in LEVELS:
        few = level == 1
        train = {p.question for seed in range(3) for p in arithmetic_problems(level, 40 if few else 500, seed, "train")}
        held = {
            p.question for seed in range(3) for p in arithmetic_problems(level, 8 if few else 100, seed, "held-out")
        }
        assert train and held and not train & held


def test_more_problems_than_exist_is_an_error():
    with pytest.raises(DataError, match=r"levels \[1\] have only about \d+ different train problems, not 500"):
        arithmetic_problems(1, 500, seed=0)
    with pytest.raises(DataError, match="levels are 1, 2, 3, 4, 5, 6; found"):
        arithmetic_problems(9, 5, seed=0)


def test_every_grader_reads_the_answers():
    tokenizer = arithmetic_tokenizer()
    prompts = arithmetic_prompts(arithmetic_problems([1, 2, 3, 4, 5, 6], 120, seed=0), tokenizer)
    for grader in (load_grader(RewardConfig(grader=name)) for name in ("math", "exact")):
        for prompt in prompts:
            for response in (prompt.answer, f"Answer: {prompt.answer}", prompt.answer + tokenizer.eos_token):
                assert grader.quick(prompt, response).correct
            assert not grader.quick(prompt, prompt.answer + "1").correct
            assert not grader.quick(prompt, "").correct


def test_the_file_and_the_prompts_agree(tmp_path):
    problems, tokenizer = arithmetic_problems([2, 3], 20, seed=0), arithmetic_tokenizer()
    write_arithmetic(tmp_path / "sums.jsonl", problems)
    loaded = load_prompts(DataConfig(path=str(tmp_path / "sums.jsonl"), template="plain"), tokenizer)
    made = arithmetic_prompts(problems, tokenizer)
    assert [(p.id, p.text, p.answer, p.tokens.tolist()) for p in loaded] == [
        (p.id, p.text, p.answer, p.tokens.tolist()) for p in made
    ]


@pytest.mark.parametrize("beside_a_model", [False, True])
def test_the_saved_tokenizer_is_a_regular_one(tmp_path, beside_a_model):
    """With a Qwen2 config.json beside it, transformers builds its own Qwen2 tokenizer: same tokens, spaces included."""
    save_arithmetic_tokenizer(tmp_path)
    if beside_a_model:
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]})
        )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "Q: 37+58=\n  Answer: 95, don't\n\n<|im_end|>"
    tokens = tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokens) == text
    assert len(tokens) == len(text) - len("<|im_end|>") + 1
    assert tokens == arithmetic_tokenizer()(text)["input_ids"]
    assert len(tokenizer) == 100 < 128 and max(tokenizer.get_vocab().values()) == 99
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "<|pad|>")
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text.removesuffix("<|im_end|>")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1="}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
