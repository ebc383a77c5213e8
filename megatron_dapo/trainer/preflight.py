"""Checks of a run's set-up before anything heavy starts: no GPU, no server, no weights in memory.

`train --dry-run`, `slurm` and, on rank 0, every start of `train` open what the run will need: trackers, plugins,
tokenizer, weight files, prompts. Whatever is wrong is a `UserError` in one line that names the key to change. The
prompts are returned, so that the run does not tokenise them again.
"""

from __future__ import annotations

import contextlib
import netrc
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from megatron_dapo.algorithm.advantages import load_estimator, reads_values
from megatron_dapo.algorithm.filtering import load_group_filter
from megatron_dapo.algorithm.loss import load_objective
from megatron_dapo.checkpoints.run_dir import clear_the_way
from megatron_dapo.config import Config, ConfigError, ModelShape, check_model
from megatron_dapo.config.data import EvalConfig
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.config.trainer import WandbConfig
from megatron_dapo.data import RunData, load_run_data, load_tokenizer
from megatron_dapo.errors import UserError
from megatron_dapo.files import check_writable, explain
from megatron_dapo.observe.trackers import make_trackers
from megatron_dapo.reward.combined import open_graders
from megatron_dapo.rollout.agents.functions import load_rollout_function
from megatron_dapo.weights.adapters import adapter_mappings, base_fingerprint, read_adapter
from megatron_dapo.weights.formats.megatron_reader import open_megatron
from megatron_dapo.weights.fp8_checkpoint import check_fp8_directory
from megatron_dapo.weights.locate import check_model_directory
from megatron_dapo.weights.mapping import adapted, check_hf_tensors, parameter_mappings
from megatron_dapo.weights.side_files import hf_files
from megatron_dapo.weights.value_weights import ValueWeights, value_shape

WANDB_URL = "https://api.wandb.ai"
STEP_METRICS = ("rollout/", "reward/", "train/", "critic/", "distillation/", "data/")  # prefixes of a step's metrics


@dataclass(frozen=True, slots=True)
class Setup:
    """A set-up that passed: its prompts, and what there is to say about Megatron's options."""

    data: RunData
    options: list[str]
    unknown_hosts: list[str]

    def report(self) -> str:
        return "\n".join([self.data.report(), *self.options, *(f"warning: {line}" for line in self.unknown_hosts)])


def check_setup(config: Config, shape: ModelShape) -> Setup:
    """Raises UserError when the run cannot work."""
    make_trackers(config.observe, Path(config.trainer.run_dir), config.model_dump(mode="json"))
    _check_wandb(config.observe.wandb)
    _check_best_metric(config)
    load_objective(config.algorithm)
    load_estimator(config.algorithm)
    open_graders(config.reward)
    load_group_filter(config.rollout.group_filter)
    load_rollout_function(config)
    tokenizer = load_tokenizer(config.policy.model, shape.vocab)
    _check_weights(config, shape)
    if reads_values(config.algorithm):
        _check_critic(config, tokenizer.get_vocab())
    data = load_run_data(config, tokenizer, _named)
    _check_enough_prompts(config, data)
    _check_run_directory(Path(config.trainer.run_dir))
    from megatron_dapo.policy.megatron.options import check_options  # imports Megatron-Core

    return Setup(data, check_options(config.policy, shape), unknown_hosts(config))


def unknown_hosts(config: Config) -> list[str]:
    """A line for every server whose host name has no address here. Not an error of a run that starts: under Kubernetes
    names come with the pods."""
    servers = config.rollout.servers
    graders: list[Any] = [config.reward, *config.reward.graders]
    keys = {
        "rollout.servers.urls": servers.addresses,
        "rollout.servers.router_url": [servers.router_url] if servers.router_url else [],
        "reward.http.urls": [url for one in graders if one.grader == "http" for url in one.http.urls],
        "reward.judge.urls": [url for one in graders if one.grader == "judge" for url in one.judge.urls],
        "algorithm.distillation.urls": config.algorithm.distillation.urls,
    }
    places = {(key, urlparse(url).hostname or "") for key, urls in keys.items() for url in urls}
    with ThreadPoolExecutor(16) as pool:  # a resolver takes seconds to give up
        found = pool.map(lambda place: _without_address(*place), sorted(places))
        return [line for line in found if line]


def _without_address(key: str, host: str) -> str:
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        return f"{key}: the host name {host!r} has no address here ({error}): is it spelled correctly?"
    return ""


def _check_enough_prompts(config: Config, data: RunData) -> None:
    """Every source has the prompts that one step takes from it."""
    weights = config.data.weights
    for name, prompts in data.training.items():
        share = weights[name] / sum(weights.values()) if weights else 1.0
        needed = int(config.trainer.prompts_per_step * share)
        if needed > len(prompts):
            what = f", {needed} of them from this source" if weights else ""
            dropped = f" ({why})" if (why := prompts.report.reasons()) else ""
            raise ConfigError(
                f"trainer.prompts_per_step is {config.trainer.prompts_per_step}{what}, but {prompts.report.path} has "
                f"only {len(prompts)} usable prompts{dropped}: a step would repeat prompts; lower it or use more data"
            )


