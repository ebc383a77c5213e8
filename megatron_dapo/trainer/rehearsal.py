"""`--dry-run`: one prompt goes through the run's own code, without weights and without a GPU.

A stand-in for the engine returns the reference answer in two forms, and something wrong every third time. The rollout
function, the graders in their processes, the group filter, the advantages and the loss are those of the run, and so are
the checks of the checkpoint that it would resume. What is wrong is a `ConfigError` in one line, as at the start of the
run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_dapo.algorithm import PolicyLoss, Scores
from megatron_dapo.algorithm.filtering import keep_all, load_group_filter
from megatron_dapo.checkpoints.folder import CheckpointFolder
from megatron_dapo.config import Config, ConfigError
from megatron_dapo.config.data import RewardConfig
from megatron_dapo.data import RunData
from megatron_dapo.engines.protocol import Completion, SamplingParams
from megatron_dapo.errors import UserError
from megatron_dapo.files import Dtype, read_safetensors_directory
from megatron_dapo.plugins import in_one_line
from megatron_dapo.policy.megatron.importing import gpu_count
from megatron_dapo.policy.step import LossInputs
from megatron_dapo.reward.combined import ResponseGrader
from megatron_dapo.rollout.accounting import GroupEvents
from megatron_dapo.rollout.agents.functions import close_shared, load_rollout_function
from megatron_dapo.rollout.group_runner import GroupRunner
from megatron_dapo.rollout.pending_group import PendingGroup, new_samples
from megatron_dapo.trainer.advantages import shape_batch
from megatron_dapo.trainer.rollout_driver import RolloutDriver
from megatron_dapo.types import FinishReason, Group, Prompt, StepBatch, Tokens, WeightSpan, as_logprobs, as_tokens
from megatron_dapo.weights.copy import all_finite

LIMIT_SECONDS = 45.0  # for the rollouts and their grades
CHECKED_BYTES = 1 << 30  # of the model's weights; of a larger model, the beginning of each tensor


def rehearse(config: Config, data: RunData) -> list[str]:
    """What was tried, one line each."""
    check_container(config, Path.cwd())
    lines = [*_resume(config, data), *_sglang(config)]
    if not config.policy.megatron_checkpoint:
        _check_finite(config.policy.model)
    prompt = next(iter(data.training.values()))[0]
    group, said = asyncio.run(_group(config, prompt))
    _loss(config, group)
    shown = "".join(f"\n    {line}" for line in f"{prompt.text:.2000}".split("\n"))
    return [*lines, f"rehearsal with prompt {prompt.id}: {said}", f"the model sees it as{shown}"]


# ---- rollout, grades, filter, loss ----


class StandIn:
    """Instead of an engine: the reference answer alone, boxed, and a wrong one, in turns."""

    weight_version = 0
    max_running = 1

    def __init__(self, answer: str, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts = [answer, f"Answer: \\boxed{{{answer}}}", "I do not know."]
        self._requests = 0

    async def generate(self, request_id: str, prompt: Tokens, params: SamplingParams) -> Completion:
        text = self._texts[self._requests % len(self._texts)]
        self._requests += 1
        found = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id or 0]
        tokens = as_tokens(found[: params.max_new_tokens])
        reason = FinishReason.STOP if len(tokens) == len(found) else FinishReason.LENGTH
        logprobs = as_logprobs([-1.0] * len(tokens))
        return Completion(tokens, logprobs, reason, [WeightSpan(0, 0, len(tokens))], "the rehearsal")

    async def abort(self, request_id: str | None = None) -> None:
        pass


async def _group(config: Config, prompt: Prompt) -> tuple[Group, str]:
    """Three rollouts, graded, repeated until the group has its size; and what the grader and the filter said."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.policy.model)
    grader = ResponseGrader(_impatient(config.reward), tokenizer)
    pending = PendingGroup(0, 0, Group(prompt, new_samples(prompt, [1, 2, 3])))
    async with contextlib.AsyncExitStack() as opened:
        opened.push_async_callback(close_shared)
        opened.push_async_callback(grader.graders.close)
        with _named("reward.grader"):
            await grader.graders.open()
        runner = GroupRunner(
            StandIn(prompt.answer, tokenizer), grader.grade, config.rollout, None, GroupEvents(),
            load_rollout_function(config, tokenizer),
        )  # fmt: skip
        key = "rollout.generate or reward.grader" if config.rollout.generate else "reward.grader"
        try:
            with _named(key):
                async with asyncio.timeout(LIMIT_SECONDS):
                    await runner.run(pending)
        except TimeoutError:
            raise ConfigError(f"{key}: three responses were not graded within {LIMIT_SECONDS:g} s") from None
    grades = pending.group.grades
    if all(sample.grade is None or sample.grade.ungraded for sample in pending.group.samples):
        reason = next((sample.grade.reason for sample in pending.group.samples if sample.grade), "")
        raise ConfigError(f"reward.grader: a response with the reference answer could not be graded: {reason:.300}")
    rollouts, size = pending.group.rollouts, config.rollout.samples_per_prompt
    samples = [replace(part, index=index) for index in range(size) for part in rollouts[index % len(rollouts)]]
    group = Group(prompt, samples)
    with _named("rollout.group_filter"):
        chosen = load_group_filter(config.rollout.group_filter) if config.rollout.dynamic_sampling else keep_all
        kept, why = chosen(group)
    scores = ", ".join(f"{grade.score:g}" for grade in grades)
    decision = "the filter keeps the group" if kept else f"the filter rejects the group ({why})"
    what = "of three rollouts" if config.rollout.generate else "(the reference answer alone, boxed, a wrong answer)"
    return group, f"scores {scores} {what}; {decision}; the loss is finite"


