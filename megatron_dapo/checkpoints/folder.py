"""The folder `checkpoints/` of a run, as rank 0 sees it: publishing, pruning, scores, damaged checkpoints, and the
settings that a resumed run must share with the run it continues.

    step_N/            a complete checkpoint; step_N+K: step N is done, and K updates (critic's too) of the next
    .step_N.tmp/       being written
    .step_N.old/       replaced or pruned, about to be deleted
    step_N.damaged/    its files are not as they were written; never used. Pruning keeps the newest of them
    best.json, scores.json
    iter_N, latest_checkpointed_iteration.txt   links and tracker file, by which Megatron-LM finds the checkpoints

A checkpoint gets its final name in one rename, after all files and folders are on disk. `manifest.json` lists every
file with its size and CRC-32; it is written last.
Pruning renames before it deletes, so what is left of an interrupted deletion is never taken for a checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from megatron_dapo import fault_points
from megatron_dapo.checkpoints.files import CheckpointFile, FileRecord, damaged_files
from megatron_dapo.config import Config, ConfigError, ModelShape
from megatron_dapo.config.base import differences, dump_yaml
from megatron_dapo.config.trainer import CheckpointConfig
from megatron_dapo.errors import CheckpointError, UserError
from megatron_dapo.files import explain, fsync_path, publish_directory, remove, set_aside, write_atomically
from megatron_dapo.weights.formats.megatron_reader import first_not_finite
from megatron_dapo.weights.locate import STEP, TRACKER
from megatron_dapo.weights.value_weights import value_shape

STATE, ARRAYS = "trainer.json", "trainer.arrays"
MARK = "$array"
ALIGN = 8


def state_files(state: dict[str, Any]) -> list[CheckpointFile]:
    """The state of the loop as two files: small JSON, and all numpy arrays in one binary file. A snapshot: later
    changes of the arrays do not reach the files."""
    arrays: list[bytes] = []
    position = 0

    def extract(value: Any) -> Any:
        nonlocal position
        if isinstance(value, dict):
            if MARK in value:
                raise ValueError(f"{MARK!r} is not allowed as a key of the state")
            if not all(isinstance(key, str) for key in value):  # they would come back as texts
                raise TypeError(f"the keys of a state must be texts, found {list(value)[:3]}")
            return {key: extract(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [extract(item) for item in value]
        if not isinstance(value, np.ndarray):
            return value.item() if isinstance(value, np.generic) else value
        if value.dtype.kind not in "biuf":
            raise TypeError(f"an array of {value.dtype} cannot be part of the state")
        content, start = value.tobytes(), position
        arrays.append(content + bytes(-len(content) % ALIGN))
        position += len(arrays[-1])
        return {MARK: [value.dtype.str, list(value.shape), start]}

    # Not by orjson: rows of the data may hold any integer and half of a surrogate pair, metrics NaN.
    text = json.dumps(extract(state)).encode()
    return [CheckpointFile(STATE, [text]), CheckpointFile(ARRAYS, [b"".join(arrays)])]


def read_state(folder: Path) -> dict[str, Any]:
    """The state that `state_files` wrote."""
    try:
        content = (folder / ARRAYS).read_bytes()
        text = (folder / STATE).read_bytes()
        state = json.loads(text, object_hook=lambda value: _array(value[MARK], content) if MARK in value else value)
    except (OSError, ValueError, TypeError, RecursionError) as error:  # json's error is a ValueError
        raise CheckpointError(f"the state in {folder / STATE} cannot be read: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{folder / STATE} does not hold a state")
    return state


def _array(place: Any, content: bytes) -> np.ndarray:
    kind, shape, start = place
    dtype, count = np.dtype(kind), math.prod(shape)
    if not count:
        return np.empty(shape, dtype)
    return np.frombuffer(content, dtype, count=count, offset=start).reshape(shape).copy()


DAMAGED = re.compile(rf"{STEP.pattern}\.damaged(\d*)")
POLICY = "policy"
CRITIC = "critic"
REQUIRED = (STATE, ARRAYS, f"{POLICY}/.metadata", f"{POLICY}/metadata.json", f"{POLICY}/common.pt")
MANIFEST, BEST, SCORES = "manifest.json", "best.json", "scores.json"
REPLACED = ".replaced"  # in a checkpoint that was moved away for another one of the same name


def checkpoint_name(step: int, updates: int | None) -> str:
    return f"step_{step}" if updates is None else f"step_{step}+{updates}"


class CheckpointFolder:
    """Used by the loop and by the thread that writes; a lock keeps their changes apart."""

    def __init__(self, run_dir: str | Path, config: CheckpointConfig) -> None:
        self.path = Path(run_dir).resolve() / "checkpoints"
        self._config = config
        self._lock = threading.Lock()

    def building(self, name: str) -> Path:
        return self.path / f".{name}.tmp"

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first. Files and folders with other names are ignored. A folder that cannot be
        read is an error: the run would begin again from nothing."""
        try:
            found = [path for path in self.path.iterdir() if STEP.fullmatch(path.name) and path.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {explain(error)}") from error
        return sorted(found, key=_order)

    def clean_up(self) -> None:
        """After a kill: removes unfinished checkpoints and unfinished deletions. One that was moved away to be
        replaced, and whose replacement never came, gets its name back. A file with the name of a checkpoint would
        prevent that one from being saved: it is renamed."""
        with self._lock, contextlib.suppress(OSError):
            for path in list(self.path.glob(".step_*")):
                name = path.name.removeprefix(".").removesuffix(path.suffix)
                if path.suffix == ".old" and (path / REPLACED).exists() and not (self.path / name).exists():
                    path.rename(self.path / name)
                    (self.path / name / REPLACED).unlink()  # in this order, or a kill between them loses the checkpoint
                elif path.suffix in (".tmp", ".old"):
                    remove(path)
            for path in list(self.path.glob("step_*")):
                if STEP.fullmatch(path.name) and not path.is_dir():
                    set_aside(path)

    def prepare(self, name: str, size: int) -> Path:
        """An empty folder for a checkpoint of `size` bytes. OSError where there is no room."""
        building = self.building(name)
        remove(building)
        try:
            building.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"{building} cannot be written: {explain(error, building)}") from error
        free = shutil.disk_usage(building).free
        if free < size:
            building.rmdir()
            raise CheckpointError(
                f"{self.path} has {free / 1e9:.2f} GB free, the checkpoint needs {size / 1e9:.2f} GB; delete "
                "something there, or lower trainer.checkpoint.keep"
            ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return building

    def discard(self, name: str) -> None:
        shutil.rmtree(self.building(name), ignore_errors=True)

    def publish(self, name: str, files: Mapping[str, FileRecord], facts: Mapping[str, Any]) -> None:
        """All files are written and synced. Writes the manifest and gives the checkpoint its name."""
        building, target, aside = self.building(name), self.path / name, self.path / f".{name}.old"
        records = {file: files[file].to_json() for file in sorted(files)}
        write_atomically(building / MANIFEST, orjson.dumps({**facts, "files": records}))
        for folder, _, _ in os.walk(building):
            fsync_path(folder)
        fault_points.reach("checkpoint/before_publish")
        with self._lock:
            if target.exists():
                (target / REPLACED).touch()
            publish_directory(building, target, aside)
        fault_points.reach("checkpoint/before_prune")

    def files_of(self, path: Path) -> dict[str, FileRecord]:
        """What the manifest lists: at least everything that loading reads. Opens no other file."""
        try:
            manifest = _read(path / MANIFEST)
            files = {name: FileRecord.from_json(record) for name, record in manifest["files"].items()}
            step = int(manifest["step"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path / MANIFEST} is damaged: {type(error).__name__}: {error}") from error
        if step != _order(path)[0]:
            raise CheckpointError(f"{path / MANIFEST} is of step {step}: the checkpoint was renamed")
        read = {*REQUIRED, *(str(p.relative_to(path)) for p in path.glob("[pr]*/[!.]*") if p.is_file())}
        if unlisted := sorted(read - files.keys()):
            raise CheckpointError(f"{path / MANIFEST} does not list {unlisted[0]}")
        return files

    def _is_whole(self, path: Path) -> bool:
        """Whether all files have the sizes that the manifest lists; their contents are not read."""
        try:
            return all((path / name).stat().st_size == file.bytes for name, file in self.files_of(path).items())
        except (OSError, CheckpointError):
            return False

    def first_usable(self, check: Callable[[dict[str, Any]], None]) -> tuple[Path | None, dict[Path, str]]:
        """For a look from outside, which changes nothing: the newest checkpoint whose files are as they were written,
        whose state passes `check` and whose values are finite; and why newer ones are not used. Raises the ConfigErrors
        of `check`."""
        rejected: dict[Path, str] = {}
        for path in reversed(self.complete()):
            try:
                problems = damaged_files(path, self.files_of(path))
                if not problems:
                    check(read_state(path))
                    parts = [path / name for name in (POLICY, CRITIC) if (path / name).is_dir()]
                    poisoned = [tensor for part in parts if (tensor := first_not_finite(part)) is not None]
                    if not poisoned:
                        return path, rejected
                    problems = [f"poisoned: {poisoned[0]} has values that are not finite"]
            except ConfigError:
                raise
            except Exception as error:  # of whatever the state holds
                problems = [str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"]
            rejected[path] = problems[0]
        return None, rejected

    def set_aside(self, path: Path) -> Path:
        """Renames a damaged checkpoint, so that it is neither used nor counted. Returns where it is now."""
        target = set_aside(path)
        with self._lock:
            self._link_for_megatron()
        return target

    # ---- pruning ----

    def prune(self) -> list[str]:
        """Keeps the checkpoints of the last complete steps and of every `keep_every`-th one, a newer one within a step,
        the best, and the newest damaged one. One with missing or cut files does not count as a newest one; it is left
        for the next start to judge. Returns a line for each failure."""
        problems: list[str] = []
        with self._lock:
            try:
                everything = self.complete()
            except CheckpointError as error:
                return [str(error)]
            complete = [path for path in everything if self._is_whole(path)]
            steps = [path for path in complete if _order(path)[1] < 0] or complete
            newest = {*steps[-(self._config.keep or len(steps)) :], *complete[-1:]}
            every = self._config.keep_every
            keep = newest | {path for path in steps if every and _order(path)[0] % every == 0}
            if self._config.keep_best and (best := self._best(complete)) is not None:
                keep.add(best[1])
                try:
                    content = {"checkpoint": best[1].name, "score": best[0]}
                    write_atomically(self.path / BEST, orjson.dumps(content), fsync=False)
                except OSError as error:
                    problems.append(f"{self.path / BEST} cannot be written: {error.strerror or error}")
            oldest = min(map(_order, newest), default=(0, 0))
            broken = [path for path in everything if path not in complete and _order(path) < oldest]
            outdated = [path for path in complete if path not in keep] + broken + self._damaged()[:-1]
            problems += [problem for path in outdated if (problem := self._delete(path))]
            problems += self._link_for_megatron()
        return problems

    def _link_for_megatron(self) -> list[str]:
        """Megatron-LM's `--load` with this folder finds the newest complete step, and others with `--ckpt-step`."""
        try:
            steps = {step: path for path in self.complete() for step, updates in [_order(path)] if updates < 0}
            links = {f"iter_{step:07d}": f"{path.name}/{POLICY}" for step, path in steps.items()}
            for link in self.path.glob("iter_*"):
                if link.is_symlink() and link.name not in links:
                    link.unlink()
            for name, target in links.items():
                if not os.path.lexists(self.path / name):
                    (self.path / name).symlink_to(target)
            if steps:
                write_atomically(self.path / TRACKER, str(max(steps)), fsync=False)
            else:
                (self.path / TRACKER).unlink(missing_ok=True)
        except (OSError, CheckpointError) as error:
            return [f"{self.path}: Megatron-LM will not find the checkpoints: {error}"]
        return []

    def _damaged(self) -> list[Path]:
        """Checkpoints that were set aside, oldest first."""
        found = [(match, path) for path in self.path.iterdir() if (match := DAMAGED.fullmatch(path.name))]
        return [path for _, path in sorted(((_position(match), int(match[3] or 1)), path) for match, path in found)]

    def _delete(self, path: Path) -> str | None:
        aside = self.path / f".{path.name}.old"
        try:
            remove(aside)
            path.rename(aside)
        except OSError as error:
            return f"the old checkpoint {path} cannot be removed: {error.strerror or error}"
        remove(aside)
        return None

    def set_score(self, name: str, score: float) -> list[str]:
        """For a score that is known after the checkpoint was saved. Returns problems, as `prune` does."""
        try:
            scores = {**self._scores(), name: score}
            known = {path.name for path in self.complete()} | {name}
            write_atomically(self.path / SCORES, orjson.dumps({n: s for n, s in scores.items() if n in known}))
        except (OSError, CheckpointError) as error:
            return [f"{self.path / SCORES} cannot be written: {error}"]
        return self.prune()

    def _best(self, complete: list[Path]) -> tuple[float, Path] | None:
        """Of equal scores one from its own evaluation, not that of an earlier step; then the newest."""
        own = self._scores()
        scored = [(score, p.name in own, _order(p), p) for p in complete if (score := self._score(p, own)) is not None]
        if not scored:
            return None
        score, _, _, path = max(scored)
        return score, path

    def _score(self, path: Path, scores: Mapping[str, Any]) -> float | None:
        """From scores.json or the manifest. A file that cannot be read has none."""
        with contextlib.suppress(CheckpointError, KeyError, TypeError, ValueError):
            if path.name in scores:
                return float(scores[path.name])
            score = _read(path / MANIFEST)["score"]
            return None if score is None else float(score)
        return None

    def _scores(self) -> dict[str, Any]:
        try:
            found = _read(self.path / SCORES) if (self.path / SCORES).exists() else {}
        except CheckpointError:
            return {}
        return found if isinstance(found, dict) else {}


def _read(path: Path) -> Any:
    if path.exists() and not path.is_file():  # reading a pipe would wait for ever
        raise CheckpointError(f"{path} is not a file")
    try:
        return orjson.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _order(path: Path) -> tuple[int, int]:
    """A complete step comes before the stops in the middle of the next one."""
    match = STEP.fullmatch(path.name)
    assert match is not None
    return _position(match)


def _position(match: re.Match[str]) -> tuple[int, int]:
    return int(match[1]), -1 if match[2] is None else int(match[2])


def best_metric(metrics: Mapping[str, float], config: CheckpointConfig, default: float | None) -> float | None:
    """The metric that decides which checkpoint is the best one: as configured, else the evaluation's avg@k, else the
    accuracy of all sampled groups: dynamic sampling keeps that of the trained ones near one half. `default` if these
    metrics do not have it."""
    averages = [name for name in metrics if "avg@" in name]
    name = config.best_metric or next(iter(averages), "reward/accuracy_all")
    return float(metrics[name]) if name in metrics else default


SETTINGS = "resume.json"
TOKENIZER = {  # in the model's folder
    "vocabulary": ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"),
    "template": ("tokenizer_config.json", "chat_template.jinja"),
}
FIXED = {
    "trainer.seed": "the order of the prompts and the seeds of the samples follow from it",
    "policy.precision": "the optimizer state is saved for it",
    "policy.distributed_optimizer": "the optimizer state is saved for it",
    **dict.fromkeys(("policy.lora.rank", "policy.lora.alpha", "policy.lora.targets"), "the weights are saved for it"),
}


def record_settings(run_dir: Path, config: Config, shape: ModelShape) -> None:
    """Writes config.yaml, for readers, and resume.json."""
    settings = config.model_dump(mode="json")
    write_atomically(run_dir / "config.yaml", dump_yaml(settings))
    content = {"config": settings, "model": _plain(shape)} | _tokenizer(config.policy.model)
    write_atomically(run_dir / SETTINGS, json.dumps(content))


def check_resume(config: Config, shape: ModelShape) -> list[str]:
    """The settings that differ from those of the run that is resumed, one line each; empty for a new run. Raises
    ConfigError for what may not differ."""
    run_dir = Path(config.trainer.run_dir)
    if not any((run_dir / "checkpoints").glob("step_*")) or not (run_dir / SETTINGS).exists():
        return []
    try:
        saved = json.loads((run_dir / SETTINGS).read_text())
        _ = saved["config"] | {}, saved["model"] | {}, saved["vocabulary"]  # TypeError unless sections
    except (OSError, ValueError, TypeError, KeyError) as error:
        return [f"{run_dir / SETTINGS} cannot be read, so the settings were not compared: {error}"]
    changed = list(differences(saved["config"], config.model_dump(mode="json")))
    refused = [
        f"{key} is {new!r}, but the run in {run_dir} was started with {old!r}, and {FIXED[key]}"
        for key, old, new in changed
        if key in FIXED
        and not (key == "policy.lora.alpha" and not config.policy.lora.rank)
        and not (key == "policy.lora.targets" and sorted(old or ()) == sorted(new))
    ]
    models, critic = [(config.policy.model, saved["model"], shape)], config.of_critic.policy.model
    critics = sorted((run_dir / "checkpoints").glob(f"step_*/{CRITIC}")) if config.uses_critic else []
    with contextlib.suppress(UserError):  # a checkpoint without its config.json; the start looks for a better one
        models += [(critic, _plain(value_shape(saved_critic)), value_shape(critic)) for saved_critic in critics[:1]]
    refused += [
        f"the model of {model} has {name} {new!r}, but that of the run in {run_dir} has {old!r}"
        for model, before, now in models
        for name, old, new in differences(before, _plain(now))
        if name.partition(".")[0] in before  # not a field that is newer than the run
    ]
    tokenizer = _tokenizer(config.policy.model)
    if saved["vocabulary"] != tokenizer["vocabulary"]:
        refused.append(f"the tokenizer in {config.policy.model} is not that of the run in {run_dir}")
    if config.uses_critic and not critics:
        refused.append(f"the checkpoints in {run_dir} have no critic, which algorithm.advantage: gae needs")
    if refused:
        raise ConfigError(f"cannot resume: {'; '.join(refused)}. Use the saved setting, or another trainer.run_dir")
    lines = [f"{key}: {old!r} → {new!r}" for key, old, new in changed]
    if saved.get("template", tokenizer["template"]) != tokenizer["template"]:  # older runs have not recorded it
        lines.append(f"the chat template or another setting of the tokenizer in {config.policy.model}")
    return lines


def _plain(shape: ModelShape) -> Any:
    """The fields that define it, as JSON values."""
    found = asdict(shape)
    return json.loads(json.dumps({item.name: found[item.name] for item in fields(shape) if item.init}))


def _tokenizer(model: str) -> dict[str, str]:
    """Hashes of its files: which token has which number, and how messages become text."""
    files = {kind: [Path(model) / name for name in names] for kind, names in TOKENIZER.items()}
    texts = {kind: [path.name.encode() + path.read_bytes() for path in files[kind] if path.exists()] for kind in files}
    return {kind: hashlib.blake2b(b"".join(text), digest_size=16).hexdigest() for kind, text in texts.items()}
