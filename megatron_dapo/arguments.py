"""What all commands share: the parser and its types, settings without `--set`, log levels, printing tables and JSON."""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from megatron_dapo.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        if wrong := re.match(r"argument \w+: invalid choice: '(.*?)' \(choose from (.*)\)", message):
            near = difflib.get_close_matches(wrong[1], re.findall(r"[\w-]+", wrong[2]), n=1)
            remedy = f"did you mean {near[0]!r}?" if near else f"choose from {wrong[2]}"
            message = f"there is no {wrong[1]!r}; {remedy}"
        elif message.startswith("unrecognized arguments"):
            message += f"; {self._remedy(message.split()[2])}"
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def _remedy(self, word: str) -> str:
        """For an argument that there is not: the setting that is meant, or an option of similar spelling."""
        from megatron_dapo.config.other_names import find_row

        name = word.partition("=")[0]
        if not name.startswith("--"):
            return "settings are given with their section: trainer.steps=5"
        if row := find_row(name.lstrip("-").replace("-", "_")):
            return row.answer
        near = difflib.get_close_matches(name, sorted(self._all_options()), n=1, cutoff=0.8)
        return f"did you mean {near[0]!r}?" if near else "settings are given with their section: trainer.steps=5"

    def _all_options(self) -> set[str]:
        found = {option for action in self._actions for option in action.option_strings}
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                found.update(*(inner._all_options() for inner in action.choices.values()))
        return found


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


def at_least(least: float, kind: type[Any] = int) -> Callable[[str], Any]:
    """The type of an argument that must be finite and not smaller."""

    def number(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value < math.inf:
            whole = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"{text!r} is not a {whole} of at least {least:g}")
        return value

    return number


def add_command(
    sub: Commands, name: str, run: Callable[[argparse.Namespace], int], summary: str, epilog: str = ""
) -> argparse.ArgumentParser:
    """A sub-command whose --help starts with its purpose and ends with examples."""
    parser = sub.add_parser(
        name, help=summary, description=summary, epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.set_defaults(run=run)
    parser.add_argument("-v", "--verbose", action="count", default=0, help="log more; -vv: also from libraries")
    return parser


def add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="override a setting; KEY=VALUE without --set means the same",
    )  # fmt: skip


def add_config(parser: argparse.ArgumentParser, text: str, nargs: str | None = None) -> None:
    """A configuration, and settings that override it."""
    parser.add_argument("config", metavar="CONFIG", nargs=nargs, type=os.path.expanduser, help=text)
    add_settings(parser)


SETTING = re.compile(r"\+{0,2}([a-z_]+(?:\.\w+)+=.*)", re.DOTALL)
REMOVED_SETTING = re.compile(r"~([a-z_]+(?:\.\w+)+)(=.*)?")


def with_set(words: Sequence[str]) -> list[str]:
    """`a.b=c` and `+a.b=c`, as Hydra has them, become `--set a.b=c`."""
    found: list[str] = []
    for word in words:
        is_value = bool(found) and found[-1] in ("--set", "--sweep")
        if removed := REMOVED_SETTING.fullmatch(word):
            raise UserError(f"{word}: a setting cannot be removed; its default or null disables it: {removed[1]}=null")
        setting = None if is_value else SETTING.fullmatch(word)
        found += ["--set", setting[1]] if setting else [word]
    return found


def set_log_level(verbose: int) -> None:
    """Warnings by default; -v: what this package does; -vv: also what the libraries log."""
    logging.basicConfig(
        level=logging.DEBUG if verbose > 1 else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S",
    )  # fmt: skip
    if verbose:
        logging.getLogger("megatron_dapo").setLevel(logging.DEBUG)


def quiet_libraries() -> None:
    """Hides warnings of Megatron and torch (no apex, renamed collectives) that a user cannot act on."""
    warnings.filterwarnings("ignore", module="megatron|torch")


def print_json(value: Any) -> None:
    """Infinity and NaN, which JSON does not have, become null."""
    print(json.dumps(json.loads(json.dumps(value), parse_constant=lambda name: None), indent=2))


def table_console(*, columns: int = 100, quiet: bool = False, markup: bool = False) -> Console:
    """`columns`: of a file or pipe, for which rich would take 80 and cut words. `markup`: [red] is a style."""
    from rich.console import Console

    return Console(
        width=None if sys.stdout.isatty() else columns, highlight=False, markup=markup, emoji=False, quiet=quiet
    )
