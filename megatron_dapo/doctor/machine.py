"""Checks of the machine: run directory with its speed and free space, room for weight updates, /dev/shm, clock, ports,
Slurm, limits, HF cache, SGLang's Python, model directory."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_dapo.config import Config, ModelShape
from megatron_dapo.config.load import local_model
from megatron_dapo.config.rollout import ServerConfig
from megatron_dapo.data import load_tokenizer
from megatron_dapo.doctor.check import Check, CommandRunner, fail, last_line, ok, run_command, warn
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


def run_directory(run_dir: Path, nodes: int = 1, mounts: Path = Path("/proc/self/mounts")) -> Check:
    """The run directory is writable, fast enough, and visible to other nodes."""
    parent = existing_parent(run_dir)
    if not parent.is_dir():
        return fail(f"{parent} is a file", "choose another trainer.run_dir")
    try:
        speed = write_speed(parent)
    except OSError as error:
        remedy = "choose another trainer.run_dir, or change its permissions or quota"
        return fail(f"{parent} is not writable: {error.strerror or error}", remedy)
    kind = file_system(parent, mounts)
    found = f"{run_dir} (on {kind}), {speed:,.0f} MB/s written"
    if nodes > 1 and kind in LOCAL:
        why = f"{kind} is local to this node, and slurm.nodes is {nodes}"
        return warn(found, f"{why}: choose a trainer.run_dir on a shared file system")
    if speed < SLOW_MB_PER_SECOND:
        remedy = "checkpoints will be slow; use a parallel file system, or save less often (trainer.checkpoint.every)"
        return warn(found, remedy)
    return ok(found)


def write_speed(folder: Path, clock: Callable[[], float] = time.perf_counter) -> float:
    """MB/s of a file written and flushed to disk. The file is removed."""
    block = os.urandom(1 << 20)
    started = clock()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        for _ in range(WRITE_BYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        seconds = clock() - started
    return WRITE_BYTES / 1e6 / max(seconds, 1e-9)


def free_disk(run_dir: Path, parameters: int, keep: int = 1, usage: Callable[[Path], Any] = shutil.disk_usage) -> Check:
    """There is room for the kept checkpoints and the one being written."""
    free = usage(existing_parent(run_dir)).free
    needed = (keep + 1) * CHECKPOINT_BYTES_PER_PARAMETER * parameters
    found = f"{free / GIB:,.0f} GiB free"
    if parameters and free < needed:
        remedy = "make room, or choose another trainer.run_dir, or keep fewer (trainer.checkpoint.keep)"
        return fail(f"{found}, but {keep + 1} checkpoints take {needed / GIB:,.0f} GiB", remedy)
    if free < 20 * GIB:
        return warn(found, "there is little room for checkpoints, samples and logs")
    return ok(found + (f"; {keep + 1} checkpoints take {needed / GIB:,.0f} GiB" if parameters else ""))


def weights_directory(folder: Path, weight_bytes: int, usage: Callable[[Path], Any] = shutil.disk_usage) -> Check:
    """Weight updates are written here, and two versions may exist at once. The run creates the folder."""
    there = existing_parent(folder)
    try:
        _touch(there)
    except OSError as error:
        remedy = "set rollout.weights.directory to a folder that trainer and engines share"
        return fail(f"{folder} is not writable: {error.strerror}", remedy)
    free = usage(there).free
    found = f"{folder}: {free / GIB:.1f} GiB free"
    if free < 2 * weight_bytes:
        return fail(
            f"{found}; two versions of the weights take {2 * weight_bytes / GIB:.1f} GiB",
            "enlarge it (/dev/shm: docker --shm-size, mount -o remount,size=…), set rollout.weights.directory to a "
            "fast disk, or use another rollout.weights.transport",
        )
    return ok(found)


def shared_memory(folder: Path = Path("/dev/shm"), usage: Callable[[Path], Any] = shutil.disk_usage) -> Check:
    """NCCL and data loaders use /dev/shm."""
    if not folder.is_dir():
        return fail(f"{folder} does not exist", "mount it: NCCL uses it between the ranks of a node")
    free, total = usage(folder).free, usage(folder).total
    found = f"{folder}: {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < GIB:
        return warn(found, "NCCL needs more: enlarge it (docker --shm-size=16g)")
    return ok(found)


def clock_skew(folder: Path) -> Check:
    """This machine's clock agrees with the file system's (the file server's, where it is shared)."""
    parent = existing_parent(folder)
    skew = _touch(parent) - time.time()
    found = f"{skew:+.1f} s between this clock and that of {parent}"
    if abs(skew) > MOST_SKEW_SECONDS:
        return warn(found, "clocks differ, so logs and heartbeats of nodes cannot be compared: start chronyd or ntpd")
    return ok(found)


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
        return ok(f"{span} free on {host}")
    remedy = "the next free ports are used instead; stop servers that you left running, or set rollout.servers.port"
    return warn(f"in use on {host}: {', '.join(map(str, used))}", remedy)


def slurm(run: CommandRunner = run_command) -> Check:
    """The Slurm controller responds, and its clock agrees with this machine's."""
    result = run(["sinfo", "--Node", "--noheader", "--format=%N %P %T"], 15)
    if result.missing:
        return ok("not a Slurm machine")
    if "configuration source" in result.err:
        remedy = "set SLURM_CONF if this machine belongs to a cluster"
        return warn("Slurm's commands are installed, but no cluster is configured", remedy)
    if result.code != 0:
        remedy = "the controller does not respond: check SLURM_CONF, munge and slurmctld, or ask the administrators"
        return fail(f"sinfo failed: {last_line(result.err) or 'no output'}", remedy)
    rows = [line.split() for line in result.out.splitlines() if len(line.split()) == 3]
    states = {node: state for node, _, state in rows}  # a node may be in several partitions; *: it does not respond
    usable = [s for s in states.values() if s.startswith(("idle", "mix", "alloc")) and not s.endswith("*")]
    partitions = sorted({name.rstrip("*") for _, name, _ in rows})
    found = f"partitions {', '.join(partitions) or 'none'}; {len(usable)} nodes up"
    skew = _controller_skew(run)
    if skew is not None and abs(skew) > 5:
        remedy = "start chronyd or ntpd: Slurm rejects credentials that are too old or from the future"
        return warn(f"{found}; its clock is {skew:+.0f} s off", remedy)
    if not usable:
        return warn(found, "no node can run a job now: see sinfo -R for the reasons")
    return ok(found)


def _controller_skew(run: CommandRunner) -> float | None:
    """Seconds between the controller's clock, printed above its configuration, and ours; None: not printed."""
    result = run(["scontrol", "show", "config"], 15)
    first = result.out.splitlines()[0] if result.code == 0 and result.out else ""
    try:
        return (datetime.fromisoformat(first.rpartition(" ")[2]) - datetime.now()).total_seconds()
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
        remedy = "ulimit -n 65536 (also in the job script): engines and checkpoints open thousands of files and sockets"
        return fail(found, remedy)
    if infiniband.is_dir() and locked != unlimited and locked < 1 << 30:
        where = "limits.conf; Slurm: PropagateResourceLimitsExcept=MEMLOCK"
        return warn(found, f"with InfiniBand, NCCL needs ulimit -l unlimited ({where})")
    return ok(found)


def hf_cache() -> Check:
    from huggingface_hub.constants import HF_HUB_CACHE as cache
    from huggingface_hub.constants import HF_HUB_OFFLINE as offline

    mode = "offline" if offline else "online"
    if not os.access(existing_parent(Path(cache)), os.W_OK):
        judge = warn if offline else fail
        return judge(f"{cache} is not writable ({mode})", "set HF_HOME to a writable folder")
    return ok(f"{cache} ({mode})")


def serving_python(servers: ServerConfig, run: CommandRunner = run_command) -> Check:
    """SGLang can be imported in the Python of the servers."""
    if servers.urls:
        return ok(f"not needed here: {len(servers.urls)} external servers")
    python = servers.python or sys.executable
    if shutil.which(python) is None:
        remedy = "set rollout.servers.python to the Python of the environment that has sglang"
        return fail(f"{python} is not a program", remedy)
    result = run([python, "-c", SGLANG_PROBE], 150, {**os.environ, **servers.environment})
    words = last_line(result.out).split()
    if result.code != 0 or words[:1] != ["found"]:
        return fail(
            f"does not import in {python}: {last_line(result.err) or 'no output'}",
            "pip install 'megatron-dapo[sglang]' there, or set rollout.servers.python to an environment that has it",
        )
    found = f"sglang {words[1]} with torch {words[2]} in {python}"
    wrong = sglang_pairing(words[1], words[2])
    return warn(found, wrong) if wrong else ok(found)


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
        return ok("no setting makes a resumed run differ in its bits")
    text = f"a resumed run is exact in its data, not in its bits: {'; '.join(found)}"
    wanted = config.policy.true_on_policy or config.policy.deterministic
    return warn(text, "change these keys") if wanted else ok(text)


def model_directory(name: str) -> Check:
    """config.json is supported, all weight files are complete, and the tokenizer loads. Weights are not downloaded."""
    try:
        path = Path(local_model(name, weights=False))
        if path != Path(name) and not any(path.glob("*.safetensors")):
            found = f"{ModelShape.from_dir(path).architecture}; the hub's cache has no weights of {name}"
            return warn(found, f"a run downloads them; without a network there: hf download {name}")
        shape = check_model_directory(path)
        load_tokenizer(path, shape.vocab)
    except UserError as error:
        return fail(str(error), "download all files of the model again (hf download)")
    return ok(f"{shape.architecture}, {shape.layers} layers, all weight files, tokenizer")
