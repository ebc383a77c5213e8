"""The configuration: one schema, unknown keys are errors. Imports no torch."""

from megatron_dapo.config.base import ConfigError, Section
from megatron_dapo.config.load import dump_config, load_config, parse_config
from megatron_dapo.config.model import ModelShape
from megatron_dapo.config.schema import Config, check_config, check_model, check_world

__all__ = [
    "Config", "ConfigError", "ModelShape", "Section", "check_config", "check_model", "check_world",
    "dump_config", "load_config", "parse_config",
]  # fmt: skip
