"""Checks model directories and checkpoints from their indexes and headers, before anything is loaded.

Every function raises an error that names the files and tensors. No tensor data is read; a model directory is checked
without torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_dapo.config.model import ModelShape
from megatron_dapo.files import StoredTensor, read_safetensors_directory, unpacked
from megatron_dapo.weights.mapping import WeightsError, hf_shapes

HEAD = "lm_head.weight"
_SHOWN = 5
_IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # buffers of old transformers versions; computed, not trained


def check_model_directory(path: str | Path) -> ModelShape:
    """An HF directory is complete: all files of its index, all tensors of its config.json, in the right shapes."""
    path = Path(path)
    shape = ModelShape.from_dir(path)
    if any(path.glob("pytorch_model*.bin")) and not any(path.glob("*.safetensors")):
        from megatron_dapo.weights.formats.torch_file import read_bin_directory  # imports torch

        check_hf_tensors(read_bin_directory(path), shape, path)
    else:
        check_hf_tensors(unpacked(read_safetensors_directory(path)), shape, path)
    return shape


def check_megatron_checkpoint(path: str | Path, shape: ModelShape) -> None:
    """A Megatron checkpoint holds every weight of the model, completely and in the right shape."""
    from megatron_dapo.weights.formats.megatron_reader import open_megatron  # imports torch

    open_megatron(path, shape)


def check_hf_tensors(stored: Mapping[str, StoredTensor], shape: ModelShape, path: Path) -> None:
    """Names and shapes are those that config.json describes."""
    check_hf_names(stored, shape, path)
    wrong = [
        f"{found.file.name}: tensor {name}: shape {found.shape}, but config.json says {expected}"
        for name, expected in hf_shapes(shape).items()
        if (found := stored[name]).shape != expected
    ]
    if wrong:
        more = f"; {len(wrong)} tensors in all have the wrong shape" if len(wrong) > 1 else ""
        raise WeightsError(f"{path}/{wrong[0]}{more}")


def check_hf_names(names: Iterable[str], shape: ModelShape, path: str | Path = "") -> None:
    """Exactly this model's tensors. A tied model may also store a copy of its embedding as head, and some have tensors
    that are only carried through a conversion."""
    expected = set(hf_shapes(shape))
    found = {name for name in names if not _IGNORED.search(name) and not name.startswith(shape.carried)}
    if shape.tied_embeddings:
        found.discard(HEAD)
    where = f"{path}: " if path else ""
    if missing := expected - found:
        raise WeightsError(f"{where}missing {listed(missing)}")
    if extra := found - expected:
        raise WeightsError(f"{where}unexpected {listed(extra)}; {_why_unexpected(extra)}")


def _why_unexpected(extra: set[str]) -> str:
    if any(name.endswith("o_proj.bias") for name in extra):
        return (
            "Qwen models have no bias in the attention output (attention_bias adds it to q, k and v only); a model "
            "with Llama's attention_bias cannot be converted as a Qwen"
        )
    return "the model that config.json describes does not have it"


def listed(names: set[Any]) -> str:
    shown = ", ".join(sorted(names)[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more}"
