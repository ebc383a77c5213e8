"""`megatron-dapo selfcheck layouts`: the same DAPO updates in one process and in each parallel layout, compared.

The mini-batches are awkward on purpose: unequal lengths, a fully masked sample, ratios beyond both clip bounds, a KL
term, an entropy bonus, importance weights, a load-balancing loss where there are experts, and a micro-batch budget that
differs between layouts. The result is a table with one line per case.

On one machine all cases of one world size run in the same forked ranks. Under torchrun or srun each case runs in the
job's own ranks (data parallelism takes the ranks that the layout leaves), and rank 0 computes the single-process
reference in a child process. A layout that cannot exist is an error before anything runs (exit code 2). A case that
fails while it runs is reported in its line, the others still run, and the exit code is 1.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_dapo.arguments import table_console
from megatron_dapo.errors import UserError
from megatron_dapo.policy.megatron.importing import gpu_count
from megatron_dapo.policy.megatron.runtime import shutdown
from megatron_dapo.processes.fork_ranks import Rendezvous, run_ranks
from megatron_dapo.selfcheck.cases import (
    DEFAULT_LAYOUTS,
    OBJECTIVE_LAYOUTS,
    Case,
    LayoutSpec,
    cases_of,
    loss_cases,
    random_cases,
)
from megatron_dapo.selfcheck.trace import AFTER_ADAM_FACTOR, Difference, Trace, compare, trace_updates

COLUMNS = (
    "layout", "ranks", "model", "objective", "aggregation", "loss", "gradients", "grad norm", "weights", "seconds", "",
)  # fmt: skip
TEXTS = ("layout", "model", "objective", "aggregation", "")


@dataclass(slots=True)
class Result:
    """One case's outcome on rank 0: a difference, or why there is none."""

    case: Case
    seconds: float
    difference: Difference | None = None
    error: str = ""

    def within(self, tolerance: float) -> bool:
        return self.difference is not None and self.difference.within(tolerance)


def print_results(console: Console, results: Sequence[Result], tolerance: float, updates: int, title: str = "") -> None:
    heading = f"Largest relative difference to a single process, {updates} DAPO updates, fp32"
    grid = Table(title=f"{title}: {heading[0].lower()}{heading[1:]}" if title else heading)
    for column in COLUMNS:
        grid.add_column(column, justify="left" if column in TEXTS else "right")
    for result in results:
        grid.add_row(*_row(result, tolerance))
    console.print(grid)
    limit = tolerance * AFTER_ADAM_FACTOR
    bad = sum(not result.within(tolerance) for result in results)
    found = [result.difference for result in results if result.difference is not None]
    worst = max((difference.gradients for difference in found), default=float("nan"))
    console.print(f"{len(results)} cases, {bad} failed; largest difference of a gradient {worst:.1e}", highlight=False)
    console.print(f"tolerance {tolerance:g} (weights and the gradients of later updates {limit:g}, after Adam)")


def _row(result: Result, tolerance: float) -> list[str]:
    case, found = result.case, result.difference
    if found is None:
        numbers, verdict = ["—"] * 4, f"[red]ERROR[/] {escape(result.error)}"
    else:
        numbers = [f"{x:.1e}" for x in (found.loss, found.gradients, found.grad_norm, found.weights)]
        worst = f"gradient of {found.gradients_at}" if not found.gradients <= tolerance else "see the numbers"
        if not found.later_gradients <= tolerance * AFTER_ADAM_FACTOR:
            worst = f"later gradient of {found.later_gradients_at}: {found.later_gradients:.1e}"
        verdict = "[green]ok[/]" if found.within(tolerance) else f"[red]FAIL[/] {worst}"
    names = [case.name, str(case.layout.world_size), case.model, case.objective, case.aggregation]
    return [*names, *numbers, f"{result.seconds:.1f}", verdict]


MOST_FORKED_RANKS = 16
SECONDS_PER_CASE = 180.0
CASES_PER_FORK = 2  # gloo threads of earlier cases stay: about fifty per case and rank
Progress = Callable[[str], None]


