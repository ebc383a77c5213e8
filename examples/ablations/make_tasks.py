"""Creates the models and prompts of the four ablation tasks in this folder, in about two minutes on one CPU core.

    python examples/ablations/make_tasks.py          # writes runs/ablation_tasks; existing models are kept

sums/      the quickstart's model. It adds two-digit and one-digit numbers and is often wrong by a little. `mixed.jsonl`
           adds products, which it cannot do: half of the prompts carry no signal at first.
counting/  a model of the same size with three kinds of response to `37+4=`:
           direct     `41`, often wrong
           counting   `38,39,40,41 answer:41`, right, and longer the larger the second number is
           rambling   counts too far and gives a wrong answer: the long wrong responses
steady/    the same without rambling; a direct response is `answer:41`.
letters/   writes twelve letters that do not matter, a few of them often and most of them rarely, then the sum of two
           digits, often wrong: `afkpejodinch answer:07`. Its held-out sums are not trained with RL; pre-training has
           seen them.
"""

from __future__ import annotations

import argparse
import itertools
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
BATCH = 32
SHARES = {"direct": 0.35, "counting": 0.4, "rambling": 0.25}  # of the counting model's pre-training examples
DIRECT_WRONG = 0.5  # of the direct ones
DIRECT_SHARE = 0.5  # of the steady model's examples
RAMBLING_EXTRA = (3, 9)  # numbers counted beyond the answer
LETTERS, LETTERS_WRONG = "abcdefghijklmnop", 0.25
LETTER_SHARES = [1 / rank**2 for rank in range(1, len(LETTERS) + 1)]  # few are frequent, many are rare
LETTER_COUNT = 12


def counting_problems(split: str) -> list[ArithmeticProblem]:
    """Every sum of a two-digit number and 1…LARGEST_STEP, except those of the other split."""
    found = []
    for a in range(10, 90):
        for b in range(1, LARGEST_STEP + 1):
            if split_of(f"{a}+{b}=") == split:
                found.append(ArithmeticProblem(f"{a}+{b}=", str(a + b), 2))
    return found


def digit_sums() -> dict[str, list[ArithmeticProblem]]:
    """The hundred sums of two digits, by split."""
    found: dict[str, list[ArithmeticProblem]] = {"train": [], "held-out": []}
    for a, b in itertools.product(range(10), repeat=2):
        found[split_of(f"{a}+{b}=")].append(ArithmeticProblem(f"{a}+{b}=", f"{a + b:02}", 1))
    return found


def nearly(answer: int, rng: random.Random, wrong: float) -> int:
    """The answer, or with this probability one that is wrong by a little."""
    return answer + rng.choice((-2, -1, 1, 2)) if rng.random() < wrong else answer


def counting_response(problem: ArithmeticProblem, rng: random.Random) -> str:
    """A response of one of the three kinds."""
    a, b = map(int, problem.question.rstrip("=").split("+"))
    kind = rng.choices(list(SHARES), weights=list(SHARES.values()))[0]
    if kind == "direct":
        return str(nearly(a + b, rng, DIRECT_WRONG))
    last = a + b + (rng.randint(*RAMBLING_EXTRA) if kind == "rambling" else 0)
    return ",".join(str(n) for n in range(a + 1, last + 1)) + f" answer:{last}"


def steady_response(problem: ArithmeticProblem, rng: random.Random) -> str:
    """Counting, always right, or the answer alone, often wrong. The first token decides."""
    a, b = map(int, problem.question.rstrip("=").split("+"))
    if rng.random() < DIRECT_SHARE:
        return f"answer:{nearly(a + b, rng, DIRECT_WRONG)}"
    return ",".join(str(n) for n in range(a + 1, a + b + 1)) + f" answer:{a + b}"


def letters_response(problem: ArithmeticProblem, rng: random.Random) -> str:
    """Letters that have nothing to do with the question, then the answer. Each position has its own frequent ones."""
    ranks = rng.choices(range(len(LETTERS)), weights=LETTER_SHARES, k=LETTER_COUNT)
    text = "".join(LETTERS[(5 * position + rank) % len(LETTERS)] for position, rank in enumerate(ranks))
    return f"{text} answer:{max(0, nearly(int(problem.answer), rng, LETTERS_WRONG)):02}"


def pretraining_batch(problems: Sequence[ArithmeticProblem], respond, tokenizer, rng: random.Random):
    """Token ids and labels; the loss is on the response."""
    sequences, targets = [], []
    for problem in rng.choices(problems, k=BATCH):
        question = tokenizer(problem.question, add_special_tokens=False)["input_ids"]
        text = tokenizer(respond(problem, rng), add_special_tokens=False)["input_ids"]
        response = [*text, tokenizer.eos_token_id]
        sequences.append(question + response)
        targets.append([-100] * len(question) + response)
    return quickstart.padded(sequences, targets, tokenizer.pad_token_id)


def make_model(folder: Path, problems: Sequence[ArithmeticProblem], respond, seed: int, updates: int) -> None:
    """A model that answers as `respond` does, unless it exists."""
    if (folder / "config.json").exists():
        return
    tokenizer, model, rng = arithmetic_tokenizer(), quickstart.new_model(seed), random.Random(seed)

    def rate(update: int) -> float:
        return quickstart.warm_up(update) * min(1.0, 0.05 + (updates - update) / (updates * 0.3))

    def batch():
        return pretraining_batch(problems, respond, tokenizer, rng)

    for update, loss in quickstart.pretrain(model, batch, updates, rate):
        if update % 100 == 0:
            print(f"  {folder.name}: update {update}, loss {loss:.3f}", flush=True)
    model.save_pretrained(folder)
    save_arithmetic_tokenizer(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/ablation_tasks"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    sums, digits = arithmetic_problems(2, 500, seed=0), digit_sums()
    mixed = [*sums[:300], *arithmetic_problems(5, 300, seed=0)]
    random.Random(0).shuffle(mixed)
    prompts = {
        "sums": sums,
        "sums_held_out": arithmetic_problems(2, 60, seed=0, split="held-out"),
        "mixed": mixed,
        "counting": counting_problems("train"),
        "counting_held_out": counting_problems("held-out")[:60],
        "digits": digits["train"],
        "digits_held_out": digits["held-out"],
    }
    for name, problems in prompts.items():
        write_arithmetic(args.out / f"{name}.jsonl", problems)
    if not (args.out / "sums" / "config.json").exists():
        quickstart.make_model(args.out / "sums", args.seed)
    for name, (problems, respond, updates) in {
        "counting": (prompts["counting"], counting_response, 300),
        "steady": (prompts["counting"], steady_response, 300),
        "letters": ([*digits["train"], *digits["held-out"]], letters_response, 400),
    }.items():
        make_model(args.out / name, problems, respond, args.seed, updates)
    print(json.dumps({"written": str(args.out)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
