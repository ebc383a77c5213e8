"""`megatron-dapo selfcheck layouts`: the same DAPO updates in one process and in each parallel layout, compared.

The mini-batches are awkward on purpose: unequal lengths, a fully masked sample, ratios beyond both clip bounds, a KL
term, an entropy bonus, importance weights, a load-balancing loss where there are experts, and a micro-batch budget that
differs between layouts. The result is a table with one line per case.

On one machine all cases of one world size run in the same forked ranks. Under torchrun or srun each case runs in the
job's own ranks (data parallelism takes the ranks that the layout leaves), while a child process of rank 0 computes the
single-process references. A layout that cannot exist is an error before anything runs (exit code 2). A case that fails
or exceeds its time is reported in its line, the others still run, and the exit code is 1. In a job, a time-out ends the
rest, because its ranks are stuck.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_dapo.arguments import table_console
from megatron_dapo.errors import RanksTimedOut, UserError
from megatron_dapo.policy.megatron.importing import gpu_count
from megatron_dapo.policy.megatron.runtime import shutdown
from megatron_dapo.processes.fork_ranks import Rendezvous, run_ranks
from megatron_dapo.selfcheck.cases import (
    ALL_MODELS,
    DEFAULT_LAYOUTS,
    OBJECTIVE_LAYOUTS,
    Case,
    LayoutSpec,
    Variants,
    cases_of,
    loss_cases,
    random_cases,
)
from megatron_dapo.selfcheck.trace import (
    AFTER_ADAM_FACTOR,
    NOISE_FACTOR,
    Difference,
    Trace,
    compare,
    measure,
    trace_updates,
)

MOST_FORKED_RANKS = 16
CASES_PER_FORK = 2  # gloo threads of earlier cases stay: about fifty per case and rank
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one call. `timeout`: seconds of one case."""

    tolerance: float = 1e-5
    updates: int = 3
    timeout: float = 180.0
    json: Path | None = None


def run_layouts(
    names: Sequence[str] | None,
    settings: Settings,
    variants: Variants = ALL_MODELS,
    *,
    random: int | None = None,
    seed: int = 0,
) -> int:
    """The command: prints one line per case; returns 0 when all are within their limits, else 1."""
    rendezvous = Rendezvous.from_environment()
    in_job = rendezvous.world_size > 1
    console = table_console(columns=220, quiet=rendezvous.rank != 0, markup=True)
    if random is not None and in_job:
        raise UserError("--random draws layouts of different sizes: run it without torchrun")
    if random is not None and variants != ALL_MODELS:
        raise UserError(
            "--random draws models, in fp32 on torch layers: leave out --models, --dtype, --fp8 and --layers"
        )
    if settings.json and rendezvous.rank == 0 and not settings.json.parent.is_dir():
        raise UserError(f"--json {settings.json}: there is no directory {settings.json.parent}")
    ranks = rendezvous.world_size if in_job else None
    cases = random_cases(random, seed) if random else _chosen(names, ranks, console, variants)
    title = f"{random} random cases, seed {seed}" if random else ""

    def report(outcomes: Mapping[str, Outcome]) -> int:
        results = [_result(case, outcomes, settings.tolerance) for case in cases]
        print_results(console, results, settings.tolerance, settings.updates, title)
        if settings.json:
            write_results(settings.json, results)
        return 0 if all(result.ok for result in results) else 1

    with console.status("") as status:

        def progress(text: str) -> None:
            status.update(escape(text))
            if (random or in_job) and not console.is_terminal:
                console.print(text, markup=False)

        if in_job:
            check_one = _CheckInJob(rendezvous, settings, cases, report)
            outcomes = check_one.run(progress)
        else:
            outcomes = check(cases, settings, progress)
    if in_job:
        shutdown()
    return report(outcomes) if rendezvous.rank == 0 else 0


# ---- which cases ----


