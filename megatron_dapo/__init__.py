"""megatron-dapo: DAPO reinforcement learning on Megatron-Core, exact under every parallel layout.

    import megatron_dapo as md
    run = md.train("Qwen/Qwen2.5-0.5B", "prompts.jsonl", reward=my_function, trainer__steps=50)

Each folder's `__init__.py` lists its modules; docs/architecture.md explains how they work together. Here:

- `api`                    `train`, `evaluate`, `convert` and `read_run` of this package, for notebooks and scripts
- `types`                  prompts, samples, groups, batches: what travels between folders
- `errors`                 `UserError`, which the command line prints without a traceback
- `plugins`                `python:module.name` in a configuration
- `files`                  atomic writes, safetensors headers
- `batch_invariant`        the bits of a token's result do not depend on the batch: trainer and engine agree exactly
- `fault_points`           named points where tests kill a run
- `evaluation`             runs a benchmark; computes avg@k, pass@k and maj@k
- `cli`                    the `megatron-dapo` command; `arguments` has what the arguments of all commands share
"""

import importlib
from typing import Any

__version__ = "0.2.0"
__all__ = ["__version__", "convert", "evaluate", "read_run", "train"]


def __getattr__(name: str) -> Any:
    """The functions of `api`, imported when they are used: `import megatron_dapo` imports nothing else. Their types are
    in __init__.pyi."""
    if name not in __all__:
        raise AttributeError(f"module 'megatron_dapo' has no attribute {name!r}")
    return getattr(importlib.import_module("megatron_dapo.api"), name)
