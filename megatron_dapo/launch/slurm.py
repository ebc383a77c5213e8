"""`megatron-dapo slurm CONFIG`: checks a run, writes its sbatch script into the run directory and submits it.

A job that is known to fail is not submitted; each error says what to change. The checks of the configuration come first
and need no cluster. Then the cluster is asked for its partitions and, at the end, with `sbatch --test-only`, which
knows limits, accounts and QoS. A dry run makes the same checks, as far as the machine allows, writes the same files and
stops.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_dapo.config import Config, ConfigError, ModelShape, dump_config
from megatron_dapo.config.load import with_local_model
from megatron_dapo.config.trainer import check_not_ours
from megatron_dapo.engines.sglang.keys import API_KEY_VARIABLE, RUN_WITH_KEYS
from megatron_dapo.errors import UserError
from megatron_dapo.files import explain, write_atomically
from megatron_dapo.launch.local import check_run, rehearse_setup
from megatron_dapo.launch.slurm_script import GPU_REQUEST, Job, render, seconds_of
from megatron_dapo.planner.models import known_shape
from megatron_dapo.trainer.preflight import check_setup
from megatron_dapo.trainer.rehearsal import check_container

Ask = Callable[..., subprocess.CompletedProcess[str]]
LOCAL_FOLDERS = ("/dev/shm", "/tmp", "/var/tmp", "/run")
# In the run directory.
SLOW_NODES = "logs/slow_nodes"  # one name a line
JOBS = "jobs.json"


class SlurmError(UserError):
    """Slurm is absent, does not reply, or refuses."""


def ask(*command: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Runs a Slurm command. A missing or hanging command is an error; the caller reads the exit code."""
    if shutil.which(command[0]) is None:
        raise SlurmError(f"{command[0]} is not installed here: run this on a machine that can submit jobs")
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} did not reply within {timeout:g} s: is the Slurm controller up?") from None


def check_job(job: Job, shape: ModelShape | None = None) -> ModelShape:
    """The checks of the configuration, which need no cluster. `shape`: of a model that is not here."""
    config = job.config
    if config.trainer.ranks and config.trainer.ranks != config.slurm.ranks:
        raise ConfigError(
            f"trainer.ranks is {config.trainer.ranks}, but the job has {config.slurm.trainer_nodes} trainer nodes × "
            f"{config.slurm.ranks_per_node} tasks = {config.slurm.ranks} ranks: leave trainer.ranks out"
        )
    if "%" in str(job.run_dir):
        raise ConfigError(f"trainer.run_dir is {job.run_dir}: Slurm replaces % in names of logs; choose another name")
    shape = check_run(config, config.slurm.ranks, shape)
    slurm = config.slurm
    if slurm.signal_seconds >= seconds_of(slurm.time):
        raise ConfigError(
            f"slurm.signal_seconds is {slurm.signal_seconds}, but the time limit is {slurm.time}: the run would be "
            "asked to save as soon as it starts; raise slurm.time or lower slurm.signal_seconds"
        )
    _check_engines(job)
    _check_environment_file(config)
    if job.seeds and len(job.components) > 1:
        raise ConfigError("Slurm has no arrays of heterogeneous jobs: submit each seed, or leave out "
                          "slurm.engine_partition and slurm.head_partition")  # fmt: skip
    if job.seeds and job.chained:
        raise ConfigError("--seeds and --chain cannot be combined: chain the seeds one by one")
    return shape


def _check_environment_file(config: Config) -> None:
    name = config.slurm.environment_file
    if not name:
        return
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"slurm.environment_file: {path} does not exist: write lines NAME=value into it")
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"slurm.environment_file: others can read {path}, which is for secrets: chmod 600 {path}")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:  # the script's shell may read no further than such a byte
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"slurm.environment_file: {path} cannot be read: {why}") from None
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#") and not re.match(r"[A-Za-z_][A-Za-z0-9_]*=", line):
            raise ConfigError(f"slurm.environment_file: line {number} of {path} is not NAME=value")
        try:
            check_not_ours(line.partition("=")[0])
        except ValueError as error:
            raise ConfigError(f"slurm.environment_file: line {number} of {path}: {error}") from None