def _chosen(
    names: Sequence[str] | None, job_ranks: int | None, console: Console, variants: Variants = ALL_MODELS
) -> list[Case]:
    """The cases to run. A named layout that cannot run is an error; of the default ones it is left out."""
    gpus = gpu_count()
    cases: list[Case] = []
    left_out = {}
    for name in names or DEFAULT_LAYOUTS:
        try:
            found = cases_of(name, job_ranks, variants)
            _check_ranks(found[0].layout, job_ranks, gpus)
        except UserError as error:
            left_out[name] = error
            continue
        cases += found
        if not names and name in OBJECTIVE_LAYOUTS and variants == ALL_MODELS:
            cases += loss_cases(found[0].layout)
    if left_out and (names or not cases):
        raise next(iter(left_out.values()))
    for name, why in left_out.items():
        text = str(why).removeprefix(f"layout {name!r}: ")
        console.print(f"layout {name} is left out: {escape(text)}")
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


def check(cases: Sequence[Case], settings: Settings, progress: Progress = lambda text: None) -> dict[str, Outcome]:
    """Runs every case and its references, all those of one world size in the same forked ranks."""
    everything = {case.key: case for case in (*_references(cases), *cases)}
    outcomes: dict[str, Outcome] = {}
    for world in sorted({case.layout.world_size for case in everything.values()}):
        some = [case for case in everything.values() if case.layout.world_size == world]
        while some:  # ranks that a case has brought down are forked again for the cases after it
            progress(f"{len(outcomes)} of {len(everything)} done; next: {some[0].name}, {some[0].model}")
            done = _run_in_ranks(world, some[:CASES_PER_FORK], settings)
            outcomes |= {case.key: outcome for case, outcome in zip(some, done, strict=False)}
            some = some[len(done) :]
    return outcomes


def _references(cases: Sequence[Case]) -> list[Case]:
    return [one for case in cases for one in (case.reference, *case.noise)]


@dataclass(slots=True)
class Outcome:
    """Of one case: its trace, or why there is none."""

    trace: Trace | None
    seconds: float = 0.0
    error: str = ""
    timed_out: bool = False


def _run_in_ranks(world: int, cases: Sequence[Case], settings: Settings) -> list[Outcome]:
    """The outcomes of the first cases: all of them, or those up to the first that failed."""
    with tempfile.TemporaryDirectory(prefix="selfcheck-") as folder:
        failure = Outcome(None, error="the ranks ended without a result")
        try:
            run_ranks(world, _trace_all, cases, settings.updates, folder, timeout=settings.timeout * len(cases))
        except Exception as found:
            failure = Outcome(None, error=reason(found), timed_out=isinstance(found, RanksTimedOut))
        files = [Path(folder, f"{index}.pickle") for index in range(len(cases))]
        outcomes = [pickle.loads(file.read_bytes()) for file in files if file.exists()]
    return outcomes if len(outcomes) == len(cases) else [*outcomes, failure]


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


def _result(case: Case, outcomes: Mapping[str, Outcome], tolerance: float) -> Result:
    mine = outcomes[case.key]
    if mine.trace is None:
        return Result(case, mine.seconds, error=mine.error, timed_out=mine.timed_out)
    traces = []
    for one in (case.reference, *case.noise):
        found = outcomes[one.key]
        if found.trace is None:
            error = f"the single-process reference failed: {found.error}"
            return Result(case, mine.seconds, error=error, timed_out=found.timed_out)
        traces.append(found.trace)
    reference, *others = traces
    noise = [measure(other, reference) for other in others]
    difference = compare(mine.trace, reference, tolerance, noise)
    largest = max(max(one["gradients"].values()) for one in noise)
    return Result(case, mine.seconds, difference, largest, mine.trace.kernels)


# ---- in a job ----


