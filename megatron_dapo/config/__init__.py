"""The configuration: one schema, unknown keys are errors. Imports no torch.

- `load`       YAML file and `--set` overrides to a `Config`; the error messages; models by their name on the hub
- `schema`     `Config`, and the checks across sections, against the model and against the number of ranks
- `policy`, `rollout`, `algorithm`, `critic`   the sections of these names
- `data`       the sections `data`, `reward` and `evaluate`
- `trainer`    the sections `trainer`, `observe` and `slurm`
- `base`       `Section`, the base of all sections; YAML 1.2; field types for paths and texts
- `model`      the shape of a model, from its config.json (`ModelShape`); `families`: what differs between families
- `megatron_fields`   fields of Megatron-Core that `policy.megatron` may not set
- `other_names`, `other_tools.yaml`   settings of other tools and ours: one table for errors, `import` and the docs
- `scripts`, `importing`   `megatron-dapo import`: reads another tool's launch script, and converts its settings
- `explain`    `megatron-dapo explain KEY`
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_dapo.config.base import ConfigError, Section
    from megatron_dapo.config.load import dump_config, load_config, parse_config
    from megatron_dapo.config.model import ModelShape
    from megatron_dapo.config.schema import Config, check_config, check_model, check_world

__all__ = [
    "Config", "ConfigError", "ModelShape", "Section", "check_config", "check_model", "check_world",
    "dump_config", "load_config", "parse_config",
]  # fmt: skip
_MODULES = {"ConfigError": "base", "Section": "base", "ModelShape": "model", "dump_config": "load",
            "load_config": "load", "parse_config": "load"}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports a module when one of its names is used: a conversion needs `model` and starts in half the time."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'schema')}"), name)
