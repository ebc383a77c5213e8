"""The batch script: its content, that bash accepts it, and that wrong configurations fail before submission."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mini_slurm import processes_of_job
from sparse_model import SMALL, write_sparse_model
from waiting import wait_for

from megatron_dapo.cli import main
from megatron_dapo.config import ConfigError, parse_config
from megatron_dapo.engines.sglang.keys import RUN_WITH_KEYS
from megatron_dapo.launch import slurm as launch
from megatron_dapo.launch.slurm import (
    SlurmError,
    check_cluster,
    check_job,
    check_submission,
    offered_gpu_request,
    partitions,
    submitted,
)
from megatron_dapo.launch.slurm_script import Job, render, seconds_of


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_sparse_model(tmp_path_factory.mktemp("model"), SMALL)


@pytest.fixture
def raw(tmp_path, model):
    prompts = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(32)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return {
        "policy": {"model": str(model), "tensor_parallel": 4, "micro_batch_tokens": 4096},
        "rollout": {
            "max_prompt_tokens": 1024, "max_response_tokens": 2048,
            "servers": {"tensor_parallel": 4}, "weights": {"directory": "/shared/weights"},
        },
        "algorithm": {"overlong": {"penalty": "none"}},
        "data": {"path": str(tmp_path / "prompts.jsonl")},
        "trainer": {"run_dir": str(tmp_path / "run"), "prompts_per_step": 32},
        "slurm": {"nodes": 4, "engine_nodes": 1, "partition": "h100"},
    }  # fmt: skip


def job_of(raw, **options):
    config = parse_config(raw)
    return Job(config, Path(config.trainer.run_dir), Path("/project"), **options)


def script_of(raw, **options):
    job = job_of(raw, **options)
    check_job(job)
    text = render(job)
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    return text


def test_disaggregated_jobs_split_trainer_and_engine_nodes(raw):
    text = script_of(raw)
    assert 'TRAINERS=("${NODES[@]:0:3}")' in text and 'ENGINES=("${NODES[@]:3}")' in text
    assert "--nodes=3 --ntasks=24" in text and "--ntasks-per-node=8" in text
    assert "seq 0 1" in text  # 8 GPUs / TP 4 = two servers on the engine node
    assert '--port "$2"' in text and '--base-gpu-id "$3"' in text and "--tp-size 4" in text
    assert "$((30000 + index)) $((index * 4))" in text
    assert '"rollout.servers.urls=[$URLS]"' in text
    assert "#SBATCH --signal=B:USR1@600" in text and "#SBATCH --requeue" in text and "#SBATCH --exclusive" in text


def test_colocated_jobs_run_engines_on_every_node(raw):
    raw["slurm"] = {"nodes": 4}
    raw["rollout"]["servers"]["arguments"] = ["--mem-fraction-static=0.4"]
    text = script_of(raw)
    assert 'ENGINES=("${NODES[@]}")' in text and "--nodes=4 --ntasks=32" in text


def test_on_one_node_the_script_starts_no_engines(raw):
    raw["slurm"] = {"nodes": 1}
    raw["rollout"]["servers"]["share_gpus"] = True
    raw["rollout"]["weights"]["directory"] = "/dev/shm"
    assert "launch_server" not in script_of(raw)


def test_the_script_makes_the_key_and_no_file_holds_it(raw, tmp_path):
    job = job_of(raw)
    launch.write(job)
    assert 'export MEGATRON_DAPO_API_KEY="${MEGATRON_DAPO_API_KEY:-$(od ' in job.script.read_text()
    assert "--key-from api-key=MEGATRON_DAPO_API_KEY" in job.script.read_text()
    assert "$MEGATRON_DAPO_API_KEY" not in job.script.read_text()  # it is on no command line
    assert "api_key_env: MEGATRON_DAPO_API_KEY" in job.settings.read_text()


def test_slurm_options_are_in_the_script(raw):
    raw["slurm"] |= {
        "account": "lab", "qos": "high", "reservation": "may", "extra": ["--constraint=h100"], "memory": "0",
        "cpus_per_task": 12, "environment": {"NCCL_IB_HCA": "mlx5"}, "setup": ["module load cuda"], "router": True,
    }  # fmt: skip
    text = script_of(raw)
    for line in (
        "#SBATCH --partition=h100", "#SBATCH --account=lab", "#SBATCH --qos=high", "#SBATCH --reservation=may",
        "#SBATCH --constraint=h100", "#SBATCH --mem=0", "#SBATCH --cpus-per-task=12", "#SBATCH --gpus-per-node=8",
        "export NCCL_IB_HCA=mlx5", "module load cuda",
    ):  # fmt: skip
        assert f"\n{line}\n" in text, line
    assert text.index("module load cuda") < text.index("set -u")  # environment activation scripts break under it
    assert "sglang_router.launch_router" in text and "router_url=http://$ROUTER:29000" in text
    assert 'ROUTER="${ENGINES[0]}"' in text
    assert "--port 29000" in text and "--prometheus-port 29001" in text


def test_every_step_runs_in_the_container(raw):
    raw["slurm"] |= {"container_image": "nvcr.io#nvidia/pytorch:25.09", "container_mounts": ["/data:/data:ro"]}
    text = script_of(raw)
    assert "--container-image=nvcr.io#nvidia/pytorch:25.09" in text and "--container-mounts=/data:/data:ro" in text
    sruns = [line for line in text.splitlines() if "srun --export=ALL" in line]
    assert len(sruns) == 3 and all('"${CONTAINER[@]}"' in line for line in sruns)
    assert "python3 -u -m megatron_dapo.cli train" in text
    words = " ".join(text.replace("\\\n", " ").split())
    assert "python3 -m megatron_dapo.engines.sglang.run_with_keys sglang.launch_server" in words
    assert sys.executable not in text  # the container has its own Python


def test_a_separate_python_in_the_container_finds_the_key_wrapper(raw, tmp_path):
    """This installation's own file may not be mounted there, the run directory is."""
    raw["slurm"] |= {"container_image": "image.sqsh", "router": True}
    raw["rollout"]["servers"]["python"] = "/opt/sglang/bin/python"
    job = job_of(raw)
    launch.write(job)
    wrapper = tmp_path / "run/run_with_keys.py"
    assert wrapper.read_text() == RUN_WITH_KEYS.read_text()
    text = " ".join(job.script.read_text().replace("\\\n", " ").split())  # long commands are wrapped
    assert text.count(f"{wrapper} sglang") == 2 and str(RUN_WITH_KEYS) not in text


