"""Checks of the machine: run directory with its speed and free space, room for weight updates, /dev/shm, clock, ports,
Slurm, limits, HF cache, SGLang's Python, model directory."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_dapo.config import Config, ModelShape
from megatron_dapo.config.load import local_model
from megatron_dapo.config.rollout import ServerConfig
from megatron_dapo.data import load_tokenizer
from megatron_dapo.doctor.check import Check, CommandRunner, last_line, run_command
from megatron_dapo.doctor.software import sglang_pairing
from megatron_dapo.errors import UserError
from megatron_dapo.files import existing_parent, file_system
from megatron_dapo.weights.locate import check_model_directory

SGLANG_PROBE = "import torch, sglang; print('found', sglang.__version__, torch.__version__)"
GIB = 1 << 30
SLOW_MB_PER_SECOND = 200
LOCAL = {"ext4", "ext3", "xfs", "btrfs", "overlay", "tmpfs"}  # file systems that other nodes cannot see
WRITE_BYTES = 64 << 20
MOST_SKEW_SECONDS = 2.0
# Bytes of a checkpoint per parameter: bf16 weights, and the optimizer's fp32 copy and two moments.
CHECKPOINT_BYTES_PER_PARAMETER = 14


def run_directory(
    run_dir: Path,
    nodes: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    mounts: Path = Path("/proc/self/mounts"),
) -> Check:
    """The run directory is writable, fast enough, and visible to other nodes."""
    parent = existing_parent(run_dir)
    if not parent.is_dir():
        return Check("run directory", "fail", f"{parent} is a file", "choose another trainer.run_dir")
    try:
        speed = write_speed(parent, clock)
    except OSError as error:
        return Check("run directory", "fail", f"{parent} is not writable: {error.strerror or error}", "choose "
                     "another trainer.run_dir, or change its permissions or quota")  # fmt: skip
    kind = file_system(parent, mounts)
    found = f"{run_dir} (on {kind}), {speed:,.0f} MB/s written"
    if nodes > 1 and kind in LOCAL:
        return Check("run directory", "warn", found, f"{kind} is local to this node, and slurm.nodes is {nodes}: "
                     "choose a trainer.run_dir on a shared file system")  # fmt: skip
    if speed < SLOW_MB_PER_SECOND:
        return Check("run directory", "warn", found, "checkpoints will be slow; use a parallel file system, or save "
                     "less often (trainer.checkpoint.every)")  # fmt: skip
    return Check("run directory", "ok", found)


def write_speed(folder: Path, clock: Callable[[], float] = time.perf_counter, size: int = WRITE_BYTES) -> float:
    """MB/s of a file written and flushed to disk. The file is removed."""
    block = os.urandom(1 << 20)
    started = clock()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        for _ in range(size >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        seconds = clock() - started
    return size / 1e6 / max(seconds, 1e-9)


def free_disk(run_dir: Path, parameters: int, keep: int = 1, usage: Callable[[Path], Any] = shutil.disk_usage) -> Check:
    """There is room for the kept checkpoints and the one being written."""
    free = usage(existing_parent(run_dir)).free
    needed = (keep + 1) * CHECKPOINT_BYTES_PER_PARAMETER * parameters
    found = f"{free / GIB:,.0f} GiB free"
    if parameters and free < needed:
        return Check("disk", "fail", f"{found}, but {keep + 1} checkpoints take {needed / GIB:,.0f} GiB", "make room, "
                     "or choose another trainer.run_dir, or keep fewer (trainer.checkpoint.keep)")  # fmt: skip
    if free < 20 * GIB:
        return Check("disk", "warn", found, "there is little room for checkpoints, samples and logs")
    return Check("disk", "ok", found + (f"; {keep + 1} checkpoints take {needed / GIB:,.0f} GiB" if parameters else ""))


def weights_directory(folder: Path, weight_bytes: int, usage: Callable[[Path], Any] = shutil.disk_usage) -> Check:
    """Weight updates are written here, and two versions may exist at once. The run creates the folder."""
    there = existing_parent(folder)
    try:
        _touch(there)
    except OSError as error:
        return Check("weights", "fail", f"{folder} is not writable: {error.strerror}", "set "
                     "rollout.weights.directory to a folder that trainer and engines share")  # fmt: skip
    free = usage(there).free
    found = f"{folder}: {free / GIB:.1f} GiB free"
    if free < 2 * weight_bytes:
        return Check("weights", "fail", f"{found}; two versions of the weights take {2 * weight_bytes / GIB:.1f} GiB",
                     "enlarge it (/dev/shm: docker --shm-size, mount -o remount,size=…), set rollout.weights.directory "
                     "to a fast disk, or use another rollout.weights.transport")  # fmt: skip
    return Check("weights", "ok", found)


def shared_memory(folder: Path = Path("/dev/shm"), usage: Callable[[Path], Any] = shutil.disk_usage) -> Check:
    """NCCL and data loaders use /dev/shm."""
    if not folder.is_dir():
        return Check("shared memory", "fail", f"{folder} does not exist", "mount it: NCCL uses it between the ranks of "
                     "a node")  # fmt: skip
    free, total = usage(folder).free, usage(folder).total
    found = f"{folder}: {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < GIB:
        return Check("shared memory", "warn", found, "NCCL needs more: enlarge it (docker --shm-size=16g)")
    return Check("shared memory", "ok", found)


def clock_skew(
    folder: Path, now: Callable[[], float] = time.time, stamp: Callable[[Path], float] | None = None
) -> Check:
    """This machine's clock agrees with the file system's (the file server's, where it is shared)."""
    parent = existing_parent(folder)
    skew = (stamp or _touch)(parent) - now()
    found = f"{skew:+.1f} s between this clock and that of {parent}"
    if abs(skew) > MOST_SKEW_SECONDS:
        return Check("clock", "warn", found, "clocks differ, so logs and heartbeats of nodes cannot be compared: start "
                     "chronyd or ntpd")  # fmt: skip
    return Check("clock", "ok", found)


def _touch(folder: Path) -> float:
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        file.write(b"x")
        file.flush()
        return os.fstat(file.fileno()).st_mtime


def ports(host: str, first: int, count: int) -> Check:
    """Servers take the next free port. A port in use means that another server runs here."""
    from megatron_dapo.engines.sglang.server_process import is_free

    used = [port for port in range(first, min(first + max(count, 1), 65536)) if not is_free(host, port)]
    span = f"{first}" if count <= 1 else f"{first} to {first + count - 1}"
    if not used:
        return Check("ports", "ok", f"{span} free on {host}")
    return Check("ports", "warn", f"in use on {host}: {', '.join(map(str, used))}", "the next free "
                 "ports are used instead; stop servers that you left running, or set rollout.servers.port")  # fmt: skip


def slurm(run: CommandRunner = run_command, now: Callable[[], datetime] = datetime.now) -> Check:
    """The Slurm controller responds, and its clock agrees with this machine's."""
    result = run(["sinfo", "--noheader", "--format=%P %D %T"], 15)
    if result.missing:
        return Check("slurm", "ok", "not a Slurm machine")
    if "configuration source" in result.err:
        return Check("slurm", "warn", "Slurm's commands are installed, but no cluster is configured", "set "
                     "SLURM_CONF if this machine belongs to a cluster")  # fmt: skip
    if result.code != 0:
        return Check("slurm", "fail", f"sinfo failed: {last_line(result.err) or 'no output'}", "the controller does "
                     "not respond: check SLURM_CONF, munge and slurmctld, or ask the administrators")  # fmt: skip
    rows = [line.split() for line in result.out.splitlines() if len(line.split()) == 3]
    usable = sum(int(count) for _, count, state in rows if state.rstrip("*~#$@").startswith(("idle", "mix", "alloc")))
    partitions = sorted({name.rstrip("*") for name, _, _ in rows})
    found = f"partitions {', '.join(partitions) or 'none'}; {usable} nodes up"
    skew = _controller_skew(run, now)
    if skew is not None and abs(skew) > 5:
        return Check("slurm", "warn", f"{found}; its clock is {skew:+.0f} s off", "start chronyd or ntpd: Slurm "
                     "rejects credentials that are too old or from the future")  # fmt: skip
    if not usable:
        return Check("slurm", "warn", found, "no node can run a job now: see sinfo -R for the reasons")
    return Check("slurm", "ok", found)


def _controller_skew(run: CommandRunner, now: Callable[[], datetime]) -> float | None:
    """Seconds between the controller's clock, printed above its configuration, and ours; None: not printed."""
    result = run(["scontrol", "show", "config"], 15)
    first = result.out.splitlines()[0] if result.code == 0 and result.out else ""
    try:
        return (datetime.fromisoformat(first.rpartition(" ")[2]) - now()).total_seconds()
    except ValueError:
        return None


def limits(
    get: Callable[[int], tuple[int, int]] = resource.getrlimit, infiniband: Path = Path("/sys/class/infiniband")
) -> Check:
    """Limits on open files (sockets and weight files) and on locked memory (InfiniBand)."""
    files, _ = get(resource.RLIMIT_NOFILE)
    locked, _ = get(resource.RLIMIT_MEMLOCK)
    unlimited = resource.RLIM_INFINITY
    shown = {
        "open files": "unlimited" if files == unlimited else str(files),
        "locked memory": "unlimited" if locked == unlimited else f"{locked >> 20} MiB",
    }
    found = ", ".join(f"{name} {value}" for name, value in shown.items())
    if files != unlimited and files < 4096:
        return Check("limits", "fail", found, "ulimit -n 65536 (also in the job script): engines and checkpoints open "
                     "thousands of files and sockets")  # fmt: skip
    if infiniband.is_dir() and locked != unlimited and locked < 1 << 30:
        return Check("limits", "warn", found, "with InfiniBand, NCCL needs ulimit -l unlimited (limits.conf; Slurm: "
                     "PropagateResourceLimitsExcept=MEMLOCK)")  # fmt: skip
    return Check("limits", "ok", found)


def hf_cache(environment: Mapping[str, str] | None = None) -> Check:
    environment = os.environ if environment is None else environment
    home = environment.get("HF_HOME") or str(Path(environment.get("HOME") or "~").expanduser() / ".cache/huggingface")
    cache = Path(environment.get("HF_HUB_CACHE") or Path(home) / "hub")
    offline = environment.get("HF_HUB_OFFLINE", "").upper() in {"1", "TRUE", "YES", "ON"}
    mode = "offline" if offline else "online"
    if not os.access(existing_parent(cache), os.W_OK):
        return Check("hf cache", "warn" if offline else "fail", f"{cache} is not writable ({mode})", "set HF_HOME "
                     "to a writable folder")  # fmt: skip
    return Check("hf cache", "ok", f"{cache} ({mode})")


def serving_python(servers: ServerConfig, run: CommandRunner = run_command) -> Check:
    """SGLang can be imported in the Python of the servers."""
    if servers.urls:
        return Check("sglang", "ok", f"not needed here: {len(servers.urls)} external servers")
    python = servers.python or sys.executable
    if shutil.which(python) is None:
        return Check("sglang", "fail", f"{python} is not a program", "set rollout.servers.python to the Python of the "
                     "environment that has sglang")  # fmt: skip
    result = run([python, "-c", SGLANG_PROBE], 150, {**os.environ, **servers.environment})
    words = last_line(result.out).split()
    if result.code != 0 or words[:1] != ["found"]:
        return Check("sglang", "fail", f"does not import in {python}: {last_line(result.err) or 'no output'}", "pip "
                     "install 'megatron-dapo[sglang]' there, or set rollout.servers.python to an environment that has "
                     "it")  # fmt: skip
    found = f"sglang {words[1]} with torch {words[2]} in {python}"
    wrong = sglang_pairing(words[1], words[2])
    return Check("sglang", "warn", found, wrong) if wrong else Check("sglang", "ok", found)


def bitwise_resume(config: Config) -> Check:
    """What makes two runs of this configuration, or a resumed one, differ in bits."""
    rollout, sampler = config.rollout, config.rollout.sampler
    seeded = rollout.servers.demands.exact or "--enable-deterministic-inference" in rollout.servers.arguments
    reasons = {
        "policy.true_on_policy and policy.deterministic are off": not config.policy.is_deterministic,
        "servers have no --enable-deterministic-inference (policy.true_on_policy adds it)": not seeded,
    }
    reasons = reasons if rollout.engine == "sglang" else {}
    reasons |= {
        "rollout.sampler.order is not prompt": sampler.order != "prompt" and sampler.oversampling != 1,
        "rollout.sampler.unfinished is not finish": sampler.unfinished != "finish",
        "rollout.weights.in_flight with max_staleness above 0": rollout.in_flight,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if not found:
        return Check("bitwise resume", "ok", "no setting makes a resumed run differ in its bits")
    text = f"a resumed run is exact in its data, not in its bits: {'; '.join(found)}"
    wanted = config.policy.true_on_policy or config.policy.deterministic
    return Check("bitwise resume", "warn", text, "change these keys") if wanted else Check("bitwise resume", "ok", text)


def model_directory(name: str) -> Check:
    """config.json is supported, all weight files are complete, and the tokenizer loads. Weights are not downloaded."""
    try:
        path = Path(local_model(name, weights=False))
        if path != Path(name) and not any(path.glob("*.safetensors")):
            found = f"{ModelShape.from_dir(path).architecture}; the hub's cache has no weights of {name}"
            return Check("model", "warn", found, f"a run downloads them; without a network there: hf download {name}")
        shape = check_model_directory(path)
        load_tokenizer(path, shape.vocab)
    except UserError as error:
        return Check("model", "fail", str(error), "download all files of the model again (hf download)")
    return Check("model", "ok", f"{shape.architecture}, {shape.layers} layers, all weight files, tokenizer")
