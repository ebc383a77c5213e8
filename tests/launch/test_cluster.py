"""DAPO runs on a real Slurm of four nodes: runs that lose ranks, nodes and engines end like an undisturbed run.

Imports take most of the time, ten seconds of CPU for each rank of each attempt. So the undisturbed run is a local one,
whose ranks are forked, and each job is disturbed several times. The jobs run at the same time. Every disturbance has a
time limit within which its attempt must have ended and all its processes must be gone.
"""

import contextlib
import json
import math
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from long_lists import ALL_CASES
from mini_slurm import NOTICED, descendants, processes_of_job, signals
from tiny_run import environment, raw_config, write_config
from waiting import wait_for

from megatron_dapo.cli import main
from megatron_dapo.config import check_config, parse_config
from megatron_dapo.launch.slurm import submitted
from megatron_dapo.observe.metrics_file import is_wall_clock
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.trainer.loop import train

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12
pytestmark = pytest.mark.timeout(1800)
START = 200  # seconds until a starting job has done a step; 15 on an idle machine
PERIOD = 30  # seconds between Slurm's checks of time limits
END_SECONDS = 5  # that the other ranks have once one has ended
KILL_WAIT = 5  # of this Slurm: between TERM and KILL
SILENT = 15  # of the heartbeat
SAVE = 30  # to interrupt a batch and save it
# The limits leave room for a busy machine. On an idle one: 2, 5, 27, 25 s.
WITHIN = {
    "asked while importing": SAVE,
    "asked by Slurm": PERIOD + SAVE,
    "rank killed": END_SECONDS + 2 * KILL_WAIT + 15,
    "rank stopped": SILENT + END_SECONDS + 2 * KILL_WAIT + 15,
    "node lost": 3 * NOTICED + 2 * KILL_WAIT + 15,
}


def settings(folder, name):
    raw = raw_config(folder / "model", folder / name, trainer__steps=STEPS)
    raw["reward"] |= {"grader": "python:tiny_reward.paced", "environment": ["PACE"]}
    raw["trainer"]["heartbeat"] = {"every": 1, "silent": SILENT}
    return raw


class Run:
    """A submitted run."""

    submitting = threading.Lock()

    def __init__(self, cluster, folder, name, **changes):
        self.cluster, self.dir, self.pace_file = cluster, folder / name, folder / f"{name}.pace"
        self.pace(0.04)
        raw = settings(folder, name)
        raw["slurm"] = {
            "nodes": 2, "gpus_per_node": 0, "exclusive": False, "time": "00:30:00", "signal_seconds": 120,
            "end_seconds": END_SECONDS, "job_name": name, "environment": {"PACE": str(self.pace_file)},
        }  # fmt: skip
        for section, values in changes.items():
            raw[section] |= values
        config = write_config(raw, folder / f"{name}.yaml")
        with self.submitting:
            assert main(["slurm", str(config)]) == 0
        (self.job,) = submitted(self.dir)
        self.times: dict[str, float] = {}

    def pace(self, seconds):
        """How long the grader takes for one response; a step has 16."""
        part = self.pace_file.with_suffix(".part")
        part.write_text(str(seconds))
        part.rename(self.pace_file)

    def steps(self):
        path = self.dir / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def until(self, condition, seconds, what):
        try:
            wait_for(condition, seconds, what)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; its processes: {self.processes()}; its log:\n{self.log}") from None

    def wait_step(self, attempt):
        """Until this attempt has finished and saved a step."""
        self.until((self.dir / "logs" / f"attempt_{attempt}").exists, START, f"attempt {attempt}")
        began = self.steps()
        self.until(lambda: self.steps() > began + 1, START, f"a step of attempt {attempt}")

    def limit(self, seconds):
        """Sets a time limit at least this far from now; Slurm counts minutes."""
        minutes = math.ceil((self.runtime() + seconds) / 60)
        self.cluster.run("scontrol", "update", f"JobId={self.job}", f"TimeLimit={minutes}")

    def runtime(self):
        hours, minutes, seconds = map(int, self.state["RunTime"].split(":"))
        return hours * 3600 + minutes * 60 + seconds

    @contextlib.contextmanager
    def over_within(self, what, restart):
        """After the block, within the limit, Slurm has requeued the job and no process of that attempt is left."""
        began, seconds = time.monotonic(), WITHIN[what]
        yield
        self.until(lambda: int(self.state["Restarts"]) > restart, seconds, f"the end of an attempt ({what})")
        left = seconds - (time.monotonic() - began)
        self.until(lambda: not [p for p in self.processes() if p.restart == restart], left, f"no process left ({what})")
        self.times[what] = time.monotonic() - began

    def wait_end(self, seconds=START):
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.until(lambda: self.state["JobState"] in over, seconds, f"the end of {self.dir.name}")
        self.until(lambda: not self.processes(), 15, "its processes to end")
        return self

    def processes(self):
        return processes_of_job(self.cluster.config, self.job)

    def ranks(self):
        """The pids of the trainer's tasks by rank, without their children."""
        python = f"{sys.executable} -u -m megatron_dapo.cli train"
        return {p.rank: p.pid for p in reversed(self.processes()) if p.command.startswith(python)}

    @property
    def state(self):
        return self.cluster.job(self.job)

    @property
    def log(self):
        path = self.dir / "logs" / f"slurm_{self.job}.log"
        return path.read_text() if path.exists() else ""

    def attempts(self):
        """The job's log by attempt."""
        return re.split(r"(?=^.*attempt \d+: job)", self.log, flags=re.MULTILINE)[1:]

    def records(self):
        return records(self.dir)