def _check_engines(job: Job) -> None:
    slurm, rollout = job.config.slurm, job.config.rollout
    if slurm.engine_nodes and not job.starts_servers:
        why = "rollout.servers.urls names external servers" if rollout.servers.urls else "the engine is embedded"
        raise ConfigError(
            f"slurm.engine_nodes is {slurm.engine_nodes}, but {why}, so these nodes would be idle: set it to 0, or "
            "rollout.engine to sglang without urls"
        )
    _check_memory(job)
    if slurm.router and not job.starts_servers:
        raise ConfigError("slurm.router needs servers that this job starts on more than one node: remove it")
    if not job.starts_servers:
        return
    if job.servers_per_node < 1:
        raise ConfigError(
            f"rollout.servers.tensor_parallel is {rollout.servers.tensor_parallel}, but a node has "
            f"{slurm.gpus_per_node} GPUs: a server must fit on one node"
        )
    if rollout.weights.transport == "tensor" and not rollout.servers.share_gpus:
        raise ConfigError(
            "rollout.weights.transport is tensor, which needs engines on the trainer's GPUs: set "
            "rollout.servers.share_gpus to true, or use disk or distributed"
        )
    if rollout.weights.transport == "tensor" and rollout.weights.keep_snapshot:
        raise ConfigError(
            "rollout.weights.transport is tensor and keep_snapshot is true, but on several nodes no rank has all "
            "weights: set rollout.weights.keep_snapshot to false (a restarted server then gets its weights with the "
            "next update)"
        )
    folder = Path(job.folder, rollout.weights.directory)
    # With the run directory in the same local folder, the job is a test on one machine.
    local = [root for root in LOCAL_FOLDERS if folder.is_relative_to(root) and not job.run_dir.is_relative_to(root)]
    if rollout.weights.writes_files and local:
        raise ConfigError(
            f"rollout.weights.directory is {rollout.weights.directory}, which the engines on other nodes cannot see: "
            f"use a shared directory, e.g. {job.run_dir / 'weights'}"
        )


def _check_memory(job: Job) -> None:
    """By default a server takes nearly all memory of a GPU."""
    slurm, rollout = job.config.slurm, job.config.rollout
    if rollout.engine != "sglang" or rollout.servers.urls or not slurm.gpus_per_node:
        return
    if slurm.engine_nodes and rollout.servers.share_gpus:
        raise ConfigError(
            f"rollout.servers.share_gpus is on, but slurm.engine_nodes is {slurm.engine_nodes}: the engines have their "
            "own GPUs; remove share_gpus"
        )
    if not slurm.engine_nodes and rollout.servers.need_own_gpus:
        raise ConfigError(
            "slurm.engine_nodes is 0, and the engines would take nearly all memory of the trainer's GPUs: set "
            "rollout.servers.share_gpus to true (they use the GPUs alternately), or limit the engines with "
            "--mem-fraction-static in rollout.servers.arguments"
        )


def partitions(ask: Ask = ask) -> list[str]:
    """The name of the default one ends with *."""
    reply = ask("sinfo", "-h", "-o", "%P")
    if reply.returncode:
        raise SlurmError(f"sinfo failed: {reason(reply.stderr)}; start this command where Slurm's commands work")
    return reply.stdout.split()


def check_cluster(config: Config, names: list[str]) -> None:
    """Every partition exists, or the cluster has a default one."""
    there = [name.rstrip("*") for name in names]
    known = ", ".join(there) or "none"
    if config.slurm.partition is None and not any(name.endswith("*") for name in names):
        raise ConfigError(f"slurm.partition is empty and the cluster has no default partition: choose one of {known}")
    for key in ("partition", "engine_partition", "head_partition"):
        wanted = getattr(config.slurm, key) or ""
        missing = [name for name in wanted.split(",") if name and name not in there]
        if missing:
            raise ConfigError(f"slurm.{key}: this cluster has no partition {missing[0]}; it has: {known}")


