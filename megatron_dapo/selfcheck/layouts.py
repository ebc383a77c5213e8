"""`megatron-dapo selfcheck layouts`: the same DAPO updates in one process and in each parallel layout, compared.

The mini-batches are awkward on purpose: unequal lengths, a fully masked sample, ratios beyond both clip bounds, a KL
term, an entropy bonus, importance weights, and a micro-batch budget that differs between layouts.

On one machine every layout runs in forked ranks. Under torchrun or srun each layout runs in the job's own ranks (data
parallelism takes the ranks that the layout leaves), and rank 0 computes the single-process reference in a child
process. A layout that cannot exist is an error before anything runs (exit code 2). A layout that fails while it runs
is reported in its line, the others still run, and the exit code is 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_dapo.config import check_model, check_world
from megatron_dapo.errors import UserError
from megatron_dapo.policy.fork_ranks import run_ranks
from megatron_dapo.policy.gpu_count import gpu_count
from megatron_dapo.policy.runtime import Rendezvous, shutdown
from megatron_dapo.selfcheck.layout_spec import LayoutSpec, selfcheck_config
from megatron_dapo.selfcheck.synthetic import synthetic_shape
from megatron_dapo.selfcheck.trace import WEIGHTS_TOLERANCE_FACTOR, Difference, Trace, compare, trace_updates

DEFAULT_LAYOUTS = (
    "tp2", "tp2sp", "pp2", "pp2vpp2", "cp2", "dp2", "dp2do", "tp2pp2", "tp2cp2sp", "ep2", "ep2tp2sp",
)  # fmt: skip
MOST_FORKED_RANKS = 16
SINGLE = LayoutSpec.parse("single")


@dataclass(slots=True)
class Result:
    """One layout's outcome on rank 0: a difference, or why there is none."""

    spec: LayoutSpec
    seconds: float
    difference: Difference | None = None
    error: str = ""

    def within(self, tolerance: float) -> bool:
        return self.difference is not None and self.difference.within(tolerance)


def run_layouts(names: Sequence[str] | None, tolerance: float, updates: int) -> int:
    """The command: prints one line per layout; returns 0 when all are within the tolerance, else 1."""
    rendezvous = Rendezvous.from_environment()
    in_job = rendezvous.world_size > 1
    console = Console(quiet=rendezvous.rank != 0)
    specs = _chosen(names, rendezvous.world_size if in_job else None, console)
    check = _CheckInJob(rendezvous, updates) if in_job else _CheckForked(updates)
    results = []
    with console.status("") as status:
        for spec in specs:
            status.update(f"layout {spec.name}")
            results.append(check.run(spec))
    if in_job:
        shutdown()
    if rendezvous.rank != 0:
        return 0
    _print(console, results, tolerance, updates)
    return 0 if all(result.within(tolerance) for result in results) else 1


# ---- which layouts ----


def _chosen(names: Sequence[str] | None, job_ranks: int | None, console: Console) -> list[LayoutSpec]:
    """The layouts to run. A named one that cannot run is an error; of the default ones it is left out."""
    specs = [LayoutSpec.parse(name) for name in names or DEFAULT_LAYOUTS]
    gpus = gpu_count()
    obstacles = {spec.name: _obstacle(spec, job_ranks, gpus) for spec in specs}
    left_out = {name: why for name, why in obstacles.items() if why}
    if left_out and (names or len(left_out) == len(specs)):
        name, why = next(iter(left_out.items()))
        raise UserError(f"layout {name!r}: {why}")
    for name, why in left_out.items():
        console.print(f"layout {name} is left out: {escape(why)}", highlight=False)
    return [spec for spec in specs if spec.name not in left_out]


def _obstacle(spec: LayoutSpec, job_ranks: int | None, gpus: int) -> str:
    """Why the layout cannot run here; empty when it can."""
    try:
        policy = selfcheck_config(spec).policy
        check_model(policy, synthetic_shape(spec.model))
        check_world(policy, job_ranks or spec.world_size)
    except UserError as error:
        return str(error)
    if job_ranks is None and spec.world_size > MOST_FORKED_RANKS:
        return f"it needs {spec.world_size} ranks; without torchrun at most {MOST_FORKED_RANKS} are forked"
    if job_ranks is None and 0 < gpus < spec.world_size:
        return (
            f"it needs {spec.world_size} GPUs, but this machine has {gpus}; with CUDA_VISIBLE_DEVICES= (empty) it "
            "runs on the CPU"
        )
    return ""


# ---- running them ----


