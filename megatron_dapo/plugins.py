"""Plugins: functions of the user, named in the configuration as `python:module.function`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from megatron_dapo.errors import UserError

PREFIX = "python:"


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
        raise UserError(
            f"{where}: importing {module_name!r} raised {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"{where}: module {module_name!r} has no function {function_name!r}")
    return function
