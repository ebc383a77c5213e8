"""The base of every configuration section: frozen and typed; unknown keys are errors.

Values are what their field asks for: a boolean is not a number, infinity and NaN are refused, a text field takes a
number as it was written, `~` in a path is the home directory, and an address holds no password. What a key does is
the docstring below its field, of which tools/generate_config_reference.py makes the reference and the JSON schema.
"""

from __future__ import annotations

import os
import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Self, Union, get_args, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from megatron_dapo.errors import ConfigError as ConfigError

# YAML 1.2 (core schema) for PyYAML, which reads YAML 1.1: the only place that parses or writes YAML.
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_RESOLVERS = (
    ("bool", _BOOL, "tTfF"),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+0123456789."),
    ("null", _NULL, ["~", "n", "N", ""]),
    ("merge", re.compile(r"^<<$"), "<"),
)
_BASES = {"0o": 8, "0x": 16}
MOST_NODES = 100_000  # of a document, aliases expanded


class YamlError(ValueError):
    """Not valid YAML; the message is one line and ends with the place."""


class WrittenInt(int):
    """An integer and how it was written."""

    text: str


class WrittenFloat(float):
    """A floating-point number and how it was written."""

    text: str


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (first := lines.get((key.tag, key.value))) is not None:
                raise yaml.composer.ComposerError(
                    None, None, f"the key {key.value!r} occurs twice, first in line {first}", key.start_mark
                )
            lines[key.tag, key.value] = key.start_mark.line + 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None and _expanded(node, {}) > MOST_NODES:
            raise YamlError(f"its aliases (*name) expand to more than {MOST_NODES} values")
        return node


def _expanded(node: yaml.Node, sizes: dict[int, float]) -> float:
    """Nodes below it, those of an alias again at each use; infinite if it contains itself. `sizes`: by id."""
    if id(node) not in sizes:
        sizes[id(node)] = float("inf")
        inner = [] if isinstance(node, yaml.ScalarNode) else node.value
        parts = [part for pair in inner for part in (pair if isinstance(pair, tuple) else (pair,))]
        sizes[id(node)] = 1 + sum(_expanded(part, sizes) for part in parts)
    return sizes[id(node)]


class _Dumper(yaml.SafeDumper):
    """Quotes what either version of YAML would not read as text."""


def _int(loader: _Loader, node: yaml.ScalarNode) -> WrittenInt:
    value = WrittenInt(node.value, _BASES.get(node.value[:2], 10))
    value.text = node.value
    return value


def _float(loader: _Loader, node: yaml.ScalarNode) -> WrittenFloat:
    value = WrittenFloat(re.sub(r"\.(inf|nan)$", r"\1", node.value.lower()))
    value.text = node.value
    return value


_Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, list(_first))
    if _name != "merge":
        _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, list(_first))
_Loader.add_constructor("tag:yaml.org,2002:int", _int)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)
_Dumper.add_representer(WrittenInt, lambda dumper, value: dumper.represent_int(int(value)))
_Dumper.add_representer(WrittenFloat, lambda dumper, value: dumper.represent_float(float(value)))


def parse_yaml(text: str) -> Any:
    """The document as dicts, lists and scalars; None for an empty one. Raises YamlError."""
    try:
        return yaml.load(text, _Loader)
    except YamlError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        problem = "found a tab: indent with spaces" if "character '\\t'" in str(error.problem) else error.problem
        raise YamlError(f"{', '.join(filter(None, (error.context, problem)))}{place}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise YamlError(" ".join(str(error).split())) from None
    except RecursionError:
        raise YamlError("nested too deeply") from None


def dump_yaml(value: Any) -> str:
    """`value` as YAML that this module, and readers of YAML 1.1, read back as `value`."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in a section. What is no section, or an empty one, is a value."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def differences(old: Any, new: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, old, new) of every value that differs. A key that only one side has counts as None on the other."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else str(key))
    elif old != new:
        yield prefix, old, new


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )

    def check(self) -> None:
        """Raises ValueError where keys of this section exclude each other."""

    @model_validator(mode="after")
    def _checked(self) -> Self:
        self.check()
        return self

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


# Names of environment variables, options and parameters of an address that hold a secret.
SECRET = re.compile(r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=://)[^/?#\s'\"]*@")
_PARAMETER = re.compile(r"(?:(?<=[?&])|(?<=--))([\w-]+)([='\", ]+)([^&\s'\"]+)")


def merged(base: Any, changes: Any) -> Any:
    """`changes` key by key; a list replaces a list."""
    if not (isinstance(base, dict) and isinstance(changes, dict)):
        return changes
    return {**base, **{key: merged(base.get(key), value) for key, value in changes.items()}}


def hide_secrets(text: str) -> str:
    """For messages: without the logins of addresses and the values of parameters that look like secrets."""

    def hide(found: re.Match[str]) -> str:
        return f"{found[1]}{found[2]}***" if is_secret(found[1]) else found[0]

    return _PARAMETER.sub(hide, _LOGIN.sub("***@", text))


def key_of(setting: str, variable: str | None) -> str | None:
    """The key in the environment variable that the setting names, if it names one."""
    if variable and not os.environ.get(variable):
        raise ConfigError(f"{setting} names the environment variable {variable}, which is not set: export it")
    return os.environ[variable] if variable else None


def is_secret(name: str) -> bool:
    return SECRET.search(name.replace("-", "_")) is not None


def _without_login(address: str) -> str:
    if "@" in address.split("://")[-1].split("/")[0] or hide_secrets(address) != address:
        raise ValueError(
            "the address holds a password or a key, which would be written to the run directory: name the environment "
            "variable that holds it in api_key_env"
        )
    return address


Address = Annotated[str, AfterValidator(_without_login)]
PathText = Annotated[str, AfterValidator(_expand_home)]
NonEmptyText = Annotated[str, AfterValidator(_not_empty)]
TokenId = Annotated[int, Field(ge=0)]
