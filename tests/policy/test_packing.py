"""Packing: positions and targets by hand, padding, and the split over context-parallel ranks."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.policy.batch import PackingSpec, TrainBatch, pack

CPU = torch.device("cpu")


def batch_of(*pairs: tuple[int, int]) -> TrainBatch:
    """Samples of (prompt, response) lengths; token ids count up from 10, so that every token is different."""
    prompts, responses = (np.array(x, dtype=np.int64) for x in zip(*pairs, strict=True))
    total = int(responses.sum())
    return TrainBatch(
        tokens=np.arange(10, 10 + int((prompts + responses).sum()), dtype=np.int32),
        prompt_lengths=prompts,
        response_lengths=responses,
        advantages=np.zeros(len(pairs), np.float32),
        loss_mask=np.ones(total, np.bool_),
        engine_logprobs=np.zeros(total, np.float32),
    )


def test_positions_and_targets_by_hand():
    # sample 0: tokens 10 11 | 12 13 14; sample 1: 15 16 17 | 18
    micro = pack(batch_of((2, 3), (3, 1)), [0, 1], PackingSpec(), CPU)
    assert micro.input_ids.tolist() == [[10, 11, 12, 13, 14, 15, 16, 17, 18]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3]]
    # hidden states at the last prompt token and at all response tokens but the last predict the response
    assert micro.positions.tolist() == [1, 2, 3, 7]
    assert micro.targets.tolist() == [12, 13, 14, 18]
    assert micro.slots.tolist() == [0, 1, 2, 3]
    assert micro.sequence_ids.tolist() == [0, 0, 0, 1]
    assert micro.packed.lengths == (5, 4)
    assert micro.padding == 0


def test_slots_follow_the_samples_when_their_order_changes():
    micro = pack(batch_of((2, 3), (3, 1)), [1, 0], PackingSpec(), CPU)
    assert micro.targets.tolist() == [18, 12, 13, 14]
    assert micro.slots.tolist() == [3, 0, 1, 2]


def test_context_parallelism_pads_each_sequence_and_sequence_parallelism_the_end():
    micro = pack(batch_of((2, 3), (3, 1)), [0, 1], PackingSpec(sequence_alignment=4, pack_alignment=16), CPU)
    assert micro.packed.lengths == (8, 8)  # 5 -> 8; 4 -> 4, then 12 -> 16 at the end
    assert micro.padding == 7


def test_context_parallel_split_by_hand():
    # one sequence of 8, cp 2: rank 0 holds chunks 0 and 3 (positions 0 1 6 7), rank 1 chunks 1 and 2
    parts = [pack(batch_of((2, 6)), [0], PackingSpec(4, 4, 2, rank), CPU) for rank in (0, 1)]
    assert parts[0].position_ids.tolist() == [[0, 1, 6, 7]]
    assert parts[1].position_ids.tolist() == [[2, 3, 4, 5]]
    # response tokens 12..17 are predicted at positions 1..6
    assert parts[0].targets.tolist() == [12, 17]
    assert parts[0].positions.tolist() == [1, 2]
    assert parts[1].targets.tolist() == [13, 14, 15, 16]


def test_no_samples_give_a_placeholder_that_scores_nothing():
    micro = pack(batch_of((2, 3)), [], PackingSpec(4, 8, 2, 1), CPU)
    assert micro.input_ids.shape == (1, 4)
    assert len(micro.positions) == len(micro.slots) == 0
    assert micro.padding == micro.tokens == 8


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
)
def test_every_response_token_is_scored_exactly_once_over_all_ranks(pairs, cp, tp):
    alignment = 2 * cp if cp > 1 else 1
    batch = batch_of(*pairs)
    parts = [
        pack(batch, range(len(pairs)), PackingSpec(alignment, int(np.lcm(alignment, cp * tp)), cp, rank), CPU)
        for rank in range(cp)
    ]
    slots = np.concatenate([p.slots for p in parts])
    assert sorted(slots.tolist()) == list(range(int(batch.response_lengths.sum())))
    targets = np.concatenate([p.targets.numpy() for p in parts])
    offsets = np.repeat(batch.token_offsets[:-1] + batch.prompt_lengths, batch.response_lengths)
    within = np.arange(len(offsets)) - np.repeat(batch.response_offsets[:-1], batch.response_lengths)
    np.testing.assert_array_equal(targets, batch.tokens[(offsets + within)[slots]])
    assert all(p.input_ids.shape[1] % tp == 0 for p in parts)


@pytest.mark.parametrize("chosen", [[1], [2, 0]])
def test_select_takes_the_same_samples_from_every_array(chosen):
    batch = batch_of((2, 3), (3, 1), (1, 2))
    part = batch.select(chosen)
    part.validate(vocab=100, longest=64)
    assert part.lengths.tolist() == [int(batch.lengths[i]) for i in chosen]
    starts = batch.token_offsets
    assert part.tokens.tolist() == [int(t) for i in chosen for t in batch.tokens[starts[i] : starts[i + 1]]]


def test_packs_have_one_size_under_overlapped_tensor_parallel_communication():
    policy = PolicyConfig(micro_batch_tokens=64, tensor_parallel=2, tp_comm_overlap=True)
    spec = PackingSpec.of(policy, cp_rank=0)
    assert [pack(batch_of((2, 3), (3, 1)), indices, spec, CPU).tokens for indices in ([0, 1], [1], [])] == [64] * 3