def run_layouts(
    names: Sequence[str] | None, tolerance: float, updates: int, *, random: int | None = None, seed: int = 0
) -> int:
    """The command: prints one line per case; returns 0 when all are within the tolerance, else 1."""
    rendezvous = Rendezvous.from_environment()
    in_job = rendezvous.world_size > 1
    console = table_console(columns=160, quiet=rendezvous.rank != 0)
    if random is not None and in_job:
        raise UserError("--random draws layouts of different sizes: run it without torchrun")
    cases = random_cases(random, seed) if random else _chosen(names, rendezvous.world_size if in_job else None, console)
    with console.status("") as status:

        def progress(text: str) -> None:
            status.update(escape(text))
            if random and not console.is_terminal:
                console.print(text, highlight=False, markup=False)

        results = check_in_job(rendezvous, cases, updates, progress) if in_job else check(cases, updates, progress)
    if in_job:
        shutdown()
    if rendezvous.rank != 0:
        return 0
    title = f"{random} random cases, seed {seed}" if random else ""
    print_results(console, results, tolerance, updates, title)
    return 0 if all(result.within(tolerance) for result in results) else 1


# ---- which cases ----


def _chosen(names: Sequence[str] | None, job_ranks: int | None, console: Console) -> list[Case]:
    """The cases to run. A named layout that cannot run is an error; of the default ones it is left out."""
    specs = [LayoutSpec.parse(name) for name in names or DEFAULT_LAYOUTS]
    gpus = gpu_count()
    cases: list[Case] = []
    left_out = {}
    for spec in specs:
        try:
            found = cases_of(spec, job_ranks)
            _check_ranks(spec, job_ranks, gpus)
        except UserError as error:
            left_out[spec.name] = error
            continue
        cases += found + (loss_cases(spec) if not names and spec.name in OBJECTIVE_LAYOUTS else [])
    if left_out and (names or not cases):
        raise next(iter(left_out.values()))
    for name, why in left_out.items():
        text = str(why).removeprefix(f"layout {name!r}: ")
        console.print(f"layout {name} is left out: {escape(text)}", highlight=False)
    return cases


def _check_ranks(spec: LayoutSpec, job_ranks: int | None, gpus: int) -> None:
    if job_ranks is not None:
        return
    if spec.world_size > MOST_FORKED_RANKS:
        raise UserError(
            f"layout {spec.name!r}: it needs {spec.world_size} ranks; without torchrun at most {MOST_FORKED_RANKS} are "
            "forked"
        )
    if 0 < gpus < spec.world_size:
        raise UserError(
            f"layout {spec.name!r}: it needs {spec.world_size} GPUs, but this machine has {gpus}; with "
            "CUDA_VISIBLE_DEVICES= (empty) it runs on the CPU"
        )


# ---- in forked ranks ----


def check(cases: Sequence[Case], updates: int, progress: Progress = lambda text: None) -> list[Result]:
    """Runs every case and its reference, all those of one world size in the same forked ranks."""
    everything = {case.key: case for case in (*(case.reference for case in cases), *cases)}
    outcomes: dict[str, Outcome] = {}
    for world in sorted({case.layout.world_size for case in everything.values()}):
        some = [case for case in everything.values() if case.layout.world_size == world]
        while some:  # ranks that a case has brought down are forked again for the cases after it
            progress(f"{len(outcomes)} of {len(everything)} done; next: {some[0].name}, {some[0].model}")
            done = _run_in_ranks(world, some[:CASES_PER_FORK], updates)
            outcomes |= {case.key: outcome for case, outcome in zip(some, done, strict=False)}
            some = some[len(done) :]
    return [_result(case, outcomes[case.key], outcomes[case.reference.key]) for case in cases]


@dataclass(slots=True)
class Outcome:
    """Of one case: its trace, or why there is none."""

    trace: Trace | None
    seconds: float = 0.0
    error: str = ""


def _run_in_ranks(world: int, cases: Sequence[Case], updates: int) -> list[Outcome]:
    """The outcomes of the first cases: all of them, or those up to the first that failed."""
    with tempfile.TemporaryDirectory(prefix="selfcheck-") as folder:
        error = ""
        try:
            run_ranks(world, _trace_all, cases, updates, folder, timeout=SECONDS_PER_CASE * len(cases))
        except Exception as found:
            error = reason(found)
        files = [Path(folder, f"{index}.pickle") for index in range(len(cases))]
        outcomes = [pickle.loads(file.read_bytes()) for file in files if file.exists()]
    if len(outcomes) < len(cases):
        outcomes.append(Outcome(None, error=error or "the ranks ended without a result"))
    return outcomes


