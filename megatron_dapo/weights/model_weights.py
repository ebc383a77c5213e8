"""Fill live Megatron models from HF weights, in place and completely, or raise and say what does not fit.

Works on the list of GPTModel chunks one rank holds under any TP, PP, VPP and EP. The rank passes its place in the
layout; nothing is looked up from global state but the layer offset, which is Megatron's own rule for the config.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_dapo.config.model import ModelShape
from megatron_dapo.weights.formats.hf_reader import HFDirectory
from megatron_dapo.weights.mapping import EMBEDDING, FINAL_NORM, OUTPUT, Row, hf_shapes, table
from megatron_dapo.weights.names import to_canonical
from megatron_dapo.weights.sharding import WeightsError, megatron_tensor, shard


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place in the layout. Experts are cut over their own tensor-parallel ranks, by default the same ones."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int | None = None
    etp_size: int | None = None

    def cut(self, row: Row) -> tuple[int, int]:
        """(rank, size) over which this row is split."""
        if row.expert is not None and self.etp_size is not None:
            return self.etp_rank or 0, self.etp_size
        return self.tp_rank, self.tp_size

    def experts(self, shape: ModelShape) -> range:
        if shape.experts % self.ep_size:
            raise WeightsError(f"{shape.experts} experts cannot be shared by {self.ep_size} expert-parallel ranks")
        count = shape.experts // self.ep_size
        return range(self.ep_rank * count, (self.ep_rank + 1) * count)


WHOLE = Place()


def load_hf_weights(
    model_chunks: Sequence[nn.Module],
    shape: ModelShape,
    source: str | os.PathLike[str] | Mapping[str, Tensor],
    place: Place = WHOLE,
) -> int:
    """Fill every parameter of the chunks from a HF directory or a dict of HF-named tensors; returns how many.

    Raises WeightsError when the source has a missing, unknown or misshapen tensor, when a live parameter has no row
    in the table, and when a row that this rank owns has no live parameter.
    """
    weights = source if isinstance(source, Mapping) else HFDirectory(source)
    check_hf_names(weights, shape)
    found = list(live_rows(model_chunks, shape, place))
    for row, parameter in found:
        _check_shape(row, parameter, place)
    for row, parameter in found:
        rank, size = place.cut(row)
        rows = parameter.shape[0] * size if row.vocabulary else None
        with torch.no_grad():
            parameter.copy_(shard(row, megatron_tensor(row, weights), rank, size, rows=rows))
    return len(found)


def live_rows(model_chunks: Sequence[nn.Module], shape: ModelShape, place: Place) -> Iterator[tuple[Row, nn.Parameter]]:
    """Every parameter of the chunks with its row; together exactly what this rank should own, or an error."""
    rows, experts = table(shape), place.experts(shape)
    for chunk in model_chunks:
        core = _core(chunk)
        if core.config.num_layers != shape.layers:
            raise WeightsError(f"the model has {core.config.num_layers} layers, the weights have {shape.layers}")
        offset = _layer_offset(core)
        expected = {name for name, row in rows.items() if _belongs(row, core, offset, experts)}
        for live, parameter in core.named_parameters():
            name = to_canonical(live, layer_offset=offset, expert_offset=experts.start)
            if name not in rows:
                raise WeightsError(
                    f"the live parameter {live} ({name}) has no row in the table of {shape.architecture}"
                )
            if name not in expected:
                raise WeightsError(f"the live parameter {live} is {name}, which this rank should not hold")
            expected.discard(name)
            yield rows[name], parameter
        if expected:
            raise WeightsError(f"the model has no parameter for {_list(expected)}; its configuration differs")


def check_hf_names(weights: Mapping[str, Any], shape: ModelShape) -> None:
    """The source holds exactly the tensors of this shape (a tied model may carry a copy of its embedding as head)."""
    expected, found = set(hf_shapes(shape)), set(weights)
    if shape.tied_embeddings:
        found.discard("lm_head.weight")
    where = f"{weights.path}: " if isinstance(weights, HFDirectory) else ""
    if missing := expected - found:
        raise WeightsError(f"{where}missing {_list(missing)}")
    if extra := found - expected:
        raise WeightsError(f"{where}unexpected {_list(extra)}; config.json describes a model without it")


def _core(chunk: nn.Module) -> Any:
    """The GPTModel inside DDP and precision wrappers."""
    core: Any = chunk
    while not hasattr(core, "pre_process") and hasattr(core, "module"):
        core = core.module
    return core


def _layer_offset(core: Any) -> int:
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    return int(get_transformer_layer_offset(core.config, getattr(core, "vp_stage", None)))


def _belongs(row: Row, core: Any, offset: int, experts: range) -> bool:
    if row.layer is not None:
        mine = offset <= row.layer < offset + len(core.decoder.layers)
        return mine and (row.expert is None or row.expert in experts)
    if row.name == EMBEDDING:
        return bool(core.pre_process)
    if row.name == OUTPUT:  # a tied model on one stage uses the embedding itself and has no parameter here
        return bool(core.post_process) and not (row.tied and core.pre_process)
    assert row.name == FINAL_NORM
    return bool(core.post_process)


def _check_shape(row: Row, parameter: Tensor, place: Place) -> None:
    """The live parameter is this rank's part of the row; no data is looked at."""
    rank, size = place.cut(row)
    rows = parameter.shape[0] * size if row.vocabulary else None
    if rows is not None and rows < row.shape[0]:
        raise WeightsError(f"{row.name}: the live model has {rows} rows for a vocabulary of {row.shape[0]}")
    part = shard(row, torch.empty(row.shape, device="meta"), rank, size, rows=rows)
    if part.shape != parameter.shape:
        raise WeightsError(
            f"{row.name}: tensor-parallel rank {rank} of {size} should hold {tuple(part.shape)}, "
            f"but the live parameter has {tuple(parameter.shape)}"
        )


def _list(names: set[str], limit: int = 5) -> str:
    shown = sorted(names)[:limit]
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(shown)}{more}"
