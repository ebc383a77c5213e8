"""Products of two numbers with a calculator: the model learns to call it instead of guessing. Data and a tiny model.

    python examples/calculator/calculator.py [SEED [KEY=VALUE …]]    # in minutes

The model writes `[37*48]`, the tool's process computes, `1776` follows, and the model repeats it as its answer. It is
pre-trained on examples of which many guess instead of calling it, or do not use the result. All numbers have a fixed
width, so that a tiny model learns to copy them.
"""

import json
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the examples, whatever their folder is called
from quickstart.quickstart import new_model, padded, pretrain

from megatron_dapo.config import load_config
from megatron_dapo.data import arithmetic_tokenizer, save_arithmetic_tokenizer
from megatron_dapo.launch.local import run_training

CALLS, USES = 0.6, 0.7  # shares of the examples that call the tool, and of those that use its result


def questions(seed, count):
    rng, found = random.Random(seed), {}
    while len(found) < count:
        a, b = rng.randint(32, 99), rng.randint(32, 99)
        found[f"{a}*{b}="] = str(a * b)
    return found


def write_problems(path, problems):
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in problems.items()))


def example(question, answer, rng):
    """(what the model writes or reads after the question, whether the model writes it)."""
    guess = str(rng.randint(1000, 9999))
    if rng.random() >= CALLS:
        return [(guess, True)]
    return [(f"[{question[:-1]}]", True), (f"{answer}\n", False), (answer if rng.random() < USES else guess, True)]


def batch(problems, tokenizer, rng):
    rows, labels = [], []
    for question, answer in problems:
        tokens = tokenizer(question, add_special_tokens=False)["input_ids"]
        wanted = [-100] * len(tokens)
        for text, written in example(question, answer, rng):
            part = tokenizer(text, add_special_tokens=False)["input_ids"]
            tokens, wanted = tokens + part, wanted + (part if written else [-100] * len(part))
        rows.append([*tokens, tokenizer.eos_token_id])
        labels.append([*wanted, tokenizer.eos_token_id])
    return padded(rows, labels, tokenizer.pad_token_id)


def make_model(folder, seed, problems, updates=300):
    tokenizer, model, rng = arithmetic_tokenizer(), new_model(seed), random.Random(seed)
    items = list(problems.items())
    for update, loss in pretrain(model, lambda: batch(rng.choices(items, k=64), tokenizer, rng), updates):
        if update % 50 == 0:
            print(f"pre-training {update}: loss {loss:.3f}", flush=True)
    model.save_pretrained(folder)
    save_arithmetic_tokenizer(folder)


if __name__ == "__main__":
    seed, run, settings = int(sys.argv[1]) if len(sys.argv) > 1 else 0, Path("runs/calculator"), sys.argv[2:]
    run.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    problems = questions(0, 1100)
    train, held_out = dict(list(problems.items())[:1000]), dict(list(problems.items())[1000:])
    write_problems(run / "prompts.jsonl", train)
    write_problems(run / "held_out.jsonl", held_out)
    make_model(run / "start", seed, train)
    sys.exit(run_training(load_config(Path(__file__).with_name("config.yaml"), [f"trainer.seed={seed}", *settings])))
