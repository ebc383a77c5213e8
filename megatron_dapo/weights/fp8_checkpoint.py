"""Writes an HF checkpoint in fp8 (`fp8`): the model that servers are started with when weight sync quantises.

The files are those of the source, tensor by tensor, and config.json gets a `quantization_config`.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from megatron_dapo.config.base import ConfigError
from megatron_dapo.files import SINGLE, safetensors_header, write_index
from megatron_dapo.weights.convert import Progress, Report, check_paths, open_hf
from megatron_dapo.weights.destination import new_directory
from megatron_dapo.weights.formats.readers import torch_dtype
from megatron_dapo.weights.fp8 import BLOCK, quantise_pairs, quantised_specs, quantization_config
from megatron_dapo.weights.mapping import WeightsError
from megatron_dapo.weights.side_files import copy_side_files
from megatron_dapo.weights.tensor_spec import TensorSpec, flat_size, flat_starts, in_flat_order


def hf_to_fp8(
    source: str | Path,
    destination: str | Path,
    *,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> Report:
    """One tensor is in memory at a time."""
    began, src, dst = time.monotonic(), Path(source), Path(destination)
    check_paths(src, dst, overwrite)
    _, weights = open_hf(src)
    if weights.quantised:
        raise WeightsError(f"{src} is in fp8 already")
    files: dict[str, list[str]] = {}
    for name, stored in weights.stored.items():
        files.setdefault(stored.file.stem, []).append(name)
    specs_of = {name: TensorSpec(name, torch_dtype(weights.dtype(name)), x.shape) for name, x in weights.stored.items()}
    sent = {name: quantised_specs([spec]) for name, spec in specs_of.items()}
    total, done = sum(flat_size(specs) for specs in sent.values()), 0
    where: dict[str, str] = {}
    not_finite: list[str] = []
    with new_directory(dst, total, overwrite=overwrite) as directory:
        for number, names in enumerate(files.values(), 1):
            file = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            specs = in_flat_order(spec for name in names for spec in sent[name])
            header = safetensors_header((spec.name, spec.dtype, spec.shape) for spec in specs)
            at = {spec.name: len(header) + start for spec, start in zip(specs, flat_starts(specs), strict=False)}
            with (directory / file).open("wb") as out:
                out.write(header)
                for name in names:
                    tensor = weights[name]
                    if not tensor.isfinite().all():
                        not_finite.append(f"{weights.stored[name].file}: tensor {name}")
                    parts = {spec.name: torch.empty(spec.shape, dtype=spec.dtype) for spec in sent[name]}
                    quantise_pairs([(name, tensor)], parts.items())
                    for key, part in parts.items():
                        out.seek(at[key])
                        done += out.write(part.view(-1).view(torch.uint8).numpy().data)
                    progress(done, total)
            where |= dict.fromkeys(at, file)
        if len(files) > 1:
            write_index(directory, where, total)
        notes = copy_side_files(src, directory)
        config = json.loads((directory / "config.json").read_text())
        config["quantization_config"] = quantization_config(weights.stored)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return Report(dst, len(where), total, not_finite, notes, seconds=time.monotonic() - began)


def check_fp8_directory(path: str | Path) -> None:
    """The directory holds a model in the format that weight sync with fp8 sends."""
    file = Path(path) / "config.json"
    try:
        found = json.loads(file.read_text()).get("quantization_config") or {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"rollout.servers.model: {file} cannot be read ({error})") from None
    if found.get("quant_method") != "fp8" or found.get("weight_block_size") != [BLOCK, BLOCK]:
        raise ConfigError(
            f"rollout.servers.model: {path} is not in fp8 with blocks of {BLOCK} × {BLOCK}, which "
            "rollout.weights.quantization: fp8 sends; create it with megatron-dapo convert hf-to-fp8"
        )
