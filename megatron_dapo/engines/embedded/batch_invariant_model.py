"""A Qwen model of transformers whose results do not depend on what else is in the batch.

Every forward pass has `batch_tokens` tokens, each a token of some sequence at some position, padded where there is less
to compute. Because all matrix products have the same shape in every pass, and attention runs over key pages of fixed
size, a token's result depends on the weights and on the tokens before it in its own sequence, and on nothing else: not
on the other sequences, not on its index in the batch, not on whether it belongs to a prompt or was just sampled. This
holds bit for bit, so a sample can be interrupted and continued, or repeated in another batch, and stays the same
(tests/engines/test_embedded.py).

`WeightLoader` sets the weights of such a model from buckets of HF-named tensors. `PagedCache` has what the layers keep
of each sequence, in pages of PAGE positions. Page 0 belongs to no sequence: padding writes there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from megatron_dapo.batch_invariant import PAGE, BatchInvariant, attend, delta_rule_step
from megatron_dapo.config.families import FAMILIES
from megatron_dapo.engines.protocol import SamplingParams
from megatron_dapo.errors import EngineError
from megatron_dapo.sync.bucket import Bucket, Manifest

CURRENT, BEFORE = 0, 1  # the state after the last written position, and before it
TENSORS = ("keys", "values", "windows", "states")


class LinearUpdate(NamedTuple):
    """One token in a gated DeltaNet layer: where its state comes from, and the page that it is written to."""

    row: int
    source: tuple[int, int] | None  # page, and CURRENT or BEFORE; None: the sequence starts
    page: int


class PagedCache:
    """Four tensors [layers, pages, …], which grow when pages run out.

    keys, values      [layers, pages, kv_heads, PAGE, head_dim] of the attention layers
    windows, states   [layers, pages, 2, …] of the gated DeltaNet layers, in fp32: the last inputs of the convolution
                      and the memory, after the last written position of the page and before it
    """

    def __init__(self, config: Any, head_dim: int, dtype: torch.dtype) -> None:
        self.linear_layers = list(getattr(config, "layer_types", None) or []).count("linear_attention")
        layers = config.num_hidden_layers - self.linear_layers
        self.keys = torch.zeros(layers, 1, config.num_key_value_heads, PAGE, head_dim, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.windows = self.states = torch.zeros(0, 1)
        if self.linear_layers:
            heads = config.linear_num_value_heads
            keys, values = config.linear_key_head_dim, config.linear_value_head_dim
            channels = 2 * config.linear_num_key_heads * keys + heads * values
            self.windows = torch.zeros(self.linear_layers, 1, 2, config.linear_conv_kernel_dim - 1, channels)
            self.states = torch.zeros(self.linear_layers, 1, 2, heads, keys, values)
        self._free: list[int] = []
        self._written = [-1]  # by page: the last position that a gated DeltaNet layer has written, in the page

    def allocate(self) -> int:
        if not self._free:
            self._grow()
        page = self._free.pop()
        for name in TENSORS:
            # Values of an earlier sequence must be finite: masked positions are multiplied by zero, not skipped.
            getattr(self, name)[:, page].zero_()
        self._written[page] = -1
        return page

    def release(self, pages: list[int]) -> None:
        self._free.extend(pages)

    def copy(self, pages: list[int]) -> list[int]:
        copies = [self.allocate() for _ in pages]
        for name in TENSORS:
            tensor = getattr(self, name)
            tensor[:, copies] = tensor[:, pages]
        for page, copied in zip(pages, copies, strict=True):
            self._written[copied] = self._written[page]
        return copies

    def _grow(self) -> None:
        pages = len(self._written)
        more = max(64, pages)
        for name in TENSORS:
            tensor = getattr(self, name)
            layers, _, *rest = tensor.shape
            setattr(self, name, torch.cat([tensor, tensor.new_zeros(layers, more, *rest)], dim=1))
        self._written += [-1] * more
        self._free.extend(range(pages + more - 1, pages - 1, -1))

    def linear_updates(self, positions: list[int], pages: list[list[int]]) -> list[LinearUpdate]:
        """What the gated DeltaNet layers write in one forward pass, in order. Rows without pages are padding."""
        updates: list[LinearUpdate] = []
        for row, (position, held) in enumerate(zip(positions, pages, strict=True)):
            block, offset = divmod(position, PAGE)
            page = held[block]
            if page == 0:
                continue
            if offset == 0:
                source = (held[block - 1], CURRENT) if block else None
            else:
                again, written = self._written[page] == offset, self._written[page]
                assert again or written == offset - 1, f"position {position} after {written}"
                source = (page, BEFORE if again else CURRENT)
            updates.append(LinearUpdate(row, source, page))
            self._written[page] = offset
        return updates


class PromptCache:
    """Pages of prompts, computed with the current weights: the samples of a group compute their prompt once. At most
    `size` prompts; the least recently used one makes room."""

    def __init__(self, size: int, cache: PagedCache) -> None:
        self.size = size
        self._cache = cache
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


class BatchInvariantModel:
    """`forward` maps [batch_tokens] tokens to [batch_tokens, vocabulary] logits, using the paged cache."""

    def __init__(self, model: Any, batch_tokens: int, *, exact: bool = False) -> None:
        """`exact`: with the bits of a trainer that has `policy.true_on_policy`."""
        config = model.config
        family = FAMILIES.get(config.model_type)
        if family is None or family.text_config:
            known = ", ".join(name for name, known in FAMILIES.items() if not known.text_config)
            raise EngineError(f"embedded engine: the model is of type {config.model_type!r}; expected one of {known}")
        if getattr(config, family.window_key, None):
            raise EngineError(f"embedded engine: sliding-window attention is not supported ({family.window_key})")
        self.model = model.eval()
        self.batch_tokens = batch_tokens
        self.exact = exact
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.max_tokens: int = config.max_position_embeddings
        self.cache = PagedCache(config, self.head_dim, model.dtype)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, pages: Tensor) -> Tensor:
        with BatchInvariant() if self.exact else nullcontext():
            return self._forward(tokens, positions, pages)

    def _forward(self, tokens: Tensor, positions: Tensor, pages: Tensor) -> Tensor:
        """tokens [batch_tokens], positions [batch_tokens], pages [batch_tokens, blocks] -> logits.

        `pages` are the page ids of each token's sequence, 0 beyond its end.
        """
        body = self.model.model
        hidden = body.embed_tokens(tokens)
        cos, sin = (part[0].unsqueeze(1) for part in body.rotary_emb(hidden, positions.unsqueeze(0)))
        write = (pages.gather(1, (positions // PAGE).unsqueeze(1)).squeeze(1), positions % PAGE)
        linear = self.cache.linear_layers
        updates = self.cache.linear_updates(positions.tolist(), pages.tolist()) if linear else []
        attention_layers, linear_layers = count(), count()
        for layer in body.layers:
            normed = layer.input_layernorm(hidden)
            if hasattr(layer, "linear_attn"):
                hidden = hidden + _linear_attention(layer.linear_attn, normed, self.cache, next(linear_layers), updates)
            else:
                index = next(attention_layers)
                query, key, value, gate = self._heads(layer.self_attn, normed, cos, sin)
                self.cache.keys[index][write[0], :, write[1]] = key
                self.cache.values[index][write[0], :, write[1]] = value
                cached = self.cache.keys[index], self.cache.values[index]
                attended = attend(query, *cached, pages, positions, self.head_dim**-0.5)
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
    scores, chosen = _route(mlp.gate, hidden)
    experts = mlp.experts
    share = torch.zeros(hidden.shape[0], experts.num_experts, dtype=hidden.dtype).scatter_(1, chosen, scores)
    mixed = torch.zeros_like(hidden)
    for index in range(experts.num_experts):
        gate, up = F.linear(hidden, experts.gate_up_proj[index]).chunk(2, dim=-1)
        mixed = mixed + F.linear(experts.act_fn(gate) * up * share[:, index, None], experts.down_proj[index])
    if hasattr(mlp, "shared_expert"):
        mixed = mixed + torch.sigmoid(mlp.shared_expert_gate(hidden)) * mlp.shared_expert(hidden)
    return mixed


def _route(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and indices of the experts of each token, in the trainer's order of operations."""
    logits = F.linear(hidden, router.weight)
    if router.norm_topk_prob:
        logits, chosen = logits.topk(router.top_k, dim=-1)
        return logits.softmax(-1), chosen
    scores, chosen = logits.softmax(-1).topk(router.top_k, dim=-1)
    return scores, chosen


