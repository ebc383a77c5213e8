"""Trains the runs of an ablation in the given order, several at a time, each in its own process.

A finished run leaves one small file of curves, `results/COMBINATION/seed_N.json`; it is not trained again. An
interrupted run is resumed by the next call. A failed run is reported and does not stop the others.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.ablation.results import read_curves
from megatron_dapo.arguments import quiet_libraries
from megatron_dapo.config import load_config
from megatron_dapo.errors import UserError
from megatron_dapo.files import write_atomically
from megatron_dapo.launch.local import import_trainer, run_training
from megatron_dapo.policy.megatron.importing import gpu_count
from megatron_dapo.processes.frames import FOR_THE_TRAINER, Channel, parent_channel
from megatron_dapo.processes.supervised import SupervisedProcess, start_worker
from megatron_dapo.processes.supervisor import end_with_parent

# A report per run costs a quarter of the time of a small run; the ablation has its own page.
RUN_SETTINGS = ("observe.console=plain", "observe.report=false")
WORKER = [sys.executable, "-m", "megatron_dapo.ablation.runs"]
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


@dataclass(eq=False, slots=True)
class _Worker:
    process: SupervisedProcess
    channel: Channel

    def train(self, job: Job) -> int:
        try:
            self.channel.send({"config": job.config_file, "settings": job.all_settings, "log": str(job.log)})
            return int(self.channel.receive()[0]["code"])
        except (EOFError, ConnectionError):  # the worker has ended
            return self.process.wait() or 1


class Workers:
    """Processes that train, one run at a time each. A worker that is free takes the next run; one that ended is
    replaced."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, job: Job) -> int:
        """The exit code of the run; its output is in its log."""
        with self._lock:
            if self._stopped:
                return -signal.SIGTERM
            worker = self._idle.pop() if self._idle else self._start()
            self._busy.add(worker)
        code = worker.train(job)
        with self._lock:
            self._busy.discard(worker)
            if worker.process.alive():
                self._idle.append(worker)
        return code

    def _start(self) -> _Worker:
        process, connection = start_worker(WORKER, self._environment)
        return _Worker(process, Channel(connection))

    def stop(self) -> None:
        """Asks trainers and workers to end, waits, and kills what is left."""
        with self._lock:
            self._stopped = True
            for worker in self._idle:
                worker.channel.socket.close()
            for worker in self._busy:
                worker.process.ask_to_end()
            left = [*self._idle, *self._busy]

        async def end() -> None:
            await asyncio.gather(*(worker.process.end(GRACE_SECONDS) for worker in left))

        asyncio.run(end())


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
    trainers, outcomes = Workers(_environment(workers)), list[Outcome]()
    waiting = deque(jobs)
    pending: set[Future[Outcome]] = set()
    with _terminable(), ThreadPoolExecutor(workers) as pool:
        try:
            while True:
                while (
                    waiting
                    and len(pending) < workers
                    and time.monotonic() + _expected_seconds(waiting[0], outcomes) < deadline
                ):
                    pending.add(pool.submit(_run, waiting.popleft(), trainers, discard))
                left = None if minutes is None else deadline - time.monotonic()
                done, pending = wait(pending, timeout=left, return_when=FIRST_COMPLETED)
                if not done:
                    break
                for future in done:
                    outcomes.append(future.result())
                    report(outcomes[-1])
        except KeyboardInterrupt:
            pass
        finally:
            trainers.stop()
    known = {outcome.job for outcome in outcomes}
    return [*outcomes, *(Outcome(job, "not run") for job in jobs if job not in known)]


def _expected_seconds(job: Job, outcomes: Sequence[Outcome]) -> float:
    """Of a run that is to be trained: as long as the longest of its task."""
    known = [outcome.seconds for outcome in outcomes if outcome.job.task == job.task]
    return 0.0 if job.result_file.exists() else max(known, default=0.0)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM interrupts as Ctrl-C does, so that no trainer is left behind. Once: a signal to a process group may be
    followed by another while the trainers save."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(job: Job, trainers: Workers, discard: bool) -> Outcome:
    try:
        digest = job.digest()
        if job.result_file.exists():
            return Outcome(job, seconds=_seconds_of_result(job, digest), skipped=True)
        started = time.monotonic()
        job.folder.mkdir(parents=True, exist_ok=True)
        code = trainers.run(job)
        if code:
            return Outcome(job, f"ended with code {code}: see the end of {job.log}", time.monotonic() - started)
        seconds = round(time.monotonic() - started, 1)
        result = {"digest": digest, "seconds": seconds, "curves": read_curves(job.folder)}
        job.result_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(job.result_file, json.dumps(result, allow_nan=False) + "\n")
        if discard:
            shutil.rmtree(job.folder)
        return Outcome(job, seconds=seconds)
    except (UserError, OSError, ValueError) as error:
        return Outcome(job, str(error))


def _seconds_of_result(job: Job, digest: str) -> float:
    try:
        stored = json.loads(job.result_file.read_text())
        found, seconds = stored["digest"], float(stored["seconds"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{job.result_file} is not a result of ablate: remove it, and the run is repeated") from None
    if found != digest:
        raise UserError(f"{job.result_file} was made with other settings: name another --out, or remove it and its run")
    return seconds


def _environment(workers: int) -> dict[str, str]:
    """Runs that share the cores use one thread each."""
    return {**os.environ, "OMP_NUM_THREADS": "1"} if workers > 1 else dict(os.environ)


class Worker:
    """Trains runs one after another, each in a fork of this process, so that imports are made once and not per run."""

    def __init__(self) -> None:
        self._channel = parent_channel()
        self._trainer: int | None = None
        self._stopped = False

    def serve(self) -> None:
        signal.signal(signal.SIGTERM, self._stop)
        with suppress(EOFError, ConnectionError):  # the parent has closed the socket
            while not self._stopped:
                job, _ = self._channel.receive()
                self._channel.send({"code": self._run(job)})

    def _run(self, job: dict[str, Any]) -> int:
        worker = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until it can be passed on
        self._trainer = os.fork()
        if self._trainer == 0:
            _become_trainer(worker, job)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        _, status = os.waitpid(self._trainer, 0)
        self._trainer = None
        return os.waitstatus_to_exitcode(status)

    def _stop(self, number: int, frame: Any) -> None:
        self._stopped = True
        if not self._trainer:
            sys.exit(0)
        os.kill(self._trainer, signal.SIGTERM)


def _become_trainer(worker: int, job: dict[str, Any]) -> None:
    """Trains and exits. Output goes to the log."""
    code = 1
    try:
        for number in FOR_THE_TRAINER:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        end_with_parent(worker)
        code = _train(job["config"], job["settings"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _train(config_file: str, settings: Sequence[str]) -> int:
    try:
        return run_training(load_config(config_file, settings))
    except UserError as error:
        print(f"megatron-dapo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def main() -> None:
    quiet_libraries()
    # With GPUs each trainer imports for itself, as in local.py.
    if gpu_count() == 0:
        import_trainer(driver=True)
        gc.freeze()  # what is imported is never collected, so its memory stays shared
    Worker().serve()


if __name__ == "__main__":
    main()
