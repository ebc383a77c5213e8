"""A real Slurm cluster on this machine, for the tests: Debian's packages, no systemd, no cgroups. It has four nodes
with GPUs (n1 to n4) and two whose GPUs Slurm does not manage (p1, p2).

Every daemon is a child of this process and ends with it. Each slurmd has its own mount and UTS namespace, so a task on
node n3 has the host name n3 and finds the other nodes by name. `unavailable()` tells why a machine cannot run it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import stat
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from waiting import wait_for

NODES = ("n1", "n2", "n3", "n4", "p1", "p2")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "unshare")
NODE_STATES = ("sinfo", "-h", "-N", "-p", "work", "-o")
PR_SET_PDEATHSIG = 1
NOTICED = 10  # SlurmdTimeout: a node that does not respond for so many seconds is down

# Short times: a dead node is noticed after 20 s, and a requeued job starts after 7 s instead of two minutes.
CONFIG = """\
ClusterName=mini
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={first_job}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge.socket,cred_expire=5
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={root}/completed.log
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
EnforcePartLimits=ALL
ReturnToService=2
SlurmdTimeout={noticed}
KillWait=5
MinJobAge=3600
NodeName=n[1-4] NodeHostname={host} NodeAddr=127.0.0.[11-14] Port=[{first}-{last}] CPUs=8 RealMemory=4000 Gres=gpu:4
NodeName=p[1-2] NodeHostname={host} NodeAddr=127.0.0.[15-16] Port=[{first_plain}-{last_plain}] CPUs=8 RealMemory=4000
PartitionName=work Nodes=n[1-4] Default=YES MaxTime=60 State=UP
PartitionName=plain Nodes=p[1-2] MaxTime=60 State=UP
PartitionName=engines Nodes=n[3-4] MaxTime=60 State=UP
PartitionName=short Nodes=n[1-2] MaxTime=2 State=UP
"""


def unavailable() -> str:
    """Why no cluster can be started here; empty if one can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"no {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge"
    if os.geteuid() != 0:
        return "a cluster with several nodes on one machine needs root"
    trial = subprocess.run(["unshare", "-m", "-u", "true"], capture_output=True, text=True)
    return f"no namespaces here: {trial.stderr.strip()}" if trial.returncode else ""


