"""`megatron-dapo slurm CONFIG`: checks a run, writes its sbatch script into the run directory and submits it.

A job that is known to fail is not submitted. A dry run makes the same checks, as far as the machine allows, writes the
same files and stops.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_dapo.config import Config, dump_config
from megatron_dapo.engines.sglang.keys import RUN_WITH_KEYS
from megatron_dapo.launch.slurm_checks import (
    Ask,
    SlurmError,
    ask,
    check_cluster,
    check_job,
    check_submission,
    offered_gpu_request,
)
from megatron_dapo.launch.slurm_script import API_KEY, Job, render
from megatron_dapo.launch.slurm_status import remember
from megatron_dapo.trainer.preflight import check_setup

SLOW_NODES = "logs/slow_nodes"  # of the run directory: one name a line


def run_slurm(
    config: Config, *, dry_run: bool = False, chain: int = 1, seeds: Sequence[int] = (), ask: Ask = ask
) -> int:
    """`seeds`: submit an array of runs, each with its own seed, in RUN_DIR/seed_N."""
    run_dir = Path(config.trainer.run_dir).resolve()
    job = Job(
        config, run_dir, Path.cwd(), chained=chain > 1, gpu_request=known_gpu_request(config),
        excluded=slow_nodes(run_dir), seeds=tuple(seeds),
    )  # fmt: skip
    shape = check_job(job)
    absent = why_no_cluster(ask) if dry_run else ""
    if not absent:
        check_cluster(config, ask)
        job = replace(job, gpu_request=offered_gpu_request(config, ask))
    report = check_setup(config, shape).report()
    write(job)
    expected = f"Slurm was not asked: {absent}" if absent else check_submission(job.script, ask)
    print(f"{describe(job)}\n{report}")
    if job.excluded:
        print(f"excluded, because an earlier attempt found them slow ({SLOW_NODES}): {', '.join(job.excluded)}")
    if dry_run:
        print(job.script.read_text())
        print(f"valid, not submitted: {job.script} ({expected})")
        return 0
    jobs = submit(job, chain, ask)
    remember(job.run_dir, jobs)
    print(f"submitted {job.script} as job {', then '.join(map(str, jobs))}")
    follow = job.run_dir / ("seed_*" if job.seeds else "") / "logs/latest/rank_0.log"
    print(f"follow: tail -F {follow}; state: megatron-dapo slurm --status {job.run_dir}")
    return 0


def known_gpu_request(config: Config) -> str:
    """As configured; without a cluster to ask, what most clusters take."""
    return "gpus-per-node" if config.slurm.gpu_request == "auto" else config.slurm.gpu_request


def slow_nodes(run_dir: Path) -> tuple[str, ...]:
    """Nodes that the network check of an earlier attempt found slow. Remove the file to use them again."""
    path = run_dir / SLOW_NODES
    return tuple(sorted(set(path.read_text().split()))) if path.exists() else ()


def why_no_cluster(ask: Ask) -> str:
    """Why a dry run cannot ask the cluster; empty where it can."""
    try:
        reply = ask("sinfo", "-h", "-o", "%P")
    except SlurmError as error:
        return str(error)
    return "" if reply.returncode == 0 else "sinfo failed here"


def write(job: Job) -> None:
    """Writes the script and the configuration it names. The servers' key is in neither: the script makes one."""
    for run in [job, *(job.of_seed(seed) for seed in job.seeds)]:
        (run.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        config = run.config
        if run.starts_servers and not config.rollout.servers.api_key_env:
            servers = config.rollout.servers.model_copy(update={"api_key_env": API_KEY})
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
    return jobs


def describe(job: Job) -> str:
    slurm, rollout = job.config.slurm, job.config.rollout
    if job.starts_servers:
        nodes = slurm.engine_nodes or slurm.nodes
        engines = (
            f"{nodes * job.servers_per_node} SGLang servers on {nodes} nodes, TP {rollout.servers.tensor_parallel}"
        )
    else:
        engines = "external servers" if rollout.servers.urls else f"{rollout.engine}, started by the trainer"
    return (
        f"{slurm.mode}: {slurm.ranks} ranks on {slurm.trainer_nodes} nodes; engines: {engines}; "
        f"limit {slurm.time}, {slurm.restarts} restarts"
    )
