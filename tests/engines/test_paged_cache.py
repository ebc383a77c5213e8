"""Pages of the embedded engine: empty when taken, copied for each request, and the oldest prompt makes room."""

from types import SimpleNamespace

import torch

from megatron_dapo.engines.embedded.batch_invariant_model import PagedCache, PromptCache


def made(prompts=2):
    config = SimpleNamespace(num_hidden_layers=1, num_key_value_heads=1)
    cache = PagedCache(config, head_dim=2, dtype=torch.float32)
    return cache, PromptCache(prompts, cache)


def fill(cache, value):
    page = cache.allocate()
    cache.keys[:, page] = cache.values[:, page] = value
    return page


def test_a_page_is_empty_when_it_is_taken():
    cache, _ = made()
    page = fill(cache, float("nan"))
    cache.release([page])
    assert cache.allocate() == page and not cache.keys[:, page].any() and not cache.values[:, page].any()


def test_every_request_has_a_copy_of_its_prompt():
    cache, prompts = made()
    page = fill(cache, 3.0)
    prompts.store(b"a", [page])
    cache.keys[:, page] = 9.0  # the request goes on writing
    (first,), (second,) = prompts.copy(b"a"), prompts.copy(b"a")
    assert first != second and (cache.keys[:, first] == 3.0).all()
    cache.keys[:, first] = 7.0
    assert (cache.keys[:, prompts.copy(b"a")[0]] == 3.0).all()


def test_the_prompt_that_was_not_used_for_longest_makes_room():
    cache, prompts = made()
    for key in (b"a", b"b"):
        prompts.store(key, [fill(cache, 1.0)])
    assert prompts.copy(b"a")
    prompts.store(b"c", [fill(cache, 2.0)])
    assert prompts.copy(b"a") and not prompts.copy(b"b") and prompts.copy(b"c")
    prompts.clear()
    assert not prompts.copy(b"a")
