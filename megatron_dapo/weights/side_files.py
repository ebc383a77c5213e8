"""The files of an HF model that are not weights: config, tokenizer, chat templates, model code, README and so on.

They travel with the weights through every conversion and with every checkpoint of a run. So do the tensors that a
model's files have beside the weights that we train: multi-token prediction (`mtp.`), a vision tower.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from megatron_dapo.config.model import ModelShape
from megatron_dapo.files import SINGLE, StoredTensor, read_safetensors_directory, safetensors_header, write_index
from megatron_dapo.weights.copy import OutputFile, RowRange, TensorWrite, copy_tensors
from megatron_dapo.weights.formats.readers import HFReader
from megatron_dapo.weights.locate import HF_FILES, METADATA

FILE = SINGLE
ONLY, SHARD = "model-00001-of-00001.safetensors", "model-carried.safetensors"
_LARGEST = 64 * 2**20  # a larger file is not a side file; it is named instead
_WEIGHTS = (
    "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.gguf",
    "*.h5", "*.msgpack", "*.onnx", "*.onnx_data",
)  # fmt: skip
_FOLDERS = ("additional_chat_templates",)
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "*.tiktoken")


def hf_files(model: str | Path) -> Path:
    """The folder with config.json and tokenizer: the model itself, or that of a checkpoint."""
    return Path(model) / HF_FILES if (Path(model) / METADATA).exists() else Path(model)


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
    """Copy the side files; `dtype` becomes that of config.json, which says nothing of quantisation, because weights are
    dequantised. Returns notes: what is missing or was left out."""
    found, left = side_files(reference)
    for name in found:
        (directory / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(reference / name, directory / name)
    _edit_config(directory / "config.json", dtype)
    needed = {"tokenizer": _TOKENIZER, "generation_config.json": ("generation_config.json",)}  # of a complete model
    missing = [what for what, names in needed.items() if not any(any(directory.glob(name)) for name in names)]
    notes = [f"{reference} has no {what}" for what in missing]
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


def _edit_config(file: Path, dtype: str | None) -> None:
    text = file.read_text()
    changed = json.loads(text)
    for section in (changed, changed.get("text_config") or {}):  # readers take the inner dtype, if there is one
        section.pop("quantization_config", None)
        key = "dtype" if "dtype" in section else "torch_dtype"
        if dtype and (section is changed or key in section):
            section[key] = dtype
    if changed != json.loads(text):
        file.write_text(json.dumps(changed, indent=2) + "\n")


def open_carried(directory: Path, shape: ModelShape) -> HFReader | None:
    """The files of `directory`, if they have such tensors."""
    if not shape.carried or not any(directory.glob("*.safetensors")):
        return None
    weights = HFReader(directory)
    return weights if carried_names(weights, shape) else None


def carried_names(weights: HFReader, shape: ModelShape) -> list[str]:
    return sorted(name for name in weights if name.startswith(shape.carried))


def copy_carried(weights: HFReader, shape: ModelShape, file: Path) -> list[StoredTensor]:
    """Copy them to a new file, as they are. Returns them."""
    names = carried_names(weights, shape)
    if not names:
        return []
    header = safetensors_header((name, weights.dtype(name), weights.stored[name].shape) for name in names)
    writes, at = [], len(header)
    for name in names:
        stored = weights.stored[name]
        writes.append(TensorWrite(0, at, weights.dtype(name), (RowRange(name, 0, stored.shape[0]),)))
        at += stored.nbytes
    file.unlink(missing_ok=True)  # of an interrupted conversion
    copy_tensors(weights, writes, [OutputFile(file, at, header)])
    return [weights.stored[name] for name in names]


def export_carried(reference: Path, directory: Path, shape: ModelShape) -> tuple[list[StoredTensor], list[str]]:
    """Add the reference's to the HF checkpoint in `directory`, as one more shard. Returns them, and what is missing."""
    weights = open_carried(reference, shape)
    if weights is None:
        prefixes = " or ".join(f"{prefix}*" for prefix in shape.carried)
        return [], [f"{reference} has no tensors {prefixes}: there are none in the result"] if shape.carried else []
    stored = read_safetensors_directory(directory)
    file_of = {name: tensor.file.name for name, tensor in stored.items()}
    if (directory / SINGLE).exists():  # readers would not look for a second file beside it
        (directory / SINGLE).rename(directory / ONLY)
        file_of = dict.fromkeys(stored, ONLY)
    copied = copy_carried(weights, shape, directory / SHARD)
    file_of |= dict.fromkeys((tensor.name for tensor in copied), SHARD)
    write_index(directory, file_of, sum(tensor.nbytes for tensor in [*stored.values(), *copied]))
    return copied, []
