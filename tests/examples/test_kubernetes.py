"""examples/kubernetes: the manifests name real commands, keys and pods, and the trainer's script runs (with a stub as
Python)."""

import importlib.util
import re
import subprocess

import pytest
import yaml
from workplace import ROOT

from megatron_dapo.cli import build_parser
from megatron_dapo.config import load_config

JOBSET = yaml.safe_load((ROOT / "examples/kubernetes/jobset.yaml").read_text())
SERVICE, DEPLOYMENT = yaml.safe_load_all((ROOT / "examples/kubernetes/engines.yaml").read_text())
PODS = {job["name"]: job["template"]["spec"] for job in JOBSET["spec"]["replicatedJobs"]}
PODS["engine"] = DEPLOYMENT["spec"]
PYTHON = """\
#!/bin/bash
{ echo "$RANK/$LOCAL_RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT"; printf '%s\\n' "$@"; } > "said_$RANK"
[ "$RANK" = "${FAILS:-}" ] && exit 2
[ -z "${SLOW:-}" ] || { trap 'exit 75' TERM; touch "ready_$RANK"; sleep 30 & wait; }
exit 0
"""


def container(role):
    return PODS[role]["template"]["spec"]["containers"][0]


def start_trainer(folder, **environment):
    (folder / "python3").write_text(PYTHON)
    (folder / "python3").chmod(0o755)
    path = {"PATH": f"{folder}:/usr/bin:/bin", "JOB_COMPLETION_INDEX": "1", **environment}
    return subprocess.Popen(container("trainer")["command"], cwd=folder, env=path)


def test_the_trainer_pod_starts_its_ranks_with_valid_settings(tmp_path):
    assert start_trainer(tmp_path).wait(60) == 0
    said = [(tmp_path / f"said_{rank}").read_text().splitlines() for rank in range(8, 16)]
    assert [lines[0] for lines in said] == [f"{8 + i}/{i} of 16 at dapo-trainer-0-0.dapo:29500" for i in range(8)]
    gpus = container("trainer")["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus * PODS["trainer"]["parallelism"] == 16 and PODS["trainer"]["completions"] == 2
    words = said[0][1:]
    assert words[:3] == ["-u", "-m", "megatron_dapo.cli"]
    args = build_parser().parse_args(words[3:])
    servers = load_config(None, args.set).rollout.servers
    assert servers.urls == [f"dns://{SERVICE['metadata']['name']}:30000"]


def test_engine_pods_come_and_go_without_the_trainer():
    """They are no part of the JobSet, which would restart it. DNS also lists pods that are not ready: an update pauses
    every server."""
    assert [job["name"] for job in JOBSET["spec"]["replicatedJobs"]] == ["trainer"]
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"] == SERVICE["spec"]["selector"] == labels
    assert SERVICE["spec"]["clusterIP"] == "None" and SERVICE["spec"]["publishNotReadyAddresses"] is True
    assert SERVICE["spec"]["ports"][0]["port"] == container("engine")["ports"][0]["containerPort"] == 30000


def test_a_wrong_configuration_ends_the_job_set(tmp_path):
    assert start_trainer(tmp_path, FAILS="10").wait(60) == 2
    (rule,) = PODS["trainer"]["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2])
    assert JOBSET["spec"]["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]


def test_an_evicted_trainer_pod_waits_for_its_ranks_to_save(tmp_path):
    pod = start_trainer(tmp_path, SLOW="1")
    for _ in range(600):
        if len(list(tmp_path.glob("ready_*"))) == 8:
            break
        with pytest.raises(subprocess.TimeoutExpired):
            pod.wait(0.1)
    pod.terminate()
    assert pod.wait(60) == 75


def test_the_engine_pod_starts_a_server_with_the_key_of_the_secret():
    _, _, wrapper, module, option, key, *arguments = container("engine")["command"]
    assert importlib.util.find_spec(wrapper) and module == "sglang.launch_server" and option == "--key-from"
    assert key == "api-key=MEGATRON_DAPO_API_KEY"
    for role in PODS:
        (variable,) = container(role)["env"]
        assert variable["name"] == "MEGATRON_DAPO_API_KEY" and "secretKeyRef" in variable["valueFrom"]
    found = dict(re.fullmatch("--([a-z-]+)=(.*)", word).groups() for word in arguments)
    assert int(found["tp-size"]) == container("engine")["resources"]["limits"]["nvidia.com/gpu"]
    assert found["port"] == "30000"