@dataclass(slots=True)
class _CheckInJob:
    """Each case in the job's own ranks; all ranks agree on every outcome before the next one starts."""

    rendezvous: Rendezvous
    settings: Settings
    cases: Sequence[Case]
    report: Callable[[Mapping[str, Outcome]], int]
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    references: Future[dict[str, Outcome]] | None = None
    broken: str = ""

    def run(self, progress: Progress) -> dict[str, Outcome]:
        """The outcomes; on rank 0 with those of the references."""
        if self.rendezvous.rank == 0:
            wanted = {case.key: case for case in _references(self.cases)}
            self.references = ThreadPoolExecutor(1).submit(_references_of_child, self.settings, wanted)
        for case in self.cases:
            progress(f"{case.name}, {case.model}, {case.precision} {case.layers}")
            timer = threading.Timer(self.settings.timeout, self._end_after_timeout, [case])
            timer.daemon = True
            timer.start()
            self.outcomes[case.key] = self._run_one(case)
            timer.cancel()
        return self.outcomes | (self.references.result() if self.references else {})

    def _run_one(self, case: Case) -> Outcome:
        if self.broken:
            return Outcome(None, error=self.broken)
        started, trace, error = time.monotonic(), None, ""
        try:
            trace = trace_updates(self.rendezvous, case, self.settings.updates)
        except Exception as found:
            error = reason(found)
            print(f"{case.name} {case.model}, rank {self.rendezvous.rank}: {error}", file=sys.stderr, flush=True)
        error = self._agree(error)
        return Outcome(None if error else trace, time.monotonic() - started, error)

    def _end_after_timeout(self, case: Case) -> None:
        """In a thread of its own: the main thread may be stuck in a collective. Rank 0 reports; others wait for their
        end."""
        if self.rendezvous.rank != 0 or self.references is None:
            return
        limit = f"{self.settings.timeout:g} s (--timeout)"
        rest = {one.key: Outcome(None, error=f"not run: {case.name} did not end before") for one in self.cases}
        rest[case.key] = Outcome(None, self.settings.timeout, f"it did not end within {limit}", timed_out=True)
        code = self.report(rest | self.outcomes | self.references.result())
        sys.stdout.flush()
        os._exit(code)

    def _agree(self, error: str) -> str:
        """Collective. The first failing rank's error, on every rank."""
        errors: list[str] = [""] * self.rendezvous.world_size
        try:
            dist.all_gather_object(errors, error)
        except Exception as found:
            self.broken = f"not run: the job's ranks lost each other before ({reason(found)})"
            return error or reason(found)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(errors) if text), "")


def _references_of_child(settings: Settings, cases: dict[str, Case]) -> dict[str, Outcome]:
    """The single-process traces, from one process outside this job's world; or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        request, reply = Path(folder) / "cases.pickle", Path(folder) / "outcomes.pickle"
        request.write_bytes(pickle.dumps((cases, settings.updates)))
        command = [sys.executable, "-m", __name__, str(request), str(reply)]
        limit = settings.timeout * len(cases)
        try:
            subprocess.run(
                command, check=True, env=_environment_of_one_process(), timeout=limit, stderr=subprocess.PIPE, text=True
            )
        except subprocess.SubprocessError as error:
            said = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1:]
            late = isinstance(error, subprocess.TimeoutExpired)
            return dict.fromkeys(cases, Outcome(None, error=" ".join(said), timed_out=late))
        outcomes: dict[str, Outcome] = pickle.loads(reply.read_bytes())
        return outcomes


def _outcome(case: Case, updates: int) -> Outcome:
    try:
        return Outcome(trace_updates(None, case, updates))
    except Exception as error:
        return Outcome(None, error=reason(error))
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


# ---- the table ----


COLUMNS = (
    "layout", "ranks", "model", "precision", "objective", "aggregation", "loss", "gradients", "grad norm", "weights",
    "noise", "of limit", "seconds", "",
)  # fmt: skip
TEXTS = ("layout", "model", "precision", "objective", "aggregation", "")


@dataclass(slots=True)
class Result:
    """One case's outcome on rank 0: a difference, or why there is none."""

    case: Case
    seconds: float
    difference: Difference | None = None
    noise: float = 0.0  # largest difference of a gradient between equally right single processes
    kernels: list[str] = field(default_factory=list)
    error: str = ""
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        return self.difference is not None and self.difference.ok

    @property
    def status(self) -> str:
        if self.difference is None:
            return "TIMEOUT" if self.timed_out else "ERROR"
        return "ok" if self.ok else "FAIL"

    @property
    def precision(self) -> str:
        return f"{self.case.precision} {self.case.layers}"


