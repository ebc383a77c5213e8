"""The files of an HF model that are not weights: config, tokenizer, chat templates, model code, README and so on.

They travel with the weights through every conversion and with every checkpoint of a run. Imports no torch.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

_LARGEST = 64 * 2**20  # a larger file is not a side file; it is named instead
_WEIGHTS = (
    "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.gguf",
    "*.h5", "*.msgpack", "*.onnx", "*.onnx_data",
)  # fmt: skip
_FOLDERS = ("additional_chat_templates",)
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "*.tiktoken")


def side_files(folder: Path) -> tuple[list[Path], list[str]]:
    """The files to copy, relative to `folder`, and what is neither copied nor weights. Hidden files do not count."""
    found, left = [], []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or any(path.match(pattern) for pattern in _WEIGHTS):
            continue
        if path.is_dir():
            if path.name in _FOLDERS:
                found += [p.relative_to(folder) for p in sorted(path.rglob("*")) if p.is_file()]
            else:
                left.append(f"{path.name}/")
        elif path.is_file() and path.stat().st_size <= _LARGEST:
            found.append(path.relative_to(folder))
        else:
            left.append(path.name)
    return found, left


def copy_side_files(reference: Path, directory: Path, dtype: str | None = None) -> list[str]:
    """Copy the side files; `dtype` becomes that of config.json. Returns notes: what is missing or was left out."""
    found, left = side_files(reference)
    for name in found:
        (directory / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(reference / name, directory / name)
    if dtype is not None:
        _set_dtype(directory / "config.json", dtype)
    notes = [f"{reference} has no {what}" for what in missing_files(directory)]
    notes += _config_notes(directory / "config.json")
    return notes + ([f"not copied from {reference}: {', '.join(left)}"] if left else [])


def _config_notes(file: Path) -> list[str]:
    """Features of attention that stay in config.json; Megatron's arguments do not describe them."""
    config = json.loads(file.read_text())
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    found = [f"rope type {kind!r}"] if kind != "default" else []
    found += ["use_sliding_window"] if config.get("use_sliding_window") else []
    found += ["dual_chunk_attention_config"] if config.get("dual_chunk_attention_config") else []
    return [f"config.json has {what}, which does not change the weights; it is kept there" for what in found]


def missing_files(directory: Path) -> list[str]:
    """What a complete model has and this directory lacks."""
    has_tokenizer = any(any(directory.glob(pattern)) for pattern in _TOKENIZER)
    has_generation = (directory / "generation_config.json").exists()
    return ([] if has_tokenizer else ["tokenizer"]) + ([] if has_generation else ["generation_config.json"])


def _set_dtype(file: Path, name: str) -> None:
    config = json.loads(file.read_text())
    key = "dtype" if "dtype" in config else "torch_dtype"
    if config.get(key) != name:
        config[key] = name
        file.write_text(json.dumps(config, indent=2) + "\n")
