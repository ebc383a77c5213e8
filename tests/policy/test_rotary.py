"""The rotary embedding equals transformers', and has the properties of a rotation."""

import torch
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding, apply_rotary_pos_emb

from megatron_dapo.policy.model.rotary import RotaryTable, rotate

BASE, DIM = 1e6, 16


def test_it_equals_transformers():
    positions = torch.tensor([0, 1, 2, 0, 1, 5000])
    query, key = torch.randn(6, 4, DIM), torch.randn(6, 2, DIM)
    config = Qwen2Config(hidden_size=64, num_attention_heads=4, rope_theta=BASE, head_dim=DIM)
    cos, sin = Qwen2RotaryEmbedding(config)(query, positions[None])
    theirs = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)
    table = RotaryTable.of(positions, DIM, BASE)
    for ours, expected in zip((rotate(query, table), rotate(key, table)), theirs, strict=True):
        torch.testing.assert_close(ours, expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_scores_depend_only_on_the_distance():
    query, key = torch.randn(1, 1, DIM), torch.randn(1, 1, DIM)

    def score(at: int, to: int) -> torch.Tensor:
        left, right = (RotaryTable.of(torch.tensor([p]), DIM, 1e4) for p in (at, to))
        return (rotate(query, left) * rotate(key, right)).sum()

    torch.testing.assert_close(score(7, 3), score(104, 100), atol=1e-4, rtol=1e-4)
    assert (score(7, 3) - score(7, 4)).abs() > 1e-3


def test_the_gradient_is_the_inverse_rotation():
    table = RotaryTable.of(torch.arange(5), DIM, 1e4)
    x = torch.randn(5, 3, DIM, dtype=torch.float32, requires_grad=True)
    upstream = torch.randn(5, 3, DIM)
    rotate(x, table).backward(upstream)
    torch.testing.assert_close(x.grad, rotate(upstream, RotaryTable(table.cos, -table.sin)))


def test_batches_rotate_like_single_sequences():
    table = RotaryTable.of(torch.arange(5), DIM, 1e4)
    batch = torch.randn(5, 2, 3, DIM)
    torch.testing.assert_close(rotate(batch, table)[:, 1], rotate(batch[:, 1], table))
