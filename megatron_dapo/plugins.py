"""Plugins: functions of the user, named in the configuration as `python:module.function`."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_dapo.errors import UserError

log = logging.getLogger(__name__)
PREFIX = "python:"
MOST_LOGGED = 20  # an error may quote the response, and so be another one each time


def is_plugin(name: str) -> bool:
    return name.startswith(PREFIX)


def load_function(name: str, where: str) -> Callable[..., Any]:
    """The function that `python:module.function` names; `where` is the configuration key, for the error."""
    module_name, _, function_name = name.removeprefix(PREFIX).rpartition(".")
    if not is_plugin(name) or not module_name:
        raise UserError(f"{where}: {name!r} is not of the form python:module.function")
    if os.getcwd() not in sys.path:  # users keep such modules beside their configuration
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"{where}: cannot import {module_name!r} (also tried in {os.getcwd()}): {error}") from error
    except Exception as error:  # the user's module runs when it is imported
        raise UserError(f"{where}: importing {module_name!r} raised {in_one_line(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"{where}: module {module_name!r} has no function {function_name!r}")
    return function


def in_one_line(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """`ValueError at my_module.py:12: the message`, with the last line of the file of `function` that was reached."""
    module = sys.modules.get(getattr(function, "__module__", ""))
    frames = traceback.extract_tb(error.__traceback__) if module is not None else []
    own = [frame for frame in frames if frame.filename == getattr(module, "__file__", None)]
    where = f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
    return f"{type(error).__name__}{where}: {' '.join(str(error).split())}"


def log_once(logged: set[str], name: str, error: str, trace: str) -> None:
    """Logs the traceback of an error of the function `name`. `logged`: its earlier errors, in one line."""
    if error not in logged and len(logged) < MOST_LOGGED:
        logged.add(error)
        log.warning("%s raised %s\n%s", name, error, trace)
