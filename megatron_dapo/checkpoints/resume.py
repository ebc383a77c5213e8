"""What a resumed run must share with the run that it continues, and what else differs.

A run writes `resume.json`: its resolved configuration, the model's shape and a hash of the tokenizer's vocabulary. When
it is started again, `check_resume` lists the settings that differ and refuses those that would make the checkpoint
wrong. docs/cluster.md lists them for users. What only the checkpoint itself can tell (the prompt set, the size of
groups that were carried over, the mini-batches of an interrupted step) is checked when it is loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_dapo.config import Config, ConfigError, ModelShape, dump_config
from megatron_dapo.files import write_atomically

SETTINGS = "resume.json"
VOCABULARY = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
FIXED = {
    "trainer.seed": "the order of the prompts and the seeds of the samples follow from it",
    "policy.precision": "the optimizer state is saved for it",
    "policy.distributed_optimizer": "the optimizer state is saved for it",
}


def record_settings(run_dir: Path, config: Config, shape: ModelShape) -> None:
    """Writes config.yaml, for readers, and resume.json."""
    write_atomically(run_dir / "config.yaml", dump_config(config))
    content = {
        "config": config.model_dump(mode="json"), "model": _plain(shape), "vocabulary": _vocabulary(config.policy.model)
    }  # fmt: skip
    write_atomically(run_dir / SETTINGS, json.dumps(content))


def check_resume(config: Config, shape: ModelShape) -> list[str]:
    """The settings that differ from those of the run that is resumed, one line each; empty for a new run. Raises
    ConfigError for what may not differ."""
    run_dir = Path(config.trainer.run_dir)
    if not any((run_dir / "checkpoints").glob("step_*")) or not (run_dir / SETTINGS).exists():
        return []
    try:
        saved = json.loads((run_dir / SETTINGS).read_text())
    except (OSError, ValueError) as error:
        return [f"{run_dir / SETTINGS} cannot be read, so the settings were not compared: {error}"]
    changed = list(_differences(saved["config"], config.model_dump(mode="json")))
    refused = [
        f"{key} is {new!r}, but the run in {run_dir} was started with {old!r}, and {FIXED[key]}"
        for key, old, new in changed
        if key in FIXED
    ]
    refused += [
        f"the model of {config.policy.model} has {name} {new!r}, but that of the run in {run_dir} has {old!r}"
        for name, old, new in _differences(saved["model"], _plain(shape))
    ]
    if saved["vocabulary"] != _vocabulary(config.policy.model):
        refused.append(f"the tokenizer in {config.policy.model} is not that of the run in {run_dir}")
    if refused:
        raise ConfigError(f"cannot resume: {'; '.join(refused)}. Use the saved setting, or another trainer.run_dir")
    return [f"{key}: {old!r} → {new!r}" for key, old, new in changed]


def _differences(old: Any, new: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, old, new) of every value that differs. A key that only one side has counts as None on the other."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else str(key))
    elif old != new:
        yield prefix, old, new


def _plain(shape: ModelShape) -> Any:
    return json.loads(json.dumps(asdict(shape)))


def _vocabulary(model: str) -> str:
    """A hash of the files that say which token has which number."""
    digest = hashlib.blake2b(digest_size=16)
    for name in VOCABULARY:
        path = Path(model) / name
        if path.exists():
            digest.update(name.encode() + path.read_bytes())
    return digest.hexdigest()
