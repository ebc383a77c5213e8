"""transformers' models for a ModelShape, with random weights: the reference for our models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_dapo.config import Config, ModelShape
from megatron_dapo.config.model import LinearAttention, Llama3Rope, Yarn
from megatron_dapo.policy.batch import TrainBatch

COMMON: dict[str, Any] = {
    "layers": 2, "hidden": 64, "ffn_hidden": 96, "heads": 4, "kv_heads": 2, "vocab": 131, "max_positions": 256,
    "rope_theta": 1e6, "norm_eps": 1e-6, "dtype": "float32",
}  # fmt: skip

HYBRID: dict[str, Any] = {
    "head_dim": 32, "rotary_dim": 8, "qkv_bias": False, "qk_norm": True, "attention_gate": True,
    "zero_centred_norms": True, "carried": ("mtp.",),
}  # fmt: skip

SHAPES = {
    "llama": ModelShape(
        architecture="llama", head_dim=16, qkv_bias=False, qk_norm=False, tied_embeddings=True,
        rope_scaling=Llama3Rope(8.0, 64, 1.0, 4.0), **COMMON | {"rope_theta": 1e4},
    ),
    "qwen2": ModelShape(
        architecture="qwen2", head_dim=16, qkv_bias=True, qk_norm=False, tied_embeddings=False, **COMMON
    ),
    "qwen2-tied": ModelShape(
        architecture="qwen2", head_dim=16, qkv_bias=True, qk_norm=False, tied_embeddings=True, **COMMON
    ),
    "qwen3-wide-heads": ModelShape(
        architecture="qwen3", head_dim=32, qkv_bias=False, qk_norm=True, tied_embeddings=True, **COMMON
    ),
    "qwen3-moe": ModelShape(
        architecture="qwen3_moe", head_dim=32, qkv_bias=False, qk_norm=True, tied_embeddings=False,
        experts=4, experts_per_token=2, expert_ffn_hidden=48, norm_topk_prob=True, **COMMON,
    ),
    "qwen3-moe-unnormalised": ModelShape(
        architecture="qwen3_moe", head_dim=16, qkv_bias=False, qk_norm=True, tied_embeddings=False,
        experts=4, experts_per_token=2, expert_ffn_hidden=48, norm_topk_prob=False, **COMMON,
    ),
    "qwen2-moe": ModelShape(
        architecture="qwen2_moe", head_dim=16, qkv_bias=True, qk_norm=False, tied_embeddings=False,
        experts=4, experts_per_token=2, expert_ffn_hidden=48, norm_topk_prob=False, shared_ffn_hidden=80, **COMMON,
    ),
    "mixed-moe": ModelShape(
        architecture="qwen3_moe", head_dim=32, qkv_bias=False, qk_norm=True, tied_embeddings=False, dense_layers=(0,),
        experts=4, experts_per_token=2, expert_ffn_hidden=48, norm_topk_prob=True, **COMMON,
    ),
    "qwen3-next": ModelShape(
        architecture="qwen3_next", tied_embeddings=False, experts=4, experts_per_token=2, expert_ffn_hidden=48,
        shared_ffn_hidden=80, linear=LinearAttention((0,), 4, 8, 16, 24, conv_width=4, fused=True), **HYBRID, **COMMON,
    ),
    "qwen3.5": ModelShape(
        architecture="qwen3_5_text", tied_embeddings=True,
        linear=LinearAttention((0,), 4, 8, 16, 24, conv_width=4, fused=False), **HYBRID, **COMMON,
    ),
}  # fmt: skip


# The slowest channels are divided by 4, the fastest kept, and one is between them.
YARN = replace(SHAPES["qwen2"], rope_scaling=Yarn(4.0, 64, attention_factor=1.3, beta_fast=8.0))


def rope_options(shape: ModelShape) -> dict[str, Any]:
    yarn = shape.rope_scaling
    if yarn is None:
        return {"rope_type": "default", "rope_theta": shape.rope_theta}
    if isinstance(yarn, Llama3Rope):
        return {
            "rope_type": "llama3", "rope_theta": shape.rope_theta, "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_positions, "low_freq_factor": yarn.low,
            "high_freq_factor": yarn.high,
        }  # fmt: skip
    return {
        "rope_type": "yarn", "rope_theta": shape.rope_theta, "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_positions, "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow, "attention_factor": yarn.attention_factor,
    }  # fmt: skip


def hf_model(shape: ModelShape, seed: int = 0) -> Any:
    """Norms and biases are random, so that a swapped or missing tensor changes the logits."""
    options: dict[str, Any] = {
        "vocab_size": shape.vocab, "hidden_size": shape.hidden, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.ffn_hidden, "tie_word_embeddings": shape.tied_embeddings,
        "max_position_embeddings": shape.max_positions, "rms_norm_eps": shape.norm_eps, "initializer_range": 0.08,
        "rope_parameters": rope_options(shape),
    }  # fmt: skip
    if shape.linear:
        options |= hybrid_options(shape)
    torch.manual_seed(seed)
    if shape.architecture == "qwen3_5_text":
        model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**options))
    elif shape.architecture == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))
    elif shape.architecture == "qwen2":
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**options))
    elif shape.architecture == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(head_dim=shape.head_dim, **options))
    else:
        options |= {
            "num_experts": shape.experts, "num_experts_per_tok": shape.experts_per_token,
            "moe_intermediate_size": shape.expert_ffn_hidden, "norm_topk_prob": shape.norm_topk_prob,
            "mlp_only_layers": list(shape.dense_layers),
        }  # fmt: skip
        if shape.has_shared_expert:
            options["shared_expert_intermediate_size"] = shape.shared_ffn_hidden
        if shape.architecture == "qwen3_next":
            model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**options))
        elif shape.architecture == "qwen2_moe":
            model = transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**options))
        else:
            config = transformers.Qwen3MoeConfig(head_dim=shape.head_dim, **options)
            model = transformers.Qwen3MoeForCausalLM(config)
        model.set_experts_implementation("eager")  # the grouped matrix product has no fp64
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif name.endswith("A_log"):
                parameter.uniform_(0.01, 1.0).log_()  # strong decay amplifies rounding
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
    return model.float().eval()


def hybrid_options(shape: ModelShape) -> dict[str, Any]:
    linear = shape.linear
    assert linear is not None
    kinds = ["linear_attention" if i in linear.layers else "full_attention" for i in range(shape.layers)]
    share = shape.rotary_dim / shape.head_dim
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta, "partial_rotary_factor": share}
    return {
        "head_dim": shape.head_dim, "layer_types": kinds, "rope_parameters": rope,
        "linear_num_key_heads": linear.key_heads, "linear_num_value_heads": linear.value_heads,
        "linear_key_head_dim": linear.key_dim, "linear_value_head_dim": linear.value_dim,
        "linear_conv_kernel_dim": linear.conv_width,
    }  # fmt: skip


@contextlib.contextmanager
def fp64() -> Iterator[None]:
    """Casts to fp32 are casts to fp64."""
    names = {"float32": torch.float64, "float": torch.float64}
    with mock.patch.multiple(torch, **names), mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def in_fp64(model: Any, shape: ModelShape) -> Any:
    """The model in fp64, with its rotary frequencies, which are rounded to fp32 when it is built."""
    channels = torch.arange(0, shape.rotated, 2, dtype=torch.float64)
    rotary = model.double().model.rotary_emb
    if shape.rope_scaling is None:
        rotary.inv_freq = 1.0 / shape.rope_theta ** (channels / shape.rotated)
    else:
        with fp64():
            rotary.inv_freq, _ = ROPE_INIT_FUNCTIONS[model.config.rope_parameters["rope_type"]](model.config)
    return model


def hf_weights(model: Any, folder: Any) -> str:
    """Saves the model. The files have the names and shapes that users have (experts are stored one by one)."""
    model.save_pretrained(folder)
    return str(folder)


def hf_gradients(model: Any) -> dict[str, torch.Tensor]:
    """The gradients under the names of the files: transformers holds all experts of a layer in one parameter."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        stem, _, last = name.rpartition(".")
        if not stem.endswith(".experts"):
            found[name] = gradient
            continue
        for expert, part in enumerate(gradient):
            kinds = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
            for kind, piece in zip(kinds, part.chunk(len(kinds)), strict=True):
                found[f"{stem}.{expert}.{kind}.weight"] = piece
    return found