def test_the_container_mounts_the_run_directory(raw, tmp_path):
    raw["slurm"]["container_image"] = "image.sqsh"
    assert f"--container-mounts=/project:/project,{tmp_path}/run:{tmp_path}/run\n" in script_of(raw)
    raw["trainer"]["run_dir"] = "/project/runs/a"
    assert "--container-mounts=/project:/project\n" in script_of(raw)


def test_long_commands_are_wrapped(raw):
    raw["slurm"]["router"] = True
    raw["rollout"]["servers"]["arguments"] = [f"--option-{i}={i}" for i in range(30)]
    commands = [line for line in script_of(raw).splitlines() if "launch_" in line or line.startswith("    --option")]
    assert len(commands) > 4 and max(map(len, commands)) <= 120


def test_engines_do_not_inherit_the_trainers_cuda_setting(raw):
    text = script_of(raw)
    assert text.index("engine() {") < text.index("export CUDA_DEVICE_MAX_CONNECTIONS") < text.index("cli train")
    raw["policy"]["tensor_parallel"] = 1
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in script_of(raw)


def test_odd_names_are_quoted(raw, tmp_path):
    raw["trainer"]["run_dir"] = str(tmp_path / "a run; touch x")
    raw["slurm"]["environment"] = {"NOTE": "$(touch x) 'y'"}
    (tmp_path / "a run; touch x").mkdir()
    text = script_of(raw)
    lines = [line for line in text.splitlines() if line.startswith(("RUN=", "export NOTE="))]
    done = subprocess.run(
        ["bash", "-c", "\n".join([*lines, 'echo "$RUN|$NOTE"'])], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout == f"{tmp_path}/a run; touch x|$(touch x) 'y'\n"
    assert not (tmp_path / "x").exists()


def test_colocated_jobs_of_several_nodes_may_use_shared_memory_without_a_snapshot(raw):
    raw["slurm"] |= {"engine_nodes": 0}
    raw["rollout"]["servers"]["share_gpus"] = True
    raw["rollout"]["weights"] = {"transport": "tensor"}
    with pytest.raises(ConfigError, match=r"set rollout\.weights\.keep_snapshot to false"):
        script_of(raw)
    raw["rollout"]["weights"]["keep_snapshot"] = False
    assert "for node in" in script_of(raw)
    raw["rollout"]["weights"]["transport"] = "distributed"
    with pytest.raises(ConfigError, match="two ranks of one NCCL communicator on one GPU"):
        job_of(raw)


@pytest.mark.parametrize(
    ("section", "change", "said"),
    [
        ("slurm", {"engine_nodes": 4}, "leaves none to train on"),
        ("slurm", {"time": "1 day"}, "is not a time"),
        ("slurm", {"time": 86400}, "put the time in quotes"),
        ("slurm", {"time": "00:05:00"}, "slurm.signal_seconds is 600, but the time limit is 00:05:00"),
        ("slurm", {"extra": ["constraint=h100"]}, "expected sbatch options"),
        ("slurm", {"environment": {"A B": "1"}}, "is not the name of an environment variable"),
        ("slurm", {"tasks_per_node": 3}, "use a multiple of 4 ranks"),
        ("policy", {"tensor_parallel": 3, "micro_batch_tokens": 4098}, "choose one of 1, 2, 4, 8"),
        ("policy", {"model": "/no/such/model"}, "/no/such/model is not a directory"),
        ("data", {"path": "/no/such/prompts.jsonl"}, "/no/such/prompts.jsonl does not exist"),
        ("trainer", {"ranks": 2}, "leave trainer.ranks out"),
        ("rollout", {"engine": "embedded"}, "these nodes would be idle"),
        ("rollout", {"servers": {"tensor_parallel": 16}}, "a server must fit on one node"),
        ("rollout", {"weights": {"directory": "/dev/shm"}}, "cannot see: use a shared directory"),
        ("rollout", {"weights": {"transport": "tensor"}}, "needs engines on the trainer's GPUs"),
        ("rollout", {"servers": {"share_gpus": True}}, "the engines have their own GPUs"),
        ("slurm", {"engine_nodes": 0}, "set rollout.servers.share_gpus to true"),
        ("slurm", {"engine_partition": "a", "engine_nodes": 0}, "engine_partition needs engine"),
        ("slurm", {"spare_nodes": 1, "head_partition": "cpu"}, "needs all nodes in one partition"),
        ("slurm", {"spare_nodes": 1, "network_check": False}, "would be idle without a network check"),
        ("slurm", {"gpu_request": "none", "exclusive": False}, "other jobs could use the same GPUs"),
        ("slurm", {"webhook_env": "https://x"}, "put the URL itself into one"),
    ],
)
def test_impossible_jobs_are_refused(section, change, said, raw, tmp_path):
    raw[section] |= change
    with pytest.raises(ConfigError) as caught:
        check_job(job_of(raw))
    assert said in str(caught.value)
    assert not (tmp_path / "run").exists()


def answer(stdout="", stderr="", code=0):
    return lambda *command: subprocess.CompletedProcess(command, code, stdout, stderr)


@pytest.mark.parametrize(
    ("partition", "known", "said"),
    [
        (None, "a100\nh100\n", "has no default partition: choose one of a100, h100"),
        ("h200", "a100*\nh100\n", "this cluster has no partition h200; it has: a100, h100"),
    ],
)
def test_a_wrong_partition_is_refused(partition, known, said, raw):
    raw["slurm"]["partition"] = partition
    with pytest.raises(ConfigError, match=said):
        check_cluster(parse_config(raw), partitions(answer(known)))


@pytest.mark.parametrize(
    ("gres", "plugin", "change", "expected"),
    [
        ("gpu:h100:8(S:0-1)\n", "select/cons_tres", {}, "gpus-per-node"),
        ("(null)\nshard:2,gpu:8\n", "select/cons_res", {}, "gres"),
        ("(null)\n", "select/cons_tres", {}, "none"),
        ("(null)\n", "select/cons_tres", {"gpu_request": "gres"}, "gres"),
        ("gpu:8\n", "select/cons_res", {"gpus_per_node": 0}, "gpus-per-node"),
    ],
)
def test_gpus_are_requested_as_the_cluster_offers_them(gres, plugin, change, expected, raw):
    raw["slurm"] |= change
    raw["policy"]["tensor_parallel"] = 1
    config = parse_config(raw)
    found = offered_gpu_request(config, lambda *command: answer(gres if command[0] == "sinfo" else plugin)(*command))
    assert found == expected
    text = script_of(raw, gpu_request=found)
    options = {"gpus-per-node": "--gpus-per-node=8", "gres": "--gres=gpu:8"}
    for name, option in options.items():
        assert (f"#SBATCH {option}\n" in text) == (name == found and bool(config.slurm.gpus_per_node)), (name, found)


def test_unmanaged_gpus_are_not_shared_with_other_jobs(raw):
    raw["slurm"]["exclusive"] = False
    with pytest.raises(ConfigError, match="Slurm manages no GPUs in this partition"):
        offered_gpu_request(parse_config(raw), answer("(null)\n"))


def test_the_run_directory_has_no_pattern_of_slurm(raw):
    with pytest.raises(ConfigError, match="Slurm replaces %"):
        check_job(Job(parse_config(raw), Path("/runs/50%a"), Path("/project")))


def test_secrets_are_in_a_file_that_only_its_owner_reads(raw, tmp_path):
    path = tmp_path / "secrets"
    raw["slurm"]["environment_file"] = str(path)
    with pytest.raises(ConfigError, match="does not exist"):
        check_job(job_of(raw))
    path.write_text("A=1\nexport B=2\n")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        check_job(job_of(raw))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"line 2 of .* is not NAME=value"):
        check_job(job_of(raw))
    path.write_text("A=1\nNODES=2\n")
    with pytest.raises(ConfigError, match=r"line 2 of .*: NODES is a variable of the batch script"):
        check_job(job_of(raw))
    path.write_bytes(b"A=1\n# caf\xe9\nB=2")
    with pytest.raises(ConfigError, match="not UTF-8"):
        check_job(job_of(raw))
    path.write_bytes(b"A=1\r\n\r\n# no value\nB=2")
    check_job(job_of(raw))
    loop = re.search(r"^while IFS= .*?^done .*?$", script_of(raw), re.DOTALL | re.MULTILINE)[0]
    read = subprocess.run(["bash", "-c", f'{loop}\necho "$A $B"'], capture_output=True, text=True, check=True)
    assert read.stdout == "1 2\n"


