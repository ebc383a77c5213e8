"""A run as a JobSet: the manifest is YAML whatever the values are, and its scripts run, with a stub as Python."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.launch.kubernetes import manifest, run_kubernetes
from megatron_dapo.launch.slurm_script import Job

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/qwen2.5_32b_dapo/dapo.yaml"
PYTHON = """\
#!/bin/bash
echo "$RANK/$LOCAL_RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT: $*" >> said
if [[ "$*" == *megatron_dapo.cli* ]]; then [ "$RANK" = "${FAILS:-}" ] && exit 2; exit 0; fi
exit 3
"""


def parts(folder, *settings):
    config = load_config(EXAMPLE, [f"slurm.python={folder}/python", *settings])
    documents = yaml.safe_load_all(manifest(Job(config, folder / "run", folder), "image:1", "shared", "dapo"))
    settings_map, jobset = documents
    pods = {job["name"]: job["template"]["spec"] for job in jobset["spec"]["replicatedJobs"]}
    return settings_map, jobset, pods


def container(pods, role):
    return pods[role]["template"]["spec"]["containers"][0]


def run(pods, role, folder, **environment):
    (folder / "python").write_text(PYTHON)
    (folder / "python").chmod(0o755)
    (folder / "said").write_text("")
    done = subprocess.run(
        container(pods, role)["command"], cwd=folder, capture_output=True, text=True, timeout=60,
        env={"PATH": "/usr/bin:/bin", "HOSTNAME": "dapo-engine-0-5", "JOB_COMPLETION_INDEX": "3", **environment},
    )  # fmt: skip
    return done, sorted((folder / "said").read_text().splitlines())


def test_the_published_run_is_eight_trainer_and_eight_engine_pods(tmp_path):
    settings, jobset, pods = parts(tmp_path, "slurm.environment={NCCL_DEBUG: WARN}")
    assert {name: pod["parallelism"] for name, pod in pods.items()} == {"trainer": 8, "engine": 8}
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 20
    for role in pods:
        assert container(pods, role)["resources"] == {"limits": {"nvidia.com/gpu": 8}}
        by_name = {item["name"]: item for item in container(pods, role)["env"]}
        assert by_name["NCCL_DEBUG"]["value"] == "WARN"
        assert by_name["MEGATRON_DAPO_API_KEY"]["valueFrom"]["secretKeyRef"]["name"] == "dapo-key"
    assert "api_key_env: MEGATRON_DAPO_API_KEY" in settings["data"]["submitted.yaml"]


def test_the_trainer_pod_starts_its_ranks(tmp_path):
    _, _, pods = parts(tmp_path)
    done, said = run(pods, "trainer", tmp_path)
    assert done.returncode == 0, done.stderr
    where = "of 64 at dapo-trainer-0-0.dapo:29500: -u -m megatron_dapo.cli train /etc/megatron-dapo/submitted.yaml"
    assert [line.split(" --set")[0] for line in said] == sorted(f"{24 + i}/{i} {where}" for i in range(8))
    urls = re.search(r"urls=\[(.*?)\]", said[0])[1].split(", ")
    assert len(urls) == 16 and urls[-1] == "http://dapo-engine-0-7.dapo:30001"


def test_a_failed_rank_gives_the_pod_its_exit_code(tmp_path):
    _, _, pods = parts(tmp_path, "slurm.end_seconds=1")
    assert run(pods, "trainer", tmp_path, FAILS="26")[0].returncode == 2
    rule = pods["trainer"]["podFailurePolicy"]["rules"][0]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2])


def test_the_engine_pod_starts_its_servers_again_and_gives_them_up(tmp_path):
    _, _, pods = parts(tmp_path, "rollout.servers.restarts=1")
    done, said = run(pods, "engine", tmp_path)
    assert len(said) == 4 and sum("--port 30001" in line and "--base-gpu-id 4" in line for line in said) == 2
    assert done.stdout.count("is given up") == 2
    assert (tmp_path / "run/logs/engine_dapo-engine-0-5_30000.given_up").exists()


@pytest.mark.parametrize("text", ["a'b", 'a"; touch x; "', "$(touch x)", "a: b #c", "{{ 7 }}", "- a", "é %s \\"])
def test_values_stay_values(text, tmp_path):
    config = load_config(EXAMPLE, [f"slurm.python={tmp_path}/python"])
    servers = config.rollout.servers.model_copy(update={"arguments": [f"--x={text}"]})
    slurm = config.slurm.model_copy(update={"environment": {"A": text}})
    policy = config.policy.model_copy(update={"model": text})
    config = config.model_copy(
        update={"slurm": slurm, "policy": policy, "rollout": config.rollout.model_copy(update={"servers": servers})}
    )
    settings, jobset = yaml.safe_load_all(manifest(Job(config, tmp_path / "run", tmp_path), text, text, "dapo"))
    assert yaml.safe_load(settings["data"]["submitted.yaml"])["policy"]["model"] == text
    pods = {job["name"]: job["template"]["spec"] for job in jobset["spec"]["replicatedJobs"]}
    assert container(pods, "engine")["image"] == text
    assert {"name": "A", "value": text} in container(pods, "engine")["env"]
    _, said = run(pods, "engine", tmp_path)
    assert f"--model-path {text} " in said[0] and f"--x={text}" in said[0] and not (tmp_path / "x").exists()


def test_impossible_manifests_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="on Kubernetes use disaggregated"):
        parts(tmp_path, "slurm.mode=colocated", "slurm.engine_nodes=0")
    with pytest.raises(ConfigError, match="lower-case letters, digits and hyphens"):
        run_kubernetes(load_config(EXAMPLE), "image", "claim", "My_Run")
