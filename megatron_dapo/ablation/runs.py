"""Trains the runs of an ablation in the given order, several at a time, each in a fork: imports are made once.

A finished run leaves one small file of curves, `results/COMBINATION/seed_N.json`; it is not trained again. An
interrupted run is resumed by the next call. A failed run is reported and does not stop the others.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import connection
from multiprocessing.context import ForkProcess
from pathlib import Path

from megatron_dapo.ablation.results import read_curves
from megatron_dapo.config.load import for_this_machine, load_config
from megatron_dapo.errors import UserError
from megatron_dapo.files import write_atomically
from megatron_dapo.launch.local import import_trainer, run_training
from megatron_dapo.observe.console import importing
from megatron_dapo.policy.megatron.importing import gpu_count
from megatron_dapo.processes.frames import FOR_THE_TRAINER
from megatron_dapo.processes.supervisor import end_with_parent

# A report per run costs a quarter of the time of a small run; the ablation has its own page.
RUN_SETTINGS = ("observe.console=plain", "observe.report=false")
STOPPING = (signal.SIGINT, signal.SIGTERM)
GRACE_SECONDS = 60.0  # a trainer that is asked to end saves first


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
    def log(self) -> Path:
        return self.folder / "train.log"

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
        """Of every setting that can change the result. Where external servers listen does not."""
        found = load_config(self.config_file, self.all_settings).model_dump(mode="json")
        del found["observe"], found["trainer"]["run_dir"], found["rollout"]["servers"]["urls"]
        return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Outcome:
    job: Job
    problem: str = ""  # empty: finished
    seconds: float = 0.0
    skipped: bool = False  # finished by an earlier call


@dataclass(frozen=True, slots=True)
class _Run:
    job: Job
    digest: str
    process: ForkProcess
    started: float


def run_jobs(
    jobs: Sequence[Job],
    workers: int,
    report: Callable[[Outcome], None],
    *,
    minutes: float | None = None,
    discard: bool = False,
) -> list[Outcome]:
    """Trains all jobs, `workers` at a time; `report` is called as each ends.

    `minutes`: no run is started that would not end by then, if it takes as long as the longest of its task so far;
    trainers that still run are ended. `discard`: the folder of a run is removed once its result is stored. Ctrl-C and
    SIGTERM end the running trainers; the outcomes so far are returned.
    """
    deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
    if workers > 1:  # they share the cores
        os.environ["OMP_NUM_THREADS"] = "1"
    outcomes, waiting, running = list[Outcome](), deque(jobs), list[_Run]()

    def add(outcome: Outcome) -> None:
        outcomes.append(outcome)
        report(outcome)

    with _told_to_stop() as stop:
        try:
            while not stop.poll():
                while (
                    waiting
                    and not stop.poll()
                    and len(running) < workers
                    and time.monotonic() + _expected_seconds(waiting[0], outcomes) < deadline
                ):
                    if outcome := _start(waiting.popleft(), running):
                        add(outcome)
                left = None if minutes is None else max(0.0, deadline - time.monotonic())
                ended = connection.wait([stop, *(run.process.sentinel for run in running)], left) if running else []
                if not ended or stop in ended:
                    break
                for run in [run for run in running if run.process.sentinel in ended]:
                    running.remove(run)
                    add(_result(run, discard))
        except KeyboardInterrupt:
            pass
        finally:
            _end(running)
    known = {outcome.job for outcome in outcomes}
    return [*outcomes, *(Outcome(job, "not run") for job in jobs if job not in known)]


def _expected_seconds(job: Job, outcomes: Sequence[Outcome]) -> float:
    """Of a run that is to be trained: as long as the longest of its task."""
    known = [outcome.seconds for outcome in outcomes if outcome.job.task == job.task]
    return 0.0 if job.result_file.exists() else max(known, default=0.0)


@contextmanager
def _told_to_stop() -> Iterator[connection.Connection]:
    """Readable once SIGTERM has come. An exception in the handler could be lost: it may run inside a destructor."""
    stop, told = multiprocessing.Pipe(duplex=False)
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.send_bytes(b"stop")) if in_main else None
    with stop, told:
        try:
            yield stop
        finally:
            if in_main:
                signal.signal(signal.SIGTERM, before)


def _start(job: Job, running: list[_Run]) -> Outcome | None:
    """Adds the run to `running`; or its outcome, if it has finished before or cannot be started."""
    try:
        digest = job.digest()
        if job.result_file.exists():
            return Outcome(job, seconds=_seconds_of_result(job, digest), skipped=True)
        job.folder.mkdir(parents=True, exist_ok=True)
    except (UserError, OSError, ValueError) as error:
        return Outcome(job, str(error))
    _import_once()
    process = multiprocessing.get_context("fork").Process(target=_become_trainer, args=(os.getpid(), job))
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # until the run can be ended
    running.append(_Run(job, digest, process, time.monotonic()))
    process.start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    return None


def _result(run: _Run, discard: bool) -> Outcome:
    """Stores the curves of a run that has ended."""
    job, seconds = run.job, round(time.monotonic() - run.started, 1)
    run.process.join()
    if code := run.process.exitcode:
        return Outcome(job, f"ended with code {code}: see the end of {job.log}", seconds)
    try:
        result = {"digest": run.digest, "seconds": seconds, "curves": read_curves(job.folder)}
        job.result_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(job.result_file, json.dumps(result, allow_nan=False) + "\n")
        if discard:
            shutil.rmtree(job.folder)
    except (UserError, OSError, ValueError) as error:
        return Outcome(job, str(error))
    return Outcome(job, seconds=seconds)


def _end(running: Sequence[_Run]) -> None:
    """Asks trainers to end, waits while they save, and kills what is left."""
    for run in running:
        run.process.terminate()
    until = time.monotonic() + GRACE_SECONDS
    for run in running:
        run.process.join(max(0.0, until - time.monotonic()))
        run.process.kill()
        run.process.join()


def _seconds_of_result(job: Job, digest: str) -> float:
    try:
        stored = json.loads(job.result_file.read_text())
        found, seconds = stored["digest"], float(stored["seconds"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{job.result_file} is not a result of ablate: remove it, and the run is repeated") from None
    if found != digest:
        raise UserError(f"{job.result_file} was made with other settings: name another --out, or remove it and its run")
    return seconds


@cache
def _import_once() -> None:
    """For all runs. With GPUs each run imports for itself, as in local.py."""
    if gpu_count() == 0:
        with importing("torch and Megatron-Core"):
            import_trainer(driver=True)


def _become_trainer(parent: int, job: Job) -> None:
    """Trains and exits. Output goes to the log. In a process group of its own: Ctrl-C is for the command."""
    code = 1
    try:
        os.setpgrp()
        for number in FOR_THE_TRAINER:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
        end_with_parent(parent)
        code = _train(job.config_file, job.all_settings)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _train(config_file: str, settings: Sequence[str]) -> int:
    try:
        return run_training(for_this_machine(load_config(config_file, settings), config_file))
    except UserError as error:
        print(f"megatron-dapo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
