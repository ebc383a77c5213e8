"""How often a job is queued again: the budget counts restarts in a row and recovers after progress.

The script runs here as it is; Slurm's commands and the trainer are stubs.
"""

import os
import signal
import subprocess

import pytest
from waiting import wait_for

from megatron_dapo.config import parse_config
from megatron_dapo.launch.slurm_script import Job, render

COMMANDS = {
    # Like Slurm, a requeue ends the script.
    "scontrol": '[ "$1" = show ] && echo $SLURM_JOB_NODELIST | tr , "\\n" || { echo "$@" >> asked; kill -TERM $PPID; }',
    "srun": """
[[ "$*" == *" true" ]] && exec test ! -e "${*: -2:1}.down"  # the probe of a node
[[ "$*" == *launch_server* ]] && . ./engine
[[ "$*" == *megatron_dapo.cli* ]] && . ./trainer
""",
}


class StubJob:
    def __init__(self, folder, rollout=None, **slurm):
        self.folder = folder
        for name, text in COMMANDS.items():
            (folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / name).chmod(0o755)
        raw = {"rollout": rollout or {"engine": "embedded"}, "slurm": {"gpus_per_node": 0, **slurm}}
        (folder / "job.sbatch").write_text(render(Job(parse_config(raw), folder / "run", folder)))

    def checkpoint(self, step, seconds):
        """Shell text that saves a checkpoint, `seconds` after the start of the attempt as far as the script knows."""
        path = f"run/checkpoints/step_{step}"
        return f"mkdir -p {path}; touch -d @$(($(stat -c %Y {path}) - {seconds})) run/logs/latest/began; "

    def start(self, trainer, job=7):
        (self.folder / "trainer").write_text(trainer + "\n")
        environment = os.environ | {
            "PATH": f"{self.folder}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n1,n2", "SLURM_JOB_ID": str(job),
        }  # fmt: skip
        return subprocess.Popen(
            ["bash", "job.sbatch"], cwd=self.folder, env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def attempt(self, trainer, job=7):
        """Runs one attempt to its end; returns its output."""
        script = self.start(trainer, job)
        try:
            return script.communicate(timeout=60)[0]
        finally:
            if script.poll() is None:
                os.killpg(script.pid, signal.SIGKILL)


def test_the_job_gives_up_after_its_restarts(tmp_path):
    job = StubJob(tmp_path, restarts=2)
    assert "restart 1 of 2" in job.attempt("exit 75")
    assert "restart 2 of 2" in job.attempt("exit 75")
    assert "not queued again: 2 restarts" in job.attempt("exit 75")
    assert (tmp_path / "asked").read_text() == "requeue 7\n" * 2


def test_progress_restores_the_restarts(tmp_path):
    job = StubJob(tmp_path, restarts=2, restart_reset_seconds=600)
    job.attempt("exit 75")
    job.attempt("exit 75")
    assert "restart 1 of 2" in job.attempt(job.checkpoint(1, 600) + "exit 75")
    assert "restart 2 of 2" in job.attempt("exit 75")
    assert "not queued again" in job.attempt(job.checkpoint(2, 599) + "exit 75")


def test_progress_counts_when_slurm_requeues_without_the_script(tmp_path):
    """A lost node ends the script in the middle: the next attempt finds the checkpoint."""
    job = StubJob(tmp_path, restarts=2, restart_reset_seconds=600)
    job.attempt("exit 75")
    job.attempt("exit 75")
    lost = job.start(job.checkpoint(1, 600) + "touch saved; sleep 60")
    try:
        wait_for((tmp_path / "saved").exists, 30, "the checkpoint")
    finally:
        os.killpg(lost.pid, signal.SIGKILL)
        lost.communicate()
    assert "restart 2 of 2" in job.attempt("exit 75")


def test_attempts_of_an_earlier_job_do_not_count(tmp_path):
    job = StubJob(tmp_path, restarts=1, crashes=2)
    job.attempt("exit 1", job=7)
    assert "2 crashes without a new checkpoint" in job.attempt("exit 1", job=7)
    assert "restart 1 of 1" in job.attempt("exit 1", job=8)
    assert "2 crashes without a new checkpoint" in job.attempt("exit 1", job=8)


@pytest.mark.parametrize("trainer", ["exit 2", "echo wrong > run/logs/latest/setup_error; exit 143"])
def test_a_wrong_set_up_is_not_queued_again(trainer, tmp_path):
    """Rank 0 exits with 2; srun may report the signal that ended the other ranks instead."""
    job = StubJob(tmp_path)
    script = job.start(trainer)
    assert "queueing" not in script.communicate(timeout=60)[0]
    assert script.returncode == 2 and not (tmp_path / "asked").exists()


@pytest.mark.parametrize("saves", [True, False])
def test_crashes_count_only_without_a_new_checkpoint(saves, tmp_path):
    job = StubJob(tmp_path, crashes=2)
    job.attempt(job.checkpoint(1, 1) + "exit 1")
    said = job.attempt((job.checkpoint(2, 2) if saves else "") + "exit 1")
    assert ("queueing the job again" in said) == saves


ENGINE_NODE = {"nodes": 2, "engine_nodes": 1}


def test_a_server_that_ends_at_every_start_is_given_up(tmp_path):
    job = StubJob(tmp_path, {"servers": {"restarts": 2}}, **ENGINE_NODE)
    (tmp_path / "engine").write_text("exit 3\n")
    trainer = "until ls run/logs/latest/*.given_up; do sleep 0.1; done; exit 0"
    said = job.attempt(trainer)
    assert [f"(start {n})" in said for n in (1, 2, 3, 4)] == [True, True, True, False]
    assert "engine_n2_30000 is given up" in said


def test_time_in_service_restores_the_restarts_of_a_server(tmp_path):
    """A server that works for restart_recovery seconds before it ends is started again as often as that happens."""
    job = StubJob(tmp_path, {"servers": {"restarts": 1, "restart_recovery": 1}}, **ENGINE_NODE)
    (tmp_path / "engine").write_text("sleep 1.1; echo >> served; exit 3\n")
    said = job.attempt("until [ $(cat served | wc -l) -ge 4 ]; do sleep 0.1; done; exit 0")
    assert "(start 3)" in said and "given up" not in said


def test_a_lost_node_does_not_count_as_a_crash(tmp_path):
    job = StubJob(tmp_path, crashes=1)
    (tmp_path / "--nodelist=n2.down").touch()
    said = job.attempt("exit 1")
    assert "node n2 does not answer" in said and "node n1" not in said and "queueing the job again" in said
    (tmp_path / "--nodelist=n2.down").unlink()
    assert "1 crashes without a new checkpoint" in job.attempt("exit 1")


def test_a_damaged_checkpoint_is_not_a_new_one(tmp_path):
    job = StubJob(tmp_path, crashes=2)
    job.attempt(job.checkpoint(1, 1) + "exit 1")
    assert "2 crashes without a new checkpoint" in job.attempt("mkdir run/checkpoints/step_2.damaged; exit 1")