def _check_weights(config: Config, shape: ModelShape) -> None:
    """The index and the headers of all weight files."""
    with _named("policy.model"):
        check_model_directory(config.policy.model)
    if config.rollout.weights.quantization == "fp8":
        check_fp8_directory(config.rollout.servers.model)
    if config.policy.megatron_checkpoint:
        with _named("policy.megatron_checkpoint"):
            open_megatron(config.policy.megatron_checkpoint, shape)
    if config.policy.lora.rank:
        with _named("policy.lora"):
            _check_adapters(config.policy, shape)


def _check_adapters(policy: PolicyConfig, shape: ModelShape) -> None:
    """Their layers, the files they start from, and how ranks share them."""
    import torch

    from megatron_dapo.policy.model.lora import rows_in_shard_order

    lora, ranks, chunks = policy.lora, policy.tensor_parallel, policy.virtual_pipeline
    table = adapter_mappings(shape, lora.rank, tuple(lora.targets))
    if lora.start:
        read_adapter(lora.start, shape, lora, base_fingerprint(policy.model))
    for mapping in parameter_mappings(shape).values():
        if mapping.expert is None and adapted(mapping, lora.targets):
            shard = torch.empty(mapping.shape[0] // ranks, mapping.shape[1], device="meta")
            for rank in range(ranks):
                rows_in_shard_order(mapping, rank, ranks, shard)
    stages = list(enumerate(policy.stage_layers(shape.layers) or []))
    stage_of = [stage for _ in range(chunks) for stage, layers in stages for _ in range(layers // chunks)]
    if empty := set(stage_of) - {stage_of[m.layer] for m in table.values() if m.layer is not None}:
        raise ConfigError(
            f"policy.lora.targets {lora.targets} leaves pipeline stage {min(empty)} without adapters, whose optimizer "
            "Megatron cannot save: add targets, or lower pipeline_parallel"
        )


def _check_critic(config: Config, vocabulary: dict[str, int]) -> None:
    """Its layout, its files, and that it reads the policy's tokens."""
    config.check_second_model()
    policy, model = config.of_critic.policy, config.of_critic.policy.model
    with _named("critic.model"):
        if not Path(model).is_dir():
            raise ConfigError(f"{model} is not a directory, nor OWNER/NAME on the hub")
        shape = value_shape(model)
        check_model(policy, shape, config.rollout.max_prompt_tokens + config.rollout.max_response_tokens)
        check_hf_tensors(ValueWeights(model, shape).stored, shape, Path(model))
        if config.critic.model and load_tokenizer(str(hf_files(model)), shape.vocab).get_vocab() != vocabulary:
            raise ConfigError(f"{model} has another tokenizer than policy.model, so it cannot read its responses")


@contextlib.contextmanager
def _named(key: str) -> Iterator[None]:
    """Errors inside begin with the key to change, and are one line: of a list of details only the first is kept."""
    try:
        yield
    except UserError as error:
        message = "; ".join(line.strip() for line in str(error).splitlines()[:2])
        raise ConfigError(message if key in message else f"{key}: {message}") from error


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
    if not config.evaluate.during_training:
        if not wanted.startswith(STEP_METRICS):
            raise ConfigError(
                f"trainer.checkpoint.best_metric: there is no metric {wanted!r}; without evaluation it is one of a "
                f"step's metrics, which begin with {', '.join(STEP_METRICS)}"
            )
        return
    known = [metric for name in config.evaluate.data.files for metric in _evaluation_metrics(config.evaluate, name)]
    if wanted not in known:
        raise ConfigError(
            f"trainer.checkpoint.best_metric: the evaluation has no metric {wanted!r}; it has {', '.join(known)}"
        )


def _evaluation_metrics(config: EvalConfig, name: str) -> list[str]:
    prefix, settings = config.metric_prefix(name), config.for_set(name)
    k = settings.samples
    known = [f"avg@{k}", *(f"pass@{n}" for n in settings.pass_at_values), f"maj@{k}", f"avg@{k}_low", f"avg@{k}_high"]
    return [prefix + metric for metric in (*known, "mean_tokens", "truncation_rate", "ungraded")]


def _check_run_directory(run_dir: Path) -> None:
    """Creates it; a run does that anyway."""
    try:
        if run_dir.is_dir():
            clear_the_way(run_dir)
        check_writable(run_dir / "logs")
    except OSError as error:
        raise ConfigError(
            f"trainer.run_dir: {run_dir} cannot be written: {explain(error, run_dir)}, or choose another directory"
        ) from error