def reason(text: str) -> str:
    """The last line, which names the error that ended the command."""
    return text.strip().rpartition("\n")[2] or "no reply"


def offered_gpu_request(config: Config, ask: Ask = ask) -> str:
    """How this cluster takes a request for GPUs: gpus-per-node (the cons_tres plugin), gres, or none where its nodes
    have no GPUs as generic resources."""
    slurm = config.slurm
    if slurm.gpu_request != "auto":
        return slurm.gpu_request
    if not slurm.gpus_per_node:
        return GPU_REQUEST
    where = [f"--partition={name}" for name in (slurm.partition,) if name]
    reply = ask("sinfo", "-h", "-o", "%G", *where)
    if reply.returncode:
        raise SlurmError(f"sinfo failed: {reason(reply.stderr)}; set slurm.gpu_request")
    if not re.search(r"(^|,)gpu(:|\()", reply.stdout, re.MULTILINE):
        if not slurm.exclusive:
            raise ConfigError(
                f"slurm.gpus_per_node is {slurm.gpus_per_node}, but Slurm manages no GPUs in this partition, so other "
                "jobs could use the same ones: set slurm.exclusive to true, or slurm.partition to one with GPUs"
            )
        return "none"
    reply = ask("scontrol", "show", "config")
    return GPU_REQUEST if reply.returncode or "cons_tres" in reply.stdout else "gres"


def check_submission(script: Path, ask: Ask = ask) -> str:
    """Asks Slurm about the script without submitting it. Returns when and where the job would start."""
    reply = ask("sbatch", "--test-only", str(script))
    said = " ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in reply.stderr.splitlines())
    if reply.returncode:
        raise SlurmError(f"Slurm would refuse the job: {said.removeprefix('allocation failure: ')} (script: {script})")
    return said


def run_slurm(
    config: Config, *, dry_run: bool = False, chain: int = 1, seeds: Sequence[int] = (), ask: Ask = ask,
    modules: Path | None = None,
) -> int:  # fmt: skip
    """`seeds`: submit an array of runs, each with its own seed, in RUN_DIR/seed_N. A dry run needs no model on this
    machine if it is a published one. `modules`: a folder with the user's Python modules."""
    config, elsewhere = _locate_model(config, dry_run)
    run_dir = Path(config.trainer.run_dir).resolve()
    job = Job(
        config, run_dir, Path.cwd(), modules=modules, chained=chain > 1, excluded=slow_nodes(run_dir),
        seeds=tuple(seeds),
    )  # fmt: skip
    if modules:
        sys.path.append(str(modules))
    shape = check_job(job, elsewhere)
    absent = ""
    try:
        names = partitions(ask)
    except SlurmError as error:
        if not dry_run:
            raise
        absent = str(error)
        if config.slurm.gpu_request != "auto":
            job = replace(job, gpu_request=config.slurm.gpu_request)
    else:
        check_cluster(config, names)
        job = replace(job, gpu_request=offered_gpu_request(config, ask))
    check_container(config, job.folder)
    if elsewhere is None:
        setup = check_setup(config, shape)
        report = "\n".join([setup.report(), *(rehearse_setup(config, setup) if dry_run else [])])
    else:
        report = f"not checked: weights, tokenizer and data, because {config.policy.model} is not on this machine"
    try:
        write(job)
    except OSError as error:
        raise ConfigError(f"trainer.run_dir: {job.run_dir} cannot be written ({explain(error, run_dir)})") from None
    expected = f"not checked with Slurm: {absent}" if absent else check_submission(job.script, ask)
    print("\n".join([describe(job), report, *(f"warning: {line}" for line in config.warnings)]))
    if job.excluded:
        print(f"excluded, because an earlier attempt found them slow ({SLOW_NODES}): {', '.join(job.excluded)}")
    if dry_run:
        print(job.script.read_text())
        print(f"valid, not submitted: {job.script} ({expected})")
        return 0
    jobs = submit(job, chain, ask)
    print(f"submitted {job.script} as job {', then '.join(map(str, jobs))}")
    follow = job.run_dir / ("seed_*" if job.seeds else "") / "logs/latest/rank_0.log"
    print(f"follow: tail -F {follow}; state: megatron-dapo slurm --status {job.run_dir}")
    return 0