def _impatient(config: RewardConfig) -> RewardConfig:
    """The first error counts."""
    changes: dict[str, Any] = {"max_errors": 1, "workers": 1}
    for name in ("http", "judge"):
        section = getattr(config, name)
        limits = {"max_failures": 1, "retries": 0, "timeout": min(section.timeout, LIMIT_SECONDS / 3)}
        changes[name] = section.model_copy(update=limits)
    return config.model_copy(update=changes)


def _loss(config: Config, group: Group) -> None:
    """Advantages, loss and gradient of the group, with log-probs of no model."""
    with _named("algorithm.advantage"):
        shaped, _ = shape_batch(StepBatch(0, [group]), config)
    if not shaped.advantages.any():  # equal rewards, or those of a critic
        shaped.advantages = np.where(np.arange(shaped.samples) % 2, 1.0, -1.0).astype(np.float32)
    shaped.loss_mask = np.ones_like(shaped.loss_mask)
    shaped.old_logprobs = shaped.ref_logprobs = shaped.engine_logprobs
    loss = PolicyLoss(config.algorithm)
    with _named("algorithm.objective"):
        batch = LossInputs(shaped, config, "old", loss).everything()
        noise = torch.randn(len(batch.mask), generator=torch.Generator().manual_seed(0))
        logprobs = (batch.old_logprobs + 0.1 * noise).requires_grad_()
        entropy = torch.ones_like(noise, requires_grad=True) if loss.needs.entropy else None
        found = loss(Scores(logprobs, entropy), batch).loss_sum
        found.backward()
        if logprobs.grad is None or not torch.isfinite(torch.cat([found[None], logprobs.grad])).all():
            raise ConfigError(f"{config.algorithm.objective} gives a loss or gradient that is not finite")


@contextlib.contextmanager
def _named(key: str) -> Iterator[None]:
    """An error inside becomes one line that begins with the key; of a traceback, its last line."""
    try:
        yield
    except (TimeoutError, asyncio.CancelledError):
        raise
    except Exception as error:
        line = _short(error)
        raise ConfigError(line if line.startswith(key.split()[0]) else f"{key}: {line}") from error