def routers(model: Any) -> list[Any]:
    """Of each layer, in order; none in a dense model. A router returns (logits, weights, experts)."""
    return [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "experts")]


def record_router_logits(model: Any) -> list[list[torch.Tensor]]:
    """Lists that each forward pass extends: [layers][passes] of [tokens, experts]."""
    found: list[list[torch.Tensor]] = [[] for _ in routers(model)]
    for router, calls in zip(routers(model), found, strict=True):
        router.register_forward_hook(lambda _, args, output, calls=calls: calls.append(output[0]))
    return found


def load_balancing_loss(logits: torch.Tensor, experts_per_token: int) -> torch.Tensor:
    """E · Σ f·P of one layer over all tokens [tokens, experts]; see policy/model/router.py."""
    tokens, experts = logits.shape
    probability = logits.softmax(-1)
    chosen = torch.zeros_like(probability).scatter(1, probability.topk(experts_per_token).indices, 1.0)
    share = chosen.sum(0) / (tokens * experts_per_token)
    return experts * (share * probability.mean(0)).sum()


def naive_gradients(
    model: Any, batch: TrainBatch, config: Config, before: Callable[[int], None] = lambda i: None
) -> tuple[float, dict[str, torch.Tensor]]:
    """The objective written out in fp64: min of the two surrogates, dual clip, k3, entropy, importance weight; one
    division; the mean of −log π over right responses; and the load-balancing loss of every layer with experts.
    `before(i)` is called before sample i."""
    a, model = config.algorithm, model.double()
    logits = record_router_logits(model)
    total, count = torch.zeros((), dtype=torch.float64), 0
    right: list[torch.Tensor] = []
    tokens = np.split(batch.tokens, np.cumsum(batch.lengths)[:-1])
    responses = [np.split(x, np.cumsum(batch.response_lengths)[:-1]) for x in (
        batch.old_logprobs, batch.engine_logprobs, batch.ref_logprobs, batch.loss_mask)]  # fmt: skip
    for i, (ids, old, engine, ref, mask) in enumerate(zip(tokens, *responses, strict=True)):
        before(i)
        ids, prompt = torch.from_numpy(ids).long(), int(batch.prompt_lengths[i])
        old, engine, ref = (torch.from_numpy(x).double() for x in (old, engine, ref))
        table = torch.log_softmax(model(ids[None]).logits[0, prompt - 1 : -1] / config.rollout.temperature, -1)
        logp = table[torch.arange(len(ids) - prompt), ids[prompt:]]
        advantage, ratio = float(batch.advantages[i]), torch.exp(logp - old)
        clipped = ratio.clamp(1 - a.clip_low, 1 + a.clip_high)
        surrogate = torch.minimum(ratio * advantage, clipped * advantage)
        if advantage < 0:
            surrogate = torch.maximum(surrogate, torch.tensor(a.dual_clip * advantage, dtype=torch.float64))
        weight = torch.exp(old - engine).clamp(max=a.off_policy.weight_cap)
        kl = torch.exp(ref - logp) - (ref - logp) - 1
        entropy = -(table.exp() * table).sum(-1)
        loss = -weight * surrogate + a.kl.coefficient * kl - a.entropy_coefficient * entropy
        total = total + loss[torch.from_numpy(mask)].sum()
        count += int(mask.sum())
        right += [logp[torch.from_numpy(mask)]] if batch.right[i] else []
    balance = [load_balancing_loss(torch.cat(layer), model.config.num_experts_per_tok) for layer in logits]
    loss = total / count - a.positive_coefficient * torch.cat(right).mean()
    (loss + config.policy.moe_aux_loss_coefficient * sum(balance)).backward()
    return float(loss.detach()), hf_gradients(model)


class GivenExperts:
    """Routes the tokens of a model to given experts: `experts[sample]` is [tokens, layers, k], counted from 1; 0 leaves
    the choice to the router, and so do tokens beyond it."""

    def __init__(self, model: Any, experts: list[Any]) -> None:
        self.experts, self.sample = experts, 0
        for layer, router in enumerate(routers(model)):
            router.register_forward_hook(lambda _, args, output, layer=layer: self._route(layer, *output))

    def before(self, sample: int) -> None:
        self.sample = sample

    def _route(self, layer: int, logits: torch.Tensor, weights: torch.Tensor, own: torch.Tensor) -> Any:
        chosen = own.clone()
        rows = torch.from_numpy(self.experts[self.sample][:, layer].astype(np.int64)) - 1
        chosen[: len(rows)] = torch.where((rows >= 0).all(-1, keepdim=True), rows, own[: len(rows)])
        return logits, logits.gather(1, chosen).softmax(-1), chosen
