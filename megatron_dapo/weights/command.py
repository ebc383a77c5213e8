"""The `megatron-dapo convert` commands: run a conversion with a progress bar and print the result. Options are those of
the functions in `convert` and `verify`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from megatron_dapo.weights import convert
from megatron_dapo.weights.mapping import WeightsError

NOT_FINITE = 3
_SHOWN = 20


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr with bytes, bytes/s and time left; nothing if stderr is not a terminal."""
    try:
        if not sys.stderr.isatty():
            yield lambda done, total: None
            return
        from rich import progress as rich
        from rich.console import Console

        columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.DownloadColumn(),
                   rich.TransferSpeedColumn(), rich.TimeRemainingColumn())  # fmt: skip
        with rich.Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task(what, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)
    except OSError as error:
        raise WeightsError(f"{error.filename or what}: {error.strerror or error}") from error


def hf_to_megatron(source: str, destination: str, allow_nan: bool = False, **options: Any) -> int:
    with _bar("hf → megatron") as progress:
        report = convert.hf_to_megatron(source, destination, progress=progress, **options)
    return _finish(report, allow_nan)


def megatron_to_hf(source: str, destination: str, allow_nan: bool = False, **options: Any) -> int:
    max_shard = int(options.pop("shard_size", 5) * 1e9)
    with _bar("megatron → hf") as progress:
        report = convert.megatron_to_hf(source, destination, max_shard=max_shard, progress=progress, **options)
    return _finish(report, allow_nan)


def hf_to_fp8(source: str, destination: str, overwrite: bool) -> int:
    from megatron_dapo.weights import fp8_checkpoint  # imports torch

    with _bar("hf → fp8") as progress:
        report = fp8_checkpoint.hf_to_fp8(source, destination, overwrite=overwrite, progress=progress)
    return _finish(report, allow_nan=False)


def merge_adapter(model: str, adapter: str, destination: str, overwrite: bool) -> int:
    from megatron_dapo.weights import adapters

    return _finish(adapters.merge_adapter(model, adapter, destination, overwrite=overwrite), allow_nan=False)


def verify(a: str, b: str, tolerance: float, **options: Any) -> int:
    from megatron_dapo.weights.verify import verify as compare

    with _bar("verify") as progress:
        result = compare(a, b, tolerance=tolerance, progress=progress, **options)
    for line in result.differences[:_SHOWN]:
        print(line)
    if len(result.differences) > _SHOWN:
        print(f"… and {len(result.differences) - _SHOWN} more")
    verdict = "bitwise equal"
    if tolerance:  # dtypes may differ
        verdict = f"equal within {result.largest:.3g}" if result.largest else "all values are equal"
    if not result.same:
        verdict = f"{len(result.differences)} differences"
    print(f"{result.tensors} tensors, {result.nbytes / 1e9:.2f} GB compared: {verdict}")
    return 0 if result.same else 1


def _finish(report: convert.Report, allow_nan: bool) -> int:
    if report.rank:  # rank 0 says it for all; an exit code other than 0 could make srun end it first
        return 0
    print(report)
    for note in report.notes:
        print(f"note: {note}", file=sys.stderr)
    for where in report.not_finite[:_SHOWN]:
        print(f"warning: {where} has values that are NaN or infinite", file=sys.stderr)
    if len(report.not_finite) > _SHOWN:
        print(f"warning: … and {len(report.not_finite) - _SHOWN} more", file=sys.stderr)
    return NOT_FINITE if report.not_finite and not allow_nan else 0
