"""Reads a legacy Megatron checkpoint (`--ckpt-format torch`): one `model_optim_rng.pt` per model-parallel rank.

    iter_0000100/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt     tensor, pipeline and expert rank

Each file holds the live state dict of a rank: its part of every tensor, with its own layer and expert numbers. They
are joined here without loading: a parameter becomes a list of pieces. Optimizer files are not opened.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.config.families.tensors import Split
from megatron_dapo.config.model import ModelShape
from megatron_dapo.files import Dtype, StoredTensor
from megatron_dapo.weights.formats.readers import Piece, PieceReader, TorchFile, check_cover, rows_of
from megatron_dapo.weights.formats.safe_pickle import PickledObject
from megatron_dapo.weights.locate import RANK_FILE, RANK_FOLDER
from megatron_dapo.weights.mapping import ParameterMapping, WeightsError, parameter_mappings, shard_blocks
from megatron_dapo.weights.names import to_canonical

_LAYER_NUMBER = re.compile(r"decoder\.layers\.(\d+)\.")
_NOT_WEIGHTS = ("_extra_state", "rotary_pos_emb.inv_freq")


@dataclass(frozen=True, slots=True)
class _RankFile:
    """One rank's file: its coordinates, and one dictionary of tensors per model chunk."""

    tp: int
    pp: int
    ep: int
    chunks: tuple[Mapping[str, StoredTensor], ...]


class LegacyReader(PieceReader):
    """The weights of a folder with `mp_rank_*` folders."""

    def __init__(self, path: str | os.PathLike[str], shape: ModelShape) -> None:
        super().__init__(Path(path))
        mappings = parameter_mappings(shape)
        parts: dict[str, dict[int, StoredTensor]] = {}  # parameter → tensor-parallel rank → its part
        for tp, name, stored in _canonical_tensors(_read_ranks(self.path), shape):
            if name not in mappings:
                raise WeightsError(
                    f"{stored.file}: unexpected tensor {stored.name}; the reference's config.json describes a model "
                    "without it"
                )
            parts.setdefault(name, {}).setdefault(tp, stored)
        for name, mapping in mappings.items():
            if mapping.tied:
                continue
            if name not in parts:
                raise WeightsError(f"{self.path}: tensor {name} is missing; is a rank's folder missing?")
            self.pieces[name] = _pieces(mapping, parts[name], self.path)
            self.dtypes[name] = Dtype(self.pieces[name][0].stored.dtype)


def _read_ranks(path: Path) -> list[_RankFile]:
    folders = [(match, p) for p in sorted(path.iterdir()) if (match := RANK_FOLDER.fullmatch(p.name))]
    files = []
    for match, folder in folders:
        if not (folder / RANK_FILE).is_file():
            raise WeightsError(f"{folder / RANK_FILE} is missing; copy the checkpoint again")
        file = TorchFile(folder / RANK_FILE, opaque=True)
        if not isinstance(file.tree, dict):
            raise WeightsError(f"{file.path}: expected a dictionary, found a {type(file.tree).__name__}")
        first, second = (int(match[i]) if match[i] else None for i in (2, 3))
        if second is None and first is not None and _size(file.tree, "pipeline_model_parallel_size") == 1:
            first, second = None, first  # without pipeline stages, the second number is the expert rank
        files.append(_RankFile(int(match[1]), first or 0, second or 0, tuple(_chunks(file))))
    return files


def _size(tree: dict[str, Any], name: str) -> int:
    args = tree.get("args")
    return int(args.get(name) or 1) if isinstance(args, PickledObject) else 1


def _chunks(file: TorchFile) -> Iterator[dict[str, StoredTensor]]:
    version = file.tree.get("checkpoint_version", 0)
    if not isinstance(version, int | float) or version < 2:
        raise WeightsError(
            f"{file.path}: checkpoint version {version}, whose QKV rows have another order; load it in Megatron and "
            "save it again"
        )
    keys = ["model"] if "model" in file.tree else sorted(k for k in file.tree if re.fullmatch(r"model\d+", str(k)))
    if not keys:
        raise WeightsError(f"{file.path}: no model in it; found {', '.join(map(str, list(file.tree)[:8]))}")
    for key in keys:
        chunk = file.tree[key]
        if "language_model" in chunk or any(str(name).startswith("language_model.") for name in chunk):
            raise WeightsError(
                f"{file.path}: saved with --use-legacy-models; load it in Megatron and save it with --use-mcore-models"
            )
        found = ((str(name), file.stored(str(name), value)) for name, value in chunk.items())
        yield {name: tensor for name, tensor in found if tensor is not None and not name.endswith(_NOT_WEIGHTS)}


def _canonical_tensors(ranks: list[_RankFile], shape: ModelShape) -> Iterator[tuple[int, str, StoredTensor]]:
    """(tensor-parallel rank, canonical name, tensor) of all files."""
    stages, ep_size = 1 + max(rank.pp for rank in ranks), 1 + max(rank.ep for rank in ranks)
    offsets, layers = {}, 0
    for number in range(max(len(rank.chunks) for rank in ranks)):  # the order in which a token passes the chunks
        for stage in range(stages):
            offsets[stage, number] = layers
            layers += max((_layers(rank.chunks[number]) for rank in ranks if rank.pp == stage), default=0)
    if layers != shape.layers:
        raise WeightsError(f"the ranks hold {layers} layers, but the reference's config.json says {shape.layers}")
    experts = shape.experts // ep_size
    for rank in ranks:
        for number, chunk in enumerate(rank.chunks):
            for name, stored in chunk.items():
                offset = offsets[rank.pp, number]
                yield rank.tp, to_canonical(name, layer_offset=offset, expert_offset=rank.ep * experts), stored


def _layers(chunk: Mapping[str, StoredTensor]) -> int:
    return len({found[1] for name in chunk if (found := _LAYER_NUMBER.search(name))})


def _pieces(mapping: ParameterMapping, parts: dict[int, StoredTensor], path: Path) -> list[Piece]:
    """A parameter from the parts of tensor-parallel ranks; one part may be the whole."""
    first = parts[min(parts)]
    whole = first.shape == mapping.shape or mapping.split is Split.NONE
    ranks = [min(parts)] if whole else list(range(1 + max(parts)))
    if missing := [rank for rank in ranks if rank not in parts]:
        raise WeightsError(f"{path}: tensor {mapping.name}: the part of tensor-parallel rank {missing[0]} is missing")
    size, by_columns = len(ranks), mapping.split is Split.COLUMNS
    rows = sum(parts[rank].shape[0] for rank in (ranks[:1] if by_columns else ranks))
    inner = [parts[rank].shape[1:] for rank in ranks]
    wrong = any(len(s) != len(mapping.shape) - 1 or (s != mapping.shape[1:] and not by_columns) for s in inner)
    if wrong or (rows < mapping.shape[0] if mapping.vocabulary else rows != mapping.shape[0]):
        raise WeightsError(
            f"{first.file}: tensor {first.name}: {size} parts of shape {first.shape} do not make the shape "
            f"{mapping.shape} of the reference's config.json"
        )
    pieces = []
    for rank in ranks:
        stored = parts[rank]
        blocks, columns = shard_blocks(mapping, rank, size, stored.shape)
        left, width = columns or (0, math.prod(stored.shape[1:]))
        pieces += [Piece(row, left, count, width, rows_of(stored, start, count)) for row, start, count in blocks]
    check_cover(f"{path}: tensor {mapping.name}", pieces, rows, math.prod(mapping.shape[1:]))
    return pieces
