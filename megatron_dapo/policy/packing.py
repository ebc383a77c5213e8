"""Packing: the samples of one micro-batch as one pack of tokens, and this context-parallel rank's share.

Each sequence is padded to `sequence_alignment` (context parallelism splits it into 2·cp chunks), and the whole pack to
`pack_alignment` (sequence parallelism splits it evenly); nothing else is padded. The hidden state at position t
predicts token t+1, so response token r of a prompt of length P is scored at position P−1+r. `slots` is the index of
each scored token in the batch's response arrays: everything a loss needs is looked up through it. `routed` is the index
in the batch's tokens of each token that this rank's routers see: with sequence parallelism a part of the rank's pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.policy.batch import Ints, TrainBatch
from megatron_dapo.policy.model.gated_delta_net import PackOrder
from megatron_dapo.policy.model.local_spec import zigzag_positions
from megatron_dapo.policy.model.rotary import RotaryTable
from megatron_dapo.policy.model.router import MicroBatchRouting


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of packed sequences, with what our attention would otherwise have to compute."""

    lengths: tuple[int, ...] | None = None  # padded, on the host
    positions: Tensor | None = None  # [local tokens]: each token's position in its sequence
    rotary_table: RotaryTable | None = None  # made by the first layer that needs it
    routing: MicroBatchRouting | None = None  # of a model with experts
    delta_order: PackOrder | None = None  # made by the first gated DeltaNet layer


@dataclass(frozen=True, slots=True)
class PackingSpec:
    """How packs are aligned and split over context-parallel ranks, and over ranks by sequence parallelism."""

    sequence_alignment: int = 1
    pack_alignment: int = 1
    cp_size: int = 1
    cp_rank: int = 0
    sp_size: int = 1
    sp_rank: int = 0

    @classmethod
    def of(cls, policy: PolicyConfig, cp_rank: int, tp_rank: int = 0) -> PackingSpec:
        split = (policy.tensor_parallel, tp_rank) if policy.uses_sequence_parallel else (1, 0)
        # Buffers of overlapped tensor-parallel communication have one size: that of a full pack.
        alignment = policy.micro_batch_tokens if policy.tp_comm_overlap else policy.pack_alignment
        return cls(policy.sequence_alignment, alignment, policy.context_parallel, cp_rank, *split)

    def padded(self, length: int) -> int:
        return -(-length // self.sequence_alignment) * self.sequence_alignment


@dataclass(slots=True)
class PackedMicroBatch:
    input_ids: Tensor  # [1, local tokens]
    position_ids: Tensor  # [1, local tokens]
    packed: PackedSequences
    positions: Tensor  # [scored] int64: local positions whose hidden states are scored
    targets: Tensor  # [scored] int64
    slots: Ints  # [scored]: index into the batch's response arrays
    sequence_ids: Ints  # [scored]: 0..sequences-1 within this micro-batch
    sequences: int
    routed: Ints  # [tokens of this rank's routers]: index into the batch's tokens; −1: padding
    tokens: int  # of all context-parallel ranks, padding included
    padding: int


def pack(batch: TrainBatch, indices: Sequence[int], spec: PackingSpec, device: torch.device) -> PackedMicroBatch:
    """Packs the samples `indices`. Without any, the result is a placeholder of padding that scores nothing."""
    whole = _WholePack.of(batch, indices, spec)
    local = np.concatenate(
        [
            start + zigzag_positions(length, spec.cp_size, spec.cp_rank).numpy()
            for start, length in zip(whole.starts, whole.lengths, strict=True)
        ]
        if spec.cp_size > 1
        else [np.arange(len(whole.tokens))]
    )
    slots = whole.slots[local]
    positions = np.flatnonzero(slots >= 0)
    chosen = local[positions]
    local_positions = _to(whole.positions[local], device)
    return PackedMicroBatch(
        input_ids=_to(whole.tokens[local], device)[None],
        position_ids=local_positions[None],
        packed=_packed_params(whole.lengths, device, local_positions),
        positions=_to(positions, device),
        targets=_to(whole.tokens[chosen + 1], device),
        slots=slots[positions],
        sequence_ids=whole.sequence_ids[chosen],
        sequences=max(1, len(indices)),
        routed=np.split(whole.rows[local], spec.sp_size)[spec.sp_rank],
        tokens=len(whole.tokens),
        padding=len(whole.tokens) - int(batch.lengths[list(indices)].sum()),
    )


@dataclass(slots=True)
class _WholePack:
    """The padded pack of all context-parallel ranks, on the host. `slots` is −1 at unscored positions. `rows`
    is the index in the batch's tokens, −1 at padding."""

    tokens: Ints
    rows: Ints
    positions: Ints
    slots: Ints
    sequence_ids: Ints
    starts: list[int]
    lengths: list[int]

    @classmethod
    def of(cls, batch: TrainBatch, indices: Sequence[int], spec: PackingSpec) -> _WholePack:
        lengths = [spec.padded(int(batch.lengths[i])) for i in indices] or [spec.pack_alignment]
        lengths[-1] += -sum(lengths) % spec.pack_alignment
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(int).tolist()
        total = starts.pop()
        positions, ids = (np.zeros(total, np.int64) for _ in range(2))
        slots, rows = (np.full(total, -1, np.int64) for _ in range(2))
        token_offsets, response_offsets = batch.token_offsets, batch.response_offsets
        for order, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            positions[start : start + length] = np.arange(length)
            ids[start : start + length] = order
            if not indices:
                continue
            i = indices[order]
            rows[start : start + int(batch.lengths[i])] = np.arange(token_offsets[i], token_offsets[i + 1])
            first = start + int(batch.prompt_lengths[i]) - 1
            count = int(batch.response_lengths[i])
            slots[first : first + count] = np.arange(response_offsets[i], response_offsets[i] + count)
        tokens = np.where(rows >= 0, batch.tokens[rows], 0).astype(np.int64)
        return cls(tokens, rows, positions, slots, ids, starts, lengths)


def _packed_params(lengths: list[int], device: torch.device, positions: Tensor | None = None) -> PackedSequences:
    cumulative = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32).to(device, non_blocking=True)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        cu_seqlens_q_padded=cumulative,
        cu_seqlens_kv_padded=cumulative,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        lengths=tuple(lengths),
        positions=positions,
    )


def _to(array: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
