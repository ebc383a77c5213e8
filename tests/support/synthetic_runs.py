"""Synthetic run directories: the files of a training, deterministic and made in milliseconds."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml

from megatron_dapo.observe import transcripts
from megatron_dapo.observe.metrics_file import EVAL, STEP, Record
from megatron_dapo.types import FinishReason, Grade, Group, Prompt, Sample, as_logprobs, as_tokens

HOSTILE = (
    "</script><script>window.hacked = 1; console.error('ran')</script><img src=x onerror=\"window.hacked=2\">"
    "<!--<script> & &lt; \x00\x1b[31m \u202egnirts\u202c \u2028 \ud800 @@SCRIPT@@ <a href='http://example.invalid/'>x</a>"
)


def step_metrics(step: int, steps: int, seed: int, *, clip_higher: bool = True) -> dict[str, float]:
    """Resembles DAPO on a task that is learnt; without clip-higher the entropy collapses."""
    noise = random.Random(seed * 100_003 + step)
    share = step / max(20, steps)
    learnt = 1 - math.exp(-3 * share)
    accuracy = 0.18 + (0.55 if clip_higher else 0.38) * learnt + noise.gauss(0, 0.025)
    entropy = 0.62 * (0.9 - 0.25 * share if clip_higher else math.exp(-4 * share)) + noise.gauss(0, 0.012)
    kept, hard = 64, int(70 * (1 - learnt) + noise.random() * 6)
    easy = int(50 * learnt + noise.random() * 6)
    length = 420 + 900 * learnt + noise.gauss(0, 25)
    return {
        "reward/mean": 2 * accuracy - 1 - 0.06 * share, "reward/accuracy": accuracy,
        "reward/accuracy_all": (kept * accuracy + easy) / (kept + hard + easy), "reward/penalty": -0.06 * share,
        "rollout/groups_kept": kept, "rollout/groups_failed": 1 if noise.random() < 0.02 else 0,
        "rollout/groups_submitted": kept + hard + easy, "rollout/seconds": 31.0,
        "rollout/dropped/all-wrong": hard, "rollout/dropped/all-correct": easy,
        **({"rollout/dropped/unfinished": 4} if step % 9 == 0 else {}),
        "rollout/length_trained": length, "rollout/length_dropped": length * 0.8,
        "rollout/truncated_share": 0.03 * share, "rollout/interrupted_share": 0.01,
        "rollout/tokens_per_second": 5200 + noise.gauss(0, 200),
        "train/loss": noise.gauss(0, 0.02), "train/entropy": max(0.01, entropy), "train/tokens": 64 * 16 * length,
        "train/grad_norm": 0.14 * math.exp(noise.gauss(0, 0.25)) * (30 if seed == 2 and step == steps // 2 else 1),
        "train/lr": 1e-6 * min(1, step / 10), "train/ratio_mean": 1.0, "train/ratio_max": 1.9,
        "train/clip_fraction_high": 0.004 + 0.004 * share + 0.001 * noise.random(),
        "train/clip_fraction_low": 0.002 + 0.001 * noise.random(), "train/clip_fraction_dual": 0.0,
        "train/approx_kl": 4e-4 * (1 + 0.3 * noise.random()), "train/mismatch_mean": 0.006 + 0.001 * noise.random(),
        "train/mismatch_kl": 6e-4 * math.exp(noise.gauss(0, 0.3)), "train/mismatch_over_cap": 0.0004,
        "time/rollout": 31 + 12 * learnt + noise.random(), "time/update": 14 + 5 * learnt, "time/log_probs": 4.2,
        "time/sync": 1.1, "time/advantages": 0.02, "time/other": 0.3, "time/step": 51 + 17 * learnt,
        **({"time/checkpoint": 6.0} if step % 20 == 1 and step > 1 else {}),
        **({"time/start": 240} if step in (1, 41) else {}),
    }  # fmt: skip


def make_groups(step: int, text: str = "") -> list[Group]:
    groups = []
    for number in (1, 2, 3):
        prompt = Prompt(f"sum-{number}", f"What is {step} + {number}?", as_tokens([1, 2]), str(step + number))
        prompt.source = "easy" if number < 3 else "hard"
        samples = []
        for index in range(6):
            right = (index + step) % 2 == 0
            answer = step + number + (0 if right else index)
            shown = text or f"Let me add them up.\n\n{step} + {number} = {answer}\n\nAnswer: {answer}"
            samples.append(
                Sample(
                    prompt.id,
                    index,
                    prompt.tokens,
                    as_tokens(range(5)),
                    as_logprobs([-0.1] * 5),
                    FinishReason.STOP,
                    text=shown,
                    grade=Grade(right, 1.0 if right else -1.0, str(answer), "exact"),
                )
            )
        groups.append(Group(prompt, samples))
    return groups


def make_arrays(groups: list[Group]) -> dict[str, np.ndarray]:
    """What a run records of every token with `observe.samples_tokens`."""
    samples = [sample for group in groups for sample in group.samples]
    lengths, random = np.array([sample.length for sample in samples]), np.random.default_rng(0)
    engine = -random.exponential(0.4, lengths.sum()).astype(np.float32)
    old = engine + random.normal(0, 0.05, len(engine)).astype(np.float32)
    right = np.array([bool(sample.grade.correct) for sample in samples])
    return {
        "advantages": np.where(right, 0.8, -1.1).astype(np.float32),
        "prompt_lengths": np.array([len(sample.prompt_tokens) for sample in samples]), "response_lengths": lengths,
        "tokens": np.concatenate([part for s in samples for part in (s.prompt_tokens, s.response_tokens)]),
        "engine_logprobs": engine, "old_logprobs": old, "new_logprobs": old + np.float32(0.1),
        "entropy": np.full(len(engine), 0.5, np.float32), "loss_mask": np.arange(len(engine)) % 5 != 4,
        "piece_ids": np.arange(8), "pieces": np.array([f" word{i}" for i in range(8)]),
    }  # fmt: skip


def make_many_samples(folder: Path, steps: int, prompts: int = 64, responses: int = 8) -> None:
    """All samples of every step. The files of all steps are the same ones under other names."""
    groups = []
    for number in range(prompts):
        prompt, samples = make_groups(number)[0].prompt, make_groups(number)[0].samples
        prompt.id, prompt.source = f"sum-{number}", "easy" if number % 2 else "hard"
        groups.append(Group(prompt, [replace(samples[i % 6], index=i) for i in range(responses)]))
    transcripts.write(folder, transcripts.choose(1, groups, 0, 0, make_arrays(groups)))
    for step in range(2, steps + 1):
        for ending in ("jsonl", "npz"):
            (folder / f"step_{step:06d}.{ending}").hardlink_to(folder / f"step_000001.{ending}")


def make_run(
    folder: Path,
    steps: int = 120,
    seed: int = 0,
    *,
    clip_higher: bool = True,
    hostile: bool = False,
    samples_every: int = 20,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for step in range(1, steps + 1):
        records.append(Record(step, STEP, step_metrics(step, steps, seed, clip_higher=clip_higher)))
        if step % max(1, steps // 6) == 0:
            score = 0.2 + (0.45 if clip_higher else 0.3) * (1 - math.exp(-3 * step / steps)) + 0.01 * seed
            scores = {"avg@8": score, "avg@8_low": score - 0.06, "avg@8_high": score + 0.06, "pass@8": score + 0.2}
            scores["pass@1"] = score
            records.append(Record(step, EVAL, {f"eval/held_out/{name}": value for name, value in scores.items()}))
        if transcripts.is_due(step, samples_every):
            groups = make_groups(step, HOSTILE if hostile else "")
            arrays = None if hostile else make_arrays(groups)
            transcripts.write(folder / "samples", transcripts.choose(step, groups, 0, 0, arrays))
    (folder / "metrics.jsonl").write_text("".join(record.to_line() for record in records))
    config = {
        "policy": {"model": "models/qwen", "optimizer": {"lr": 1e-6}},
        "algorithm": {
            "objective": "dapo",
            "clip_low": 0.2,
            "clip_high": 0.28 if clip_higher else 0.2,
            "dual_clip": None,
        },
        "trainer": {"steps": steps, "seed": seed},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return folder