def print_results(console: Console, results: Sequence[Result], tolerance: float, updates: int, title: str = "") -> None:
    heading = f"Largest relative difference to a single process, {updates} DAPO updates"
    grid = Table(title=f"{title}: {heading[0].lower()}{heading[1:]}" if title else heading)
    for column in COLUMNS:
        grid.add_column(column, justify="left" if column in TEXTS else "right")
    for result in results:
        grid.add_row(*_row(result))
    console.print(grid)
    counts = {status: sum(r.status == status for r in results) for status in ("FAIL", "ERROR", "TIMEOUT")}
    text = f"{len(results)} cases, {counts['FAIL'] + counts['ERROR']} failed, {counts['TIMEOUT']} timed out"
    worst = max((r.difference.gradients for r in results if r.difference is not None), default=float("nan"))
    console.print(f"{text}; largest difference of a gradient {worst:.1e}")
    console.print(
        f"limits: {tolerance:g} (weights and the gradients of later updates {tolerance * AFTER_ADAM_FACTOR:g}, after "
        f"Adam), or {NOISE_FACTOR:g} × the noise of the tensor in one process: other micro-batches and, in bf16 and "
        "fp8, the difference to fp32"
    )
    users: dict[str, list[str]] = {}
    for result in results:
        if result.kernels:
            users.setdefault(", ".join(result.kernels), []).append(
                f"{result.case.name} {result.case.model} {result.precision}"
            )
    for kernels, names in users.items():
        some = list(dict.fromkeys(names))
        more = f" and {len(some) - 4} more" if len(some) > 4 else ""
        console.print(f"kernels of {', '.join(some[:4])}{more}: {kernels}", markup=False)


def _row(result: Result) -> list[str]:
    case, found = result.case, result.difference
    if found is None:
        numbers, verdict = ["—"] * 6, f"[red]{result.status}[/] {escape(result.error)}"
    else:
        numbers = [f"{x:.1e}" for x in (found.loss, found.gradients, found.grad_norm, found.weights, result.noise)]
        numbers.append(f"{found.share:.2f}")
        worst = f"{found.worst}: {found.share * found.worst_limit:.1e}, limit {found.worst_limit:.1e}"
        verdict = "[green]ok[/]" if found.ok else f"[red]FAIL[/] {worst}"
    names = [case.name, str(case.layout.world_size), case.model, result.precision, case.objective, case.aggregation]
    return [*names, *numbers, f"{result.seconds:.1f}", verdict]


def write_results(path: Path, results: Sequence[Result]) -> None:
    rows = [
        {
            "layout": r.case.name, "ranks": r.case.layout.world_size, "model": r.case.model,
            "precision": r.case.precision, "layers": r.case.layers, "objective": r.case.objective,
            "aggregation": r.case.aggregation, "status": r.status, "error": r.error, "seconds": round(r.seconds, 2),
            "noise": r.noise, "kernels": r.kernels, **(asdict(r.difference) if r.difference else {}),
        }
        for r in results
    ]  # fmt: skip
    path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    from megatron_dapo.selfcheck import layouts as imported  # its Outcome, not that of __main__

    source, target = map(Path, sys.argv[1:])
    wanted, count = pickle.loads(source.read_bytes())
    target.write_bytes(pickle.dumps({key: imported._outcome(case, count) for key, case in wanted.items()}))