def _trace_all(rendezvous: Rendezvous, cases: Sequence[Case], updates: int, folder: str) -> None:
    """Rank 0 leaves each outcome in a file, because an error in one case ends all ranks."""
    for index, case in enumerate(cases):
        started = time.monotonic()
        try:
            trace = trace_updates(replace(rendezvous, url=f"{rendezvous.url}-{index}"), case, updates)
        finally:
            shutdown()
        if rendezvous.rank == 0:
            part = Path(folder, f"{index}.part")
            part.write_bytes(pickle.dumps(Outcome(trace, time.monotonic() - started)))
            part.rename(part.with_suffix(".pickle"))


def _result(case: Case, found: Outcome, reference: Outcome) -> Result:
    for outcome in (found, reference):
        if outcome.trace is None:
            return Result(case, outcome.seconds, error=outcome.error)
    assert found.trace is not None and reference.trace is not None
    return Result(case, found.seconds, compare(found.trace, reference.trace))


# ---- in a job ----


def check_in_job(rendezvous: Rendezvous, cases: Sequence[Case], updates: int, progress: Progress) -> list[Result]:
    check_one = _CheckInJob(rendezvous, updates, [case.reference for case in cases])
    results = []
    for case in cases:
        progress(f"{case.name}, {case.model}")
        results.append(check_one.run(case))
    return results


class _CheckInJob:
    """Each case in the job's own ranks; all ranks agree on every outcome before the next one starts."""

    def __init__(self, rendezvous: Rendezvous, updates: int, references: Sequence[Case]) -> None:
        self._rendezvous = rendezvous
        self._updates = updates
        self._reference_cases = {case.key: case for case in references}
        self._references: dict[str, Trace | str] = {}
        self._broken = ""

    def run(self, case: Case) -> Result:
        started = time.monotonic()
        difference, error = None, self._broken
        if not error:
            try:
                trace = trace_updates(self._rendezvous, case, self._updates)
                difference = compare(trace, self._reference(case.reference)) if self._rendezvous.rank == 0 else None
            except Exception as found:
                error = reason(found)
            error = self._agree(error)
        return Result(case, time.monotonic() - started, None if error else difference, error)

    def _agree(self, error: str) -> str:
        """Collective. The first failing rank's error, on every rank."""
        errors: list[str] = [""] * self._rendezvous.world_size
        try:
            dist.all_gather_object(errors, error)
        except Exception as found:
            self._broken = f"not run: the job's ranks lost each other before ({reason(found)})"
            return error or reason(found)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(errors) if text), "")

    def _reference(self, case: Case) -> Trace:
        if not self._references:
            self._references = _references_of_child(self._updates, self._reference_cases)
        found = self._references[case.key]
        if isinstance(found, str):
            raise UserError(f"the single-process reference failed: {found}")
        return found


def _references_of_child(updates: int, cases: dict[str, Case]) -> dict[str, Trace | str]:
    """The single-process traces, from one process outside this job's world; or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        request, reply = Path(folder) / "cases.pickle", Path(folder) / "traces.pickle"
        request.write_bytes(pickle.dumps((cases, updates)))
        command = [sys.executable, "-m", __name__, str(request), str(reply)]
        environment = _environment_of_one_process()
        try:
            subprocess.run(command, check=True, env=environment, timeout=600, stderr=subprocess.PIPE, text=True)
        except subprocess.SubprocessError as error:
            said = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1:]
            return dict.fromkeys(cases, " ".join(said))
        traces: dict[str, Trace | str] = pickle.loads(reply.read_bytes())
        return traces


def _trace_or_reason(case: Case, updates: int) -> Trace | str:
    try:
        return trace_updates(None, case, updates)
    except Exception as error:
        return reason(error)
    finally:
        shutdown()


def _environment_of_one_process() -> dict[str, str]:
    """Ours, without what torchrun and srun use to describe the job."""
    job = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")
    return {k: v for k, v in os.environ.items() if k not in job and not k.startswith("TORCHELASTIC")}


def reason(error: Exception) -> str:
    """One line. The message of a forked rank's error is its traceback, whose last line is the reason."""
    lines = str(error).strip().splitlines()
    last = lines[-1].strip() if lines else ""
    return last if isinstance(error, UserError) and last else f"{type(error).__name__}: {last}"


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    wanted, count = pickle.loads(source.read_bytes())
    target.write_bytes(pickle.dumps({key: _trace_or_reason(case, count) for key, case in wanted.items()}))
