"""The batch script on different kinds of clusters, on a real Slurm: sites that submit with --export=NONE, no default
partition, GPUs as generic resources or not, Apptainer, heterogeneous jobs, slow nodes, arrays of seeds.

The jobs run at the same time. Their Python is a stub that prints its environment, except for the network check, which
really runs. A recording script takes the place of Apptainer.
"""

import hashlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from sparse_model import SMALL, write_sparse_model
from waiting import wait_for

from megatron_dapo.config import load_config, parse_config
from megatron_dapo.launch import slurm as launch
from megatron_dapo.launch.slurm import offered_gpu_request, remember, submitted
from megatron_dapo.launch.slurm_script import Job
from megatron_dapo.launch.slurm_status import print_status

ROOT = Path(__file__).resolve().parents[2]
# Prints what a process of the job was given. Servers stay; the trainer waits until WAIT_FOR of them have printed.
PYTHON = f"""\
#!/bin/bash
if [[ "$*" == *doctor.network* ]]; then
  [ "$(hostname)" = "${{SLOW_NODE:-}}" ] && exec {sys.executable} "$(dirname "$0")/slow.py" "${{@:4}}"
  exec {sys.executable} "$@"
fi
key=$(printf %s "$MEGATRON_DAPO_API_KEY" | sha256sum)
echo "$(hostname) task $SLURM_PROCID of $SLURM_NTASKS; GPUs ${{CUDA_VISIBLE_DEVICES:-none}};" \\
  "master ${{MASTER_ADDR:-none}}; key ${{key%% *}}; token ${{TOKEN:-none}}; shell ${{FROM_THE_SHELL:-none}}; $*"
[[ "$*" == *megatron_dapo.cli* ]] || exec sleep 60
for _ in $(seq 200); do
  [ "$(cat "$RUN_LOGS"/engine_* "$RUN_LOGS"/router* 2>/dev/null | wc -l)" -ge "$WAIT_FOR" ] && exit
  sleep 0.2
done
exit 1
"""
SLOW = """\
import runpy, sys, time
import torch.distributed as dist
all_reduce = dist.all_reduce
dist.all_reduce = lambda *a, **k: (time.sleep(0.15), all_reduce(*a, **k))[1]
sys.argv[0] = "network"
runpy.run_module("megatron_dapo.doctor.network", run_name="__main__")
"""
APPTAINER = """\
#!/bin/bash
echo "$(hostname): $*" >> "$(dirname "$0")/apptainer.log"
while [[ "$1" != */dapo.sif ]]; do shift; done
shift; exec "$@"
"""


