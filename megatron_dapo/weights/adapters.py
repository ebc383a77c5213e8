"""LoRA adapters as tensors: names, shapes and shards, and PEFT directories in and out.

An adapter of a linear layer adds scale · B·A to its weight, with A [rank, inputs] and B [outputs, rank]. Adapters are
those of the HF model, also where Megatron fuses layers: q, k and v, gate and up have an A and a B each, so a PEFT
adapter can be loaded, trained and written without any arithmetic. `adapter_mappings` describes them as parameters of
the weight table: layers whose outputs are split over tensor-parallel ranks have B split by rows and A on every rank;
layers whose inputs are split have A split by columns and B on every rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from megatron_dapo.config.families.tensors import Split, Transform
from megatron_dapo.config.model import ModelShape
from megatron_dapo.config.policy import LoraConfig
from megatron_dapo.files import INDEX, Dtype
from megatron_dapo.weights.convert import Report, check_paths, open_hf
from megatron_dapo.weights.destination import new_directory
from megatron_dapo.weights.mapping import (
    ParameterMapping,
    Segment,
    WeightsError,
    adapted,
    listed,
    parameter_mappings,
    target_of,
)
from megatron_dapo.weights.side_files import copy_side_files

PREFIX = "base_model.model."  # of the names in PEFT's files
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


@lru_cache(maxsize=8)
def adapter_mappings(shape: ModelShape, rank: int, targets: tuple[str, ...] = ()) -> dict[str, ParameterMapping]:
    """Every A and B of the model by name, as parameters of their own."""
    layers = list(parameter_mappings(shape).values())
    known = {target_of(name) for layer in layers for name in adapted(layer, ())}
    if unknown := sorted(set(targets) - known):
        raise WeightsError(f"policy.lora.targets: the model has no linear layer {unknown[0]}; it has {sorted(known)}")
    found = [_adapter(layer, name, rank, half) for layer in layers for name in adapted(layer, targets) for half in "AB"]
    return {mapping.name: mapping for mapping in found}


def adapter_name(hf_name: str, half: str) -> str:
    return f"{PREFIX}{hf_name.removesuffix('.weight')}.lora_{half}.weight"


def _adapter(layer: ParameterMapping, hf: str, rank: int, half: str) -> ParameterMapping:
    size = layer.hf_shapes[layer.hf.index(hf)]
    shape = (rank, size[1]) if half == "A" else (size[0], rank)
    splits_inputs = layer.split is Split.COLUMNS
    split = Split.NONE
    if splits_inputs == (half == "A"):
        split = Split.COLUMNS if splits_inputs else Split.ROWS
    name = adapter_name(hf, half)
    return ParameterMapping(
        name=name, shape=shape, hf=(name,), hf_shapes=(shape,), transform=Transform.COPY, split=split,
        segments=(Segment(0, 0, 0, shape[0]),), layer=layer.layer, expert=layer.expert,
    )  # fmt: skip


def initial_adapter(mapping: ParameterMapping, seed: int) -> Tensor:
    """The full tensor before training: B is zero, A uniform with bound 1/√inputs (PEFT's default). It depends on the
    name alone, so it is the same in every layout."""
    if ".lora_B." in mapping.name:
        return torch.zeros(mapping.shape)
    digest = hashlib.sha256(f"{seed} {mapping.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return (torch.rand(mapping.shape, generator=generator) * 2 - 1) * mapping.shape[1] ** -0.5


# ---- PEFT directories ----


def read_adapter(
    directory: str | os.PathLike[str], shape: ModelShape, lora: LoraConfig, base: str = ""
) -> dict[str, Tensor]:
    """The tensors of a PEFT directory; they must be those of this model and configuration. `base`: fingerprint of the
    weights that the adapter is added to."""
    folder = Path(directory)
    _check_config(folder, _described(folder), lora, base)
    try:
        tensors: dict[str, Tensor] = load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{folder / WEIGHTS_FILE} cannot be read: {error}") from error
    expected = adapter_mappings(shape, lora.rank, tuple(lora.targets))
    if missing := set(expected) - set(tensors):
        raise WeightsError(f"{folder}: missing {listed(missing)}")
    if extra := set(tensors) - set(expected):
        raise WeightsError(f"{folder}: unexpected {listed(extra)}; policy.lora.targets must name the adapted layers")
    for name, mapping in expected.items():
        found = tensors[name]
        if tuple(found.shape) != mapping.shape or not found.is_floating_point() or found.dtype.itemsize < 2:
            has = f"{name} has shape {tuple(found.shape)} in {Dtype.of(found.dtype)}"
            raise WeightsError(f"{folder}: {has}, expected {mapping.shape} in bfloat16, float16 or float32")
    return tensors


def _described(folder: Path) -> dict[str, Any]:
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise WeightsError(f"{folder} is not a PEFT adapter: it has no {name}")
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text())
        _ = config["r"], config["lora_alpha"], config["target_modules"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise WeightsError(f"{folder / CONFIG_FILE} cannot be read: {type(error).__name__}: {error}") from error
    return config


def _check_config(folder: Path, config: Mapping[str, Any], lora: LoraConfig, base: str) -> None:
    if config.get("r") != lora.rank or config.get("lora_alpha") != lora.alpha:
        raise WeightsError(
            f"{folder}: rank {config.get('r')} and alpha {config.get('lora_alpha')}, but policy.lora has rank "
            f"{lora.rank} and alpha {lora.alpha:g}: use the adapter's"
        )
    for key in ("use_rslora", "use_dora", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern"):
        if config.get(key):
            raise WeightsError(f"{folder}: {key} is {config[key]}, which is not supported")
    trained_on = config.get("base_fingerprint")
    if base and trained_on and trained_on != base:
        raise WeightsError(f"{folder} was trained on another base model than policy.model (its weights differ)")


def adapter_config(names: Iterable[str], lora: LoraConfig, model: str) -> str:
    """PEFT's description of an adapter. peft and SGLang read it; other readers ignore the base's fingerprint."""
    targets = sorted({target_of(name.removesuffix(".lora_A.weight")) for name in names if ".lora_A." in name})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": 0.0,
        "bias": "none", "target_modules": targets, "base_model_name_or_path": model, "inference_mode": True,
        "base_fingerprint": base_fingerprint(model),
    }  # fmt: skip
    return json.dumps(config, indent=2) + "\n"


def merge_adapter(
    model: str | os.PathLike[str], adapter: str | os.PathLike[str], destination: str, *, overwrite: bool = False
) -> Report:
    """A HF directory with the adapter added to the model's weights, in fp32 and rounded to their type. Its files have
    the layout of the model's, so experts that are in one tensor stay there."""
    began = time.monotonic()
    for source in (model, adapter):
        check_paths(Path(source), Path(destination), overwrite)
    shape, weights = open_hf(Path(model))
    if weights.quantised:
        raise WeightsError(f"{model} is in fp8; merge into the bf16 checkpoint, then use convert hf-to-fp8")
    described = _described(Path(adapter))
    try:
        lora = LoraConfig(rank=described["r"], alpha=described["lora_alpha"], targets=described["target_modules"])
    except ValidationError:
        found = {key: described[key] for key in ("r", "lora_alpha", "target_modules")}
        expected = "r and lora_alpha above 0 and target_modules as a list"
        raise WeightsError(f"{Path(adapter) / CONFIG_FILE}: expected {expected}, found {found}") from None
    tensors = read_adapter(adapter, shape, lora, base_fingerprint(model))
    changed = {name for name in weights if adapter_name(name, "A") in tensors}
    if any(file.suffix != ".safetensors" for file in weights.files()):
        raise WeightsError(f"{model}: expected .safetensors files; convert hf-to-megatron and back writes them")
    scale = lora.alpha / lora.rank
    not_finite = [f"{adapter}: tensor {name}" for name, tensor in tensors.items() if not tensor.isfinite().all()]
    need = sum(file.stat().st_size for file in weights.files())
    with new_directory(Path(destination), need, overwrite=overwrite) as folder:
        notes = [f"{len(changed)} tensors have their adapter added", *copy_side_files(Path(model), folder)]
        for file in [*weights.files(), *Path(model).glob(INDEX)]:
            shutil.copyfile(file, folder / file.name)
        for name, stored in weights.stored.items():
            tensor = weights[name]
            if name in changed:
                a, b = (tensors[adapter_name(name, half)].float() for half in "AB")
                tensor = (tensor.float() + scale * (b @ a)).to(tensor.dtype)
                with (folder / stored.file.name).open("r+b") as out:
                    out.seek(stored.offset)
                    out.write(tensor.view(torch.uint8).numpy().data)
            if not tensor.isfinite().all():
                not_finite.append(f"{Path(destination) / stored.file.name}: tensor {name}")
    return Report(Path(destination), len(weights), need, not_finite, notes, seconds=time.monotonic() - began)


def base_fingerprint(model: str | os.PathLike[str]) -> str:
    """Of a HF directory's weights: file names, sizes and 64 blocks of each file. Cheap, and other weights differ."""
    digest = hashlib.sha256()
    files = sorted(Path(model).glob("*.safetensors")) or sorted(Path(model).glob("pytorch_model*.bin"))
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for block in range(64):
                file.seek(block * size // 64)
                digest.update(file.read(4096))
    return digest.hexdigest() if files else ""
