"""Functions of another project's source file, taken out of a checkout that an environment variable names: the file
itself imports most of that project."""

from __future__ import annotations

import ast
import math
import os
from argparse import Namespace
from collections import defaultdict
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
import torch

VERL = os.environ.get("VERL", "")
SLIME = os.environ.get("SLIME", "")
needs_verl = pytest.mark.skipif(not VERL, reason="VERL is not set: the path of a checkout of verl-project/verl")
needs_slime = pytest.mark.skipif(not SLIME, reason="SLIME is not set: the path of a checkout of THUDM/slime")


def functions(file: Path, **names: Any) -> Namespace:
    """All functions and constants of the file that can be defined without its imports; `names` are what it imports."""
    known: dict[str, Any] = {
        "torch": torch, "np": np, "math": math, "defaultdict": defaultdict, "Any": Any, "Optional": Optional,
        "Namespace": Namespace, **names,
    }  # fmt: skip
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list, node.returns = [], None
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
        elif not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        try:
            exec(compile(ast.Module([node], []), str(file), "exec"), known)
        except NameError:  # of something that it imports
            continue
    return Namespace(**known)


def verl(path: str) -> Namespace:
    tensors = functions(Path(VERL, "verl/utils/torch_functional.py"))
    return functions(Path(VERL, "verl", path), verl_F=tensors, AlgoConfig=dict)