def script(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


class Case:
    """A submitted job."""

    def __init__(self, cluster, job, number):
        self.cluster, self.dir, self.number = cluster, job.run_dir, number
        self.script = job.script.read_text()

    def finish(self):
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        wait_for(lambda: self.cluster.job(self.number)["JobState"] in over, 150, f"the job of {self.dir.name}")
        assert self.cluster.job(self.number)["JobState"] == "COMPLETED", self.log
        return self

    @property
    def log(self):
        return "".join(path.read_text() for path in self.dir.glob("logs/slurm_*.log"))

    def outputs(self, pattern, folder="."):
        return {path.stem: path.read_text() for path in sorted((self.dir / folder / "logs/latest").glob(pattern))}


@pytest.fixture(scope="module")
def jobs(cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    model = write_sparse_model(folder / "model", SMALL)
    script(folder / "python", PYTHON)
    script(folder / "apptainer", APPTAINER)
    (folder / "dapo.sif").touch()
    (folder / "slow.py").write_text(SLOW)
    (folder / "secrets").write_text("# of the tests\nTOKEN=a b'c")
    (folder / "secrets").chmod(0o600)
    prompts = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(600)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        patch.setenv("FROM_THE_SHELL", "yes")
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.chdir(folder)
        cluster.run("scontrol", "update", "PartitionName=work", "Default=NO")
        try:
            yield {make.__name__: make(cluster, folder, str(model)) for make in KINDS}
        finally:
            cluster.run("scontrol", "update", "PartitionName=work", "Default=YES")


def published_run(folder, model, name, *settings, engines=4):
    """examples/qwen2.5_32b_dapo on four nodes of four GPUs instead of sixteen of eight."""
    return load_config(ROOT / "examples/qwen2.5_32b_dapo/dapo.yaml", [
        f"policy.model={model}", f"data.path={folder}/prompts.jsonl", f"evaluate.data.path={folder}/prompts.jsonl",
        "data.template=plain", "evaluate.data.template=plain", f"trainer.run_dir={folder / name}",
        f"rollout.weights.directory={folder / name}/weights", "policy.context_parallel=1", "slurm.gpus_per_node=4",
        "slurm.nodes=4", "slurm.engine_nodes=2", "rollout.servers.tensor_parallel=2", "slurm.time='5'",
        "slurm.signal_seconds=60", "slurm.network_check=false", f"slurm.python={folder}/python",
        f"slurm.environment={{WAIT_FOR: {engines}, RUN_LOGS: {folder / name}/logs/latest}}", *settings,
    ])  # fmt: skip


def export_none(cluster, folder, model):
    """In an Apptainer container, with --export=NONE."""
    config = published_run(
        folder, model, "export_none", "slurm.partition=work", "slurm.extra=[--export=NONE]",
        "slurm.container_runtime=apptainer", f"slurm.container_image={folder}/dapo.sif",
        f"slurm.environment_file={folder}/secrets", f"slurm.setup=['export PATH={folder}:$PATH']",
    )  # fmt: skip
    assert launch.run_slurm(config) == 0
    job = Job(config, folder / "export_none", folder)
    (number,) = submitted(job.run_dir)
    return Case(cluster, job, number)


def submit(cluster, folder, config, **options):
    """Without the checks of model and data, which take seconds and do not concern Slurm."""
    job = Job(config, Path(config.trainer.run_dir), folder, gpu_request=offered_gpu_request(config), **options)
    launch.write(job)
    (number,) = launch.submit(job, 1, launch.ask)
    remember(job.run_dir, [number])
    return Case(cluster, job, number)


def unmanaged_gpus(cluster, folder, model):
    """Slurm knows nothing of the GPUs."""
    return submit(cluster, folder, published_run(
        folder, model, "unmanaged_gpus", "slurm.partition=plain", "slurm.extra=[--export=NONE]", "slurm.nodes=2",
        "slurm.engine_nodes=1", "policy.pipeline_parallel=1", engines=2,
    ))  # fmt: skip


def heterogeneous(cluster, folder, model):
    """Batch script and router on a CPU node, engines in another partition, GPUs requested with --gres."""
    return submit(cluster, folder, published_run(
        folder, model, "heterogeneous", "slurm.partition=work", "slurm.head_partition=plain", "slurm.exclusive=false",
        "slurm.engine_partition=engines", "slurm.router=true", "slurm.gpu_request=gres", "slurm.gpus_per_node=2",
        "slurm.nodes=3", "slurm.engine_nodes=1", "slurm.extra=[--export=NONE]", "policy.pipeline_parallel=1", engines=2,
    ))  # fmt: skip


def slow_node(cluster, folder, model):
    """Three nodes are needed, four are allocated, and n2 is slow, by a factor of 50 or more. The nodes are one machine
    with other work on it: one of the others was measured at a third of the median."""
    raw = {
        "rollout": {"engine": "embedded"}, "trainer": {"run_dir": str(folder / "slow_node")},
        "slurm": {
            "partition": "work", "nodes": 3, "spare_nodes": 1, "network_check": True, "network_slow": 0.1,
            "gpus_per_node": 0, "time": "5", "signal_seconds": 60, "exclusive": False, "python": str(folder / "python"),
            "webhook_env": "HOOK",
            "environment": {"WAIT_FOR": "0", "RUN_LOGS": "none", "SLOW_NODE": "n2", "HOOK": f"file://{folder}/none"},
        },
    }  # fmt: skip
    return submit(cluster, folder, parse_config(raw))


def seeds(cluster, folder, model):
    raw = {
        "rollout": {"engine": "embedded"}, "trainer": {"run_dir": str(folder / "seeds")},
        "slurm": {
            "partition": "work", "gpus_per_node": 0, "time": "5", "signal_seconds": 60, "exclusive": False,
            "python": str(folder / "python"), "environment": {"WAIT_FOR": "0", "RUN_LOGS": "none"},
        },
    }  # fmt: skip
    return submit(cluster, folder, parse_config(raw), seeds=(3, 7))


KINDS = (export_none, unmanaged_gpus, heterogeneous, slow_node, seeds)


def test_the_32b_script_runs_with_export_none_and_without_a_default_partition(jobs):
    case = jobs["export_none"].finish()
    assert "#SBATCH --gpus-per-node=4\n" in case.script and "#SBATCH --mem=0\n" in case.script
    ranks, engines = case.outputs("rank_*"), case.outputs("engine_*")
    assert len(ranks) == 8 and sorted(name[:9] for name in engines) == ["engine_n3"] * 2 + ["engine_n4"] * 2
    keys = {re.search(r"key (\w+);", said)[1] for said in (ranks | engines).values()}
    assert len(keys) == 1 and keys != {hashlib.sha256(b"").hexdigest()}
    for rank in range(8):
        said = ranks[f"rank_{rank}"]
        assert said.startswith(f"n{1 + rank // 4} task {rank} of 8; GPUs 0,1,2,3; master n1; "), said
    for said in (ranks | engines).values():
        assert "shell none;" in said  # --export=NONE was in force
        assert "token a b'c;" in said  # from slurm.environment_file


def test_every_step_of_the_32b_script_runs_in_apptainer(jobs):
    case = jobs["export_none"].finish()
    recorded = (case.dir.parent / "apptainer.log").read_text().splitlines()
    assert len(recorded) == 12  # 8 ranks, 4 engines
    folder = case.dir.parent
    for line in recorded:
        assert f": exec --nv --pwd {folder} --bind {folder}:{folder} {folder}/dapo.sif " in line
        assert "a b'c" not in line
    assert sum("megatron_dapo.cli train" in line for line in recorded) == 8


def test_the_32b_script_runs_where_slurm_does_not_manage_the_gpus(jobs):
    case = jobs["unmanaged_gpus"].finish()
    assert (
        "--gpus-per-node" not in case.script and "--gres" not in case.script and "#SBATCH --exclusive\n" in case.script
    )
    ranks = case.outputs("rank_*")
    assert [ranks[f"rank_{r}"].split(";")[:3] for r in range(4)] == [
        [f"p1 task {r} of 4", " GPUs none", " master p1"] for r in range(4)
    ]
    assert len(case.outputs("engine_p2_*")) == 2


def test_a_heterogeneous_job_has_the_router_on_a_cpu_node_and_engines_in_another_partition(jobs):
    case = jobs["heterogeneous"].finish()
    assert case.script.count("#SBATCH hetjob\n") == 2 and case.script.count("#SBATCH --gres=gpu:2\n") == 2
    ranks, engines, router = case.outputs("rank_*"), case.outputs("engine_*"), case.outputs("router*")
    assert [said.split(";")[0] for said in ranks.values()] == [f"n{1 + r // 2} task {r} of 4" for r in range(4)]
    (engine,), (routed,) = engines.values(), router.values()
    assert re.match(r"n[34] task 0 of 1; GPUs [0-3],[0-3]; master n1; ", engine)
    assert re.match(r"p[12] task 0 of 1; GPUs none; ", routed)
    assert f"rollout.servers.router_url=http://{routed[:2]}:29000" in ranks["rank_0"]
    assert all("master n1;" in said and "GPUs none" not in said for said in ranks.values())


def test_a_slow_node_is_named_and_replaced_before_the_trainer_starts(jobs, capsys):
    case = jobs["slow_node"].finish()
    print(case.log)
    speeds = {speed["node"]: speed for speed in json.loads((case.dir / "logs/latest/network.json").read_text())}
    assert set(speeds) == {"n1", "n2", "n3", "n4"} and all(len(speed["pairs"]) == 3 for speed in speeds.values())
    assert "excluded: n2" in case.log and re.search(r"^n2 .* slow$", case.log, re.MULTILINE)
    said = case.outputs("rank_*").values()
    assert sorted(text.split()[0] for text in said) == ["n1", "n3", "n4"]
    assert all("master n1;" in text for text in said)
    assert launch.slow_nodes(case.dir) == ("n2",)  # which the next submission excludes
    assert launch.slow_nodes(case.dir.parent) == ()
    (case.dir.parent / "seed_1").symlink_to(case.dir)  # as a task of an array
    assert launch.slow_nodes(case.dir.parent) == ("n2",)
    assert "#SBATCH --exclude=n2\n" in launch.render(
        replace(Job(load_config(case.dir / "submitted.yaml"), case.dir, case.dir.parent), excluded=("n2",))
    )
    assert "the webhook was not reached" in case.log  # which does not change the job's result


def test_an_array_runs_each_seed_in_its_own_directory(jobs, capsys):
    case = jobs["seeds"]
    wait_for(lambda: len(case.outputs("rank_0*", "seed_3") | case.outputs("rank_0*", "seed_7")) == 1, 60, "both seeds")
    wait_for(lambda: print_status(case.dir) == 0 and capsys.readouterr().out.count("finished") == 2, 60, "their end")
    for seed in (3, 7):
        config = load_config(case.dir / f"seed_{seed}/submitted.yaml")
        assert (config.trainer.seed, config.trainer.run_dir) == (seed, str(case.dir / f"seed_{seed}"))
        (said,) = case.outputs("rank_*", f"seed_{seed}").values()
        assert said.rstrip().endswith(f"cli train {case.dir}/seed_{seed}/submitted.yaml")
