"""Loads HF weights into live Megatron models: all parameters or none, with an error that says what does not fit.

Also the tensors of one mapping: from HF tensors to the full Megatron tensor, to a rank's shard, and back to HF tensors.

Works on the list of GPTModel chunks that one rank holds under any TP, PP, VPP and EP. The rank passes its position in
the layout. Only the layer offset comes from Megatron itself, because it follows from the model's configuration.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_dapo.config.families.tensors import EMBEDDING, FINAL_NORM, OUTPUT, OUTPUT_BIAS, Split
from megatron_dapo.config.model import ModelShape
from megatron_dapo.weights.formats.readers import HFReader, check_tied_head
from megatron_dapo.weights.mapping import (
    ParameterMapping,
    WeightsError,
    check_hf_names,
    listed,
    parameter_mappings,
    shard_copies,
)
from megatron_dapo.weights.names import to_canonical


@dataclass(frozen=True, slots=True)
class RankPosition:
    """A rank's coordinates in the layout. Experts may have tensor-parallel ranks of their own (`etp`)."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int | None = None
    etp_size: int | None = None

    def split(self, mapping: ParameterMapping) -> tuple[int, int]:
        """(rank, size) of the tensor-parallel group that splits this parameter."""
        if mapping.expert is not None and self.etp_size is not None:
            return self.etp_rank or 0, self.etp_size
        return self.tp_rank, self.tp_size

    def experts(self, shape: ModelShape) -> range:
        if shape.experts % self.ep_size:
            raise WeightsError(f"{shape.experts} experts cannot be split over {self.ep_size} expert-parallel ranks")
        count = shape.experts // self.ep_size
        return range(self.ep_rank * count, (self.ep_rank + 1) * count)


WHOLE = RankPosition()
ADAPTERS = "adapters."  # prefix of LoRA's parameters in a model chunk; weights.adapters describes them


def load_hf_weights(
    model_chunks: Sequence[nn.Module],
    shape: ModelShape,
    source: str | os.PathLike[str] | Mapping[str, Tensor],
    position: RankPosition = WHOLE,
) -> None:
    """Fill every parameter of the chunks from an HF directory or a dict of HF-named tensors.

    Raises WeightsError when the source has a missing, unknown or misshapen tensor, when a live parameter has no
    mapping, and when a parameter that this rank should hold does not exist in the model.
    """
    weights = source if isinstance(source, Mapping) else HFReader(source)
    check_hf_names(weights, shape, weights.path if isinstance(weights, HFReader) else "")
    check_tied_head(weights, shape)
    found = list(live_mappings(model_chunks, shape, position))
    for mapping, parameter in found:
        _check_shape(mapping, parameter, position)
    for mapping, parameter in found:
        rank, size = position.split(mapping)
        rows = parameter.shape[0] * size if mapping.vocabulary else None
        with torch.no_grad():
            parameter.copy_(shard(mapping, megatron_tensor(mapping, weights), rank, size, rows=rows))


# By the layer that SGLang makes of several: the first of them in HF's order.
FUSED = {"qkv_proj": "q_proj", "gate_up_proj": "gate_proj"}


@torch.no_grad()
def use_server_weights(
    model_chunks: Sequence[nn.Module], shape: ModelShape, served: Mapping[str, Tensor], files: Mapping[str, Tensor]
) -> None:
    """The parameters become those of an SGLang server with the same model on one GPU, where it has their rows in the
    same order; others are copied. `served`: by SGLang's names. `files`: the model, of which some rows are compared."""
    for mapping, parameter in live_mappings(model_chunks, shape, WHOLE):
        name = mapping.hf[0]
        for fused, first in FUSED.items():
            name = name.replace(f".{first}.", f".{fused}.")
        found, rows = served.get(name), [size[0] for size in mapping.hf_shapes]
        if found is None or found.shape[0] < sum(rows) or found.shape[1:] != parameter.shape[1:]:
            has = "none" if found is None else f"one of shape {tuple(found.shape)}"
            raise WeightsError(f"the server should have a parameter {name} with {sum(rows)} rows, but has {has}")
        if (found.dtype, found.device) != (parameter.dtype, parameter.device):
            expected = f"{parameter.dtype} on {parameter.device}"
            raise WeightsError(f"{name} is {found.dtype} on {found.device} in the server, but should be {expected}")
        pieces = dict(zip(mapping.hf, found.narrow(0, 0, sum(rows)).split(rows), strict=True))
        for hf, piece in pieces.items():
            sample = torch.linspace(0, len(piece) - 1, min(len(piece), 4)).long()
            if not torch.equal(piece[sample.to(piece.device)].cpu(), files[hf][sample].to(piece.dtype)):
                raise WeightsError(f"{name} in the server is not {hf} of the model: share_base cannot be used")
        if mapping.in_hf_order and len(parameter) <= len(found):
            parameter.data = found.narrow(0, 0, len(parameter))
        else:
            full = megatron_tensor(mapping, pieces)
            parameter.data = shard(mapping, full, 0, 1, rows=len(parameter)).clone()