class MiniSlurm:
    def __init__(self, root: Path) -> None:
        self.root, self.config = root, root / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._parent = ThreadPoolExecutor(1)  # a child ends with the thread that started it: one thread starts all
        self.environment = os.environ | {"SLURM_CONF": str(self.config)}

    def start(self) -> MiniSlurm:
        self.root.mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o755)
        (self.root / "state").mkdir()
        (self.root / "munge.key").write_bytes(os.urandom(1024))
        (self.root / "munge.key").chmod(0o400)
        self.write_config()
        host = socket.gethostname().split(".")[0]
        names = "".join(f"127.0.0.1{i} {node}\n" for i, node in enumerate(NODES, 1))
        (self.root / "hosts").write_text(f"127.0.0.1 localhost {host}\n{names}")
        self._spawn(
            "munged", "--foreground", "--force", f"--key-file={self.root}/munge.key",
            f"--socket={self.root}/munge.socket", f"--pid-file={self.root}/munged.pid",
            f"--log-file={self.root}/munged.log", f"--seed-file={self.root}/munged.seed",
        )  # fmt: skip
        wait_for(lambda: (self.root / "munge.socket").exists(), 10, "munged")
        self._spawn("slurmctld", "-D", "-c", "-f", f"{self.root}/slurm.conf")
        for node in NODES:
            self.start_node(node)
        try:
            self.wait_idle(30)
        except BaseException:
            self.stop()
            raise
        return self

    def wait_idle(self, seconds: float = 60) -> None:
        """Waits until all four nodes are up and idle."""
        try:
            wait_for(lambda: self.run(*NODE_STATES, "%T").split() == ["idle"] * 4, seconds, "four idle nodes")
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {self.run(*NODE_STATES, '%N %T (%E)')}; {self.run('squeue')}") from None

    def write_config(self) -> None:
        ports = _free_ports(7)
        host = socket.gethostname().split(".")[0]
        text = CONFIG.format(
            root=self.root, host=host, port=ports[0], first=ports[1], last=ports[4], noticed=NOTICED,
            first_plain=ports[5], last_plain=ports[6],
            first_job=ports[0] % 9000 + 1000,  # several clusters at once: a job's rendezvous port is made of its number
        )  # fmt: skip
        (self.root / "slurm.conf").write_text(text)
        for gpu in range(4):  # copies of /dev/null: Slurm requires device files
            os.mknod(self.root / f"gpu{gpu}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        (self.root / "gres.conf").write_text(f"NodeName=n[1-4] Name=gpu File={self.root}/gpu[0-3]\n")

    def start_node(self, node: str) -> None:
        # Empty, as after a reinstallation: a slurmd ends the steps that it finds there, and a requeued job has the same
        # step numbers as before.
        shutil.rmtree(self.root / f"spool.{node}", ignore_errors=True)
        (self.root / f"spool.{node}").mkdir()
        script = f"hostname {node} && mount --bind {self.root}/hosts /etc/hosts && exec slurmd -D -N {node} -f $0"
        self._spawn("unshare", "-m", "-u", "sh", "-c", script, f"{self.root}/slurm.conf", name=node)

    def kill_node(self, node: str) -> None:
        """Like a power failure: kills the slurmd, its step daemons and all their descendants at once."""
        slurmd = self._daemons.pop(node)
        daemons = _step_daemons(os.readlink(f"/proc/{slurmd.pid}/ns/uts"))
        for pid in [slurmd.pid, *daemons, *(pid for daemon in daemons for pid in descendants(daemon))]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        slurmd.wait()

    def run(self, *command: str, timeout: float = 30) -> str:
        """A Slurm command's output."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=timeout)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout.strip()

    def job(self, job: int | str) -> dict[str, str]:
        """The fields of `scontrol show job`, e.g. JobState, Reason, ExitCode, Restarts, BatchHost."""
        words = self.run("scontrol", "-o", "show", "job", str(job)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def stop(self) -> None:
        if "slurmctld" in self._daemons:
            with contextlib.suppress(Exception):
                self.run("scancel", "--user=root")
                wait_for(lambda: not self.run("squeue", "-h"), 20, "the jobs to end")
        for daemon in reversed(list(self._daemons.values())):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        self._parent.shutdown()

    def _spawn(self, *command: str, name: str = "") -> None:
        name = name or command[0]
        with (self.root / f"{name}.out").open("ab") as log:
            self._daemons[name] = self._parent.submit(
                subprocess.Popen, command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=_end_with_parent,
            ).result()  # fmt: skip


@dataclass(frozen=True)
class JobProcess:
    pid: int
    command: str
    restart: int  # of the job: 0 the first time it runs
    rank: int  # within its step; 0 outside of one


def processes_of_job(config: Path, job: int | str) -> list[JobProcess]:
    """Processes whose environment names this job and this cluster."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                environment = dict(entry.split("=", 1) for entry in entries if "=" in entry)
                if environment.get("SLURM_JOB_ID") == str(job) and environment.get("SLURM_CONF") == str(config):
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    numbers = (int(environment.get(name, 0)) for name in ("SLURM_RESTART_COUNT", "SLURM_PROCID"))
                    found.append(JobProcess(int(folder.name), command, *numbers))
    return sorted(found, key=lambda process: process.pid)


def signals(pid: int, kind: str, *numbers: int) -> bool:
    """Whether a process catches (`kind` SigCgt in /proc/PID/status) or ignores (SigIgn) all these signals."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return all(int(lines[kind], 16) >> (number - 1) & 1 for number in numbers)


def descendants(pid: int) -> Iterable[int]:
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from descendants(int(child))


def _step_daemons(namespace: str) -> list[int]:
    """The step daemons in one node's UTS namespace."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                is_daemon = (folder / "cmdline").read_bytes().startswith(b"slurmstepd")
                if is_daemon and os.readlink(folder / "ns/uts") == namespace:
                    found.append(int(folder.name))
    return found


def _free_ports(count: int) -> list[int]:
    """Consecutive free ports."""
    for first in range(17000 + os.getpid() % 1000 * 10, 60000, count):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    trial = stack.enter_context(socket.socket())
                    trial.bind(("", port))
            except OSError:
                continue
            return list(range(first, first + count))
    raise RuntimeError("no free ports")


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
