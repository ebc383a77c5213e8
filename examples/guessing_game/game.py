"""Guess a number from 1 to 9 in three turns, told > or <: `python -m examples.guessing_game.game [SEED]`."""

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
        guess = turn.text.strip()
        if guess == prompt.answer:
            return Grade(True, 1.0, guess, f"in {number} turns")
        if guess.isascii() and guess.isdecimal():
            conversation.append(">\n" if int(prompt.answer) > int(guess) else "<\n", role="user")
    return Grade(False, -1.0, guess, "out of turns")


def random_game(rng):  # of a player who uses the replies for a third of the guesses
    text, secret, left = f"{rng.randint(1000, 9999)}:", rng.randint(1, 9), range(1, 10)
    for _ in range(3):
        guess = rng.choice(left) if rng.random() < 1 / 3 else rng.randint(1, 9)
        left = [number for number in left if (number > guess) == (secret > guess)]
        text += f"{guess}\n{'>' if secret > guess else '<'}\n"
    return text


def make_model(folder, seed, updates=400):
    tokenizer, model, rng = arithmetic_tokenizer(), new_model(seed), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(updates):
        games = torch.tensor(tokenizer([random_game(rng) for _ in range(64)])["input_ids"])
        model(input_ids=games, labels=games).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    save_arithmetic_tokenizer(folder)


def main(seed="0", *settings):
    run = Path("runs/guessing_game")
    make_model(run / "start", int(seed))
    for name, numbers in (("games", range(1000, 3000)), ("held_out", range(3000, 3100))):
        rows = (f'{{"question": "{i}:", "answer": "{random.Random(i).randint(1, 9)}"}}\n' for i in numbers)
        (run / f"{name}.jsonl").write_text("".join(rows))
    return run_training(load_config(Path(__file__).with_name("config.yaml"), [f"trainer.seed={seed}", *settings]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
