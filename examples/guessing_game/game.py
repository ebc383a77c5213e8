"""Guess a number from 1 to 3 in two turns, told > or <: `python -m examples.guessing_game.game [SEED]`."""

import random
import sys
from pathlib import Path

import torch

from examples.quickstart.quickstart import new_model
from megatron_dapo.config import load_config
from megatron_dapo.data import arithmetic_tokenizer, save_arithmetic_tokenizer
from megatron_dapo.launch.local import run_training
from megatron_dapo.rollout.functions import rollout_function
from megatron_dapo.types import Grade


@rollout_function(resume="turn")
async def play(prompt, conversation, settings):
    for number in range(1, settings["turns"] + 1):
        turn = await conversation.generate(max_tokens=2, stop=["\n"])
        guess, secret = turn.text.strip(), prompt.answer  # digits: texts compare as numbers do
        if guess == secret:
            return Grade(True, 1.0, guess, f"in turn {number}")
        conversation.append(">\n" if secret > guess else "<\n", role="user")
    return Grade(False, -1.0, guess, "out of turns")


def make_model(folder, seed, updates=200):
    """A tiny model that knows the format: it guesses at random."""
    tokenizer, model, rng = arithmetic_tokenizer(), new_model(seed), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(updates):
        turns = [f"{rng.choice('123')}\n{rng.choice('<>')}\n" for _ in range(128)]
        games = [f"{rng.randint(1000, 9999)}:{turns[i]}{turns[i + 1]}" for i in range(0, 128, 2)]
        tokens = torch.tensor(tokenizer(games)["input_ids"])
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    save_arithmetic_tokenizer(folder)


def main(seed="0", *settings):
    make_model("runs/guessing_game/start", int(seed))
    for name, numbers in (("games", range(1000, 3000)), ("held_out", range(3000, 3100))):
        rows = (f'{{"question": "{i}:", "answer": "{random.Random(i).randint(1, 3)}"}}\n' for i in numbers)
        Path(f"runs/guessing_game/{name}.jsonl").write_text("".join(rows))
    return run_training(load_config(Path(__file__).with_name("config.yaml"), [f"trainer.seed={seed}", *settings]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
