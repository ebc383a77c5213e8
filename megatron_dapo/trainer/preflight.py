"""Checks of a run's set-up before anything heavy starts: no GPU, no server, no weights in memory.

`train --dry-run`, `slurm` and, on rank 0, every start of `train` open what the run will need: trackers, plugins,
tokenizer, weight files, prompts. Whatever is wrong is a `UserError` in one line that names the key to change.
"""

from __future__ import annotations

import contextlib
import netrc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from megatron_dapo.algorithm.filtering import load_group_filter
from megatron_dapo.algorithm.objective import load_objective
from megatron_dapo.config import Config, ConfigError, ModelShape
from megatron_dapo.config.data import DataConfig
from megatron_dapo.config.observe import WandbConfig
from megatron_dapo.data import load_tokenizer
from megatron_dapo.errors import UserError
from megatron_dapo.observe.trackers import make_trackers
from megatron_dapo.reward.grader import load_grader
from megatron_dapo.weights.check import check_megatron_checkpoint, check_model_directory

if TYPE_CHECKING:
    from megatron_dapo.data import PromptSet

WANDB_URL = "https://api.wandb.ai"
STEP_METRICS = ("rollout/", "reward/", "train/")  # prefixes of a step's metrics


def check_setup(config: Config, shape: ModelShape) -> str:
    """Raises UserError when the run cannot work; else returns the report of the data files, a line or more for each."""
    make_trackers(config.observe, Path(config.trainer.run_dir), {})
    _check_wandb(config.observe.wandb)
    _check_best_metric(config)
    load_objective(config.algorithm)
    load_grader(config.reward)
    load_group_filter(config.rollout.group_filter)
    tokenizer = load_tokenizer(config.policy.model, shape.vocab)
    _check_weights(config, shape)
    prompts = _check_data("data", config.data, tokenizer, config)
    if config.trainer.prompts_per_step > len(prompts):
        raise ConfigError(
            f"trainer.prompts_per_step is {config.trainer.prompts_per_step}, but {config.data.path} has only "
            f"{len(prompts)} usable prompts: a step would repeat prompts; lower it or use more data"
        )
    reports = [prompts.report.summary()]
    if config.evaluate.data.path:
        reports.append(_check_data("evaluate.data", config.evaluate.data, tokenizer, config).report.summary())
    _check_run_directory(Path(config.trainer.run_dir))
    return "\n".join(reports)


def _check_weights(config: Config, shape: ModelShape) -> None:
    """The index and the headers of all weight files."""
    with _named("policy.model"):
        check_model_directory(config.policy.model)
    if config.policy.megatron_checkpoint:
        with _named("policy.megatron_checkpoint"):
            check_megatron_checkpoint(config.policy.megatron_checkpoint, shape)


@contextlib.contextmanager
def _named(key: str) -> Iterator[None]:
    """Errors inside begin with the key to change, and are one line: of a list of details only the first is kept."""
    try:
        yield
    except UserError as error:
        message = "; ".join(line.strip() for line in str(error).splitlines()[:2])
        raise ConfigError(message if key in message else f"{key}: {message}") from error


def _check_data(key: str, data: DataConfig, tokenizer: Any, config: Config) -> PromptSet:
    from megatron_dapo.data import load_prompts

    with _named(f"{key}.path"):
        return load_prompts(data, tokenizer, config.rollout.max_prompt_tokens)


def _check_wandb(wandb: WandbConfig) -> None:
    """An online run needs a key; without one wandb would ask for it in the middle of the start."""
    if wandb.mode != "online" or os.environ.get("WANDB_API_KEY"):
        return
    host = urlparse(os.environ.get("WANDB_BASE_URL") or WANDB_URL).hostname or ""
    file = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        known = file.is_file() and netrc.netrc(file).authenticators(host) is not None
    except (netrc.NetrcParseError, OSError):
        known = False
    if not known:
        raise ConfigError(
            f"observe.wandb.mode is online, but there is no key for {host}: run `wandb login`, set WANDB_API_KEY, or "
            "use mode offline"
        )


def _check_best_metric(config: Config) -> None:
    wanted = config.trainer.checkpoint.best_metric
    if not wanted:
        return
    if not config.evaluate.data.path:
        if not wanted.startswith(STEP_METRICS):
            raise ConfigError(
                f"trainer.checkpoint.best_metric: there is no metric {wanted!r}; without evaluation it is one of a "
                f"step's metrics, which begin with {', '.join(STEP_METRICS)}"
            )
        return
    k = config.evaluate.samples
    known = [f"eval/avg@{k}", *(f"eval/pass@{n}" for n in config.evaluate.pass_at_values), f"eval/maj@{k}"]
    known += [f"eval/avg@{k}_low", f"eval/avg@{k}_high", "eval/mean_tokens", "eval/truncation_rate", "eval/ungraded"]
    if wanted not in known:
        raise ConfigError(
            f"trainer.checkpoint.best_metric: the evaluation has no metric {wanted!r}; it has {', '.join(known)}"
        )


def _check_run_directory(run_dir: Path) -> None:
    """Creates it; a run does that anyway."""
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        trial = run_dir / "logs" / f".preflight-{os.getpid()}"
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise ConfigError(
            f"trainer.run_dir: {run_dir} cannot be written ({error.strerror or error}): choose another directory"
        ) from error
