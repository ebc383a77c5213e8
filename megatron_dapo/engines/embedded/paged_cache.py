"""What the layers of a model keep of each sequence, in pages of PAGE positions, and the prompts that are kept.

Page 0 belongs to no sequence: padding writes there.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch

from megatron_dapo.batch_invariant import PAGE

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
            heads, keys, values = (
                config.linear_num_value_heads,
                config.linear_key_head_dim,
                config.linear_value_head_dim,
            )
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
