"""Megatron-LM's own `megatron.training.checkpointing`, unmodified, on the CPU.

MEGATRON_LM names a checkout of github.com/NVIDIA/Megatron-LM at the tag of the installed megatron-core. The files of
megatron.training are the checkout's; only its `__init__`, which imports CUDA kernels, is not run.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

CHECKOUT = os.environ.get("MEGATRON_LM", "")


def unavailable() -> str | None:
    """Why the tests cannot run; None if they can."""
    if not CHECKOUT:
        return "MEGATRON_LM does not name a checkout of Megatron-LM"
    if not (Path(CHECKOUT) / "megatron" / "training" / "checkpointing.py").is_file():
        return f"MEGATRON_LM: {CHECKOUT} has no megatron/training/checkpointing.py"
    return None


def checkpointing() -> Any:
    """The module megatron.training.checkpointing."""
    if "megatron.training" not in sys.modules:
        sys.path.append(CHECKOUT)  # for megatron.legacy; the installed megatron.core comes first
        package = types.ModuleType("megatron.training")
        package.__path__ = [str(Path(CHECKOUT) / "megatron" / "training")]
        sys.modules["megatron.training"] = package
        sys.modules.setdefault("six", types.ModuleType("six"))  # for BERT's tokenizer
        known = importlib.import_module("megatron.training.global_vars")
        vars(package).update({name: value for name, value in vars(known).items() if name.startswith("get_")})
    return importlib.import_module("megatron.training.checkpointing")


def set_args(flags: list[str], **more: Any) -> Any:
    """Parses flags with Megatron-LM's own parser and makes them the job's arguments."""
    module = checkpointing()
    arguments, known = (importlib.import_module(f"megatron.training.{name}") for name in ("arguments", "global_vars"))
    with mock.patch.object(sys, "argv", ["pretrain_gpt.py", *flags]):
        args = arguments.parse_args()
    for name, value in {"use_dist_ckpt": True, "consumed_train_samples": 0, "padded_vocab_size": 101, **more}.items():
        setattr(args, name, value)
    known._GLOBAL_ARGS = args
    module._CHECKPOINT_VERSION = None
    return args
