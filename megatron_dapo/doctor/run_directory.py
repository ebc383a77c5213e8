"""`megatron-dapo doctor RUN_DIR`: what the next start of a run would find there, and do about it. Changes nothing."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dapo.checkpoints.folder import CheckpointFolder
from megatron_dapo.checkpoints.run_dir import in_the_way, left_memory
from megatron_dapo.config import Config, ConfigError, load_config
from megatron_dapo.doctor.check import Check, Probe, fail, ok, warn
from megatron_dapo.errors import CheckpointError
from megatron_dapo.files import check_writable, explain
from megatron_dapo.observe.metrics_file import Record, RecordError, parse_records
from megatron_dapo.rollout.pending_group import CarryOver
from megatron_dapo.types import StepBatch

HOUR = 3600.0


def probes(run_dir: Path, overrides: Sequence[str]) -> list[Probe]:
    checks = (writing, holder, checkpoints, metrics, leftovers)
    found = [Probe(look.__name__, partial(look, run_dir), HOUR) for look in checks]
    saved, config = run_dir / "config.yaml", load_config(None, overrides)
    try:
        config = load_config(saved, overrides) if saved.is_file() else config
    except ConfigError as error:  # of another version, perhaps
        damage = warn(str(error), "a start replaces it; servers are not asked")
        found.insert(0, Probe(saved.name, lambda: damage))
    servers = config.rollout.servers
    if servers.addresses:
        key = os.environ.get(servers.api_key_env or "")
        found.append(Probe("servers", partial(paused_servers, servers.addresses, key), HOUR))
    return found


def writing(run_dir: Path) -> Check:
    """A file can be made and has room."""
    try:
        check_writable(run_dir)
    except OSError as error:
        return fail(f"{run_dir} cannot be written", explain(error, run_dir))
    found = os.statvfs(run_dir)
    return ok(f"{found.f_bavail * found.f_frsize / 1e9:.2f} GB and {found.f_favail} inodes free")


def holder(run_dir: Path) -> Check:
    """The newest lock, as far as it can be judged from outside."""
    locks = [path for path in (run_dir / "lock").glob("*.json") if path.stem.isdigit()]
    if not locks:
        return ok("no run has used this directory")
    newest = max(locks, key=lambda path: int(path.stem))
    try:
        lock = json.loads(newest.read_text())
        who, released = f"pid {lock['pid']} on {lock['host']}, since {lock['since']}", bool(lock["released"])
    except (OSError, ValueError, KeyError, TypeError):
        return warn(f"{newest} is damaged", "a start waits 90 s for a sign of life, then takes over")
    if released:
        return ok(f"free; the last run was {who}")
    return warn(who, "it runs, or it was killed: a start notices, or waits up to 90 s")


def checkpoints(run_dir: Path) -> Check:
    """Reads every file of the checkpoints, from the newest one on to the first good one."""
    folder = CheckpointFolder(run_dir, Config().trainer.checkpoint)
    found: list[int] = []
    try:
        used, bad = folder.first_usable(lambda state: found.append(_step(state)))
    except CheckpointError as error:
        return fail(str(error), "a start is refused until it can be read")
    aside = "".join(f"; {path.name} was set aside" for path in sorted(folder.path.glob("*.damaged*")))
    unusable = "; ".join(f"{path.name}: {problem}" for path, problem in bad.items())
    if used and bad:
        line = f"a start continues from {used.name}, step {found[-1]}{aside}; unusable: {unusable}"
        return warn(line, "a start renames these")
    if used:
        return ok(f"a start continues from {used.name}, step {found[-1]}{aside}")
    if bad:
        return fail(f"none can be used: {unusable}", "restore one; a start is refused")
    return ok(f"none: a start begins with step 1{aside}")


def _step(state: dict[str, Any]) -> int:
    """Raises where a start could not restore the state."""
    current, rollouts = state["current"], state["rollouts"]
    CarryOver.from_state(rollouts["sampler"])
    for batch in [*state["batches"], *([current["batch"]] if current else [])]:
        for sample in StepBatch.from_state(batch).samples:
            where = f"sample {sample.index} of prompt {sample.prompt_id}"
            if sample.grade is not None and (grade := sample.grade.checked()) != sample.grade:
                raise CheckpointError(f"poisoned: {where} has a grade that is {grade.reason}")
            if not np.isfinite(sample.engine_logprobs).all():
                raise CheckpointError(f"poisoned: {where} has log-probs that are not finite")
    for line in state["observer"].get("unwritten", ()):
        Record.from_line(line)
    return int(state["step"]) if rollouts["cursor"] else 0


def metrics(run_dir: Path) -> Check:
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return ok("none yet")
    try:
        records, damaged = parse_records(path)
    except RecordError as error:
        return fail(str(error), "make it readable")
    found = f"{len(records)} records, the last of step {max((record.step for record in records), default=0)}"
    if damaged:
        found += f"; no record: line {', '.join(map(str, damaged))}"
        return warn(found, "a start moves it to metrics.jsonl.damaged")
    return ok(found)


def leftovers(run_dir: Path) -> Check:
    """What a killed run left, and what has the name of something else."""
    files = [path for path in (run_dir / "checkpoints").glob("step_*[0-9]") if not path.is_dir()]
    found = [f"{path.name} is in the way" for path in in_the_way(run_dir) + files]
    found += [f"{path} is shared memory of a killed run" for path in left_memory(run_dir)]
    found += [f"{path.name} is unfinished" for path in sorted((run_dir / "checkpoints").glob(".step_*"))]
    if not found:
        return ok("none")
    return warn("; ".join(found), "a start renames what is in the way and removes the rest")


def paused_servers(urls: list[str], key: str | None) -> Check:
    """External servers: those that a killed trainer has left paused reply, and generate nothing."""
    bad = [f"{url}: {state}" for url in urls if (state := _server_state(url, key))]
    if not bad:
        return ok(f"{len(urls)} generate")
    return warn("; ".join(bad), "a start resumes a paused server, and waits for the others")


def _server_state(url: str, key: str | None) -> str:
    """Why a server is not ready; empty if it is."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as the engines are asked
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for path in ("/model_info", "/health"):
        request = urllib.request.Request(url.rstrip("/") + path, headers=headers)
        try:
            direct.open(request, timeout=30).close()
        except urllib.error.HTTPError as error:
            return "it is paused or starting" if error.code == 503 else f"HTTP {error.code}"
        except OSError as error:
            return f"it does not reply ({error})"
    return ""