class _CheckForked:
    """Each layout in forked ranks of its own."""

    def __init__(self, updates: int) -> None:
        self._updates = updates
        self._references: dict[str, Trace] = {}

    def run(self, spec: LayoutSpec) -> Result:
        started = time.monotonic()
        try:
            difference = compare(self._trace(spec, spec.model), self._reference(spec.model))
        except Exception as error:
            return Result(spec, time.monotonic() - started, error=_reason(error))
        return Result(spec, time.monotonic() - started, difference)

    def _reference(self, model: str) -> Trace:
        if model not in self._references:
            self._references[model] = self._trace(SINGLE, model)
        return self._references[model]

    def _trace(self, spec: LayoutSpec, model: str) -> Trace:
        trace: Trace = run_ranks(spec.world_size, _trace_and_leave, spec, self._updates, model)[0]
        return trace


class _CheckInJob:
    """Each layout in the job's own ranks; all ranks agree on every outcome before the next one starts."""

    def __init__(self, rendezvous: Rendezvous, updates: int) -> None:
        self._rendezvous, self._updates = rendezvous, updates
        self._references: dict[str, Trace | UserError] = {}
        self._broken = ""

    def run(self, spec: LayoutSpec) -> Result:
        started = time.monotonic()
        difference, error = None, self._broken
        if not error:
            try:
                trace = trace_updates(self._rendezvous, spec, self._updates, spec.model)
                difference = compare(trace, self._reference(spec.model)) if self._rendezvous.rank == 0 else None
            except Exception as found:
                error = _reason(found)
            error = self._agree(error)
        return Result(spec, time.monotonic() - started, None if error else difference, error)

    def _agree(self, error: str) -> str:
        """Collective. The first failing rank's error, on every rank."""
        errors: list[str] = [""] * self._rendezvous.world_size
        try:
            dist.all_gather_object(errors, error)
        except Exception as found:
            self._broken = f"not run: the job's ranks lost each other before ({_reason(found)})"
            return error or _reason(found)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(errors) if text), "")

    def _reference(self, model: str) -> Trace:
        if model not in self._references:
            self._references[model] = _reference_of_child(self._updates, model)
        found = self._references[model]
        if isinstance(found, UserError):
            raise found
        return found


def _trace_and_leave(rendezvous: Rendezvous, *args: Any) -> Trace:
    try:
        return trace_updates(rendezvous, *args)
    finally:
        shutdown()


def _reference_of_child(updates: int, model: str) -> Trace | UserError:
    """The single-process trace, from a process outside this job's world; or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.pt"
        command = [sys.executable, "-m", __name__, str(file), str(updates), model]
        environment = _environment_of_one_process()
        try:
            subprocess.run(command, check=True, env=environment, timeout=600, stderr=subprocess.PIPE, text=True)
        except subprocess.SubprocessError as error:
            said = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1:]
            return UserError(f"the single-process reference failed: {' '.join(said)}")
        return Trace(**torch.load(file, weights_only=True))


def _environment_of_one_process() -> dict[str, str]:
    """Ours, without what torchrun and srun use to describe the job."""
    job = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")
    return {k: v for k, v in os.environ.items() if k not in job and not k.startswith("TORCHELASTIC")}


def _reason(error: Exception) -> str:
    """One line. The message of a forked rank's error is its traceback, whose last line is the reason."""
    lines = str(error).strip().splitlines()
    last = lines[-1].strip() if lines else ""
    return last if isinstance(error, UserError) and last else f"{type(error).__name__}: {last}"


# ---- the table ----


def _print(console: Console, results: Sequence[Result], tolerance: float, updates: int) -> None:
    grid = Table(title=f"Largest relative difference to a single process, {updates} DAPO updates, fp32")
    for column in ("layout", "ranks", "model", "loss", "gradients", "grad norm", "weights", "seconds", ""):
        grid.add_column(column, justify="left" if column in ("layout", "model", "") else "right")
    for result in results:
        spec, found = result.spec, result.difference
        if found is None:
            numbers, verdict = ["—"] * 4, f"[red]ERROR[/] {escape(result.error)}"
        else:
            numbers = [f"{x:.1e}" for x in (found.loss, found.gradients, found.grad_norm, found.weights)]
            verdict = "[green]ok[/]" if found.within(tolerance) else f"[red]FAIL[/] gradient of {found.gradients_at}"
        grid.add_row(spec.name, str(spec.world_size), spec.model, *numbers, f"{result.seconds:.1f}", verdict)
    console.print(grid)
    limit = tolerance * WEIGHTS_TOLERANCE_FACTOR
    console.print(f"tolerance {tolerance:g} (weights {limit:g}, after Adam)")


if __name__ == "__main__":
    target, count, kind = sys.argv[1:]
    result = trace_updates(None, SINGLE, int(count), kind)
    shutdown()
    torch.save({name: getattr(result, name) for name in Trace.__slots__}, target)
