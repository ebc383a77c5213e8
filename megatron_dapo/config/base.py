"""The base of every configuration section: frozen, typed, and unknown keys are errors."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from megatron_dapo.errors import UserError


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())


class ConfigError(UserError, ValueError):
    """A configuration that cannot run; the message says what to change."""