def test_jobs_have_all_memory_of_exclusive_nodes(raw):
    assert "#SBATCH --mem=0\n" in script_of(raw)
    raw["slurm"]["exclusive"] = False
    assert "--mem" not in script_of(raw)
    raw["slurm"]["memory"] = "900G"
    assert "#SBATCH --mem=900G\n" in script_of(raw)


def test_modules_are_loaded_in_a_shell_without_them(raw, tmp_path):
    raw["slurm"]["modules"] = ["cuda/13.0", "nccl"]
    text = script_of(raw)
    part = text[text.index("for file in") : text.index("set -u")]
    (tmp_path / "init").mkdir()
    (tmp_path / "init/bash").write_text('module() { echo "module $*"; }\n')
    environment = {"PATH": "/usr/bin:/bin", "MODULESHOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", part], env=environment, capture_output=True, text=True)
    assert done.stdout == "module load cuda/13.0 nccl\n"


def test_an_existing_or_default_partition_is_accepted(raw):
    check_cluster(parse_config(raw), partitions(answer("a100*\nh100\n")))
    raw["slurm"]["partition"] = None
    check_cluster(parse_config(raw), partitions(answer("a100*\nh100\n")))


def test_a_dry_run_needs_no_model_here(raw, capsys):
    """Of a published model the layout is checked all the same; a real submission needs the model."""
    absent = raw | {"policy": raw["policy"] | {"model": "models/Qwen2.5-32B"}}
    gone = answer(stderr="sinfo: fatal", code=1)
    assert launch.run_slurm(parse_config(absent), dry_run=True, ask=gone) == 0
    assert "not checked: weights, tokenizer and data" in capsys.readouterr().out
    wrong = absent | {"policy": absent["policy"] | {"pipeline_parallel": 3}}
    with pytest.raises(ConfigError, match="64 layers"):
        launch.run_slurm(parse_config(wrong), dry_run=True, ask=gone)
    for unknown, dry_run in ((absent, False), (raw | {"policy": raw["policy"] | {"model": "models/Mine"}}, True)):
        with pytest.raises(ConfigError, match=r"no directory|not a directory"):
            launch.run_slurm(parse_config(unknown), dry_run=dry_run, ask=gone)


