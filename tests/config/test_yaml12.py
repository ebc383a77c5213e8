"""YAML as the configuration reads it: the core schema of YAML 1.2, with errors that name the line."""

import math

import pytest
import yaml

from megatron_dapo.config.base import YamlError, dump_yaml, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True), ("False", False), ("yes", "yes"), ("off", "off"), ("on", "on"), ("n", "n"),
        ("null", None), ("~", None), ("", None), ("nil", "nil"),
        ("12", 12), ("-12", -12), ("+3", 3), ("010", 10), ("0o17", 15), ("0x1F", 31),
        ("1_000", "1_000"), ("0b11", "0b11"),
        ("1e5", 1e5), ("1e-6", 1e-6), ("1E5", 1e5), ("-.5", -0.5), ("1.", 1.0),
        (".inf", math.inf), ("-.INF", -math.inf),
        ("1.5e+3", 1500.0), ("inf", "inf"), ("1e", "1e"), (".", "."), ("-", [None]),
        ("12:30", "12:30"), ("190:20:30.15", "190:20:30.15"), ("2024-01-01", "2024-01-01"),
        ("2024-01-01 10:00:00", "2024-01-01 10:00:00"), ("'1e5'", "1e5"), ('"true"', "true"),
    ],
)  # fmt: skip
def test_scalars_are_those_of_the_core_schema(text, value):
    found = parse_yaml(text)
    assert found == value and isinstance(found, type(value))


def test_nan_is_a_number():
    assert math.isnan(parse_yaml(".nan"))


@pytest.mark.parametrize("text", ["1e5", "007", "0x1F", "1.50", "+3", ".INF"])
def test_numbers_remember_how_they_were_written(text):
    assert parse_yaml(text).text == text


def bomb(collection, member):
    """Nine levels of nine aliases each."""
    inner = [", ".join(member.format(f"a{i}", j) for j in range(9)) for i in range(8)]
    lines = [f"a{i}: &a{i} {collection.format(text)}" for i, text in enumerate(inner, 1)]
    return "\n".join(["a0: &a0 {k: v}", *lines])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "the key 'a' occurs twice, first in line 1 (line 3, column 1)"),
        ("{a: 1, a: 2}", "the key 'a' occurs twice, first in line 1 (line 1, column 8)"),
        ("x:\n  y: 1\n  y: 2", "the key 'y' occurs twice, first in line 2 (line 3, column 3)"),
        ("'a': 1\na: 2", "the key 'a' occurs twice"),
        ("a: [1", "line 1, column 6"),
        ("a: b: c", "mapping values are not allowed here (line 1, column 5)"),
        ("\tx: 1", "line 1"),
        ("--- 1\n--- 2", "expected a single document"),
        ("? [a]\n: 1", "unhashable key"),
        ("!!python/object:os.system {}", "could not determine a constructor"),
        ("a\x00b", "special characters are not allowed"),
        ("[" * 600, "nested too deeply"),
        (bomb("[{}]", "*{0}"), "aliases (*name) expand to more than 100000 values"),
        (bomb("{{{}}}", "{1}: *{0}"), "aliases"),
        ("a: &a [*a]", "aliases"),
        ("a: &a {b: {<<: *a}}", "aliases"),
    ],
)
def test_bad_yaml_is_one_line_with_its_place(text, message):
    with pytest.raises(YamlError) as error:
        parse_yaml(text)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_merge_keys_work_and_may_be_overridden():
    text = "base: &base {a: 1, b: 2}\nmore: &more\n  <<: *base\n  b: 3\nlast:\n  <<: *more\n  a: 4\n"
    assert parse_yaml(text) == {"base": {"a": 1, "b": 2}, "more": {"a": 1, "b": 3}, "last": {"a": 4, "b": 3}}


VALUES = [
    "off", "yes", "1e5", "007", "0o7", "12:30", "2024-01-01", "null", "~", "", "true", "a: b", "#x", "1_000", ".inf",
    "ü", "two\nlines", 1, -2.5, 1e-6, 1e300, math.inf, True, None, [1, "1"], {"a": {"b": "3"}},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_what_is_written_reads_back_in_both_versions_of_yaml(value):
    text = dump_yaml({"x": value})
    assert parse_yaml(text) == {"x": value} and isinstance(parse_yaml(text)["x"], type(value))
    assert yaml.safe_load(text) == {"x": value}


def test_aliases_are_allowed_where_they_stay_small():
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]")["b"] == {"x": 1, "y": 2}