def _linear_attention(
    module: Any, hidden: Tensor, cache: PagedCache, layer: int, updates: list[LinearUpdate]
) -> Tensor:
    """hidden [batch tokens, hidden size] through a gated DeltaNet of transformers; `layer` counts these layers.

    One token after the other, so that a token's bits depend only on the tokens before it in its own sequence.
    """
    mixed, z, b, a = _linear_projections(module, hidden)
    beta = b.sigmoid().float()
    decay = (-module.A_log.float().exp() * F.softplus(a.float() + module.dt_bias)).exp()
    weight = module.conv1d.weight.squeeze(1).float().T  # [width, channels]
    out = torch.zeros(hidden.shape[0], module.num_v_heads, module.head_v_dim)
    for row, source, page in updates:
        windows, memories = cache.windows[layer], cache.states[layer]
        if source is None:
            window, memory = torch.zeros_like(windows[0, 0]), torch.zeros_like(memories[0, 0])
        else:
            window, memory = windows[source].clone(), memories[source].clone()
        inputs = torch.cat([window, mixed[row : row + 1].float()])
        total = inputs[-1] * weight[-1]  # the newest first, as in the trainer
        for back in range(2, len(inputs) + 1):
            total = total + inputs[-back] * weight[-back]
        q, k, v = _linear_heads(module, F.silu(total))
        out[row], new = delta_rule_step(memory, q, k, v, decay[row], beta[row])
        windows[page, BEFORE], memories[page, BEFORE] = window, memory
        windows[page, CURRENT], memories[page, CURRENT] = inputs[1:], new
    heads = out.to(hidden.dtype).reshape(-1, module.head_v_dim)
    normed = module.norm(heads, z.reshape(-1, module.head_v_dim))
    projected: Tensor = module.out_proj(normed.view(hidden.shape[0], -1))
    return projected


