"""Guess a number from 1 to 7 in three turns, told > or <: `python examples/guessing_game/game.py [SEED]`."""

import random
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[i]) for i in (0, 1)]  # the examples, whatever their folder is called
from quickstart.quickstart import new_model, pretrain

from megatron_dapo.config import load_config
from megatron_dapo.data import arithmetic_tokenizer, save_arithmetic_tokenizer
from megatron_dapo.launch.local import run_training
from megatron_dapo.rollout.agents.functions import rollout_function
from megatron_dapo.types import Grade

DIGITS = "1234567"


@rollout_function(resume="turn")
async def play(prompt, conversation, settings):
    secret = random.Random(conversation.seed).choice(DIGITS)
    for number in range(1, settings["turns"] + 1):
        guess = (await conversation.generate(max_tokens=2, stop=["\n"])).text.strip()
        if guess == secret:
            return Grade(True, 1.0, guess, f"in turn {number}")
        conversation.append(">\n" if secret > guess else "<\n", role="user")
    return Grade(False, -1.0, guess, "out of turns")


def game(rng):  # one in three players halves what is left; the others guess at random
    text, secret, left, skilled = f"{rng.randint(1000, 9999)}:", rng.choice(DIGITS), DIGITS, rng.random() < 1 / 3
    for _ in range(3):
        guess = left[len(left) // 2] if skilled and left else rng.choice(DIGITS)
        left = [n for n in left if n != guess and (n > guess) == (secret > guess)]
        text += f"{guess}\n{'>' if secret > guess else '<'}\n"
    return text


def make_model(folder, seed, updates=300):
    tokenizer, model, rng = arithmetic_tokenizer(), new_model(seed), random.Random(seed)

    def batch():
        games = torch.tensor(tokenizer([game(rng) for _ in range(64)])["input_ids"])
        return games, games.where(torch.tensor([0] * 5 + [1, 1, 0, 0] * 3) > 0, -100)  # labels: the guesses

    print("pre-training: loss", list(pretrain(model, batch, updates))[-1][1])
    model.save_pretrained(folder)
    save_arithmetic_tokenizer(folder)


def main(seed="0", *settings):
    torch.set_num_threads(1)
    make_model("runs/guessing_game/start", int(seed))
    for name, ids in (("games.jsonl", range(1000, 3000)), ("held_out.jsonl", range(3000, 3100))):
        Path("runs/guessing_game", name).write_text("".join(f'{{"question": "{i}:", "answer": "?"}}\n' for i in ids))
    return run_training(load_config(Path(__file__).with_name("config.yaml"), [f"trainer.seed={seed}", *settings]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