def records(run_dir):
    """(step, metrics) of metrics.jsonl, without times."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], {n: v for n, v in r["metrics"].items() if not is_wall_clock(n)}) for r in lines]


@pytest.fixture(scope="module")
def folder(cluster, tmp_path_factory):
    """Of the runs, which find Slurm and the graders through the environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (environment() | {"SLURM_CONF": cluster.environment["SLURM_CONF"]}).items():
            patch.setenv(name, value)
        yield tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def undisturbed(folder):
    """Records of the same run, with the same layout, on this machine and without Slurm."""
    pace = folder / "undisturbed.pace"
    pace.write_text("0")
    config = parse_config(settings(folder, "undisturbed"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACE", str(pace))
        assert run_ranks(2, run_rank, config, check_config(config, 2)) == [0, 0]
    return records(folder / "undisturbed")


def run_rank(rendezvous, config, shape):
    return train(config, shape, rendezvous)


@pytest.fixture(scope="module")
def scenarios(cluster, folder, undisturbed):
    """All scenarios start now; a test waits for its own. The forks of `undisturbed` come before the threads."""
    every = (lost_ranks, lost_node, lost_engine, failing_engine)
    pool = ThreadPoolExecutor(len(every))
    found = {scenario: pool.submit(scenario, cluster, folder) for scenario in every}
    yield found
    pool.shutdown()


def importing(run):
    """Both ranks have installed their signal handlers, and have not started the loop."""
    pids = list(run.ranks().values())
    return len(pids) == 2 and all(signals(pid, "SigCgt", signal.SIGUSR1) for pid in pids)


def lost_ranks(cluster, folder):
    """Asked to stop during the imports, then a rank is killed, then, with ALL_CASES=1, one is stopped. The last attempt
    is only asked for its stacks, which does not disturb it."""
    run = Run(cluster, folder, "lost-ranks", slurm={"extra": ["--nodelist=n1,n2"]})
    run.until(lambda: importing(run), START, "two ranks that import")
    with run.over_within("asked while importing", restart=0):
        cluster.run("scancel", "--batch", "--signal=USR1", str(run.job))
    run.wait_step(1)
    with run.over_within("rank killed", restart=1):
        os.kill(run.ranks()[1], signal.SIGKILL)
    run.wait_step(2)
    if ALL_CASES:  # test_watchdog.py has two ranks of one node
        with run.over_within("rank stopped", restart=2):
            os.kill(run.ranks()[1], signal.SIGSTOP)
        run.wait_step(3)
    cluster.run("scancel", "--signal=USR2", f"{run.job}.0")
    return run.wait_end(2 * START)


def lost_node(cluster, folder):
    """Slurm sends its signal before the time limit, then a node loses its power. The last attempt is not disturbed."""
    run = Run(cluster, folder, "lost-node", slurm={"extra": ["--nodelist=n3,n4"], "crashes": 5})  # n4: no other job
    run.wait_step(0)
    with run.over_within("asked by Slurm", restart=0):
        run.pace(2)  # the signal comes in the middle of a batch
        run.limit(75)
        run.until(lambda: "passing USR1 on" in run.log, WITHIN["asked by Slurm"], "Slurm's signal")
        run.pace(0.04)
    cluster.run("scontrol", "update", f"JobId={run.job}", "TimeLimit=30")
    run.wait_step(1)
    with run.over_within("node lost", restart=1):
        cluster.kill_node("n4")
    # Repaired in the same second, the job would start at once and fail with "Job credential revoked".
    cluster.run("scontrol", "update", "NodeName=n4", "State=DOWN", "Reason=power")
    run.until(lambda: run.state["JobState"] == "PENDING", 60, "the job without n4")
    time.sleep(5)
    cluster.start_node("n4")
    return run.wait_end(2 * START)


def lost_engine(cluster, folder):
    """A trainer node and an engine node with a real SGLang server, which is killed in the middle."""
    python = sorted(ROOT.glob(".venv-sglang-*/bin/python"))
    if not python:
        return None
    run = Run(
        cluster, folder, "lost-engine",
        slurm={"nodes": 2, "engine_nodes": 1, "extra": ["--nodelist=n1,n3"]},
        rollout={
            "engine": "sglang", "weights": {"directory": str(folder / "weights")},
            "servers": {
                "device": "cpu", "python": str(python[-1]), "dtype": "float32", "port": 31000 + os.getpid() % 900,
                "start_timeout": 2 * START,
            },
        },
    )  # fmt: skip
    run.until(lambda: run.steps() >= 3, 3 * START, "three steps")
    serves = rf"{re.escape(str(python[-1]))} \S+run_with_keys.py cpu_launch_server"
    engine = next(p.pid for p in run.processes() if re.match(serves, p.command))
    family = {engine, *descendants(engine)}
    began, before = time.monotonic(), run.steps()
    os.kill(engine, signal.SIGKILL)
    run.until(lambda: not family & {p.pid for p in run.processes()}, 30, "the engine's own processes to end")
    run.until(lambda: run.steps() >= before + 2, 3 * START, "a step after the engine was killed")
    run.times["engine killed"] = time.monotonic() - began
    return run.wait_end(2 * START)


def failing_engine(cluster, folder):
    """An engine that ends at every start."""
    python = folder / "python"
    python.write_text("#!/bin/bash\necho 'this machine has no such library' >&2; exit 3\n")
    python.chmod(0o755)
    run = Run(
        cluster, folder, "failing-engine",
        slurm={"nodes": 2, "engine_nodes": 1, "extra": ["--nodelist=n1,n2"], "crashes": 1},
        rollout={
            "engine": "sglang", "weights": {"directory": str(folder / "failing-weights")},
            "servers": {
                "device": "cpu", "python": str(python), "port": 32000 + os.getpid() % 900, "restarts": 1,
                "start_timeout": 10 * START,
            },
        },
    )  # fmt: skip
    return run.wait_end()


def test_a_run_on_two_nodes(scenarios, capsys):
    run = scenarios[lost_ranks].result()
    assert run.state["JobState"] == "COMPLETED", run.log
    assert [step for step, _ in run.records()] == list(range(1, STEPS + 1))
    logs = run.dir / "logs" / "latest"
    assert {p.name for p in logs.glob("rank_*")} == {"rank_0.log", "rank_1.log"}
    assert "DP 2" in (logs / "rank_0.log").read_text()
    assert all("loop.py" in (logs / f"stacks_rank_{rank}.txt").read_text() for rank in (0, 1))
    assert all(metrics["reward/retries"] == metrics["reward/restarts"] == 0 for _, metrics in run.records())
    capsys.readouterr()
    assert main(["slurm", "--status", str(run.dir)]) == 0
    shown = capsys.readouterr().out
    assert f"job {run.job} finished" in shown and f"{STEPS} steps done" in shown


@pytest.mark.parametrize("scenario", [lost_ranks, lost_node])
def test_a_disturbed_run_ends_like_an_undisturbed_one(scenario, scenarios, undisturbed):
    run = scenarios[scenario].result()
    assert run.state["JobState"] == "COMPLETED", f"{run.state}\n{run.log}"
    assert run.records() == undisturbed
    assert "ended with code 0" in run.attempts()[-1]
    print("seconds:", run.times)


def test_the_logs_name_the_reason_of_each_end(scenarios):
    run = scenarios[lost_ranks].result()
    imports, killed, *stopped, last = run.attempts()
    assert "passing USR1 on" in imports and "ended with code 75" in imports
    assert "while nothing had to be saved" in (run.dir / "logs/attempt_0/rank_1.log").read_text()
    assert not (run.dir / "logs/attempt_0/heartbeat").exists()
    assert "task 1: Killed" in killed  # Slurm says who
    for attempt in stopped:
        found = re.search(r"hanging: rank 1 \(pid \d+ on n2\) has been silent for (\d+)", attempt)
        assert found and SILENT <= int(found[1]) <= WITHIN["rank stopped"], attempt
        assert "watchdog.py" in (run.dir / "logs/attempt_2/stacks_rank_0.txt").read_text()
    assert len(stopped) == ALL_CASES
    assert "ended with code 0" in last

    # On a slow machine there is one more: Slurm repeats its order to end the lost attempt, and it ends the next one.
    signalled, lost, *_, last = scenarios[lost_node].result().attempts()
    assert "ended with code 0" in last
    assert "passing USR1 on" in signalled and "ended with code 75" in signalled
    assert re.search(r"NODE FAILURE|node n4 does not answer", lost)  # Slurm's message or the script's


def test_a_killed_engine_comes_back_with_the_current_weights(scenarios):
    run = scenarios[lost_engine].result()
    if run is None:
        pytest.skip("SGLang for the CPU is not installed: make sglang-cpu")
    assert run.state["JobState"] == "COMPLETED", run.log + (run.dir / "logs/latest/rank_0.log").read_text()
    assert run.state["Restarts"] == "0"
    assert len(re.findall(r"engine_n3_\d+ ended with code 137", run.log)) == 1  # and none is started at the end
    records = run.records()
    assert [step for step, _ in records] == list(range(1, STEPS + 1))
    # The trainer scores what the engine sampled: stale weights would show as different log-probs.
    assert max(metrics["train/mismatch_max"] for _, metrics in records) < 1e-3
    print("seconds:", run.times)


def test_an_engine_that_ends_at_every_start_ends_the_run_with_the_reason(scenarios):
    run = scenarios[failing_engine].result()  # long before start_timeout
    assert run.state["JobState"] == "FAILED", run.log
    assert re.findall(r"engine_n2_\d+ ended with code 3 \(start (\d)\)", run.log) == ["1", "2"]
    assert re.search(r"engine_n2_\d+ is given up", run.log)
    assert "will not be started again" in run.log and run.log.count("this machine has no such library") >= 2
    assert run.steps() == 0 and len(run.attempts()) == 1
