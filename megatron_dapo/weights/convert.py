"""Converts HF safetensors to Megatron torch_dist and back.

No model is built and no tensor is held in memory. Every tensor is accounted for before the first byte is written, and
the destination appears only when it is complete.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from megatron_dapo.config.families.tensors import EMBEDDING
from megatron_dapo.config.model import ModelShape
from megatron_dapo.errors import UserError
from megatron_dapo.files import Dtype, StoredTensor, is_packed
from megatron_dapo.weights.copy import copy_tensors, default_workers
from megatron_dapo.weights.destination import PROGRESS, CopyGroup, check_free, new_directory
from megatron_dapo.weights.formats.hf_writer import MAX_SHARD, HFWriter
from megatron_dapo.weights.formats.megatron_reader import open_megatron
from megatron_dapo.weights.formats.readers import HFReader, PieceReader, check_tied_head, read_hf_directory
from megatron_dapo.weights.formats.torch_dist_writer import TorchDistWriter
from megatron_dapo.weights.locate import HF_FILES, RELEASE, TRACKER, Format, format_of, locate
from megatron_dapo.weights.mapping import HEAD, WeightsError, check_hf_tensors, stored_mappings
from megatron_dapo.weights.model_card import write_model_card
from megatron_dapo.weights.side_files import FILE as CARRIED_FILE
from megatron_dapo.weights.side_files import copy_carried, copy_side_files, export_carried

RECORD = "conversion.json"  # in a converted checkpoint: what an export cannot see in the weights

Progress = Callable[[int, int], None]  # (bytes copied, total bytes)


@dataclass(slots=True)
class Report:
    """What a conversion did."""

    destination: Path
    tensors: int
    nbytes: int
    not_finite: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what is missing or was left out
    rank: int = 0  # of several processes that convert together; rank 0 has the findings of all
    seconds: float = 0.0

    def add(self, carried: Sequence[StoredTensor]) -> None:
        self.tensors += len(carried)
        self.nbytes += sum(tensor.nbytes for tensor in carried)

    def __str__(self) -> str:
        rate = self.nbytes / max(self.seconds, 1e-9) / 1e9
        return (
            f"{self.destination}: {self.tensors} tensors, {self.nbytes / 1e9:.2f} GB in {self.seconds:.1f} s "
            f"({rate:.2f} GB/s)"
        )


def hf_to_megatron(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    progress: Progress = lambda done, total: None,
) -> Report:
    """Write the weights of an HF directory as a torch_dist checkpoint that loads at any TP, PP and EP."""
    began, src, dst = time.monotonic(), Path(source), Path(destination)
    check_paths(src, dst, overwrite)
    shape, weights = open_hf(src)
    dtypes = {mapping.name: _one_dtype(weights, mapping.hf, dtype) for mapping in stored_mappings(shape)}
    group = CopyGroup.from_environment()
    writer = TorchDistWriter(shape, dtypes, files=group.size * (workers or default_workers()))
    plan = _plan(weights, writer, dtype)
    with (
        new_directory(dst, writer.total, overwrite=overwrite, plan=plan, group=group) as directory,
        ThreadPoolExecutor(1) as pool,
    ):
        checkpoint = directory / RELEASE
        checkpoint.mkdir(exist_ok=True)
        metadata = None if group.rank else pool.submit(writer.metadata)
        report = _copy(dst, weights, writer, checkpoint, directory / PROGRESS, group, workers, progress)
        if metadata is None:
            return report
        (checkpoint / HF_FILES).mkdir(exist_ok=True)
        report.notes += copy_side_files(src, checkpoint / HF_FILES)
        report.add(copy_carried(weights, shape, checkpoint / HF_FILES / CARRIED_FILE))
        (checkpoint / RECORD).write_text(json.dumps({"stores_head": HEAD in weights, "packed_experts": weights.packed}))
        writer.write_metadata(checkpoint, metadata.result())
        (directory / TRACKER).write_text(RELEASE)
    report.seconds = time.monotonic() - began
    return report


def megatron_to_hf(
    source: str | Path,
    destination: str | Path,
    *,
    reference: str | Path | None = None,
    step: int | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    max_shard: int = MAX_SHARD,
    progress: Progress = lambda done, total: None,
) -> Report:
    """Write the weights of a Megatron checkpoint (optimizer state is not read) as a complete HF directory.

    `source`: any path that `weights.locate` understands; `step` chooses among several checkpoints. `reference`: the HF
    directory to take config and tokenizer from; by default the copy inside the checkpoint.
    """
    began, src, dst = time.monotonic(), Path(source), Path(destination)
    check_paths(src, dst, overwrite)
    src = locate(src, step)
    tied_head, pack = _original_files(src, reference)
    reference = find_reference(src, reference)
    shape = ModelShape.from_dir(reference, weights_only=True)
    tied_head &= shape.tied_embeddings
    weights = open_megatron(src, shape)
    dtypes = {
        mapping.name: Dtype(dtype) if dtype else weights.dtype(mapping.name) for mapping in stored_mappings(shape)
    }
    writer = HFWriter(shape, dtypes, max_shard=max_shard, tied_head=tied_head, pack=pack)
    group, plan = CopyGroup.from_environment(), _plan(weights, writer, dtype)
    with new_directory(dst, writer.total, overwrite=overwrite, plan=plan, group=group) as directory:
        report = _copy(dst, weights, writer, directory, directory / PROGRESS, group, workers, progress)
        if group.rank:
            return report
        writer.write_index(directory)
        carried, notes = export_carried(reference, directory, shape)
        notes += copy_side_files(reference, directory, dtypes[EMBEDDING])
        report.notes += write_model_card(src, directory, notes)
        report.add(carried)
    report.seconds = time.monotonic() - began
    return report


def _plan(weights: HFReader | PieceReader, writer: TorchDistWriter | HFWriter, dtype: str | None) -> str:
    """Everything that decides what is written where: a killed conversion is continued only if it is unchanged."""
    sources = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in weights.files()]
    files = [(file.path.name, file.size, zlib.crc32(file.head)) for file in writer.files(Path())]
    return json.dumps({"version": 1, "sources": sources, "files": files, "dtype": dtype, "tensors": len(writer.writes)})


def _copy(
    destination: Path,
    weights: HFReader | PieceReader,
    writer: TorchDistWriter | HFWriter,
    directory: Path,
    marks: Path,
    group: CopyGroup,
    workers: int | None,
    progress: Progress,
) -> Report:
    """Copies this process's files; rank 0 then waits for the others."""
    not_finite, kept = copy_tensors(
        weights, writer.writes, writer.files(directory), workers=workers, finished=marks, group=group,
        progress=lambda done: progress(done, writer.weight_bytes),
    )  # fmt: skip
    if group.rank:
        group.hand_in(marks, not_finite, kept)
    else:
        of_others, kept_by_others = group.collect(marks)
        not_finite = sorted({*not_finite, *of_others})
        kept += kept_by_others
    count = sum(len(mapping.hf) for mapping in stored_mappings(writer.shape))
    notes = [f"{kept} finished files of an interrupted run were compared and kept"] if kept else []
    return Report(destination, count, writer.weight_bytes, not_finite, notes, group.rank)


