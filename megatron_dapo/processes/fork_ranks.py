"""Functions in forked processes: ranks on this machine without torchrun, or one call whose threads must not stay here.

A forked layout starts in a second where torchrun needs forty, because the imports are shared. The parent must not
have used CUDA. If a rank fails or the time is up, the other ranks are killed, and the error carries the first failing
rank's reason. If the parent is killed, even with kill -9, Linux kills the ranks.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.config import ConfigError
from megatron_dapo.errors import RankError, RanksTimedOut, UserError
from megatron_dapo.processes.supervisor import end_with_parent


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float | None = 300.0, grace: float = 5.0
) -> list[Any]:
    """Calls `function(rendezvous, *args)` in `world_size` forked ranks; returns their results in rank order. Raises the
    first failing rank's ConfigError, or RankError with the reason of any other failure."""
    if torch.cuda.is_initialized():
        raise RankError("CUDA is initialized in the process that forks the ranks, so they cannot use it: use torchrun")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        url = f"file://{Path(folder) / 'store'}"
        ranks = [Rendezvous(rank, world_size, rank, url) for rank in range(world_size)]
        forks = [_fork(function, rendezvous, *args) for rendezvous in ranks]
        pipes, processes = [fork[0] for fork in forks], [fork[1] for fork in forks]
        signals = _Signals(processes)
        previous = signals.install()
        try:
            results = _collect(pipes, processes, timeout, grace)
            for process in processes:  # they have sent their results; let them exit by themselves
                process.join(timeout=grace)
            if signals.interrupts:
                raise KeyboardInterrupt
            return results
        except RankError as error:
            if signals.interrupts:
                raise KeyboardInterrupt from error
            raise
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            _end(processes)


def run_in_fork(function: Callable[..., Any], *args: Any) -> Any:
    """The function's result, computed in a forked process. Its UserError is raised here."""
    pipe, process = _fork(function, *args)
    try:
        ok, value = _receive(pipe, process)
    finally:
        _end([process])
    if not ok:
        raise value[0](value[1])
    return value


def _fork(function: Callable[..., Any], *args: Any) -> tuple[Connection, ForkProcess]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    arguments = (sender, os.getpid(), function, args)
    process = context.Process(
        target=_child_main, name=getattr(function, "__name__", None), args=arguments, daemon=False
    )
    process.start()
    sender.close()
    return receiver, process


def _receive(pipe: Connection, process: ForkProcess) -> tuple[bool, Any]:
    """(True, result), or (False, (kind of error, reason))."""
    try:
        ok, value = pickle.loads(pipe.recv_bytes())
        return ok, value
    except EOFError:
        process.join()
        return False, (RankError, f"the process of {process.name} ended with exit code {process.exitcode}")


def _end(processes: list[ForkProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


class _Signals:
    """Forwards to the ranks what asks this process to stop. A terminal sends Ctrl-C to the ranks as well, so they
    ignore it: the first one becomes a SIGTERM, which lets them save, and the second one kills them."""

    def __init__(self, processes: list[ForkProcess]) -> None:
        self._processes = processes
        self.interrupts = 0

    def install(self) -> dict[int, Any]:
        """Returns the handlers to restore; {} outside the main thread, which alone may set them."""
        if threading.current_thread() is not threading.main_thread():
            return {}
        numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
        wanted = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        return {number: signal.signal(number, self._forward) for number in wanted}

    def _forward(self, number: int, _: Any) -> None:
        if number == signal.SIGINT:
            self.interrupts += 1
            number = signal.SIGTERM if self.interrupts == 1 else signal.SIGKILL
            if self.interrupts == 1:
                text = "interrupted: saving at the next safe point; press Ctrl-C again to end at once without saving"
                os.write(2, f"\nmegatron-dapo: {text}\n".encode())
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)


def _collect(pipes: list[Connection], processes: list[ForkProcess], timeout: float | None, grace: float) -> list[Any]:
    """Waits for every rank. After the first failure the others have `grace` seconds to report theirs."""
    results: dict[int, Any] = {}
    failures: dict[int, tuple[type[UserError], str]] = {}
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    waiting = dict(enumerate(pipes))
    while waiting:
        ready = multiprocessing.connection.wait(
            list(waiting.values()), timeout=min(60.0, max(0.0, deadline - time.monotonic()))
        )
        if not ready:
            if time.monotonic() < deadline:
                continue
            if not failures:
                raise RanksTimedOut(f"ranks {sorted(waiting)} did not finish within {timeout:.0f} s")
            break
        for rank, pipe in [(r, p) for r, p in waiting.items() if p in ready]:
            del waiting[rank]
            ok, value = _receive(pipe, processes[rank])
            if ok:
                results[rank] = value
            else:
                if not failures:
                    deadline = min(deadline, time.monotonic() + grace)
                failures[rank] = value
    if failures:
        rank, (kind, reason) = next(iter(failures.items()))
        raise kind(reason if kind is ConfigError else f"rank {rank} of {len(pipes)}: {reason}")
    return [results[rank] for rank in range(len(pipes))]


def _child_main(sender: Connection, parent: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    end_with_parent(parent)
    gc.freeze()  # a search for garbage among the parent's objects would copy the memory that they are in
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A pool of OpenMP threads does not survive a fork: if the parent has computed anything, its ranks would hang.
    torch.set_num_threads(1)
    try:
        ok, value = True, function(*args)
    except ConfigError as error:
        ok, value = False, (ConfigError, str(error))
    except UserError as error:
        ok, value = False, (RankError, str(error))
    except BaseException:
        ok, value = False, (RankError, traceback.format_exc())
    # Plain bytes: multiprocessing would send tensors through a server that ends with this process.
    sender.send_bytes(pickle.dumps((ok, value)))
    sender.close()
    raise SystemExit(0 if ok else 1)


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Rank, world size and the address where ranks meet: `url` is an init_method of torch.distributed, such as env://,
    or empty for a single process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    url: str = "env://"

    @classmethod
    def from_environment(cls) -> Rendezvous:
        """From torchrun's variables, else from srun's, else a single process."""
        env = os.environ
        if "RANK" in env:
            return cls(int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", 0)))
        if "SLURM_PROCID" in env and "MASTER_ADDR" in env:
            return cls(int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"]), int(env["SLURM_LOCALID"]))
        return cls(url="")
