"""`slurm --status` describes every state that Slurm has, and counts only COMPLETED as success."""

import json
import subprocess

import pytest

from megatron_dapo.launch.slurm import SlurmError, remember
from megatron_dapo.launch.slurm_status import STATES, JobStatus, job_statuses, print_status

# squeue's manual, JOB STATE CODES.
OVER = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
NOT_OVER = {
    "CONFIGURING", "COMPLETING", "PENDING", "RUNNING", "RESV_DEL_HOLD", "REQUEUE_FED", "REQUEUE_HOLD", "REQUEUED",
    "RESIZING", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT", "STOPPED", "SUSPENDED",
}  # fmt: skip


def scontrol(state, reason="None", restarts=0, code="0:0"):
    line = f"JobId=7 JobName=x JobState={state} Reason={reason} Requeue=1 Restarts={restarts} ExitCode={code}\n"
    return lambda *command: subprocess.CompletedProcess(command, 0, line, "")


@pytest.mark.parametrize("state", sorted(OVER | NOT_OVER))
def test_every_state_has_a_description(state):
    text = JobStatus(7, state).description()
    assert text.startswith("job 7 ") and "does not know" not in text and state not in text
    assert STATES[state].over == (state in OVER)


@pytest.mark.parametrize(
    ("state", "code"), [("COMPLETED", 0), ("RUNNING", 0), ("TIMEOUT", 1), ("PREEMPTED", 1), ("NODE_FAIL", 1)]
)
def test_only_completed_is_success(state, code, tmp_path, capsys):
    remember(tmp_path, [7])
    assert print_status(tmp_path, scontrol(state)) == code
    assert STATES[state].description in capsys.readouterr().out


def test_status_shows_exit_code_restarts_steps_and_hang(tmp_path, capsys):
    remember(tmp_path, [7])
    lines = [json.dumps({"step": step, "kind": "step", "metrics": {}}) for step in (1, 2, 3)]
    damaged = b'{"step": 99, \xff\n'
    (tmp_path / "metrics.jsonl").write_bytes(lines[0].encode() + b"\n" + damaged + "\n".join([*lines[1:], ""]).encode())
    (tmp_path / "logs/latest/heartbeat").mkdir(parents=True)
    (tmp_path / "logs/latest/heartbeat/ended").write_text("hanging: rank 3 (pid 9 on n2)\n")
    print_status(tmp_path, scontrol("FAILED", "NonZeroExitCode", 2, "76:0"))
    shown = capsys.readouterr().out
    assert "job 7 failed with exit code 76 (NonZeroExitCode) after 2 restarts; read logs/latest" in shown
    assert "3 steps done" in shown and "hanging: rank 3" in shown


def test_an_unknown_state_is_shown_as_it_is():
    status = job_statuses(7, scontrol("EXPLODED"))[0]
    assert not status.known.over and "EXPLODED, which this version does not know" in status.description()


def test_a_job_that_the_controller_forgot_is_found_in_the_accounting():
    def ask(*command):
        found = {"scontrol": (1, ""), "sacct": (0, "7|OUT_OF_MEMORY\n")}[command[0]]
        return subprocess.CompletedProcess(command, *found, "")

    assert job_statuses(7, ask)[0].description().startswith("job 7 ran out of the node's memory")


def test_a_job_that_slurm_forgot_hides_no_other(tmp_path, capsys):
    """Without an accounting database the controller forgets a job minutes after its end (MinJobAge)."""

    def ask(*command):
        running = subprocess.CompletedProcess(command, 0, "JobId=8 JobState=RUNNING Reason=None\n", "")
        gone = subprocess.CompletedProcess(command, 1, "", "slurm_load_jobs error: Invalid job id specified\n")
        return running if command[-1] == "8" else gone

    remember(tmp_path, [7, 8])
    assert print_status(tmp_path, ask) == 0
    assert capsys.readouterr().out.startswith("job 8 is running\n0 steps done")
    (tmp_path / "jobs.json").write_text("[7, 8")  # of a full disk
    remember(tmp_path, [9])
    assert print_status(tmp_path, ask) == 0, "job 8 runs"
    assert "job 9 is no longer known" in capsys.readouterr().out


def test_a_controller_that_does_not_reply_is_no_end_of_a_job():
    down = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
    with pytest.raises(SlurmError, match="Unable to contact"):
        job_statuses(7, lambda *command: subprocess.CompletedProcess(command, 1, "", down))


def test_every_task_of_an_array_that_the_controller_forgot_is_reported():
    def ask(*command):
        found = {"scontrol": (1, ""), "sacct": (0, "12_0|FAILED\n12_1|OUT_OF_MEMORY\n12_2|CANCELLED by 1000\n")}[
            command[0]
        ]
        return subprocess.CompletedProcess(command, *found, "")

    assert [(status.job, status.state) for status in job_statuses(12, ask)] == [
        ("12_0", "FAILED"), ("12_1", "OUT_OF_MEMORY"), ("12_2", "CANCELLED"),
    ]  # fmt: skip


def test_the_tasks_of_an_array_are_in_order():
    lines = "".join(f"JobId=12 ArrayTaskId={task} JobState=RUNNING\n" for task in ("10", "2", "11-14%1"))
    found = job_statuses(12, lambda *command: subprocess.CompletedProcess(command, 0, lines, ""))
    assert [status.job for status in found] == ["12_2", "12_10", "12_11-14%1"]


def test_status_of_a_held_and_a_cancelled_job_on_a_real_cluster(cluster, monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    job = int(cluster.run("sbatch", "--parsable", "--hold", "--wrap=true"))
    assert job_statuses(job)[0].description() == f"job {job} is waiting in the queue (JobHeldUser)"
    cluster.run("scancel", str(job))
    assert job_statuses(job)[0].description().startswith(f"job {job} was cancelled")