def _linear_projections(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v [batch tokens, channels], then z, b and a."""
    if not hasattr(module, "in_proj_qkvz"):
        return module.in_proj_qkv(hidden), module.in_proj_z(hidden), module.in_proj_b(hidden), module.in_proj_a(hidden)
    fused = module.in_proj_qkvz(hidden)[None], module.in_proj_ba(hidden)[None]
    q, k, v, z, b, a = (part[0] for part in module.fix_query_key_value_ordering(*fused))
    return torch.cat([x.reshape(hidden.shape[0], -1) for x in (q, k, v)], dim=-1), z, b, a


def _linear_heads(module: Any, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k of unit length, one per value head; q is also divided by √dk."""
    q, k, v = mixed.split([module.key_dim, module.key_dim, module.value_dim])
    q, k = (x.view(-1, module.head_k_dim) for x in (q, k))
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    repeats = module.num_v_heads // module.num_k_heads
    q, k = (x.repeat_interleave(repeats, dim=0) for x in (q, k))
    return q * module.head_k_dim**-0.5, k, v.view(-1, module.head_v_dim)


class WeightLoader:
    """`load` and `missing` return an error message, or an empty string."""

    def __init__(self, model: Any) -> None:
        self._targets = dict(checkpoint_tensors(model))
        shapes = {name: tuple(target.shape) for name, target in self._targets.items()}
        self._manifest = Manifest(shapes, tied=bool(model.config.tie_word_embeddings))
        self.missing = self._manifest.missing
        self.count = self.bytes = 0

    def load(self, bucket: Bucket) -> str:
        for full_name, tensor in bucket:
            name = full_name.replace("model.language_model.", "model.", 1)
            if problem := self._manifest.check([(name, tensor)]):
                return problem
            with torch.no_grad():
                self._targets[name].copy_(tensor)
            self.count += 1
            self.bytes += tensor.numel() * tensor.element_size()
        return ""


def checkpoint_tensors(model: Any) -> list[tuple[str, Tensor]]:
    """Every tensor of the model under its name in a checkpoint."""
    found: list[tuple[str, Tensor]] = []
    for name, parameter in model.state_dict(keep_vars=True).items():
        data = parameter.data
        if name.endswith(".mlp.experts.gate_up_proj"):
            prefix = name.removesuffix(".gate_up_proj")
            for index, expert in enumerate(data):
                gate, up = expert.chunk(2)
                found += [(f"{prefix}.{index}.gate_proj.weight", gate), (f"{prefix}.{index}.up_proj.weight", up)]
        elif name.endswith(".mlp.experts.down_proj"):
            prefix = name.removesuffix(".down_proj")
            found += [(f"{prefix}.{index}.down_proj.weight", expert) for index, expert in enumerate(data)]
        else:
            found.append((name, data))
    return found


# Samples tokens from the distribution that SGLang samples from, with one random number per (seed, position).


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position): splitmix64 applied twice, the upper 53 bits."""
    with np.errstate(over="ignore"):
        mixed = _splitmix(_splitmix(seeds) + positions * _GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@torch.inference_mode()
def sample_tokens(
    logits: Tensor, params: Sequence[SamplingParams], numbers: NDArray[np.float64], *, exact: bool = False
) -> tuple[Tensor, Tensor]:
    """logits [tokens, vocabulary] -> (token, log-prob), each [tokens]; log-probs as protocol.py defines them."""
    temperatures = torch.tensor([p.temperature if p.temperature > 0 else 1.0 for p in params]).unsqueeze(1)
    if exact:  # as the trainer's head computes them
        with BatchInvariant():
            scaled = logits.float() * (1 / temperatures)
            peak = scaled.amax(-1, keepdim=True)
            logprobs = scaled - (peak + (scaled - peak).exp().sum(-1, keepdim=True).log())
    else:
        logprobs = torch.log_softmax(logits.float() / temperatures, dim=-1)
    weights = logprobs.exp().double()
    if any(p.top_k > 0 or p.top_p < 1 for p in params):
        weights = _truncate(weights, params)
    ends = weights.cumsum(-1)
    thresholds = torch.from_numpy(numbers).unsqueeze(1) * ends[:, -1:]
    tokens = (ends <= thresholds).sum(-1)
    greedy = torch.tensor([p.temperature == 0 for p in params])
    # A threshold that rounds up to the total lies beyond the last token: take the most likely one instead.
    tokens = torch.where(greedy | (tokens >= logits.shape[1]), logprobs.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _truncate(weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Sets weights outside top-k and top-p to zero; both are measured on the full distribution."""
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    top_k = torch.tensor([p.top_k if p.top_k > 0 else weights.shape[1] for p in params]).unsqueeze(1)
    top_p = torch.tensor([p.top_p for p in params], dtype=weights.dtype).unsqueeze(1)
    excluded = torch.arange(weights.shape[1]).unsqueeze(0) >= top_k
    excluded |= (before > top_p) & (top_p < 1)
    return torch.zeros_like(weights).scatter_(1, order, ordered.masked_fill(excluded, 0.0))
