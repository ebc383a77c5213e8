"""Weights & Biases and TensorBoard, imported only when the configuration enables them; a user's own tracker; and a
webhook for warnings.

A missing package is an error at the start of the run. A tracker that fails later is reported once; its metrics are
kept and sent when it works again. metrics.jsonl has the same numbers. `observe.aliases` adds metrics under the names
that verl and prime-rl give them, for dashboards that exist already.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import threading
import time
import urllib.request
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_dapo.config.trainer import ObserveConfig, WandbConfig
from megatron_dapo.errors import UserError
from megatron_dapo.files import write_atomically
from megatron_dapo.observe.metrics_file import Record
from megatron_dapo.observe.transcripts import StepSamples
from megatron_dapo.plugins import in_one_line, load_function

COLUMNS = ("prompt_id", "prompt", "reference", "group", "verdict", "score", "advantage", "tokens", "text")
RULE = re.compile(r"diagnosis\.md#([\w-]+)")  # in the message of a finding


class Tracker:
    """A service or format that metrics are sent to. One of a user's own is made with the run directory and the settings
    of the run; it should connect in its first `log`, since a dry run makes it, too."""

    name: str = "tracker"

    def send(self, item: Record | StepSamples) -> None:
        if isinstance(item, Record):
            self.log(item)
        else:
            self.log_samples(item)

    def log(self, record: Record) -> None:
        """May be called several times for one step (evaluations). Raises if it fails, and may then be called again with
        the same record."""
        raise NotImplementedError

    def log_samples(self, samples: StepSamples) -> None:
        """Some of the responses that are also written to samples/."""

    def rewind(self, step: int) -> None:
        """Later steps are logged again; with a deterministic engine the numbers are the same."""

    def close(self, status: str) -> None: ...


def make_trackers(config: ObserveConfig, run_dir: Path, settings: Mapping[str, Any]) -> list[Tracker]:
    found: list[Tracker] = []
    if config.wandb.mode != "off":
        _require("wandb", "observe.wandb.mode")
        found.append(Wandb(config.wandb, run_dir, settings))
    if config.tensorboard:
        _require("tensorboard", "observe.tensorboard")
        found.append(TensorBoard(run_dir / "logs" / "tensorboard"))
    if config.tracker is not None:
        make = load_function(config.tracker, "observe.tracker")
        try:
            tracker = make(run_dir, settings)
        except Exception as error:
            raise UserError(f"observe.tracker: {config.tracker} raised {in_one_line(error, make)}") from error
        if not isinstance(tracker, Tracker):
            raise UserError(f"observe.tracker: {config.tracker} must be a class derived from {__name__}.Tracker")
        found.append(tracker)
    return found


def make_webhook(variable: str | None, run: str) -> Webhook | None:
    """`variable`: the environment variable with the URL."""
    if variable is None:
        return None
    url = os.environ.get(variable, "")
    if not url.startswith(("https://", "http://")):
        raise UserError(f"observe.webhook_env: the environment variable {variable} has no http address in it")
    return Webhook(url, run)


class Webhook:
    """Posts every warning as a JSON object with `text`, `run`, `step` and `rule`, from a thread of its own: neither a
    slow nor a dead server delays the run. What fails is tried again for ten minutes. The URL is a secret: it is never
    printed or logged."""

    PAUSE = 10.0  # seconds between two attempts
    GIVE_UP = 600.0
    TIMEOUT = 10.0

    def __init__(self, url: str, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._run = run
        self._clock = clock
        self._waiting: deque[tuple[float, dict[str, Any]]] = deque(maxlen=200)
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    def send(self, step: int, message: str) -> None:
        rule = RULE.search(message)
        text = f"{self._run}, after step {step}: {message}"
        entry = {"text": text, "run": self._run, "step": step, "rule": rule[1] if rule else None}
        self._waiting.append((self._clock(), entry))
        self.start()
        self._wake.set()

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="webhook", daemon=True)
            self._thread.start()

    def deliver(self) -> bool:
        """Posts what waits, oldest first; False if that fails."""
        while self._waiting:
            since, entry = self._waiting[0]
            try:
                self._post(entry)
            except (OSError, ValueError):  # HTTPError and URLError are OSErrors
                if self._clock() - since < self.GIVE_UP:
                    return False
            self._waiting.popleft()
        return True

    def _post(self, entry: dict[str, Any]) -> None:
        body = json.dumps(entry).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=self.TIMEOUT).close()

    def _work(self) -> None:
        while not self._closing:
            self._wake.wait(None if self.deliver() else self.PAUSE)
            self._wake.clear()
        self.deliver()

    def close(self) -> None:
        """Waits for a running attempt, and makes a last one."""
        if self._thread is not None:
            self._closing = True
            self._wake.set()
            self._thread.join(self.TIMEOUT)


def _require(package: str, key: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{key} is set, but {package} is not installed: pip install 'megatron-dapo[{package}]', or disable it"
        )


class Wandb(Tracker):
    """One wandb run for the whole training. Its id is in logs/wandb_id from the first metrics on, so that a run that is
    killed before its first checkpoint continues it, too.

    Metrics are plotted against our own `step`, because wandb's counter cannot decrease when a run resumes from an
    earlier checkpoint.
    """

    name = "wandb"

    def __init__(self, config: WandbConfig, run_dir: Path, settings: Mapping[str, Any]) -> None:
        self._config = config
        self._dir = run_dir
        self._settings = settings
        self._run: Any = None

    def _start(self) -> Any:
        import wandb

        known = self._dir / "logs" / "wandb_id"
        known.parent.mkdir(parents=True, exist_ok=True)
        if not known.exists():
            write_atomically(known, uuid.uuid4().hex[:12])
        config = self._config
        run = wandb.init(
            project=config.project, entity=config.entity, name=config.name or self._dir.name, group=config.group,
            tags=config.tags, id=known.read_text(), resume="allow", mode=config.mode,
            dir=str(known.parent), config=dict(self._settings),
        )  # fmt: skip
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def log(self, record: Record) -> None:
        if self._run is None:
            self._run = self._start()
        self._run.log({"step": record.step, **record.metrics})

    def log_samples(self, samples: StepSamples) -> None:
        import wandb

        rows = [[getattr(found, name) for name in COLUMNS] for found in samples.transcripts]
        self._run.log({"step": samples.step, "samples": wandb.Table(columns=list(COLUMNS), data=rows)})

    def close(self, status: str) -> None:
        if self._run is not None:
            self._run.finish(exit_code=1 if status.startswith("failed") else 0)


class TensorBoard(Tracker):
    """Event files of torch's SummaryWriter.

    The writer's thread ends at its first error, so a failure needs a new writer. `purge_step` tells TensorBoard to
    ignore what older files say about this step and later ones.
    """

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._purge: int | None = None

    def log(self, record: Record) -> None:
        from torch.utils.tensorboard import SummaryWriter

        try:
            if self._writer is None:
                self._writer = SummaryWriter(str(self._folder), purge_step=self._purge)
            for name, value in record.metrics.items():
                self._writer.add_scalar(name, value, record.step)
            self._writer.flush()
        except Exception:
            self.rewind(record.step - 1)
            raise

    def rewind(self, step: int) -> None:
        with suppress(Exception):  # it may have failed
            self.close("rewound")
        self._writer = None
        self._purge = step + 1

    def close(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()


TOOLS = ("verl", "prime-rl")
# By our name: theirs; empty where that tool has no such metric.
NAMES = {
    "reward/mean": ("critic/rewards/mean", "reward/mean"),
    "reward/score": ("critic/score/mean", ""),
    "train/loss": ("actor/pg_loss", "loss/mean"),
    "train/entropy": ("actor/entropy", "entropy/mean"),
    "train/grad_norm": ("actor/grad_norm", "optim/grad_norm"),
    "train/lr": ("actor/lr", "optim/lr"),
    "train/clip_fraction_high": ("actor/pg_clipfrac", ""),
    "train/clip_fraction_dual": ("actor/pg_clipfrac_lower", ""),
    "train/approx_kl": ("actor/ppo_kl", ""),
    "train/mfu": ("perf/mfu/actor", "perf/mfu"),
    "train/batch_tokens": ("perf/total_num_tokens", ""),
    "train/mismatch_kl": ("", "mismatch_kl/mean"),
    "train/tokens_per_second_per_gpu": ("", "perf/throughput_per_gpu"),
    "critic/loss": ("critic/vf_loss", ""),
    "critic/clip_fraction": ("critic/vf_clipfrac", ""),
    "critic/explained_variance": ("critic/vf_explained_var", ""),
    "critic/value_mean": ("critic/values/mean", ""),
    "time/critic": ("timing_s/update_critic", ""),
    "time/tokens_per_second_per_gpu": ("perf/throughput", ""),
    "time/rollout": ("timing_s/gen", "time/generate_completions"),
    "time/log_probs": ("timing_s/old_log_prob", ""),
    "time/advantages": ("timing_s/adv", ""),
    "time/update": ("timing_s/update_actor", "time/forward_backward"),
    "time/sync": ("timing_s/update_weights", ""),
    "time/checkpoint": ("timing_s/save_checkpoint", "time/save_ckpt"),
    "time/evaluate": ("timing_s/testing", ""),
    "time/step": ("timing_s/step", "time/step"),
    "memory/gpu_peak_gib": ("perf/max_memory_allocated_gb", "perf/peak_memory"),
    "memory/gpu_reserved_gib": ("perf/max_memory_reserved_gb", ""),
    "memory/host_gib": ("perf/cpu_memory_used_gb", ""),
    "rollout/length_trained": ("response_length/mean", "seq_len/mean"),
    "rollout/length_max": ("response_length/max", ""),
    "rollout/truncated_share": ("response_length/clip_ratio", "is_truncated/mean"),
    "rollout/dropped/all-wrong": ("", "solve_none"),
    "rollout/dropped/all-correct": ("", "solve_all"),
}
FACTORS = {("prime-rl", "train/mfu"): 100.0}  # where their unit is not ours


def with_aliases(metrics: Mapping[str, float], tools: Iterable[str]) -> dict[str, float]:
    """The metrics, and those that a tool has under another name. Ours win where the names are the same."""
    found: dict[str, float] = {}
    for tool in tools:
        for name, theirs in NAMES.items():
            if name in metrics and (alias := theirs[TOOLS.index(tool)]):
                found[alias] = metrics[name] * FACTORS.get((tool, name), 1.0)
    return found | dict(metrics)
