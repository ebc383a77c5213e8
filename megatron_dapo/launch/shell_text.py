"""Values of a configuration as shell text: quoted, on one line, or refused.

No value can add a line, an option or a command to a script whose values pass through these functions.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from megatron_dapo.config import ConfigError
from megatron_dapo.config.slurm import NAME

WIDTH = 118  # columns of a wrapped command


class Shell(str):
    """Shell text of our own, such as `"$1"`, that must not be quoted. Never holds a value from the configuration."""


def quote(value: object) -> str:
    """One shell word that stands for exactly this value."""
    return value if isinstance(value, Shell) else shlex.quote(one_line(value))


def quote_words(words: Iterable[object]) -> str:
    return " ".join(quote(word) for word in words)


def one_line(value: object) -> str:
    """The value as text. Comments and #SBATCH lines end at a line break, quoted or not: such a value is an error."""
    text = str(value)
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        raise ConfigError(f"{text!r} has a line break or a control character, which cannot be in a batch script")
    return text


def variable(name: str) -> str:
    """The name of an environment variable, which cannot be quoted."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not the name of an environment variable")
    return name


def wrap(words: Iterable[object], indent: str = "") -> str:
    """Quoted words on lines of a readable length; an option stays with its value."""
    quoted = [quote(word) for word in words]
    lines, line = [], indent
    for word, after in zip(quoted, [*quoted[1:], ""], strict=True):
        pair = len(word) + (len(after) + 1 if word.startswith("--") and not after.startswith("--") else 0)
        if line.strip() and len(line) + 1 + pair > WIDTH:
            lines.append(f"{line} \\")
            line = f"{indent}  "
        line += f"{' ' if line.strip() else ''}{word}"
    return "\n".join([*lines, line])
