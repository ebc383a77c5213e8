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

from collections import OrderedDict
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_dapo.errors import EngineError

# Gated DeltaNet layers for the embedded engine: one token after the other, so that a token's bits depend only on the
# tokens before it in its own sequence.


CURRENT, BEFORE = 0, 1  # the state after the last written position, and before it


class Update(NamedTuple):
    """One token of a forward pass: where its state comes from, and the page that it is written to."""

    row: int
    source: tuple[int, int] | None  # page, and CURRENT or BEFORE; None: the sequence starts
    page: int


class LinearStates:
    """Windows [layers, pages, 2, width − 1, channels] and states [layers, pages, 2, heads, dk, dv], in fp32."""

    def __init__(self, config: Any) -> None:
        heads, keys, values = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
        channels = 2 * config.linear_num_key_heads * keys + heads * values
        layers = sum(kind == "linear_attention" for kind in config.layer_types)
        self.windows = torch.zeros(layers, 1, 2, config.linear_conv_kernel_dim - 1, channels)
        self.states = torch.zeros(layers, 1, 2, heads, keys, values)
        self.written = [-1]  # by page: the last position that was written, in the page

    def grow(self, pages: int) -> None:
        for name in ("windows", "states"):
            tensor = getattr(self, name)
            layers, _, *rest = tensor.shape
            setattr(self, name, torch.cat([tensor, torch.zeros(layers, pages, *rest)], dim=1))
        self.written += [-1] * pages

    def clear(self, page: int) -> None:
        self.written[page] = -1

    def copy(self, pages: list[int], copies: list[int]) -> None:
        self.windows[:, copies], self.states[:, copies] = self.windows[:, pages], self.states[:, pages]
        for page, copied in zip(pages, copies, strict=True):
            self.written[copied] = self.written[page]

    def plan(self, positions: list[int], pages: list[list[int]], page_size: int) -> list[Update]:
        """The updates of one forward pass, in order. Rows without pages are padding."""
        updates = []
        for row, (position, held) in enumerate(zip(positions, pages, strict=True)):
            block, offset = divmod(position, page_size)
            page = held[block]
            if page == 0:
                continue
            if offset == 0:
                source = (held[block - 1], CURRENT) if block else None
            else:
                again = self.written[page] == offset
                assert again or self.written[page] == offset - 1, f"position {position} after {self.written[page]}"
                source = (page, BEFORE if again else CURRENT)
            updates.append(Update(row, source, page))
            self.written[page] = offset
        return updates


def linear_attention(module: Any, hidden: Tensor, states: LinearStates, layer: int, updates: list[Update]) -> Tensor:
    """hidden [batch tokens, hidden size] through a transformers' gated DeltaNet; `layer` counts these layers."""
    mixed, z, b, a = _projections(module, hidden)
    beta = b.sigmoid().float()
    decay = (-module.A_log.float().exp() * F.softplus(a.float() + module.dt_bias)).exp()
    weight = module.conv1d.weight.squeeze(1).float().T  # [width, channels]
    out = torch.zeros(hidden.shape[0], module.num_v_heads, module.head_v_dim)
    for row, source, page in updates:
        windows, memories = states.windows[layer], states.states[layer]
        if source is None:
            window, memory = torch.zeros_like(windows[0, 0]), torch.zeros_like(memories[0, 0])
        else:
            window, memory = windows[source].clone(), memories[source].clone()
        inputs = torch.cat([window, mixed[row : row + 1].float()])
        q, k, v = _heads(module, F.silu((inputs * weight).sum(0)))
        new = memory * decay[row, :, None, None]
        delta = (v - (new * k[..., None]).sum(-2)) * beta[row, :, None]
        new = new + k[..., None] * delta[:, None, :]
        out[row] = (new * q[..., None]).sum(-2)
        windows[page, BEFORE], memories[page, BEFORE] = window, memory
        windows[page, CURRENT], memories[page, CURRENT] = inputs[1:], new
    heads = out.to(hidden.dtype).reshape(-1, module.head_v_dim)
    normed = module.norm(heads, z.reshape(-1, module.head_v_dim))
    projected: Tensor = module.out_proj(normed.view(hidden.shape[0], -1))
    return projected


def _projections(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v [batch tokens, channels], then z, b and a."""
    if not hasattr(module, "in_proj_qkvz"):
        return module.in_proj_qkv(hidden), module.in_proj_z(hidden), module.in_proj_b(hidden), module.in_proj_a(hidden)
    fused = module.in_proj_qkvz(hidden)[None], module.in_proj_ba(hidden)[None]
    q, k, v, z, b, a = (part[0] for part in module.fix_query_key_value_ordering(*fused))
    return torch.cat([x.reshape(hidden.shape[0], -1) for x in (q, k, v)], dim=-1), z, b, a


def _heads(module: Any, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k of unit length, one per value head; q is also divided by √dk."""
    q, k, v = mixed.split([module.key_dim, module.key_dim, module.value_dim])
    q, k = (x.view(-1, module.head_k_dim) for x in (q, k))
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    repeats = module.num_v_heads // module.num_k_heads
    q, k = (x.repeat_interleave(repeats, dim=0) for x in (q, k))
    return q * module.head_k_dim**-0.5, k, v.view(-1, module.head_v_dim)


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


# Keys and values of prompts, computed with the current weights: the G samples of a prompt compute it once.


class PromptCache:
    """At most `size` prompts; the least recently used one makes room."""

    def __init__(self, size: int, cache: PagedCache) -> None:
        self.size, self._cache = size, cache
        self._pages: OrderedDict[bytes, list[int]] = OrderedDict()

    def copy(self, key: bytes) -> list[int]:
        """A copy of the prompt's pages for one request; empty when the prompt is not cached."""
        if key not in self._pages:
            return []
        self._pages.move_to_end(key)
        return self._cache.copy(self._pages[key])

    def store(self, key: bytes, pages: list[int]) -> None:
        if not self.size or key in self._pages:
            return
        while len(self._pages) >= self.size:
            self._cache.release(self._pages.popitem(last=False)[1])
        self._pages[key] = self._cache.copy(pages)

    def clear(self) -> None:
        for pages in self._pages.values():
            self._cache.release(pages)
        self._pages.clear()
