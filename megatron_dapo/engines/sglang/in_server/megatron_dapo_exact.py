"""Makes an SGLang server compute with the trainer's kernels (megatron_dapo_kernels.py), for `policy.true_on_policy`.

A plugin of SGLang: the entry point in megatron_dapo_exact-1.dist-info names `install`, and the environment variable
SGLANG_PLUGINS chooses it. The server runs with --enable-deterministic-inference and --attention-backend triton; what it
replaces on top of that (qwen2, qwen3, llama):

- attention: decoding uses the kernel of prefill. SGLang's own splits the keys of a decoded token.
- matrix products: one order of sums for any number of rows; a bias is added to the rounded product, as Megatron does.
- RMSNorm: of the rounded sum of residual and output, which is what Megatron hands on.
- rotary embedding and SwiGLU: the trainer's operations.
- log-softmax: the statistics of the trainer's head.

SGLang ignores a plugin that fails. So the trainer asks: `POST /weights_checker {"action": "exact"}` is answered with
the checksum of the kernels and what uses them.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import megatron_dapo_checksums  # type: ignore[import-not-found]
import megatron_dapo_kernels as kernels  # type: ignore[import-not-found]
import torch
from torch import Tensor

ACTION = "exact"
GRAPHS = 4096  # larger than any batch of a CUDA graph
_backends: list[Any] = []  # of attention, that use our kernel


def install() -> None:
    from sglang.srt.batch_invariant_ops import batch_invariant_ops
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.utils.weight_checker import WeightChecker

    replaced = (
        (batch_invariant_ops, "matmul_persistent"), (batch_invariant_ops, "_log_softmax_batch_invariant"),
        (RMSNorm, "forward_cuda"), (SiluAndMul, "forward_cuda"), (RotaryEmbedding, "forward_cuda"),
        (WeightChecker, "_parallelism_info"),
    )  # fmt: skip
    for owner, name in replaced:
        getattr(owner, name)  # another version may have renamed it
    batch_invariant_ops.matmul_persistent = _matmul
    batch_invariant_ops._log_softmax_batch_invariant = _log_softmax
    RMSNorm.forward_cuda = _norm
    SiluAndMul.forward_cuda = SiluAndMul.forward_native
    RotaryEmbedding.forward_cuda = _rotate
    original = TritonAttnBackend.__init__

    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        most = max(self.req_to_token_pool.size, GRAPHS)
        places = torch.arange(most + 1, dtype=torch.int32, device=self.device)
        for name in ("extend_attention_fwd_unified", "decode_attention_fwd"):
            getattr(self, name)
        self.extend_attention_fwd_unified = _extend
        self.decode_attention_fwd = lambda *args, **kwargs: _decode(places, *args, **kwargs)
        _backends.append(self)

    TritonAttnBackend.__init__ = initialise

    def answer(model: Any, action: str) -> dict[str, str]:
        return {
            "kernels": f"{zlib.crc32(Path(kernels.__file__).read_bytes()):x}",
            "attention": str(bool(_backends)),
            "products": str(batch_invariant_ops.is_batch_invariant_mode_enabled()),
        }

    megatron_dapo_checksums.teach((ACTION,), answer)


def _matmul(a: Tensor, b: Tensor, bias: Tensor | None = None, out_dtype: Any = None) -> Tensor:
    product = kernels.mm(a, b, out=None if out_dtype is None else a.new_empty(len(a), b.shape[1], dtype=out_dtype))
    return product if bias is None else product + bias


def _log_softmax(x: Tensor, dim: int, _: bool) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    peak, total, _weighted = kernels.row_stats(flat, x.shape[-1], 1.0)
    return (flat - (peak + total.log())[:, None]).view(x.shape)


def _norm(
    self: Any, x: Tensor, residual: Tensor | None = None, post_residual_addition: Any = None, *_: Any, **__: Any
) -> Any:
    if residual is None:
        return kernels.rms_norm(x, self.weight, self.variance_epsilon)[0]
    total = x + residual
    if post_residual_addition is not None:
        total = total + post_residual_addition
    return kernels.rms_norm(total, self.weight, self.variance_epsilon)[0], total


def _rotate(self: Any, positions: Tensor, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
    cached = getattr(self, "exact_table", None)
    if cached is None:
        places = torch.arange(self.max_position_embeddings, device=query.device)
        self.exact_table = cached = kernels.rotary_table(places, self.rotary_dim, self.base)
    cos, sin = (part.index_select(0, positions) for part in cached)
    return tuple(kernels.rotate(x.view(len(x), -1, self.head_size), cos, sin).view(x.shape) for x in (query, key))


def _extend(
    q: Tensor, out: Tensor, k: Tensor, v: Tensor, k_scale: float, v_scale: float, q_starts: Tensor, k_starts: Tensor,
    slots: Tensor, prefix_lengths: Tensor, longest: int, *, sm_scale: float, **_: Any,
) -> None:  # fmt: skip
    kernels.attend(q, k, v, q_starts[: len(k_starts)], k_starts, longest, sm_scale, slots=slots, out=out)


def _decode(
    places: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, k_starts: Tensor, slots: Tensor, *args: Any, **_: Any
) -> None:
    scale = args[4]  # after attn_logits, attn_lse, num_kv_splits and max_kv_splits
    kernels.attend(q, k, v, places[: len(q) + 1], k_starts, 1, scale, slots=slots, out=out)
