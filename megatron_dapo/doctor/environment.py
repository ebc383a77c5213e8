"""What is around the run: ports, Slurm, limits, the HF cache, the Python that serves, the model directory."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from megatron_dapo.config import ConfigError, ModelShape
from megatron_dapo.config.rollout import ServerConfig
from megatron_dapo.doctor.check import Answer, Check, ask, last_line
from megatron_dapo.doctor.software import sglang_pairing

Ask = Callable[..., Answer]
SGLANG_PROBE = "import torch, sglang; print('found', sglang.__version__, torch.__version__)"


def ports(host: str, first: int, count: int) -> Check:
    """Engines take the next free port; many in use near the first say that other servers run here."""
    used = [port for port in range(first, min(first + max(count, 1), 65536)) if not port_free(host, port)]
    span = f"{first}" if count <= 1 else f"{first} to {first + count - 1}"
    if not used:
        return Check("ports", "ok", f"{span} free on {host}")
    return Check("ports", "warn", f"in use on {host}: {', '.join(map(str, used))}", "others are taken instead; if "
                 "these are servers that you left running, end them, or set rollout.servers.port")  # fmt: skip


def port_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def slurm(run: Ask = ask, now: Callable[[], datetime] = datetime.now) -> Check:
    """Does the controller answer, and does its clock agree with this one."""
    answer = run(["sinfo", "--noheader", "--format=%P %D %T"], 15)
    if answer.missing:
        return Check("slurm", "ok", "not a Slurm machine")
    if answer.code != 0:
        return Check("slurm", "fail", f"sinfo failed: {last_line(answer.err) or 'no answer'}", "the controller does "
                     "not answer: look at SLURM_CONF, munge and slurmctld, or ask who runs the cluster")  # fmt: skip
    rows = [line.split() for line in answer.out.splitlines() if len(line.split()) == 3]
    usable = sum(int(count) for _, count, state in rows if state.rstrip("*~#$@").startswith(("idle", "mix", "alloc")))
    partitions = sorted({name.rstrip("*") for name, _, _ in rows})
    found = f"partitions {', '.join(partitions) or 'none'}; {usable} nodes up"
    skew = _controller_skew(run, now)
    if skew is not None and abs(skew) > 5:
        return Check("slurm", "warn", f"{found}; its clock is {skew:+.0f} s off", "start chronyd or ntpd: Slurm "
                     "refuses credentials that are too old or from the future")  # fmt: skip
    if not usable:
        return Check("slurm", "warn", found, "no node can run a job now: sinfo -R says why nodes are down")
    return Check("slurm", "ok", found)


def _controller_skew(run: Ask, now: Callable[[], datetime]) -> float | None:
    """Seconds, from the time that the controller writes above its configuration; None when it does not say."""
    answer = run(["scontrol", "show", "config"], 15)
    first = answer.out.splitlines()[0] if answer.code == 0 and answer.out else ""
    try:
        return (datetime.fromisoformat(first.rpartition(" ")[2]) - now()).total_seconds()
    except ValueError:
        return None


def limits(
    get: Callable[[int], tuple[int, int]] = resource.getrlimit, infiniband: Path = Path("/sys/class/infiniband")
) -> Check:
    """Open files (sockets and shards) and locked memory (InfiniBand)."""
    files, _ = get(resource.RLIMIT_NOFILE)
    locked, _ = get(resource.RLIMIT_MEMLOCK)
    unlimited = resource.RLIM_INFINITY
    words = {
        "open files": "unlimited" if files == unlimited else str(files),
        "locked memory": "unlimited" if locked == unlimited else f"{locked >> 20} MiB",
    }
    found = ", ".join(f"{name} {value}" for name, value in words.items())
    if files != unlimited and files < 4096:
        return Check("limits", "fail", found, "ulimit -n 65536 (and in the job script): engines and checkpoints hold "
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
    words = "offline" if offline else "online"
    there = cache
    while not there.exists() and there != there.parent:
        there = there.parent
    if not os.access(there, os.W_OK):
        return Check("hf cache", "warn" if offline else "fail", f"{cache} cannot be written ({words})", "set HF_HOME "
                     "to a folder that you can write")  # fmt: skip
    return Check("hf cache", "ok", f"{cache} ({words})")


def serving_python(servers: ServerConfig, run: Ask = ask) -> Check:
    """SGLang imports in the Python that the servers will run."""
    if servers.urls:
        return Check("sglang", "ok", f"not needed here: {len(servers.urls)} servers are given by URL")
    python = servers.python or sys.executable
    if shutil.which(python) is None:
        return Check("sglang", "fail", f"{python} is no program", "set rollout.servers.python to the Python of the "
                     "environment that has sglang")  # fmt: skip
    answer = run([python, "-c", SGLANG_PROBE], 150, {**os.environ, **servers.environment})
    words = last_line(answer.out).split()
    if answer.code != 0 or words[:1] != ["found"]:
        return Check("sglang", "fail", f"does not import in {python}: {last_line(answer.err) or 'no answer'}", "pip "
                     "install 'megatron-dapo[sglang]' there, or set rollout.servers.python to an environment that has "
                     "it")  # fmt: skip
    found = f"sglang {words[1]} with torch {words[2]} in {python}"
    wrong = sglang_pairing(words[1], words[2])
    return Check("sglang", "warn", found, wrong) if wrong else Check("sglang", "ok", found)


def model_directory(path: Path) -> Check:
    """config.json is supported, every file that the index names is there, and the tokenizer loads."""
    try:
        shape = ModelShape.from_dir(path)
    except ConfigError as error:
        return Check("model", "fail", str(error), "point policy.model at the complete HF directory of a Qwen model")
    remedy = "download the model again (hf download), all files of it"
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        return Check(
            "model", "fail", f"{path}: {len(missing)} of {len(names)} weight files are missing: {listed}", remedy
        )
    empty = [name for name in names if (path / name).stat().st_size < 8]
    if empty:
        return Check("model", "fail", f"{path}: {empty[0]} is empty", remedy)
    try:
        tokens = _tokenizer_length(path)
    except Exception as error:
        return Check("model", "fail", f"{path}: the tokenizer does not load: {last_line(str(error))}", remedy)
    if tokens > shape.vocab:
        return Check("model", "fail", f"{path}: the tokenizer has {tokens} tokens, the model {shape.vocab}", "they "
                     "belong to different models: use the tokenizer that came with the weights")  # fmt: skip
    return Check("model", "ok", f"{shape.architecture}, {shape.layers} layers, {len(names)} weight files, tokenizer")


def _tokenizer_length(path: Path) -> int:
    from transformers import AutoTokenizer

    return len(AutoTokenizer.from_pretrained(path, local_files_only=True))
