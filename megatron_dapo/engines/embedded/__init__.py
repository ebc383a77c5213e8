"""The embedded engine: a small Qwen in this process, for the quickstart and most tests.

- engine.py                  the engine: continuous batching in a worker thread
- batch_invariant_model.py   forward passes whose results do not depend on the rest of the batch; sets the weights;
                             keys, values and states in pages, and the pages of prompts, which a group computes once
"""
