"""A whole training run in seconds: a random Qwen2 of a few thousand parameters, arithmetic prompts, a toy reward."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_dapo.data import arithmetic_problems, arithmetic_tokenizer, save_arithmetic_tokenizer, write_arithmetic

HERE = Path(__file__).resolve().parent


def make_model(folder: Path, seed: int = 0, intermediate_size: int = 64, layers: int = 2) -> Path:
    tokenizer = arithmetic_tokenizer()
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=intermediate_size, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).float()
    model.save_pretrained(folder)
    save_arithmetic_tokenizer(folder)
    return folder


def raw_config(folder: Path, run_dir: Path, **overrides: Any) -> dict[str, Any]:
    """`section__key=value` overrides; dictionaries are merged one level deep."""
    if not (folder / "config.json").exists():
        make_model(folder)
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        write_arithmetic(prompts, arithmetic_problems(2, 64, seed=1))
        write_arithmetic(folder / "problems.jsonl", arithmetic_problems(2, 6, seed=1, split="held-out"))
    raw: dict[str, Any] = {
        "policy": {
            "model": str(folder), "precision": "fp32", "micro_batch_tokens": 256, "timeout_seconds": 60,
            "optimizer": {"lr": 3e-3, "warmup_steps": 0},
        },
        "rollout": {
            "engine": "embedded", "samples_per_prompt": 4, "max_prompt_tokens": 16, "max_response_tokens": 8,
            "embedded": {"batch_tokens": 32},
            "sampler": {"oversampling": 1, "order": "prompt", "unfinished": "finish"},
        },
        "reward": {"grader": "python:tiny_reward.even_characters"},
        "data": {"path": str(prompts), "template": "plain"},
        "evaluate": {"every": 0},
        "trainer": {
            "run_dir": str(run_dir), "steps": 4, "prompts_per_step": 4, "mini_batch_prompts": 2,
            "checkpoint": {"every": 1, "keep": 2}, "gate": {"max_mean_gap": 1e-3, "max_gap": 1e-2},
        },
        "observe": {"console": "off", "report": False},  # a report is a quarter of the CPU time of such a run
    }  # fmt: skip
    for key, value in overrides.items():
        section, name = key.split("__", 1)
        known = raw.setdefault(section, {})
        known[name] = known[name] | value if isinstance(value, dict) and isinstance(known.get(name), dict) else value
    return raw


def evaluated_config(folder: Path, run_dir: Path, steps: int, **overrides: Any) -> dict[str, Any]:
    """`raw_config` of `steps` steps, with an evaluation before the first, after every second and after the last."""
    raw = raw_config(folder, run_dir, trainer__steps=steps, evaluate__every=2, **overrides)
    raw["evaluate"] |= {"data": {"path": str(folder / "problems.jsonl"), "template": "plain"}, "samples": 2}
    return raw


def write_config(raw: dict[str, Any], path: Path) -> Path:
    path.write_text(yaml.safe_dump(raw))
    return path


def command(config: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "megatron_dapo.cli", "train", str(config), *arguments]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
