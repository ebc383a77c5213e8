"""Small models, random weights and awkward mini-batches, for the self-check and the tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_dapo.config import ModelShape
from megatron_dapo.config.model import LinearAttention, Llama3Rope
from megatron_dapo.policy.batch import TrainBatch
from megatron_dapo.types import RoutedExperts
from megatron_dapo.weights.mapping import ParameterMapping, parameter_mappings

MODELS = ("dense", "tied", "moe", "moe-shared", "moe-mixed", "hybrid")
MORE_MODELS = ("llama", "mistral")  # by name only: little that the others do not have


class ModelSize(NamedTuple):
    """What a layout must divide. `wide`: matrices that fp8 kernels and fused attention take."""

    layers: int = 4
    kv_heads: int = 2
    experts: int = 4
    wide: bool = False


SMALL = ModelSize()


def multiple(number: int, *, at_least: int) -> int:
    """The smallest multiple of `number` that is not below `at_least`."""
    return -(-at_least // number) * number


def synthetic_shape(kind: str, size: ModelSize = SMALL) -> ModelShape:
    """`dense`: Qwen2 with QKV bias. `tied`: Qwen3 with q/k norms and tied embeddings. `moe`: Qwen3 with experts.
    `moe-shared`: Qwen2 with experts, a gated shared expert and QKV bias. `moe-mixed`: Qwen3 with experts in every other
    layer. `hybrid`: Qwen3-Next, with a gated DeltaNet in every other layer. `llama`: Llama 3.2, with its rope scaling
    and tied embeddings. `mistral`: Mistral, whose heads together are wider than the hidden state.

    All have grouped heads, MLPs that the heads divide, and a vocabulary that no layout divides.

    The first outputs of a delta rule are β·(q·k)·v, and its norm divides by their length: where random q and k are
    nearly orthogonal, that multiplies rounding errors. With an eps of 1e-3 the gradients of `hybrid` are as exact as
    those of the others (2e-6 from fp64 instead of 9e-6, in one process as well as in a layout).
    """
    heads, wide = 2 * size.kv_heads, size.wide
    base: dict[str, Any] = {
        "layers": size.layers, "hidden": 256 if wide else 32, "heads": heads, "kv_heads": size.kv_heads, "vocab": 101,
        "ffn_hidden": multiple(size.kv_heads, at_least=512 if wide else 48), "max_positions": 512, "rope_theta": 1e4,
        "norm_eps": 1e-3 if kind == "hybrid" else 1e-6, "dtype": "float32",
    }  # fmt: skip
    qwen2: dict[str, Any] = {"head_dim": 64 if wide else 8, "qkv_bias": True, "qk_norm": False, **base}
    qwen3: dict[str, Any] = {"head_dim": 64 if wide else 16, "qkv_bias": False, "qk_norm": True, **base}
    experts: dict[str, Any] = {
        "experts": size.experts, "experts_per_token": 2, "expert_ffn_hidden": 256 if wide else 24,
    }  # fmt: skip
    shared = multiple(size.kv_heads, at_least=256 if wide else 40)
    match kind:
        case "dense":
            return ModelShape("qwen2", tied_embeddings=False, **qwen2)
        case "tied":
            return ModelShape("qwen3", tied_embeddings=True, **qwen3)
        case "moe":
            return ModelShape("qwen3_moe", tied_embeddings=False, **qwen3, **experts)
        case "moe-mixed":
            mixed = tuple(range(0, size.layers, 2))
            return ModelShape("qwen3_moe", tied_embeddings=False, dense_layers=mixed, **qwen3, **experts)
        case "llama":
            rope = Llama3Rope(factor=8.0, original_positions=64, low=1.0, high=4.0)
            return ModelShape("llama", tied_embeddings=True, rope_scaling=rope, **qwen2 | {"qkv_bias": False})
        case "mistral":
            return ModelShape("mistral", tied_embeddings=False, **qwen3 | {"qk_norm": False})
        case "moe-shared":
            return ModelShape(
                "qwen2_moe", tied_embeddings=False, norm_topk_prob=False, shared_ffn_hidden=shared, **qwen2, **experts,
            )  # fmt: skip
        case "hybrid":
            dims = (14, 16) if wide else (4, 6)
            linear = LinearAttention(tuple(range(0, size.layers, 2)), 8, 16, *dims, conv_width=4, fused=True)
            return ModelShape(
                "qwen3_next", tied_embeddings=False, shared_ffn_hidden=shared, linear=linear,
                rotary_dim=16 if wide else 4, attention_gate=True, zero_centred_norms=True, carried=("mtp.",),
                **qwen3, **experts,
            )  # fmt: skip
    raise ValueError(f"unknown kind of model {kind!r}")


def random_hf_weights(shape: ModelShape, seed: int = 0, scale: float = 0.1) -> dict[str, Tensor]:
    """Random weights under HF names. Norms multiply by about one and biases are not zero, so that every mapping error
    shows."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for mapping in parameter_mappings(shape).values():
        for name, size in zip(mapping.hf, mapping.hf_shapes, strict=True):
            noise = torch.randn(size, generator=generator) * scale
            centre = 1 if "linear_attn.norm" in name or ("norm" in name and not shape.zero_centred_norms) else 0
            weights[name] = centre + noise
    return weights


def awkward_batch(shape: ModelShape, seed: int, samples: int = 14) -> TrainBatch:
    """Unequal lengths; sample 3 is masked, sample 5 partly; every third is right, 3 and others among them; old
    log-probs and values differ enough to clip on both sides."""
    rng = np.random.default_rng(seed)
    prompts, responses = rng.integers(2, 9, samples), rng.integers(3, 30, samples)
    total = int(responses.sum())
    mask = np.ones(total, dtype=np.bool_)
    starts = np.concatenate([[0], np.cumsum(responses)])
    mask[starts[3] : starts[4]] = False
    mask[starts[5] : starts[5] + 2] = False
    typical = -np.log(shape.vocab)
    return TrainBatch(
        tokens=rng.integers(0, shape.vocab, int((prompts + responses).sum())).astype(np.int32),
        prompt_lengths=prompts.astype(np.int64),
        response_lengths=responses.astype(np.int64),
        advantages=rng.normal(size=samples).astype(np.float32),
        loss_mask=mask,
        old_logprobs=(typical + 0.5 * rng.normal(size=total)).astype(np.float32),
        engine_logprobs=(typical + 0.5 * rng.normal(size=total)).astype(np.float32),
        ref_logprobs=(typical + 0.5 * rng.normal(size=total)).astype(np.float32),
        values=rng.normal(size=total).astype(np.float32),
        returns=rng.normal(size=total).astype(np.float32),
        right=np.arange(samples) % 3 == 0,
    )


def random_experts(shape: ModelShape, batch: TrainBatch, seed: int, unknown: float = 0.2) -> list[RoutedExperts | None]:
    """Distinct experts for every token and layer, unrelated to the router's choice. With a share `unknown` that are not
    known, the last token of each sample is among them, as in a run."""
    rng = np.random.default_rng(seed)
    found: list[RoutedExperts | None] = []
    for length in batch.lengths - (1 if unknown else 0):
        order = rng.random((length, shape.layers, shape.experts)).argsort(-1)[..., : shape.experts_per_token] + 1
        order[rng.random(length) < unknown] = 0
        found.append(order.reshape(length, -1).astype(np.uint8))
    return found


def random_adapters(mappings: Mapping[str, ParameterMapping]) -> dict[str, Tensor]:
    """LoRA's tensors with values of the size that training reaches, in B as well."""
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(m.shape, generator=generator) * 0.05 for name, m in sorted(mappings.items())}
