"""What an update trains on: a mini-batch as flat numpy arrays (`TrainBatch`), and its micro-batches as packs (`pack`).

Per-sample arrays are [samples]. Response arrays are [responses]: the response tokens of all samples, concatenated.
Masks are set before anything is counted: the `loss_mask` of a truncated or ungraded sample, and of every token that
the policy has not generated, is False. `validate` refuses input that would later become a NaN, a wrong count or a hang.

A pack is the samples of one micro-batch as one sequence of tokens, and this context-parallel rank's share of it. Each
sample is padded to `sequence_alignment` (context parallelism splits it into 2·cp chunks), and the whole pack to
`pack_alignment` (sequence parallelism splits it evenly); nothing else is padded. The hidden state at position t
predicts token t+1, so response token r of a prompt of length P is scored at position P−1+r. `slots` is the index of
each scored token in the batch's response arrays: everything a loss needs is looked up through it. `routed` is the index
in the batch's tokens of each token that this rank's routers see: with sequence parallelism a part of the rank's pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.errors import UserError
from megatron_dapo.policy.model.gated_delta_net import PackOrder
from megatron_dapo.policy.model.local_spec import RotaryTable, zigzag_positions
from megatron_dapo.policy.model.router import MicroBatchRouting
from megatron_dapo.types import RoutedExperts, Sample

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


PER_SAMPLE = ("prompt_lengths", "response_lengths", "advantages", "rollouts", "right")  # arrays of a TrainBatch


class BatchError(UserError):
    """A mini-batch that cannot be trained on; the message names the array and the sample."""


@dataclass(slots=True)
class TrainBatch:
    tokens: NDArray[np.int32]  # [all tokens]: prompt and response of sample 0, of sample 1, …
    prompt_lengths: Ints  # [samples]
    response_lengths: Ints  # [samples]
    advantages: Floats  # [samples]
    loss_mask: NDArray[np.bool_]  # [responses]
    old_logprobs: Floats | None = None  # [responses]; None where the engine's log-probs are the old ones
    engine_logprobs: Floats | None = None  # [responses]
    ref_logprobs: Floats | None = None  # [responses]
    token_advantages: Floats | None = None  # [responses]; added to that of the sample
    values: Floats | None = None  # [responses]; the critic's before the first update, at the token's prediction
    returns: Floats | None = None  # [responses]; what the critic learns to predict
    rollouts: Ints | None = None  # [samples]: samples of one rollout have the same number; None: each is its own
    right: NDArray[np.bool_] | None = None  # [samples]: the grader's verdict, whatever the reward
    # Of each sample [its tokens, layers · experts per token]; rows may be missing at the end. None: the router chooses.
    routed_experts: list[RoutedExperts | None] | None = None  # [samples]

    @classmethod
    def from_samples(
        cls, samples: Sequence[Sample], advantages: Sequence[float] | Floats, active: Sequence[bool] | NDArray[np.bool_]
    ) -> TrainBatch:
        """`active[i]` False masks sample i: it is ungraded, or truncated under overlong filtering. Of the others, the
        tokens that the policy has not generated are masked."""
        lengths = np.array([s.length for s in samples], dtype=np.int64)
        routed = [s.routed_experts for s in samples]
        return cls(
            tokens=_concat([part for s in samples for part in (s.prompt_tokens, s.response_tokens)], np.int32),
            prompt_lengths=np.array([len(s.prompt_tokens) for s in samples], dtype=np.int64),
            response_lengths=lengths,
            advantages=np.asarray(advantages, dtype=np.float32),
            loss_mask=np.repeat(np.asarray(active, dtype=np.bool_), lengths) & trained_tokens(samples),
            engine_logprobs=_concat([s.engine_logprobs for s in samples], np.float32),
            routed_experts=routed if any(experts is not None for experts in routed) else None,
        )

    @property
    def samples(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> Ints:
        return self.prompt_lengths + self.response_lengths

    @property
    def token_offsets(self) -> Ints:
        """[samples + 1]: where each sample's tokens start."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    @property
    def response_offsets(self) -> Ints:
        """[samples + 1]: where each sample's response starts in the response arrays."""
        return np.concatenate([[0], np.cumsum(self.response_lengths)]).astype(np.int64)

    @property
    def behaviour_logprobs(self) -> Floats | None:
        """Log-probs of the policy that the ratio compares with: the recomputed ones if present, else the engine's."""
        return self.engine_logprobs if self.old_logprobs is None else self.old_logprobs

    def validate(self, vocab: int, longest: int) -> None:
        """Raises BatchError unless all arrays have matching lengths and hold usable numbers."""
        if self.samples == 0:
            raise BatchError("the mini-batch is empty: it needs at least one sample")
        self._check_lengths(longest)
        bad = np.flatnonzero((self.tokens < 0) | (self.tokens >= vocab))
        if bad.size:
            where = int(np.searchsorted(self.token_offsets, bad[0], side="right")) - 1
            raise BatchError(f"sample {where}: token id {self.tokens[bad[0]]} is outside the vocabulary of {vocab}")
        self._check_finite()

    def _check_lengths(self, longest: int) -> None:
        responses, samples = int(self.response_lengths.sum()), self.samples
        expected = {
            "tokens": int(self.lengths.sum()), "response_lengths": samples, "advantages": samples,
            "loss_mask": responses, "old_logprobs": responses, "engine_logprobs": responses,
            "ref_logprobs": responses, "token_advantages": responses, "values": responses, "returns": responses,
            "routed_experts": samples, "rollouts": samples, "right": samples,
        }  # fmt: skip
        for name, length in expected.items():
            value = getattr(self, name)
            if value is not None and len(value) != length:
                raise BatchError(f"{name} has {len(value)} entries, expected {length} for {samples} samples")
        if (self.prompt_lengths < 1).any():
            raise BatchError(
                f"sample {int(np.argmin(self.prompt_lengths))} has an empty prompt; it needs at least one token"
            )
        if int(self.lengths.max()) > longest:
            worst = int(np.argmax(self.lengths))
            raise BatchError(
                f"sample {worst} has {self.lengths[worst]} tokens, more than policy.micro_batch_tokens ({longest}): "
                "raise it, or lower rollout.max_response_tokens"
            )

    def _check_finite(self) -> None:
        missing = np.flatnonzero(~np.isfinite(self.advantages))
        if missing.size:
            raise BatchError(
                f"sample {missing[0]}: its advantage is {self.advantages[missing[0]]}; an ungraded sample needs 0"
            )
        for name in ("old_logprobs", "engine_logprobs", "ref_logprobs", "token_advantages", "values", "returns"):
            values = getattr(self, name)
            if values is None:
                continue
            bad = np.flatnonzero(~np.isfinite(values) & self.loss_mask)
            if bad.size:
                where = int(np.searchsorted(self.response_offsets, bad[0], side="right")) - 1
                token = int(bad[0] - self.response_offsets[where])
                raise BatchError(f"sample {where}: {name} is {values[bad[0]]} at response token {token}")

    def select(self, chosen: Sequence[int] | Ints) -> TrainBatch:
        """The samples with these indices, in this order."""
        index = np.asarray(chosen, dtype=np.int64)
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "tokens":
                values[field.name] = _take(value, self.token_offsets, index)
            elif field.name == "routed_experts":
                values[field.name] = None if value is None else [value[i] for i in index]
            elif field.name in PER_SAMPLE:
                values[field.name] = None if value is None else value[index]
            else:
                values[field.name] = None if value is None else _take(value, self.response_offsets, index)
        return TrainBatch(**values)


def trained_tokens(samples: Sequence[Sample]) -> NDArray[np.bool_]:
    """[responses]: the tokens that the policy generated."""
    return _concat([sample.trained_mask for sample in samples], np.bool_)


def _concat(parts: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)


def _take(flat: NDArray[Any], offsets: Ints, index: Ints) -> NDArray[Any]:
    return _concat([flat[offsets[i] : offsets[i + 1]] for i in index], flat.dtype.type)


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
