"""Keys and values of prompts, computed with the current weights: the G samples of a prompt compute it once."""

from __future__ import annotations

from collections import OrderedDict

from megatron_dapo.engines.embedded.batch_invariant_model import PagedCache


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