def open_hf(path: Path) -> tuple[ModelShape, HFReader]:
    """Open an HF directory whose tensors are exactly those that its config.json describes."""
    shape, weights = ModelShape.from_dir(path, weights_only=True), HFReader(path)
    check_hf_tensors(weights.stored, shape, path)
    check_tied_head(weights, shape)
    return shape, weights


def find_reference(source: Path, reference: str | Path | None) -> Path:
    if reference is not None:
        return Path(reference)
    if (source / HF_FILES / "config.json").exists():
        return source / HF_FILES
    if format_of(source) is Format.HF:
        raise WeightsError(f"{source} is a HF model already; expected a Megatron checkpoint")
    raise WeightsError(f"{source} does not say which model it holds; pass --reference with the HF model's directory")


def _original_files(source: Path, reference: str | Path | None) -> tuple[bool, bool]:
    """Whether the original HF model also stores a copy of its embedding as head, and whether it has all experts of a
    layer in one tensor, so that the export does the same."""
    try:  # a reference may have no weights, and a checkpoint no record
        if reference is not None:
            names = read_hf_directory(Path(reference))
            return HEAD in names, is_packed(names)
        record = json.loads((source / RECORD).read_bytes())
        return bool(record["stores_head"]), bool(record.get("packed_experts"))
    except (UserError, OSError, ValueError, KeyError, TypeError, RecursionError):
        return False, False


def check_paths(source: Path, destination: Path, overwrite: bool) -> None:
    """Refuse a bad destination before reading anything."""
    here, there = source.resolve(), destination.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise WeightsError(f"{destination}: the destination must be outside the source {source}")
    check_free(destination.absolute(), overwrite)


def _one_dtype(weights: HFReader, names: tuple[str, ...], dtype: str | None) -> Dtype:
    if dtype:
        return Dtype(dtype)
    first = weights.stored[names[0]]
    for other in (weights.stored[name] for name in names[1:]):
        if other.dtype != first.dtype:
            raise WeightsError(
                f"{other.file}: tensor {other.name} is {other.dtype}, but {first.name} of the same Megatron tensor is "
                f"{first.dtype}; pass --dtype to convert both"
            )
    return weights.dtype(first.name)
