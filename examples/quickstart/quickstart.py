"""The quickstart: a complete DAPO run with a tiny model, on two CPU cores, in a few minutes.

    make quickstart          # in a checkout; megatron-dapo quickstart where the wheel is installed
    megatron-dapo quickstart --lora      # adapters of rank 4 learn instead of the model (docs/lora.md)

1. creates a tiny Qwen2 model and pre-trains it on sums such as 47+5. Some of the examples are wrong, so that it knows
   the task but is not certain;
2. converts it from HF to Megatron;
3. trains it with DAPO on Megatron-Core: dynamic sampling, clip-higher, token-level loss, exact resume;
4. converts the result back to HF and evaluates both models on held-out problems;
5. writes the report.

From step 2 on, everything is done as in a 32B run, with the same functions; the configuration is `config.yaml` in this
folder. An interrupted quickstart is resumed by the next call; a finished one starts again.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console

from megatron_dapo.config import load_config
from megatron_dapo.data import arithmetic_problems, arithmetic_tokenizer, save_arithmetic_tokenizer, write_arithmetic
from megatron_dapo.evaluation import run as run_evaluation
from megatron_dapo.launch.local import run_training
from megatron_dapo.observe.report import write_report
from megatron_dapo.weights.adapters import merge_adapter
from megatron_dapo.weights.convert import hf_to_megatron, megatron_to_hf

LEVEL = 2
PRETRAINING_UPDATES = 1500  # at most
PRETRAINING_BATCH = 128
WRONG_SHARE = 0.4  # of the pre-training examples
ENOUGH = 0.36  # mean probability of the right answer at which pre-training ends
CERTAIN = 0.9  # the same of the first part of pre-training with --lora, which has no wrong examples
DOUBT = 0.65  # share of wrong examples in its second part, which ends when the probability has fallen to ENOUGH
MARKER = ".quickstart"  # in a directory that the quickstart may use again
MADE = (
    "start", "start-megatron", "trained", "prompts.jsonl", "held_out.jsonl", "checkpoints", "lock", "logs", "samples",
    "traces", "evaluations", "eval_before", "eval_after", "dumps", "metrics.jsonl", "config.yaml", "resume.json",
    "environment.json", "report.html", "summary.json",
)  # fmt: skip
console = Console(stderr=True)


def new_model(seed: int):
    """A Qwen2 of 0.3 M random parameters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = arithmetic_tokenizer()
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=96, intermediate_size=256, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    )  # fmt: skip


def make_model(folder: Path, seed: int, updates: int = PRETRAINING_UPDATES, *, for_lora: bool = False) -> None:
    """A `new_model`, pre-trained with cross-entropy, written as an HF directory. `for_lora`: until it is certain of the
    right answers, and then on wrong ones. Adapters do not train the output layer, which must be able to be certain."""
    tokenizer, model = arithmetic_tokenizer(), new_model(seed)
    problems, rng = arithmetic_problems(LEVEL, 700, seed=0), random.Random(seed)

    def pretrain_until(reached, wrong_share: float, every: int = 25) -> None:
        def batch():
            return pretraining_batch(rng.choices(problems, k=PRETRAINING_BATCH), tokenizer, rng, wrong_share)

        for update, _ in pretrain(model, batch, updates):
            if update % every == 0:
                right = probability_of_right_answers(model, problems[:100], tokenizer)
                console.print(f"  pre-training {update}: the right answer has probability {right:.2f}", highlight=False)
                if reached(right):
                    break

    if for_lora:
        pretrain_until(lambda right: right >= CERTAIN, wrong_share=0.0)
        pretrain_until(lambda right: right <= ENOUGH, wrong_share=DOUBT, every=1)
    else:
        pretrain_until(lambda right: right >= ENOUGH, WRONG_SHARE)
    model.save_pretrained(folder)
    save_arithmetic_tokenizer(folder)


def warm_up(update: int) -> float:
    return min(1.0, (update + 1) / 20)


def pretrain(model, batch, updates: int, rate=warm_up):
    """Updates with cross-entropy on what `batch()` returns (token ids, labels); yields the number and loss of each.
    `rate`: of the learning rate, by update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for update in range(1, updates + 1):
        inputs, labels = batch()
        loss = model(input_ids=inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        yield update, loss.item()


@torch.no_grad()
def probability_of_right_answers(model, problems, tokenizer) -> float:
    inputs, labels = pretraining_batch(problems, tokenizer, random.Random(0), wrong_share=0.0)
    logprobs = model(input_ids=inputs).logits[:, :-1].log_softmax(-1)
    wanted = labels[:, 1:]
    picked = logprobs.gather(2, wanted.clamp_min(0)[..., None]).squeeze(2)
    return float(torch.where(wanted >= 0, picked, 0.0).sum(1).exp().mean())


def pretraining_batch(problems, tokenizer, rng, wrong_share):
    """Questions and answers; the loss is on the answer. A share of the answers is slightly wrong."""
    sequences, targets = [], []
    for problem in problems:
        answer = problem.answer
        if rng.random() < wrong_share:
            answer = str(max(0, int(answer) + rng.choice((-10, -2, -1, 1, 2, 10))))
        question = tokenizer(problem.question, add_special_tokens=False)["input_ids"]
        response = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        sequences.append(question + response)
        targets.append([-100] * len(question) + response)
    return padded(sequences, targets, tokenizer.pad_token_id)


def padded(sequences, targets, pad: int):
    """Token ids and labels of equal length; padding has no label."""
    width = max(map(len, sequences))
    inputs = torch.tensor([tokens + [pad] * (width - len(tokens)) for tokens in sequences])
    return inputs, torch.tensor([labels + [-100] * (width - len(labels)) for labels in targets])


class Phases:
    """Prints and times the phases of the quickstart."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, text: str):
        if text:
            console.print(f"[bold]{text}[/]")
        started = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - started, 1)


