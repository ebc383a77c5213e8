"""The embedded engine: a small Qwen in this process, for the quickstart and most tests.

- engine.py                  the engine: continuous batching in a worker thread
- batch_invariant_model.py   forward passes whose results do not depend on the rest of the batch; the paged KV cache
- linear_attention.py        gated DeltaNet layers and their state, which pages hold beside keys and values
- prompt_cache.py            keeps the KV pages of prompts, so that the samples of a group compute them once
- token_sampling.py          samples tokens, with a random number per seed and position
- weight_loader.py           copies weight buckets into the model
"""
