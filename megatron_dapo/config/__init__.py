"""The configuration: one schema, unknown keys are errors. Imports no torch.

- `load`       YAML file and `--set` overrides to a `Config`; the error messages
- `other_names` our keys by the names of other tools
- `hub`        models by their name on the Hugging Face hub
- `yaml12`     the YAML 1.2 reader and writer
- `base`       `Section`, the base of all sections; field types for paths and texts
- `schema`     `Config`, and the checks across sections, against the model and against the number of ranks
- `megatron`   options of Megatron-Core inside `policy`: fields by name, MoE, fp8
- `model`      the shape of a Qwen model, from its config.json (`ModelShape`)
- `rope`       its rotary embedding: default or YaRN
- one file per section: `policy`, `rollout`, `reward`, `data`, `algorithm`, `evaluate`, `trainer`, `observe`, `slurm`
"""

from megatron_dapo.config.base import ConfigError, Section
from megatron_dapo.config.load import dump_config, load_config, parse_config
from megatron_dapo.config.model import ModelShape
from megatron_dapo.config.schema import Config, check_config, check_model, check_world

__all__ = [
    "Config", "ConfigError", "ModelShape", "Section", "check_config", "check_model", "check_world",
    "dump_config", "load_config", "parse_config",
]  # fmt: skip