def may_use(run_dir: Path) -> bool:
    """Whether the directory is new, empty, or an earlier quickstart's."""
    if not run_dir.is_dir() or not any(run_dir.iterdir()):
        return True
    return (run_dir / MARKER).exists() or (run_dir / "summary.json").exists()


def remove_what_was_made(run_dir: Path) -> None:
    """Everything that a quickstart and its run write; other files in the directory stay."""
    for name in MADE:
        path = run_dir / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def accuracy(config_file: Path, settings: list[str], model: Path, out: Path) -> float:
    config = load_config(config_file, [*settings, f"policy.model={model}"])
    (result,) = run_evaluation(config, str(out), seed=0).results.values()
    return result.avg


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, help="default: runs/quickstart, with --lora runs/quickstart_lora")
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 4 instead of the model (lora.yaml)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", action="store_true", help="remove what an earlier quickstart made there first")
    parser.add_argument("--pretraining-updates", type=int, default=PRETRAINING_UPDATES, help="maximum number")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="megatron|torch|transformers")
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    run_dir, phase = args.run_dir or Path("runs/quickstart_lora" if args.lora else "runs/quickstart"), Phases()
    if not may_use(run_dir):
        console.print(f"{run_dir} has files that the quickstart did not make: name another --run-dir", highlight=False)
        return 2
    try:
        if args.fresh or (run_dir / "summary.json").exists():
            remove_what_was_made(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / MARKER).write_text("made by the quickstart\n")  # a full disk is found here
    except OSError as error:
        console.print(f"{run_dir} cannot be written ({error.strerror}): name another --run-dir", highlight=False)
        return 2
    start, converted, trained = run_dir / "start", run_dir / "start-megatron", run_dir / "trained"
    config_file = Path(__file__).with_name("lora.yaml" if args.lora else "config.yaml")
    settings = [
        f"policy.model={start}", f"policy.megatron_checkpoint={converted}", f"trainer.run_dir={run_dir}",
        f"trainer.seed={args.seed}", f"data.path={run_dir / 'prompts.jsonl'}",
        f"evaluate.data.path={run_dir / 'held_out.jsonl'}", *args.set,
    ]  # fmt: skip
    load_config(config_file, settings)  # a mistake is found before anything is trained
    if not (start / "config.json").exists():
        with phase("pretraining", "1. creating and pre-training a tiny Qwen2"):
            write_arithmetic(run_dir / "prompts.jsonl", arithmetic_problems(LEVEL, 700, seed=0))
            write_arithmetic(run_dir / "held_out.jsonl", arithmetic_problems(LEVEL, 100, seed=0, split="held-out"))
            make_model(start, args.seed, args.pretraining_updates, for_lora=args.lora)
    with phase("convert_in", "2. HF → Megatron"):
        hf_to_megatron(start, converted, overwrite=True)
    with phase("train", "3. DAPO on Megatron-Core"):
        config = load_config(config_file, settings)
        code = run_training(config)
        if code:
            return code
    with phase("convert_out", "4. Megatron → HF, evaluation of both models on held-out problems"):
        newest = run_dir / "checkpoints" / f"step_{config.trainer.steps}"
        if args.lora:
            shutil.rmtree(trained, ignore_errors=True)
            merge_adapter(start, newest / "policy" / "adapter", str(trained))
        else:
            megatron_to_hf(newest, trained, reference=start, overwrite=True)
    with phase("evaluate", ""):
        before = accuracy(config_file, settings, start, run_dir / "eval_before")
        after = accuracy(config_file, settings, trained, run_dir / "eval_after")
    with phase("report", "5. report"):
        write_report([run_dir], run_dir / "report.html")
    summary = {"accuracy_before": before, "accuracy_after": after, "seed": args.seed, "seconds": phase.seconds}
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    console.print(f"[bold green]held-out avg@{config.evaluate.samples}: {before:.1%} → {after:.1%}[/]")
    console.print(f"open {run_dir / 'report.html'}; {run_dir / 'trained'} is the model", soft_wrap=True)
    command = Path(sys.executable).with_name("megatron-dapo")
    if shutil.which("megatron-dapo") is None and command.exists():
        activate = command.with_name("activate")
        console.print(f"the command: {command}, or megatron-dapo after `source {activate}`", soft_wrap=True)
    console.print(f"next: megatron-dapo watch {run_dir}; megatron-dapo train --help", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
