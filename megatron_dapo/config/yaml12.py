"""YAML 1.2 (core schema) for PyYAML, which reads YAML 1.1: the only place that parses or writes YAML.

Only true and false are booleans (`console: off` is the word), `1e-6` is a number, `010` is ten, `12:30` and
`2024-01-01` are text. A key that occurs twice is an error with both line numbers. Merge keys (`<<`) still work.

Numbers remember how they were written, so that a text field can take `1e5` or `007` as it stands (`config.base`).
"""

from __future__ import annotations

import re
from typing import Any

import yaml

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