def live_mappings(
    model_chunks: Sequence[nn.Module], shape: ModelShape, position: RankPosition
) -> Iterator[tuple[ParameterMapping, nn.Parameter]]:
    """Every parameter of the chunks' own weights with its mapping: exactly those that this rank should hold, or an
    error."""
    mappings, experts = parameter_mappings(shape), position.experts(shape)
    for chunk in model_chunks:
        core = _core(chunk)
        if core.config.num_layers != shape.layers:
            raise WeightsError(f"the model has {core.config.num_layers} layers, the weights have {shape.layers}")
        offset = _layer_offset(core)
        expected = {name for name, mapping in mappings.items() if _belongs(mapping, core, offset, experts)}
        for live, parameter in core.named_parameters():
            if live.startswith(ADAPTERS):
                continue
            name = to_canonical(live, layer_offset=offset, expert_offset=experts.start)
            if name not in mappings:
                raise WeightsError(
                    f"the live parameter {live} ({name}) has no mapping in the table of {shape.architecture}"
                )
            if name not in expected:
                raise WeightsError(f"the live parameter {live} is {name}, which this rank should not hold")
            expected.discard(name)
            yield mappings[name], parameter
        if expected:
            raise WeightsError(
                f"the model has no parameter for {listed(expected)}; its configuration differs from config.json"
            )


def live_adapters(model_chunks: Sequence[Any]) -> Iterator[tuple[ParameterMapping, nn.Parameter]]:
    """Every LoRA adapter of the chunks with its mapping."""
    return (found for chunk in model_chunks for found in chunk.adapters.live())


def _core(chunk: nn.Module) -> Any:
    """The GPTModel inside DDP and precision wrappers."""
    core: Any = chunk
    while not hasattr(core, "pre_process") and hasattr(core, "module"):
        core = core.module
    return core


def _layer_offset(core: Any) -> int:
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    return int(get_transformer_layer_offset(core.config, getattr(core, "vp_stage", None)))


def _belongs(mapping: ParameterMapping, core: Any, offset: int, experts: range) -> bool:
    if mapping.layer is not None:
        mine = offset <= mapping.layer < offset + len(core.decoder.layers)
        return mine and (mapping.expert is None or mapping.expert in experts)
    if mapping.name == EMBEDDING:
        return bool(core.pre_process)
    if mapping.name == OUTPUT:  # a tied model on one stage uses the embedding itself and has no parameter here
        return bool(core.post_process) and not (mapping.tied and core.pre_process)
    assert mapping.name in (FINAL_NORM, OUTPUT_BIAS)
    return bool(core.post_process)


def _check_shape(mapping: ParameterMapping, parameter: Tensor, position: RankPosition) -> None:
    """The live parameter has the shape of this rank's shard; reads no data."""
    rank, size = position.split(mapping)
    rows = parameter.shape[0] * size if mapping.vocabulary else None
    if rows is not None and rows < mapping.shape[0]:
        raise WeightsError(f"{mapping.name}: the live model has {rows} rows for a vocabulary of {mapping.shape[0]}")
    part = shard(mapping, torch.empty(mapping.shape, device="meta"), rank, size, rows=rows)
    if part.shape != parameter.shape:
        raise WeightsError(
            f"{mapping.name}: tensor-parallel rank {rank} of {size} should hold {tuple(part.shape)}, "
            f"but the live parameter has {tuple(parameter.shape)}"
        )


def megatron_tensor(mapping: ParameterMapping, hf: Mapping[str, Tensor]) -> Tensor:
    """The full Megatron tensor (without vocabulary padding) from its HF tensors."""
    pieces = [hf[name] for name in mapping.hf]
    for name, piece, shape in zip(mapping.hf, pieces, mapping.hf_shapes, strict=True):
        if tuple(piece.shape) != shape:
            raise WeightsError(f"{name}: shape {tuple(piece.shape)}, but the model's config.json says {shape}")
    if len(mapping.segments) == 1:
        return pieces[0]
    return torch.cat([pieces[s.source].narrow(0, s.hf_start, s.rows) for s in mapping.segments])


def hf_tensors(mapping: ParameterMapping, shards: Sequence[Tensor]) -> dict[str, Tensor]:
    """The HF tensors from every tensor-parallel rank's shard, in rank order; vocabulary padding is dropped."""
    out = {name: shards[0].new_empty(size) for name, size in zip(mapping.hf, mapping.hf_shapes, strict=True)}
    for place, block in shard_places(mapping, shards, out):
        place.copy_(block)
    return out


def shard_places(
    mapping: ParameterMapping, shards: Sequence[Tensor], hf: Mapping[str, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every place in the HF tensors with the block of a shard that belongs there; of replicas only the first."""
    for rank, part in enumerate(shards[:1] if mapping.split is Split.NONE else shards):
        for copy in shard_copies(mapping, rank, len(shards), part.shape):
            place = hf[mapping.hf[copy.source]].narrow(0, copy.hf_row, copy.rows)
            if copy.columns is not None:
                place = place.narrow(1, *copy.columns)
            yield place, part.narrow(0, copy.shard_row, copy.rows).reshape(place.shape)


def _part(tensor: Tensor, dim: int, rank: int, size: int, name: str) -> Tensor:
    if tensor.shape[dim] % size:
        raise WeightsError(f"{name}: {tensor.shape[dim]} entries of dimension {dim} cannot be split over {size} ranks")
    step = tensor.shape[dim] // size
    return tensor.narrow(dim, rank * step, step)


def shard(mapping: ParameterMapping, full: Tensor, rank: int, size: int, *, rows: int | None = None) -> Tensor:
    """What tensor-parallel rank `rank` of `size` holds. `rows`: of the full tensor with vocabulary padding."""
    if mapping.vocabulary and rows is not None and rows != full.shape[0]:
        full = torch.cat([full, full.new_zeros(rows - full.shape[0], *full.shape[1:])])
    if mapping.split is Split.NONE or size == 1:
        return full
    if mapping.split is Split.PARTS:
        return torch.cat([_part(part, 0, rank, size, mapping.name) for part in full.split(mapping.parts)])
    return _part(full, 0 if mapping.split is Split.ROWS else 1, rank, size, mapping.name)