def _locate_model(config: Config, dry_run: bool) -> tuple[Config, ModelShape | None]:
    """The configuration with the model's directory; or the shape of a published model that is not here."""
    try:
        found = with_local_model(config)
    except ConfigError:
        if not dry_run or known_shape(config.policy.model) is None:
            raise
        found = config
    absent = dry_run and not Path(found.policy.model).is_dir()
    return found, known_shape(config.policy.model) if absent else None


def slow_nodes(run_dir: Path) -> tuple[str, ...]:
    """Nodes that the network check of an earlier attempt found slow. Remove the file to use them again."""
    files = [path for folder in (run_dir, *run_dir.glob("seed_*")) if (path := folder / SLOW_NODES).exists()]
    return tuple(sorted({node for path in files for node in path.read_text().split()}))


def write(job: Job) -> None:
    """Writes the script and the configuration it names. The servers' key is in neither: the script makes one."""
    for run in [job, *(job.of_seed(seed) for seed in job.seeds)]:
        (run.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        config = run.config
        if run.starts_servers and not config.rollout.servers.api_key_env:
            servers = config.rollout.servers.model_copy(update={"api_key_env": API_KEY_VARIABLE})
            config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"servers": servers})})
        run.settings.write_text(dump_config(config))
    job.script.write_text(render(job))
    if job.key_wrapper:
        shutil.copyfile(RUN_WITH_KEYS, job.key_wrapper)


def submit(job: Job, chain: int, ask: Ask) -> list[int]:
    """Submits `chain` jobs; each starts when the one before it has ended without finishing the run."""
    jobs: list[int] = []
    for _ in range(chain):
        after = [f"--dependency=afternotok:{jobs[-1]}", "--kill-on-invalid-dep=yes"] if jobs else []
        reply = ask("sbatch", "--parsable", *after, str(job.script))
        found = re.match(r"\d+", reply.stdout.strip())
        if reply.returncode or found is None:
            queued = f"; already submitted: {', '.join(map(str, jobs))}" if jobs else ""
            raise SlurmError(f"sbatch refused {job.script}: {reply.stderr.strip()}{queued}")
        jobs.append(int(found[0]))
        remember(job.run_dir, jobs[-1:])
    return jobs


def describe(job: Job) -> str:
    slurm, rollout = job.config.slurm, job.config.rollout
    placement = "disaggregated" if slurm.engine_nodes else "colocated"
    if job.starts_servers:
        nodes = slurm.engine_nodes or slurm.nodes
        engines = (
            f"{nodes * job.servers_per_node} SGLang servers on {nodes} nodes, TP {rollout.servers.tensor_parallel}"
        )
    else:
        engines = "external servers" if rollout.servers.urls else f"{rollout.engine}, started by the trainer"
    return (
        f"{placement}: {slurm.ranks} ranks on {slurm.trainer_nodes} nodes; engines: {engines}; "
        f"limit {slurm.time}, {slurm.restarts} restarts"
    )


def remember(run_dir: Path, jobs: list[int]) -> None:
    write_atomically(run_dir / JOBS, json.dumps([*submitted(run_dir), *jobs]) + "\n")


def submitted(run_dir: Path) -> list[int]:
    path = run_dir / JOBS  # a list; what a full disk has left of it is read as well
    return [int(job) for job in re.findall(r"\d+", path.read_text())] if path.exists() else []