def test_a_dry_run_works_without_a_controller(raw, capsys):
    assert launch.run_slurm(parse_config(raw), dry_run=True, ask=answer(stderr="sinfo: fatal", code=1)) == 0
    assert "valid, not submitted" in capsys.readouterr().out
    with pytest.raises(SlurmError, match="sinfo failed"):
        launch.run_slurm(parse_config(raw), ask=answer(stderr="sinfo: fatal", code=1))


@pytest.mark.parametrize("name", ["prompts.jsonl", "/proc/x"])
def test_a_run_directory_that_cannot_be_made_is_named(name, raw, tmp_path):
    """Also in a dry run that reads neither model nor data."""
    raw["policy"]["model"] = "models/Qwen2.5-32B"
    raw["trainer"]["run_dir"] = str(tmp_path / name)
    with pytest.raises(ConfigError, match=r"trainer\.run_dir"):
        launch.run_slurm(parse_config(raw), dry_run=True, ask=answer("h100*\n"))


def test_modules_beside_the_configuration_are_found_as_by_train(raw, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/grader_beside.py").write_text("def grade(prompt, response):\n    return True\n")
    raw["reward"] = {"grader": "python:grader_beside.grade"}
    (tmp_path / "mine/run.yaml").write_text(json.dumps(raw))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert main(["slurm", "mine/run.yaml", "--dry-run"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("export PYTHONPATH")]
    for before, found in ((None, f"{tmp_path}/mine"), ("/a:/b", f"/a:/b:{tmp_path}/mine")):
        shell = f"set -u\n{f'PYTHONPATH={before}' if before else 'unset PYTHONPATH'}\n{line}\necho $PYTHONPATH"
        assert subprocess.run(["bash", "-c", shell], text=True, capture_output=True).stdout == f"{found}\n"


def test_each_job_of_a_chain_depends_on_the_one_before(raw, capsys):
    """A job starts when the one before has ended without finishing; none requeues itself."""
    asked = []

    def ask(*command):
        asked.append(command)
        return answer("a100*\nh100\n" if command[0] == "sinfo" else f"{100 + len(asked)};cluster\n")(*command)

    launch.run_slurm(parse_config(raw), chain=3, ask=ask)
    submissions = [command[2:-1] for command in asked if "--parsable" in command]
    assert submissions == [
        (), ("--dependency=afternotok:104", "--kill-on-invalid-dep=yes"),
        ("--dependency=afternotok:105", "--kill-on-invalid-dep=yes"),
    ]  # fmt: skip
    assert '[ "$RESTARTS" -ge 0 ]' in Path(raw["trainer"]["run_dir"], "job.sbatch").read_text()
    assert "as job 104, then 105, then 106" in capsys.readouterr().out


def test_the_jobs_of_a_chain_that_slurm_cut_short_are_known(raw):
    """They run; `slurm --status` must find them."""
    replies = iter([answer("104\n"), answer(stderr="QOSMaxSubmitJobPerUserLimit", code=1)])

    def ask(*command):
        reply = next(replies) if "--parsable" in command else answer("a100*\nh100\n")
        return reply(*command)

    with pytest.raises(SlurmError, match="already submitted: 104"):
        launch.run_slurm(parse_config(raw), chain=3, ask=ask)
    assert submitted(Path(raw["trainer"]["run_dir"])) == [104]


def test_time_limits_in_seconds():
    found = [seconds_of(text) for text in ("90", "2:30", "24:00:00", "1-0", "2-03:04", "1-02:03:04")]
    assert found == [5400, 150, 86400, 86400, 2 * 86400 + 3 * 3600 + 240, 86400 + 2 * 3600 + 184]


def test_a_missing_default_partition_on_a_real_cluster(cluster, monkeypatch, raw):
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    raw["slurm"]["partition"] = None
    cluster.run("scontrol", "update", "PartitionName=work", "Default=NO")
    try:
        with pytest.raises(ConfigError, match="no default partition: choose one of"):
            launch.run_slurm(parse_config(raw))
    finally:
        cluster.run("scontrol", "update", "PartitionName=work", "Default=YES")
    assert not Path(raw["trainer"]["run_dir"]).exists()


STUB = """\
#!/bin/bash
echo "$(hostname), task $SLURM_PROCID of $SLURM_NTASKS, GPUs $CUDA_VISIBLE_DEVICES: $*"
[[ "$*" == *megatron_dapo.cli* ]] || exec sleep 60
for _ in $(seq 100); do [ "$(cat run/logs/latest/engine_* | wc -l)" = 4 ] && exit; sleep 0.2; done
"""


@pytest.mark.parametrize("mode", ["disaggregated", "colocated"])
def test_gpu_assignment_on_a_real_cluster(mode, cluster, monkeypatch, raw, tmp_path):
    """The script runs with a stub instead of Python: every step of a node sees all of its GPUs, and each server gets
    its own first GPU as an argument."""
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    (tmp_path / "python").write_text(STUB)
    (tmp_path / "python").chmod(0o755)
    raw["slurm"] = {
        "nodes": 4 if mode == "disaggregated" else 2, "engine_nodes": 2 * (mode == "disaggregated"),
        "gpus_per_node": 4, "time": "5", "signal_seconds": 60, "python": str(tmp_path / "python"), "exclusive": False,
        "network_check": False,
    }  # fmt: skip
    raw["rollout"]["servers"] |= {"tensor_parallel": 2, "share_gpus": mode == "colocated"}
    monkeypatch.chdir(tmp_path)
    cluster.wait_idle()
    assert launch.run_slurm(parse_config(raw)) == 0
    (number,) = submitted(tmp_path / "run")
    wait_for(lambda: cluster.job(number)["JobState"] == "COMPLETED", 60, "the job")
    wait_for(lambda: not processes_of_job(cluster.config, number), 15, "its processes to end")
    logs = tmp_path / "run/logs/latest"
    ranks = [(logs / f"rank_{rank}.log").read_text() for rank in range(8)]
    for rank, said in enumerate(ranks):
        assert said.startswith(f"n{1 + rank // 4}, task {rank} of 8, GPUs 0,1,2,3: -u -m megatron_dapo.cli train ")
    nodes = ("n3", "n4") if mode == "disaggregated" else ("n1", "n2")
    assert sorted(p.name for p in logs.glob("engine_*")) == [
        f"engine_{n}_{p}.log" for n in nodes for p in (30000, 30001)
    ]
    for node in nodes:
        for index in range(2):
            said = (logs / f"engine_{node}_{30000 + index}.log").read_text()
            assert said.startswith(f"{node}, task 0 of 1, GPUs 0,1,2,3: -m megatron_dapo.engines.sglang.run_with_keys ")
            assert f"--port {30000 + index} --tp-size 2" in said and f"--base-gpu-id {2 * index}" in said
            assert f"http://{node}:{30000 + index}" in ranks[0]


def test_sbatch_test_only_reports_limits_of_the_cluster(cluster, monkeypatch, tmp_path):
    """Only the cluster knows the limits and the size of a partition."""
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    script = tmp_path / "job.sbatch"
    cluster.wait_idle()
    for option, said in (("--time=05:00:00", "time limit"), ("--nodes=9", "ode"), ("--account=x --qos=gold", "")):
        script.write_text(f"#!/bin/bash\n#SBATCH --partition=work {option}\n")
        if said:
            with pytest.raises(SlurmError, match=said):
                check_submission(script)
    script.write_text("#!/bin/bash\n#SBATCH --nodes=4 --time=10\n")
    assert "to start at" in check_submission(script)
    assert cluster.run("squeue", "-h", "-n", "job.sbatch") == ""
