"""megatron-dapo: DAPO reinforcement learning on Megatron-Core, exact under every parallel layout.

Each folder's `__init__.py` lists its modules; docs/architecture.md explains how they work together. Here:

- `types`                  prompts, samples, groups, batches: what travels between folders
- `errors`                 `UserError`, which the command line prints without a traceback
- `plugins`                `python:module.name` in a configuration
- `tables`                 the width of printed tables
- `files`                  atomic writes, safetensors headers
- `batch_invariant`        the bits of a token's result do not depend on the batch: trainer and engine agree exactly
- `fault_points`           named points where tests kill a run
- `evaluate`               runs a benchmark; `evaluation_statistics` computes avg@k, pass@k and maj@k
- `cli`                    the `megatron-dapo` command; `arguments` has what the arguments of all commands share
"""

__version__ = "0.1.0"