def _short(error: Exception) -> str:
    if not isinstance(error, UserError):
        return in_one_line(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if len(lines) < 2 else f"{lines[0].rstrip(':')}: {lines[-1]}"


# ---- what else the start would find ----


def _resume(config: Config, data: RunData) -> list[str]:
    """The checkpoint that a start would resume; refused for what a start refuses."""
    folder = CheckpointFolder(config.trainer.run_dir, config.trainer.checkpoint)
    if not folder.complete():
        return []
    driver = RolloutDriver(config, data=data)

    def check(state: dict[str, Any]) -> None:
        current = state["current"]
        driver.check(state, [] if current is None else [current["batch"]])

    path, rejected = folder.first_usable(check)
    problems = [f"{one.name}: {problem}" for one, problem in rejected.items()]
    if path is None:
        raise ConfigError(
            f"no checkpoint in {folder.path} can be used: {'; '.join(problems)}. Restore one, or choose another "
            "trainer.run_dir"
        )
    return [*(f"warning: {line}; it would be set aside" for line in problems), f"resumes from {path}"]


PRINT_VERSION = "import sglang; print(sglang.__version__)"


def _sglang(config: Config) -> list[str]:
    """SGLang can be imported by the Python that would start the servers."""
    servers = config.rollout.servers
    if config.rollout.engine != "sglang" or servers.urls or config.slurm.container_image:
        return []
    python = servers.python or sys.executable
    try:
        done = subprocess.run([python, "-c", PRINT_VERSION], capture_output=True, text=True, timeout=LIMIT_SECONDS)
        problem = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = _short(error)
    if not problem:
        return [f"SGLang {done.stdout.strip()} of {python}"]
    line = f"rollout.engine is sglang, which {python} cannot import ({problem})"
    remedy = "pip install 'megatron-dapo[sglang]', or name SGLang's Python in rollout.servers.python"
    runs_here = servers.device == "cpu" or (gpu_count() > 0 and config.slurm.nodes == 1)
    if servers.python or runs_here:
        raise ConfigError(f"{line}: {remedy}")
    return [f"warning: {line}; where the run is started: {remedy}"]


ALWAYS_MOUNTED = ("/tmp", "/proc", "/sys", "/dev")


def check_container(config: Config, folder: Path) -> None:
    """The image is there, and the mounts have what the run reads and writes. `folder`: where the job is submitted."""
    slurm = config.slurm
    image = slurm.container_image
    if not image:
        return
    is_file = image.startswith(("/", ".", "~")) or image.endswith((".sif", ".sqsh", ".img"))
    if is_file and not Path(image).expanduser().exists():
        raise ConfigError(f"slurm.container_image: {image} does not exist")
    inside = []
    for mount in slurm.container_mounts:
        host, _, target = mount.partition(":")
        if not Path(host).exists():
            raise ConfigError(f"slurm.container_mounts: {host} does not exist on this machine")
        inside.append(target.partition(":")[0] or host)
    run_dir = Path(config.trainer.run_dir).resolve()
    inside = inside or [str(folder), str(run_dir)]
    if slurm.container_runtime != "pyxis":  # which add these by themselves
        inside += [*ALWAYS_MOUNTED, os.path.expanduser("~"), str(folder)]
    paths = {"policy.model": config.policy.model, "trainer.run_dir": str(run_dir)}
    paths |= {f"data ({name})": file.path for name, file in config.data.files.items()}
    paths |= {"policy.megatron_checkpoint": config.policy.megatron_checkpoint or ""}
    for key, path in paths.items():
        place = (folder / path).resolve()
        if path and place.exists() and not any(place.is_relative_to(known) for known in inside):
            raise ConfigError(
                f"{key}: {place} is in none of the container's mounts ({', '.join(inside)}): add it to "
                "slurm.container_mounts"
            )


def _check_finite(model: str) -> None:
    """No weight is NaN or infinite. Of a large model, only the beginning of each tensor is read."""
    if not any(Path(model).glob("*.safetensors")):
        return
    stored = read_safetensors_directory(model).values()
    total = sum(tensor.nbytes for tensor in stored)
    most = total if total <= CHECKED_BYTES else CHECKED_BYTES // len(stored) // 16 * 16
    for tensor in stored:
        with open(tensor.file, "rb") as file:
            file.seek(tensor.offset)
            if not all_finite(memoryview(file.read(min(most, tensor.nbytes))), Dtype(tensor.dtype)):
                raise ConfigError(f"policy.model: {tensor.name} in {tensor.file} has values that are NaN or infinite")
