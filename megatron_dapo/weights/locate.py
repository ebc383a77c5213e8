"""Finds the checkpoint that a path means, names formats that are not read, and checks model directories.

A path may be a checkpoint itself, Megatron-LM's save directory (a tracker file beside `iter_…` or `release`), a run
directory of this project, its `checkpoints/` folder or one `step_N` in it. Imports no torch.
"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from pathlib import Path

from megatron_dapo.config.model import ModelShape
from megatron_dapo.files import INDEX, unpacked
from megatron_dapo.weights.formats.readers import read_hf_directory
from megatron_dapo.weights.mapping import WeightsError, check_hf_tensors

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
METADATA, CONFIG = ".metadata", "metadata.json"  # of a torch_dist checkpoint; Megatron looks for the second one
HF_FILES = "hf"  # folder in a torch_dist checkpoint: config and tokenizer of the original model
RANK_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
RANK_FILE = "model_optim_rng.pt"

_ITERATION = re.compile(r"iter_(\d{7,})")
STEP = re.compile(r"step_(\d+)(?:\+(\d+))?")
_COMPLETE = ("manifest.json", "trainer.json")  # one of them is in every complete checkpoint of a run


class Format(StrEnum):
    HF = "HF"
    TORCH_DIST = "torch_dist"
    LEGACY = "legacy"  # one model_optim_rng.pt per model-parallel rank


def locate(path: str | Path, step: int | None = None) -> Path:
    """The folder that holds the weight files. `step`: which of several; by default the newest."""
    path = Path(path)
    if not path.is_dir():
        raise WeightsError(f"{path} is not a directory; expected a checkpoint")
    if (path / "policy" / METADATA).exists():
        path = path / "policy"
    if format_of(path) is not None:
        if step is not None:
            raise WeightsError(f"{path} is one checkpoint; --step chooses among those of a run")
        return path
    for choose in (_of_run, _of_megatron):
        if (found := choose(path, step)) is not None:
            return found
    raise WeightsError(unreadable(path))


def format_of(path: Path) -> Format | None:
    """The format of the weight files in a folder; None if there are none that we read."""
    if (path / METADATA).exists() and _backend(path) == "torch_dist":
        return Format.TORCH_DIST
    if any(RANK_FOLDER.fullmatch(p.name) and (p / RANK_FILE).exists() for p in path.glob("mp_rank_*")):
        return Format.LEGACY
    if any(path.glob("*.safetensors")) or (path / INDEX).exists() or any(path.glob("pytorch_model*.bin*")):
        return Format.HF
    return None


# Files of formats that are not read: a pattern, what it is, and what to do.
_OTHER_FORMATS = (
    (METADATA, "a PyTorch DCP checkpoint (torch_dcp or fsdp_dtensor); save it with --ckpt-format torch_dist"),
    ("*.distcp", f"an incomplete torch_dist checkpoint (no {METADATA}): its save did not finish; use another one"),
    ("context/io.json", "a NeMo checkpoint; export it to HF format with NeMo"),
    ("*zero_pp_rank*", "a DeepSpeed checkpoint; use its zero_to_fp32.py"),
    ("mp_rank_*_model_states.pt", "a DeepSpeed checkpoint; use its zero_to_fp32.py"),
    ("consolidated*.pth", "a model in consolidated.pth files; use the HF format"),
    ("*.gguf", "a GGUF model, which is quantised; use the bf16 checkpoint"),
    ("*_local.pt", "a local (non-persistent) Megatron checkpoint; use a global one"),
)


def unreadable(path: Path) -> str:
    """A message that names the format of a folder that cannot be read, if it is a known one."""
    backend = _backend(path)
    if backend not in (None, "torch_dist"):
        return (
            f"{path} is a dist_checkpointing checkpoint with the backend {backend!r}; load it in Megatron and save it "
            "with --ckpt-format torch_dist"
        )
    for pattern, description in _OTHER_FORMATS:
        if any(path.glob(pattern)):
            return f"{path} is {description}"
    return (
        f"{path}: no checkpoint found; expected a HF model, a Megatron torch_dist checkpoint ({METADATA} and "
        f"{CONFIG}), mp_rank_XX folders, {TRACKER}, or a run directory"
    )


def _backend(path: Path) -> str | None:
    try:
        return str(json.loads((path / CONFIG).read_bytes())["sharded_backend"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _of_run(path: Path, step: int | None) -> Path | None:
    """A run of this project, or its `checkpoints` folder."""
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    named = [(match, p) for p in folder.iterdir() if (match := STEP.fullmatch(p.name))]
    found = {
        (int(match[1]), -1 if match[2] is None else int(match[2])): p / "policy"
        for match, p in named
        if any((p / name).is_file() for name in _COMPLETE)
    }
    if not found:
        return None
    if step is None:
        return found[max(found)]
    if (step, -1) not in found:
        have = ", ".join(str(number) for number, updates in sorted(found) if updates < 0)
        raise WeightsError(
            f"{folder} has no checkpoint of step {step}; it has steps {have or 'none that are complete'}"
        )
    return found[step, -1]


def _of_megatron(path: Path, step: int | None) -> Path | None:
    """A directory that Megatron-LM saves to."""
    named = [(match, p) for p in path.iterdir() if (match := _ITERATION.fullmatch(p.name))]
    iterations = {int(match[1]): p for match, p in named}
    tracker = path / TRACKER
    if not tracker.exists() and not iterations:
        return None
    only = f"only {RELEASE!r}: leave out --step" if (path / RELEASE).is_dir() else "none"
    have = ", ".join(str(number) for number in sorted(iterations)) or only
    if step is not None:
        if step not in iterations:
            raise WeightsError(f"{path} has no iteration {step}; it has {have}")
        found = iterations[step]
    elif not tracker.exists():
        raise WeightsError(f"{path} has no {TRACKER}; choose an iteration with --step (there are: {have})")
    else:
        word = tracker.read_text(errors="replace").strip()
        if word != RELEASE and not re.fullmatch("[0-9]{1,18}", word):
            raise WeightsError(f"{tracker} says {word[:40]!r}; expected an iteration or {RELEASE!r}")
        found = path / RELEASE if word == RELEASE else iterations.get(int(word), path / f"iter_{int(word):07d}")
        if not found.is_dir():
            raise WeightsError(f"{tracker} says {word!r}, but {found} does not exist; choose an iteration with --step")
    if format_of(found) is None:
        raise WeightsError(unreadable(found))
    return found


def check_model_directory(path: str | Path) -> ModelShape:
    """An HF directory is complete: all files of its index, all tensors of its config.json, in the right shapes."""
    path = Path(path)
    shape = ModelShape.from_dir(path)
    check_hf_tensors(unpacked(read_hf_directory(path)), shape, path)
    return shape
