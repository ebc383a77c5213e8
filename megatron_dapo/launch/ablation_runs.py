"""Trains the runs of an ablation, several at a time, each in its own process.

A finished run leaves one small file of curves, `results/COMBINATION/seed_N.json`; it is not trained again. An
interrupted run is resumed by the next call. A failed run is reported and does not stop the others. The first seed of
every combination runs before the second, so that an ablation that is stopped early compares equal numbers of seeds.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.config import load_config
from megatron_dapo.errors import UserError
from megatron_dapo.files import write_atomically
from megatron_dapo.launch.ablation_results import read_curves

# A report per run costs a quarter of the time of a small run; the ablation has its own page.
RUN_SETTINGS = ("observe.console=plain", "observe.report=false")
GRACE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Job:
    """One training run: a combination and a seed."""

    config_file: str
    settings: tuple[str, ...]
    task: Path  # directory of this configuration's ablation
    combination: str
    seed: int

    @property
    def folder(self) -> Path:
        return self.task / "runs" / self.combination / f"seed_{self.seed}"

    @property
    def result_file(self) -> Path:
        return self.task / "results" / self.combination / f"seed_{self.seed}.json"

    @property
    def all_settings(self) -> list[str]:
        own = [f"trainer.seed={self.seed}", f"trainer.run_dir={self.folder}"]
        return [*self.settings, *RUN_SETTINGS, *own]

    def __str__(self) -> str:
        return f"{self.task.name}: {self.combination}, seed {self.seed}"

    def digest(self) -> str:
        """Of every setting that can change the result."""
        found = load_config(self.config_file, self.all_settings).model_dump(mode="json")
        del found["observe"], found["trainer"]["run_dir"]
        return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Outcome:
    job: Job
    problem: str = ""  # empty: finished
    seconds: float = 0.0
    skipped: bool = False  # finished by an earlier call


class Processes:
    """The running trainers. `stop` asks them to end, waits, and kills what is left."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self.stopped = False

    def run(self, command: Sequence[str], log: Path, environment: dict[str, str]) -> int:
        with log.open("ab") as file:
            with self._lock:
                if self.stopped:
                    return -signal.SIGTERM
                process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
                self._running.add(process)
            try:
                return process.wait()
            finally:
                with self._lock:
                    self._running.discard(process)

    def stop(self) -> None:
        with self._lock:
            self.stopped = True
            left = list(self._running)
        for process in left:
            process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        for process in left:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


def run_jobs(
    jobs: Sequence[Job],
    workers: int,
    report: Callable[[Outcome], None],
    *,
    minutes: float | None = None,
    discard: bool = False,
) -> list[Outcome]:
    """Trains all jobs, `workers` at a time; `report` is called as each ends. After `minutes`, no run is started.

    `discard`: the folder of a run is removed once its result is stored. Ctrl-C and SIGTERM end the running trainers;
    the outcomes so far are returned.
    """
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    processes, outcomes = Processes(), []
    waiting = iter(sorted(jobs, key=lambda job: job.seed))
    pending: set[Future[Outcome]] = set()
    with _terminable(), ThreadPoolExecutor(workers) as pool:
        try:
            while True:
                while len(pending) < workers and (deadline is None or time.monotonic() < deadline):
                    job = next(waiting, None)
                    if job is None:
                        break
                    pending.add(pool.submit(_run, job, processes, workers, discard))
                if not pending:
                    break
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    outcomes.append(future.result())
                    report(outcomes[-1])
        except KeyboardInterrupt:
            processes.stop()
        except BaseException:
            processes.stop()
            raise
    known = {outcome.job for outcome in outcomes}
    return [*outcomes, *(Outcome(job, "not run") for job in jobs if job not in known)]


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM interrupts as Ctrl-C does, so that no trainer is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(job: Job, processes: Processes, workers: int, discard: bool) -> Outcome:
    try:
        digest = job.digest()
        if job.result_file.exists():
            _check_result(job, digest)
            return Outcome(job, skipped=True)
        started = time.monotonic()
        job.folder.mkdir(parents=True, exist_ok=True)
        log = job.folder / "train.log"
        code = processes.run(_command(job), log, _environment(workers))
        if code:
            return Outcome(job, f"ended with code {code}: see the end of {log}", time.monotonic() - started)
        seconds = round(time.monotonic() - started, 1)
        result = {"digest": digest, "seconds": seconds, "curves": read_curves(job.folder)}
        job.result_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(job.result_file, json.dumps(result, allow_nan=False) + "\n")
        if discard:
            shutil.rmtree(job.folder)
        return Outcome(job, seconds=seconds)
    except (UserError, OSError, ValueError) as error:
        return Outcome(job, str(error))


def _check_result(job: Job, digest: str) -> None:
    try:
        found = json.loads(job.result_file.read_text())["digest"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{job.result_file} is not a result of ablate: remove it, and the run is repeated") from None
    if found != digest:
        raise UserError(f"{job.result_file} was made with other settings: name another --out, or remove it and its run")


def _command(job: Job) -> list[str]:
    command = [sys.executable, "-m", "megatron_dapo.cli", "train", job.config_file]
    return [*command, *(word for item in job.all_settings for word in ("--set", item))]


def _environment(workers: int) -> dict[str, str]:
    """Runs that share the cores use one thread each."""
    return {**os.environ, "OMP_NUM_THREADS": "1"} if workers > 1 else dict(os.environ)
