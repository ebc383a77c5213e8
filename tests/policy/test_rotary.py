"""The rotary embedding equals transformers', and has the properties of a rotation."""

from dataclasses import replace

import pytest
import torch
from transformers import Qwen2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding, apply_rotary_pos_emb

from megatron_dapo.config import ConfigError, ModelShape
from megatron_dapo.policy.megatron.options import _scaled_softmax
from megatron_dapo.policy.model.local_spec import RotaryTable, inverse_frequencies, rotate

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


def yarn_config(**rope):
    rope = {"rope_type": "yarn", "rope_theta": BASE, **rope}
    return Qwen2Config(
        hidden_size=512, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=40960,
        rope_parameters=rope, architectures=["Qwen2ForCausalLM"], num_hidden_layers=2, intermediate_size=64,
        vocab_size=100,
    )  # fmt: skip


@pytest.mark.parametrize(
    "rope",
    [
        {"factor": 4.0, "original_max_position_embeddings": 32768},
        {"factor": 2.0},
        {"factor": None, "original_max_position_embeddings": 10240},
        {"factor": 4.0, "beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 0.9},
        {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.2},
        {"factor": 1.0, "original_max_position_embeddings": 40960},
    ],
)
def test_yarn_equals_transformers(rope):
    """Frequencies and attention factor, from the same config.json; most channels are on the ramp or beyond it."""
    config = yarn_config(**rope)
    shape = ModelShape.from_hf(config.to_dict())
    expected, attention = ROPE_INIT_FUNCTIONS["yarn"](config)
    found = inverse_frequencies(128, BASE, shape.rope_scaling)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)
    assert shape.rope_scaling.attention_factor == attention
    plain = inverse_frequencies(128, BASE)
    assert rope["factor"] == 1.0 or (torch.equal(found[:5], plain[:5]) and not torch.allclose(found[40:], plain[40:]))
    cos, sin = Qwen2RotaryEmbedding(config)(torch.zeros(1), torch.tensor([[0, 3, 3000]]))
    table = RotaryTable.of(torch.tensor([0, 3, 3000]), 128, BASE, shape.rope_scaling)
    for ours, theirs in zip(table, (cos, sin), strict=True):
        torch.testing.assert_close(ours, theirs[0, :, :64], atol=2e-3, rtol=0)


def test_with_transformer_engine_the_attention_factor_scales_the_scores():
    """Its rotation cannot scale. With some channels not rotated the two are not the same, and it is refused."""
    shape = ModelShape.from_hf(yarn_config(factor=4.0).to_dict())
    factor = shape.rope_scaling.attention_factor
    assert factor > 1.1 and _scaled_softmax(shape, factor) == pytest.approx(factor**2 / 128**0.5)
    positions, x = torch.tensor([3, 900]), torch.randn(2, 1, 128)
    plain = replace(shape.rope_scaling, attention_factor=1.0)
    scaled, unscaled = (
        rotate(x, RotaryTable.of(positions, 128, BASE, yarn))[:, 0] for yarn in (shape.rope_scaling, plain)
    )
    torch.testing.assert_close(scaled @ scaled.mT, unscaled @ unscaled.mT * factor**2, atol=1e-3, rtol=1e-5)
    with pytest.raises(ConfigError, match="on 64 of 128 channels of a head is not supported with Transformer Engine"):
        _scaled_softmax(replace(shape, rotary_dim=64), factor)


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
