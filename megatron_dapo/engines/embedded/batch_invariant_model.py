"""A Qwen model of transformers whose results do not depend on what else is in the batch.

Every forward pass has `batch_tokens` tokens, each a token of some sequence at some position, padded where there is less
to compute. Because all matrix products have the same shape in every pass, and attention runs over key pages of fixed
size, a token's result depends on the weights and on the tokens before it in its own sequence, and on nothing else: not
on the other sequences, not on its index in the batch, not on whether it belongs to a prompt or was just sampled. This
holds bit for bit, so a sample can be interrupted and continued, or repeated in another batch, and stays the same
(tests/engines/test_embedded.py).

Keys and values are stored in pages of PAGE positions. Page 0 belongs to no sequence: padding writes there.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_dapo.engines.embedded.linear_attention import LinearStates, linear_attention
from megatron_dapo.engines.protocol import EngineError

PAGE = 64
MODEL_TYPES = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


class PagedCache:
    """Keys and values of all attention layers, [layers, pages, kv_heads, PAGE, head_dim], and what the gated DeltaNet
    layers keep; grows when pages run out."""

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, linear: LinearStates | None = None
    ) -> None:
        self.linear = linear
        self.shape = (layers, kv_heads, PAGE, head_dim)
        self.keys = torch.zeros(layers, 1, *self.shape[1:], dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.free: list[int] = []

    def allocate(self) -> int:
        if not self.free:
            self._grow()
        page = self.free.pop()
        # Values of an earlier sequence must be finite: masked positions are multiplied by zero, not skipped.
        self.keys[:, page].zero_()
        self.values[:, page].zero_()
        if self.linear:
            self.linear.clear(page)
        return page

    def release(self, pages: list[int]) -> None:
        self.free.extend(pages)

    def copy(self, pages: list[int]) -> list[int]:
        copies = [self.allocate() for _ in pages]
        if pages:
            self.keys[:, copies] = self.keys[:, pages]
            self.values[:, copies] = self.values[:, pages]
            if self.linear:
                self.linear.copy(pages, copies)
        return copies

    def _grow(self) -> None:
        pages = self.keys.shape[1]
        more = max(64, pages)
        layers, *rest = self.shape
        empty = torch.zeros(layers, more, *rest, dtype=self.keys.dtype)
        self.keys = torch.cat([self.keys, empty], dim=1)
        self.values = torch.cat([self.values, empty.clone()], dim=1)
        if self.linear:
            self.linear.grow(more)
        self.free.extend(range(pages + more - 1, pages - 1, -1))


class BatchInvariantModel:
    """`forward` maps [batch_tokens] tokens to [batch_tokens, vocabulary] logits, using the paged cache."""

    def __init__(self, model: Any, batch_tokens: int) -> None:
        config = model.config
        if config.model_type not in MODEL_TYPES:
            raise EngineError(
                f"embedded engine: the model is of type {config.model_type!r}; expected one of {', '.join(MODEL_TYPES)}"
            )
        if getattr(config, "use_sliding_window", False):
            raise EngineError("embedded engine: sliding-window attention is not supported (use_sliding_window)")
        self.model, self.batch_tokens = model.eval(), batch_tokens
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.max_tokens: int = config.max_position_embeddings
        self.cache = self.empty_cache()

    def empty_cache(self) -> PagedCache:
        layers = sum(hasattr(layer, "self_attn") for layer in self.model.model.layers)
        linear = LinearStates(self.model.config) if layers < self.model.config.num_hidden_layers else None
        return PagedCache(layers, self.kv_heads, self.head_dim, self.model.dtype, linear)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, pages: Tensor) -> Tensor:
        """tokens [batch_tokens], positions [batch_tokens], pages [batch_tokens, blocks] -> logits.

        `pages` are the page ids of each token's sequence, 0 beyond its end.
        """
        body = self.model.model
        hidden = body.embed_tokens(tokens)
        cos, sin = (part[0].unsqueeze(1) for part in body.rotary_emb(hidden, positions.unsqueeze(0)))
        write = (pages.gather(1, (positions // PAGE).unsqueeze(1)).squeeze(1), positions % PAGE)
        masked = torch.arange(pages.shape[1] * PAGE).view(-1, 1, 1, PAGE) > positions.view(1, -1, 1, 1)
        linear, attention_layers, linear_layers = self.cache.linear, count(), count()
        updates = linear.plan(positions.tolist(), pages.tolist(), PAGE) if linear else []
        for layer in body.layers:
            normed = layer.input_layernorm(hidden)
            if linear and hasattr(layer, "linear_attn"):
                hidden = hidden + linear_attention(layer.linear_attn, normed, linear, next(linear_layers), updates)
            else:
                index = next(attention_layers)
                query, key, value, gate = self._heads(layer.self_attn, normed, cos, sin)
                self.cache.keys[index][write[0], :, write[1]] = key
                self.cache.values[index][write[0], :, write[1]] = value
                attended = self._attend(index, query, pages, masked)
                hidden = hidden + layer.self_attn.o_proj(attended if gate is None else attended * gate)
            normed = layer.post_attention_layernorm(hidden)
            hidden = hidden + _feed_forward(layer.mlp, normed)
        logits: Tensor = self.model.lm_head(body.norm(hidden))
        return logits

    def _heads(
        self, attention: Any, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Query, key, value, and the gate on the output of gated attention."""
        query, gate = attention.q_proj(hidden).view(self.batch_tokens, self.heads, -1), None
        if query.shape[-1] == 2 * self.head_dim:
            query, gate = query.chunk(2, dim=-1)
            gate = torch.sigmoid(gate.reshape(self.batch_tokens, -1))
        key = attention.k_proj(hidden).view(self.batch_tokens, self.kv_heads, self.head_dim)
        value = attention.v_proj(hidden).view(self.batch_tokens, self.kv_heads, self.head_dim)
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm(query), attention.k_norm(key)
        return _rotate(query, cos, sin), _rotate(key, cos, sin), value, gate

    def _attend(self, layer: int, query: Tensor, pages: Tensor, masked: Tensor) -> Tensor:
        """Softmax over pages with a running maximum; a page with no visible key changes nothing, not even rounding."""
        keys, values = self.cache.keys[layer].flatten(1), self.cache.values[layer].flatten(1)
        batch, group = self.batch_tokens * self.kv_heads, self.heads // self.kv_heads
        query = (query * self.head_dim**-0.5).reshape(batch, group, self.head_dim)
        peak = total = mixed = None
        for block in range(pages.shape[1]):
            page = pages[:, block]
            scores = torch.bmm(query, keys.index_select(0, page).view(batch, PAGE, self.head_dim).transpose(1, 2))
            scores = scores.view(self.batch_tokens, self.kv_heads, group, PAGE)
            scores = scores.masked_fill_(masked[block].unsqueeze(1), -torch.inf).view(batch, group, PAGE)
            block_peak = scores.amax(-1, keepdim=True)
            new_peak = block_peak if peak is None else torch.maximum(peak, block_peak)
            weights = (scores - new_peak).exp_()
            block_total = weights.sum(-1, keepdim=True)
            block_mixed = torch.bmm(weights, values.index_select(0, page).view(batch, PAGE, self.head_dim))
            if peak is None:
                total, mixed = block_total, block_mixed
            else:
                assert total is not None and mixed is not None
                shrink = (peak - new_peak).exp_()
                total, mixed = total * shrink + block_total, mixed * shrink + block_mixed
            peak = new_peak
        assert total is not None and mixed is not None
        return (mixed / total).view(self.batch_tokens, self.heads * self.head_dim)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated = cos.shape[-1]
    if rotated < x.shape[-1]:
        return torch.cat([_rotate(x[..., :rotated], cos, sin), x[..., rotated:]], dim=-1)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def _feed_forward(mlp: Any, hidden: Tensor) -> Tensor:
    if not hasattr(mlp, "experts"):
        out: Tensor = mlp(hidden)
        return out
    # Every expert computes every token: how many tokens the router sends to an expert depends on the batch.
    _, scores, chosen = mlp.gate(hidden)
    experts = mlp.experts
    share = torch.zeros(hidden.shape[0], experts.num_experts, dtype=hidden.dtype).scatter_(1, chosen, scores)
    mixed = torch.zeros_like(hidden)
    for index in range(experts.num_experts):
        gate, up = F.linear(hidden, experts.gate_up_proj[index]).chunk(2, dim=-1)
        mixed = mixed + F.linear(experts.act_fn(gate) * up, experts.down_proj[index]) * share[:, index, None]
    if hasattr(mlp, "shared_expert"):
        mixed = mixed + torch.sigmoid(mlp.shared_expert_gate(hidden)) * mlp.shared_expert(hidden)
    return mixed
