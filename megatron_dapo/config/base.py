"""The base of every configuration section: frozen and typed; unknown keys are errors.

Values are what their field asks for: a boolean is not a number, infinity and NaN are refused, a text field takes a
number as it was written, and `~` in a path is the home directory.
"""

from __future__ import annotations

import os
import types
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, field_validator

from megatron_dapo.config.yaml12 import WrittenFloat, WrittenInt
from megatron_dapo.errors import UserError


class ConfigError(UserError, ValueError):
    """A configuration that cannot run; the message says what to change."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _as_the_field_asks(cls, value: Any, info: ValidationInfo) -> Any:
        return _convert(value, cls.model_fields[info.field_name or ""].annotation)


def admits(annotation: Any, *kinds: type) -> bool:
    """Whether a field with this annotation takes values of one of these types."""
    return any(member in kinds for member in _members(annotation))


def _members(annotation: Any) -> list[Any]:
    """The members of a union, without Annotated; the annotation itself if it is no union."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _members(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [member for option in get_args(annotation) for member in _members(option)]
    return [annotation]


def _convert(value: Any, annotation: Any) -> Any:
    """A number where the field wants text becomes the text in the file; a boolean is not a number."""
    if isinstance(value, bool) and admits(annotation, int, float) and not admits(annotation, bool):
        raise ValueError(f"expected a number, found {str(value).lower()}")
    if isinstance(value, WrittenInt | WrittenFloat):
        return value.text if admits(annotation, str) and not admits(annotation, int, float) else value
    for member in _members(annotation):
        inner = get_args(member)
        if isinstance(value, list) and get_origin(member) is list:
            return [_convert(item, inner[0]) for item in value]
        if isinstance(value, dict) and get_origin(member) is dict:
            return {_convert(key, inner[0]): _convert(item, inner[1]) for key, item in value.items()}
    return value


def _expand_home(path: str) -> str:
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError(f"the home directory of {path.split('/')[0]!r} is not known")
    return expanded


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("expected a text, found an empty one: remove it")
    return text


PathText = Annotated[str, AfterValidator(_expand_home)]
NonEmptyText = Annotated[str, AfterValidator(_not_empty)]
