"""Forward passes on the CPU whose result for a token does not depend on the rest of the batch, bit for bit.

Inside of `BatchInvariant` every operation gives a row the same bits, whatever the other rows, their number and the
row's place among them. So a trainer and an engine that apply the same operations to a token compute the same number,
although one of them has the token in a packed micro-batch and the other in a batch of single tokens. Three things in
torch break this, and are replaced:

- The order in which a matrix product adds depends on its shape. Products are computed in tiles of one fixed shape, so
  an element depends on its row and its column alone; a product of fused weights has the columns of the separate ones.
- Vectorised functions such as exp differ in the last bit from the scalar version that computes the remainder of a
  tensor. Their inputs are padded, so that there is no remainder.
- Kernels of attention divide the keys as they see fit. `attend` goes through pages of fixed size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten: Any = torch.ops.aten

PAGE = 64  # keys of one step of attention
ROWS, COLUMNS = 32, 16  # of a tile of a matrix product
LANES = 64  # a multiple of what any CPU computes at a time


_thread = threading.local()


def active() -> bool:
    """Whether this thread is inside of `BatchInvariant`."""
    return getattr(_thread, "depth", 0) > 0


class BatchInvariant(TorchDispatchMode):
    """Of the thread that enters it. A backward pass outside of it is not affected."""

    def __enter__(self) -> Any:
        _thread.depth = getattr(_thread, "depth", 0) + 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _thread.depth -= 1
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        replacement = REPLACED.get(func)
        if replacement is not None and args[0].is_cpu and args[0].is_floating_point():
            return replacement(func, *args, **kwargs)
        if torch.is_inference_mode_enabled():  # operations arrive before they are decomposed
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        return func(*args, **kwargs)


def _product(_: Any, left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
    """left [rows, k] · right [k, columns]."""
    rows, size = left.shape
    columns = right.shape[1]
    down, across = -(-rows // ROWS), -(-columns // COLUMNS)
    tall = _padded(left, down * ROWS).view(down, 1, ROWS, size).expand(-1, across, -1, -1)
    wide = _padded(right.t(), across * COLUMNS).view(1, across, COLUMNS, size).expand(down, -1, -1, -1)
    tiles = torch.bmm(tall.reshape(-1, ROWS, size), wide.reshape(-1, COLUMNS, size).transpose(1, 2))
    whole = tiles.view(down, across, ROWS, COLUMNS).transpose(1, 2).reshape(down * ROWS, across * COLUMNS)
    found = whole[:rows, :columns]
    return found.contiguous() if out is None else out.copy_(found)


def _padded(matrix: Tensor, rows: int) -> Tensor:
    blank = matrix.new_zeros(rows, matrix.shape[1])
    blank[: len(matrix)] = matrix
    return blank


def _product_and_bias(func: Any, bias: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return _product(func, left, right) + bias


def _without_remainder(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    count = x.numel()
    flat = x.new_zeros(-(-count // LANES) * LANES)
    flat[:count] = x.reshape(-1)
    found: Tensor = func(flat, *args, **kwargs)
    return found[:count].view(x.shape)


VECTORISED = ("exp", "log", "silu", "sigmoid", "softplus", "cos", "sin", "rsqrt")
REPLACED: dict[Any, Callable[..., Tensor]] = {
    aten.mm.default: _product,
    aten.mm.out: _product,
    aten.addmm.default: _product_and_bias,
    **{getattr(aten, name).default: _without_remainder for name in VECTORISED},
}


def attend(query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Causal attention of single tokens: query [tokens, heads, d], keys and values [pages, kv heads, PAGE, d] to
    [tokens, heads · d]. `pages` [tokens, blocks]: the pages of each token's sequence; `positions` [tokens]: its place.

    Softmax over pages with a running maximum; a page with no visible key changes nothing, not even rounding."""
    tokens, heads, size = query.shape
    kv_heads = keys.shape[1]
    batch, group = tokens * kv_heads, heads // kv_heads
    keys, values = keys.flatten(1), values.flatten(1)
    query = (query * scale).reshape(batch, group, size)
    peak = query.new_full((batch, group, 1), -torch.inf)
    total, mixed = torch.zeros_like(peak), torch.zeros_like(query)
    masked = torch.arange(pages.shape[1] * PAGE).view(-1, 1, 1, 1, PAGE) > positions.view(1, -1, 1, 1, 1)
    for block, page in enumerate(pages.unbind(1)):
        scores = torch.bmm(query, keys.index_select(0, page).view(batch, PAGE, size).transpose(1, 2))
        scores = scores.view(tokens, kv_heads, group, PAGE).masked_fill(masked[block], -torch.inf)
        scores = scores.view(batch, group, PAGE)
        new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
        weights = (scores - new_peak).exp()
        shrink = (peak - new_peak).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + torch.bmm(weights, values.index_select(0, page).view(batch, PAGE, size))
        peak = new_peak
    return (mixed / total).view(tokens, heads * size)


def attend_sequence(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """`attend` of one sequence: query [tokens, heads, d], key and value [tokens, kv heads, d]."""
    tokens = len(query)
    blocks = -(-tokens // PAGE)

    def paged(x: Tensor) -> Tensor:
        padding = x.new_zeros(blocks * PAGE - tokens, *x.shape[1:])
        return torch.cat([x, padding]).unflatten(0, (blocks, PAGE)).transpose(1, 2)

    pages = torch.arange(blocks).expand(tokens, -1)
    return attend(query, paged(key), paged(value), pages, torch.arange(tokens), scale)


def delta_rule_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of the gated delta rule (policy/model/delta_rule.py): what it reads, and the state after it. state
    [heads, dk, dv]; q and k [heads, dk] of unit length, q divided by √dk; v [heads, dv]; decay and beta [heads]."""
    faded = state * decay[:, None, None]
    change = (v - (faded * k[..., None]).sum(-2)) * beta[:, None]
    new = faded + k[..., None] * change[:, None, :]
    return (new * q[..., None]).sum(-2), new
