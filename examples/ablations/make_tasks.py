"""Creates the models and prompts of the four ablation tasks in this folder, in about two minutes on one CPU core.

    python examples/ablations/make_tasks.py          # writes runs/ablation_tasks; existing models are kept

sums/      the quickstart's model. It adds two-digit and one-digit numbers and is often wrong by a little. `mixed.jsonl`
           adds products, which it cannot do: half of the prompts carry no signal at first.
counting/  a model of the same size with three kinds of response to `37+4=`:
           direct     `41`, often wrong
           counting   `38,39,40,41 answer:41`, right, and longer the larger the second number is
           rambling   counts too far and gives a wrong answer: the long wrong responses
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quickstart"))
import quickstart

from megatron_dapo.data import arithmetic_problems, arithmetic_tokenizer, save_arithmetic_tokenizer, write_arithmetic
from megatron_dapo.data.arithmetic import ArithmeticProblem, split_of

LARGEST_STEP = 6  # the second number of a counting problem
COUNTING_UPDATES = 300
BATCH = 32
SHARES = {"direct": 0.35, "counting": 0.4, "rambling": 0.25}  # of the pre-training examples
DIRECT_WRONG = 0.5  # of the direct ones
RAMBLING_EXTRA = (3, 9)  # numbers counted beyond the answer


def counting_problems(split: str) -> list[ArithmeticProblem]:
    """Every sum of a two-digit number and 1…LARGEST_STEP, except those of the other split."""
    found = []
    for a in range(10, 90):
        for b in range(1, LARGEST_STEP + 1):
            if split_of(f"{a}+{b}=") == split:
                found.append(ArithmeticProblem(f"{a}+{b}=", str(a + b), 2))
    return found


def example_response(a: int, b: int, rng: random.Random) -> str:
    """A response of one of the three kinds."""
    kind = rng.choices(list(SHARES), weights=list(SHARES.values()))[0]
    if kind == "direct":
        return str(a + b + (rng.choice((-2, -1, 1, 2)) if rng.random() < DIRECT_WRONG else 0))
    last = a + b + (rng.randint(*RAMBLING_EXTRA) if kind == "rambling" else 0)
    return ",".join(str(n) for n in range(a + 1, last + 1)) + f" answer:{last}"


def counting_batch(problems: Sequence[ArithmeticProblem], tokenizer, rng: random.Random):
    """Token ids and labels; the loss is on the response."""
    sequences, targets = [], []
    for problem in rng.choices(problems, k=BATCH):
        a, b = map(int, problem.question.rstrip("=").split("+"))
        question = tokenizer(problem.question, add_special_tokens=False)["input_ids"]
        text = tokenizer(example_response(a, b, rng), add_special_tokens=False)["input_ids"]
        response = [*text, tokenizer.eos_token_id]
        sequences.append(question + response)
        targets.append([-100] * len(question) + response)
    return quickstart.padded(sequences, targets, tokenizer.pad_token_id)


def make_counting_model(folder: Path, seed: int, updates: int) -> None:
    tokenizer, model = arithmetic_tokenizer(), quickstart.new_model(seed)
    problems, rng = counting_problems("train"), random.Random(seed)

    def rate(update: int) -> float:
        return quickstart.warm_up(update) * min(1.0, 0.05 + (updates - update) / (updates * 0.3))

    for update, loss in quickstart.pretrain(model, lambda: counting_batch(problems, tokenizer, rng), updates, rate):
        if update % 100 == 0:
            print(f"  counting: update {update}, loss {loss:.3f}", flush=True)
    model.save_pretrained(folder)
    save_arithmetic_tokenizer(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/ablation_tasks"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=COUNTING_UPDATES, help="of the counting model")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    sums = arithmetic_problems(2, 500, seed=0)
    write_arithmetic(args.out / "sums.jsonl", sums)
    write_arithmetic(args.out / "sums_held_out.jsonl", arithmetic_problems(2, 60, seed=0, split="held-out"))
    mixed = [*sums[:300], *arithmetic_problems(5, 300, seed=0)]
    random.Random(0).shuffle(mixed)
    write_arithmetic(args.out / "mixed.jsonl", mixed)
    write_arithmetic(args.out / "counting.jsonl", counting_problems("train"))
    write_arithmetic(args.out / "counting_held_out.jsonl", counting_problems("held-out")[:60])
    if not (args.out / "sums" / "config.json").exists():
        quickstart.make_model(args.out / "sums", args.seed)
    if not (args.out / "counting" / "config.json").exists():
        make_counting_model(args.out / "counting", args.seed, args.updates)
    print(json.dumps({"written": str(args.out)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
