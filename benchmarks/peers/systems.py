"""The systems of benchmarks/head_to_head.py: how each is started, and what a step line of its log says.

All get the same `Work`; the rest of their configurations is in head_to_head.yaml, trl_head_to_head.py and verl.yaml.
A step line is read as: step, samples and tokens in the loss, tokens generated, accuracy, and seconds by phase.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PEERS = Path(__file__).resolve().parent
Line = dict[str, Any]


@dataclass(frozen=True)
class Work:
    model: str
    prompts: str = ""  # a file: question, text, ids and answer of each, in the order in which they are trained on
    steps: int = 0
    lr: float = 0.0
    prompts_per_step: int = 64
    samples: int = 8
    updates: int = 1  # a step
    max_prompt_tokens: int = 512
    max_response_tokens: int = 768
    seed: int = 0
    gpu: bool = True
    options: dict[str, Any] = field(default_factory=dict)  # of a peer, beyond its file in this folder


@dataclass(frozen=True)
class System:
    command: Callable[[Work, Path], list[str]]  # of a run in a folder
    log: str  # the file with its step lines
    parse: Callable[[Line], Line | None]  # None: not the line of a step
    path: str  # PYTHONPATH


def our_config(gpu: bool) -> Path:
    return PEERS / ("head_to_head.yaml" if gpu else "dapo.yaml")


def our_command(work: Work, folder: Path, settings: list[str]) -> list[str]:
    common = [
        f"policy.model={work.model}", f"data.path={work.prompts}", f"trainer.run_dir={folder / 'run'}",
        f"trainer.steps={work.steps}", f"trainer.seed={work.seed}", f"trainer.prompts_per_step={work.prompts_per_step}",
        f"trainer.mini_batch_prompts={work.prompts_per_step // work.updates}", f"policy.optimizer.lr={work.lr}",
        f"rollout.samples_per_prompt={work.samples}", f"rollout.max_prompt_tokens={work.max_prompt_tokens}",
        f"rollout.max_response_tokens={work.max_response_tokens}", "rollout.dynamic_sampling=false",
        "data.question_column=question", "trainer.checkpoint.at_end=false", "reward.grader=python:grader.grade",
    ]  # fmt: skip
    start = [sys.executable, "-W", "ignore", "-m", "megatron_dapo", "train", str(our_config(work.gpu))]
    return [*start, *(word for one in [*common, *settings] for word in ("--set", one))]


def our_step(line: Line) -> Line | None:
    if line["kind"] != "step":
        return None
    found = line["metrics"]
    times = {"generate": "rollout", "log_probs": "log_probs", "update": "update", "sync": "sync"}
    return {
        "step": line["step"], "samples": found["rollout/samples_trained"], "tokens": found["train/tokens"],
        "generated": found["rollout/response_tokens"], "accuracy": found["reward/accuracy_all"],
        "phases": {phase: found.get(f"time/{name}", 0.0) for phase, name in times.items()},
    }  # fmt: skip


def trl_command(folder: Path, python: str) -> list[str]:
    script, files = PEERS / "trl_head_to_head.py", [folder / "work.json", folder / "steps.jsonl"]
    return [python, "-W", "ignore", *map(str, [script, *files])]


def trl_step(line: Line) -> Line:
    return {**line, "generated": line["tokens"]}


def verl_prompts(work: Work) -> Path:
    """verl's own file: it carries every column of a prompt through the step, so this one has no other."""
    return Path(work.prompts).with_name("verl.jsonl")


def verl_command(work: Work, folder: Path, python: str) -> list[str]:
    actor, prompts, length = "actor_rollout_ref", work.prompts_per_step, work.max_response_tokens
    settings = {
        "data.train_files": verl_prompts(work), "data.val_files": verl_prompts(work), "data.train_batch_size": prompts,
        "data.max_prompt_length": work.max_prompt_tokens, "data.max_response_length": length,
        f"{actor}.model.path": work.model, f"{actor}.actor.optim.lr": work.lr, f"{actor}.rollout.n": work.samples,
        f"{actor}.actor.ppo_mini_batch_size": prompts // work.updates,
        f"{actor}.rollout.max_model_len": work.max_prompt_tokens + length,
        "reward.custom_reward_function.path": PEERS / "grader.py", "trainer.total_training_steps": work.steps,
        "trainer.default_local_dir": folder / "checkpoints", **work.options,
    }  # fmt: skip
    program = [python, "-W", "ignore", "-m", "verl.trainer.main_ppo", "--config-path", str(PEERS), "--config-name"]
    return [*program, "verl", *(f"{key}={'null' if value is None else value}" for key, value in settings.items())]


def verl_step(line: Line, samples: int) -> Line | None:
    found = line["data"]
    if "timing_s/step" not in found:
        return None
    times = {"generate": "gen", "log_probs": "old_log_prob", "update": "update_actor", "sync": "update_weights"}
    tokens = found["response_length/mean"] * samples
    return {
        "step": line["step"], "samples": samples, "tokens": tokens, "generated": tokens,
        "accuracy": (found["critic/score/mean"] + 1) / 2,
        "phases": {phase: found.get(f"timing_s/{name}", 0.0) for phase, name in times.items()},
    }  # fmt: skip
