"""`megatron-dapo kubernetes CONFIG`: a run as a Kubernetes JobSet, from the same description as the Slurm job.

`slurm.nodes`, `engine_nodes`, `gpus_per_node`, `restarts` and `environment` say how many pods there are and what they
get. Server commands and their restarts come from the template of the batch script. The manifest is dumped as YAML, and
every value in a pod's script is quoted, so no value of a configuration can add to either. No cluster is asked.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from megatron_dapo.config import Config, ConfigError, dump_config
from megatron_dapo.launch.slurm_checks import check_job
from megatron_dapo.launch.slurm_script import Job, render

NAME = re.compile(r"[a-z]([-a-z0-9]{0,30}[a-z0-9])?")
SETTINGS = "/etc/megatron-dapo"
MASTER_PORT = 29500


def run_kubernetes(config: Config, image: str, claim: str, name: str, output: str | None = None) -> int:
    """`claim`: a PersistentVolumeClaim with model, data and run directory, mounted at the current directory."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"--name: found {name!r}; expected at most 32 lower-case letters, digits and hyphens")
    slurm = config.slurm.model_copy(update={"python": "python3", "container_image": None})
    job = Job(config.model_copy(update={"slurm": slurm}), Path(config.trainer.run_dir).resolve(), Path.cwd())
    check_job(job)
    text = manifest(job, image, claim, name)
    if output:
        Path(output).write_text(text)
    else:
        print(text, end="")
    return 0


def manifest(job: Job, image: str, claim: str, name: str) -> str:
    """ConfigMap and JobSet. The servers' key is in a Secret that you create: it is in no file."""
    slurm = job.config.slurm
    engines = slurm.engine_nodes if job.starts_servers else 0
    if job.starts_servers and not engines:
        raise ConfigError("slurm.mode is colocated on several nodes: on Kubernetes use disaggregated")
    with_key = _with_key(job)
    settings = {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name},
        "data": {"submitted.yaml": dump_config(with_key.config)},
    }  # fmt: skip
    urls = [
        f"http://{name}-engine-0-{node}.{name}:{job.config.rollout.servers.port + index}"
        for node in range(engines) for index in range(job.servers_per_node)
    ]  # fmt: skip
    pods = [_pods(job, name, image, claim, "trainer", slurm.trainer_nodes, urls)]
    if engines:
        pods.append(_pods(job, name, image, claim, "engine", engines, urls))
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "failurePolicy": {"maxRestarts": slurm.restarts},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["trainer"]},
            "replicatedJobs": pods,
        },
    }  # fmt: skip
    return "---\n".join(yaml.safe_dump(part, sort_keys=False, width=10**6) for part in (settings, jobset))


def _with_key(job: Job) -> Job:
    servers = job.config.rollout.servers.model_copy(update={"api_key_env": job.api_key})
    rollout = job.config.rollout.model_copy(update={"servers": servers})
    return replace(job, config=job.config.model_copy(update={"rollout": rollout}))


def _pods(job: Job, name: str, image: str, claim: str, role: str, count: int, urls: list[str]) -> dict[str, Any]:
    slurm = job.config.slurm
    secret = {"secretKeyRef": {"name": f"{name}-key", "key": "api-key"}}
    environment: list[dict[str, Any]] = [{"name": key, "value": value} for key, value in slurm.environment.items()]
    if job.starts_servers:
        environment.append({"name": job.api_key, "valueFrom": secret})
    resources = {"limits": {"nvidia.com/gpu": slurm.gpus_per_node}} if slurm.gpus_per_node else {}
    container = {
        "name": role, "image": image, "workingDir": str(job.folder), "env": environment, "resources": resources,
        "command": ["bash", "-c", pod_script(job, name, role, urls)],
        "volumeMounts": [
            {"name": "shared", "mountPath": str(job.folder)}, {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "settings", "mountPath": SETTINGS, "readOnly": True},
        ],
    }  # fmt: skip
    # Code 2: the configuration is wrong, and starting again would not help.
    wrong = {"action": "FailJob", "onExitCodes": {"containerName": role, "operator": "In", "values": [2]}}
    pod = {
        "restartPolicy": "Never", "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}}, {"name": "settings", "configMap": {"name": name}},
        ],
    }  # fmt: skip
    spec = {
        "parallelism": count, "completions": count, "backoffLimit": 0, "completionMode": "Indexed",
        "podFailurePolicy": {"rules": [wrong]}, "template": {"spec": pod},
    }  # fmt: skip
    return {"name": role, "replicas": 1, "template": {"spec": spec}}


def pod_script(job: Job, name: str, role: str, urls: list[str]) -> str:
    return render(
        job, "pod.sh.j2", role=role, settings=f"{SETTINGS}/submitted.yaml", master=f"{name}-trainer-0-0.{name}",
        port=MASTER_PORT, urls=json.dumps(urls).replace('"', ""),
    )  # fmt: skip
