"""`megatron-dapo slurm --status RUN_DIR`: the state of a run's jobs, its progress, and what to do next.

States come from the controller while it remembers the job, afterwards from the accounting database or the completion
log. A state that is not in the table is printed as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.launch.slurm import JOBS, Ask, SlurmError, ask, reason, submitted
from megatron_dapo.observe.runs import last_records


@dataclass(frozen=True, slots=True)
class State:
    description: str
    over: bool  # nothing more happens without a new submission
    advice: str = ""


AGAIN = "submit again: it resumes from the newest checkpoint"
STATES = {
    "PENDING": State("is waiting in the queue", False),
    "CONFIGURING": State("is waiting for its nodes to get ready", False),
    "RUNNING": State("is running", False),
    "COMPLETING": State("has ended and is being cleaned up", False),
    "REQUEUED": State("was put back into the queue", False),
    "REQUEUE_FED": State("was put back into the queue of another cluster", False),
    "REQUEUE_HOLD": State("was put back into the queue and is held", False, "scontrol release JOB"),
    "SPECIAL_EXIT": State("is held in the queue because of its exit code", False, "scontrol release JOB"),
    "RESV_DEL_HOLD": State("is held: its reservation is gone", False, "set slurm.reservation and submit again"),
    "RESIZING": State("is changing its size", False),
    "SIGNALING": State("is receiving a signal", False),
    "STAGE_OUT": State("is copying its files out", False),
    "STOPPED": State("is stopped and keeps its nodes", False, "scancel --signal=CONT JOB"),
    "SUSPENDED": State("is suspended and has given up its nodes", False, "scontrol resume JOB"),
    "COMPLETED": State("finished", True),
    "CANCELLED": State("was cancelled", True, AGAIN),
    "FAILED": State("failed", True, "read logs/latest, fix the cause, " + AGAIN),
    "TIMEOUT": State("reached its time limit before it could save", True, "raise slurm.signal_seconds and " + AGAIN),
    "DEADLINE": State("could not end before its deadline", True, AGAIN),
    "OUT_OF_MEMORY": State("ran out of the node's memory", True, "raise slurm.memory, or fewer ranks a node; " + AGAIN),
    "NODE_FAIL": State("lost a node", True, AGAIN),
    "BOOT_FAIL": State("was given a node that does not boot", True, AGAIN),
    "LAUNCH_FAILED": State("could not be started on its nodes", True, AGAIN),
    "RECONFIG_FAIL": State("was given a node that could not be set up", True, AGAIN),
    "PREEMPTED": State("was preempted by another job", True, AGAIN),
    "REVOKED": State("was taken over by another cluster", True),
    "FORGOTTEN": State("is no longer known to Slurm: it ended long ago, or is of another cluster", True),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class JobStatus:
    job: int | str  # 12, or 12_3 for task 3 of an array
    state: str
    reason: str = ""
    restarts: int = 0
    exit_code: str = ""

    @property
    def known(self) -> State:
        return STATES.get(self.state, State(f"is in state {self.state}, which this version does not know", False))

    def description(self) -> str:
        known = self.known
        parts = [f"job {self.job} {known.description}"]
        if self.state == "FAILED" and self.exit_code:
            status, _, signal = self.exit_code.partition(":")
            parts.append(f"by signal {signal}" if signal not in ("", "0") else f"with exit code {status}")
        if self.reason and self.reason != "None":
            parts.append(f"({self.reason})")
        if self.restarts:
            parts.append(f"after {self.restarts} restart{'s' if self.restarts > 1 else ''}")
        return " ".join(parts) + (f"; {known.advice.replace('JOB', str(self.job))}" if known.advice else "")


def job_statuses(job: int, ask: Ask = ask) -> list[JobStatus]:
    """Of an array the status of each task; of any other job one. A heterogeneous job has that of its first part."""
    reply = ask("scontrol", "-o", "show", "job", str(job))
    lines = [line for line in reply.stdout.splitlines() if "JobState=" in line]
    if reply.returncode or not lines:
        ended = _ended_jobs(job, ask)
        if not ended and "Invalid job id" not in reply.stderr:
            raise SlurmError(f"scontrol show job {job} failed: {reason(reply.stderr)}")
        return ended or [JobStatus(job, "FORGOTTEN")]
    found = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]
    tasks = [fields for fields in found if "ArrayTaskId" in fields]
    return [
        JobStatus(
            f"{job}_{fields['ArrayTaskId']}" if tasks else job, fields["JobState"],
            fields.get("Reason", ""), int(fields.get("Restarts", 0)), fields.get("ExitCode", ""),
        ) for fields in sorted(tasks, key=_first_task) or found[:1]
    ]  # fmt: skip


def _first_task(fields: dict[str, str]) -> int:
    """Tasks that wait are one entry, for example 11-14%1."""
    return int(re.split(r"\D", fields["ArrayTaskId"])[0])


def _ended_jobs(job: int, ask: Ask) -> list[JobStatus]:
    """A job, or the tasks of an array, that the controller has forgotten."""
    for options in (["-X"], ["-c"]):  # the database, or the log of completed jobs
        reply = ask("sacct", *options, "-n", "-P", "-j", str(job), "-o", "JobID,State")
        states = dict(line.split("|", 1) for line in reply.stdout.splitlines() if "|" in line)
        if reply.returncode == 0 and states:
            tasks = [name for name in states if "_" in name] or [*states][-1:]
            return [JobStatus(name, states[name].split()[0]) for name in tasks]  # CANCELLED by 1000
    return []


def print_status(run_dir: Path, ask: Ask = ask) -> int:
    """Exit code 0: the run is waiting, running or finished. 1: it ended otherwise."""
    jobs = submitted(run_dir)
    if not jobs:
        raise SlurmError(f"{run_dir}: no job was submitted with this run directory (no {JOBS})")
    *earlier, newest = [job_statuses(job, ask) for job in jobs]
    for status in [s for statuses in earlier for s in statuses if not s.known.over] + newest:
        print(status.description())
    for run in sorted(run_dir.glob("seed_*")) or [run_dir]:
        print(f"{steps_done(run)} steps done; logs: {run / 'logs' / 'latest'}")
        ended = run / "logs" / "latest" / "heartbeat" / "ended"
        if ended.exists():
            print(ended.read_text().rstrip())
    over = all(status.known.over for statuses in [*earlier, newest] for status in statuses)
    return 1 if over and any(status.state != "COMPLETED" for status in newest) else 0


def steps_done(run_dir: Path) -> int:
    return max((record.step for record in last_records(run_dir / "metrics.jsonl").values()), default=0)
