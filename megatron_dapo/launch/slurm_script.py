"""The sbatch script of a run: one file that a Slurm user would have written, with everything it does in it.

`render` is a pure function of the configuration and of where the run lives. The script starts the engines (where they
are not the trainer's own), then the trainer under srun, one task per rank; it passes the signal before the time limit
on to the trainer, and queues the job again when the trainer has saved, crashed or hung, a bounded number of times.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.config import Config
from megatron_dapo.config.rollout import ServerConfig

API_KEY = "MEGATRON_DAPO_API_KEY"
WIDTH = 118  # of a line of the script
# First of all: a signal that comes while the job is being set up must not end the script.
SIGNALS = """\
say() { echo "$(date '+%F %T') attempt ${ATTEMPT:-?}: $*"; }

# USR1 comes before the time limit (--signal above): the trainer saves and ends with 75. TERM (scancel, preemption)
# reaches the trainer by itself; whether the job starts again is then Slurm's to decide.
ASKED="" TRAINER=""
trap 'ASKED=USR1; say "passing USR1 on to the trainer"; [ -z "$TRAINER" ] || kill -USR1 "$TRAINER"' USR1
trap 'ASKED=TERM; say "asked to end"' TERM
"""


@dataclass(frozen=True, slots=True)
class Job:
    """A run as a Slurm job. `folder` is where relative paths of the configuration start."""

    config: Config
    run_dir: Path
    folder: Path
    chained: bool = False  # a later job takes over, so this one does not queue itself again

    @property
    def settings(self) -> Path:
        return self.run_dir / "submitted.yaml"

    @property
    def script(self) -> Path:
        return self.run_dir / "job.sbatch"

    @property
    def starts_servers(self) -> bool:
        """Whether the script starts servers; on a single node, and in process, the trainer does."""
        rollout, slurm = self.config.rollout, self.config.slurm
        return rollout.engine == "sglang" and not rollout.servers.urls and slurm.nodes > 1

    @property
    def servers_per_node(self) -> int:
        slurm, servers = self.config.slurm, self.config.rollout.servers
        return slurm.gpus_per_node // servers.tensor_parallel if slurm.gpus_per_node else servers.count

    @property
    def python(self) -> str:
        slurm = self.config.slurm
        return slurm.python or ("python3" if slurm.container_image else sys.executable)


def render(job: Job) -> str:
    parts = [_head(job), SIGNALS, _surroundings(job), _logs(job), _nodes(job)]
    if job.starts_servers:
        parts.append(_engines(job))
    parts += [_trainer(job), _ending(job)]
    return "\n".join(parts)


def _head(job: Job) -> str:
    slurm = job.config.slurm
    options = {
        "job-name": slurm.job_name or job.run_dir.name,
        "partition": slurm.partition, "account": slurm.account, "qos": slurm.qos, "reservation": slurm.reservation,
        "nodes": slurm.nodes, "ntasks-per-node": slurm.ranks_per_node, "cpus-per-task": slurm.cpus_per_task,
        "gpus-per-node": slurm.gpus_per_node or None, "mem": slurm.memory, "time": slurm.time,
        "signal": f"B:USR1@{slurm.signal_seconds}", "chdir": job.folder,
        "output": job.run_dir / "logs" / "slurm_%j.log", "open-mode": "append",
    }  # fmt: skip
    lines = [f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in options.items() if value is not None]
    lines += ["#SBATCH --requeue"] + (["#SBATCH --exclusive"] if slurm.exclusive else [])
    lines += [f"#SBATCH {option}" for option in slurm.extra]
    return "\n".join([
        "#!/bin/bash",
        f"# The run in {job.run_dir}, written by `megatron-dapo slurm`. It resumes by itself.",
        f"# State in words: megatron-dapo slurm --status {shlex.quote(str(job.run_dir))}",
        *lines, "",
    ])  # fmt: skip


def _surroundings(job: Job) -> str:
    slurm = job.config.slurm
    lines = [*slurm.setup, "set -u  # not before: what activates an environment is rarely written for it"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in slurm.environment.items()]
    if slurm.container_image:
        folders = [job.folder, *([] if job.run_dir.is_relative_to(job.folder) else [job.run_dir])]
        mounts = slurm.container_mounts or [f"{folder}:{folder}" for folder in folders]
        flags = [f"--container-image={slurm.container_image}", f"--container-workdir={job.folder}"]
        flags += [f"--container-mounts={','.join(mounts)}", *slurm.container_arguments]
        lines += ["CONTAINER=(", *(f"  {shlex.quote(flag)}" for flag in flags), ")"]
    return "\n".join([*lines, ""])


def _logs(job: Job) -> str:
    return f"""\
# One folder of logs per attempt; logs/latest is the newest.
RUN={shlex.quote(str(job.run_dir))}
ATTEMPT=0
while [ -e "$RUN/logs/attempt_$ATTEMPT" ]; do ATTEMPT=$((ATTEMPT + 1)); done
LOGS="$RUN/logs/attempt_$ATTEMPT"
mkdir -p "$LOGS" && ln -sfn "attempt_$ATTEMPT" "$RUN/logs/latest"
"""


def _nodes(job: Job) -> str:
    slurm = job.config.slurm
    engines = f'ENGINES=("${{NODES[@]:{slurm.trainer_nodes}}}")' if slurm.engine_nodes else 'ENGINES=("${NODES[@]}")'
    return "\n".join([
        "# The first node is where ranks meet.",
        'mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        f'TRAINERS=("${{NODES[@]:0:{slurm.trainer_nodes}}}")',
        *([engines] if job.starts_servers else []),
        'export MASTER_ADDR="${NODES[0]}"',
        "export MASTER_PORT=$((10000 + SLURM_JOB_ID % 10000))",
        'say "job $SLURM_JOB_ID on ${NODES[*]}, restart ${SLURM_RESTART_COUNT:-0}"', "",
    ])  # fmt: skip


def _engines(job: Job) -> str:
    slurm, servers = job.config.slurm, job.config.rollout.servers
    key, first, size = servers.api_key_env or API_KEY, servers.port, servers.tensor_parallel
    lines = [
        "# Engines. Servers that other nodes can reach need a key. One that dies is started again, and the trainer",
        "# gives it the current weights before it serves.",
        f'export {key}="${{{key}:-$(od -An -tx1 -N24 /dev/urandom | tr -d " \\n")}}"',
        "keep() {  # keep NAME NODE COMMAND...: runs it there, and starts it again when it ends",
        '  local name="$1" node="$2" start; shift 2',
        f"  for start in $(seq 1 {servers.restarts + 1}); do",
        f"    srun {_step_flags(job)} --nodes=1 --ntasks=1 --ntasks-per-node=1 \\",
        '      --nodelist="$node" --output="$LOGS/$name.log" --open-mode=append "$@"',
        '    say "$name ended with code $? (start $start)"',
        "  done",
        '  say "$name is given up"; touch "$LOGS/$name.given_up"  # the trainer looks for it while it waits',
        "}",
        "engine() {  # engine NODE PORT FIRST_GPU",
        _wrapped(["keep", '"engine_$1_$2"', '"$1"', *server_command(job, key)], "  "),
        "}",
        "trap 'kill $(jobs -p) 2>/dev/null' EXIT  # at the end of the job nothing is started again",
        'URLS=""',
        'for node in "${ENGINES[@]}"; do',
        f"  for index in $(seq 0 {job.servers_per_node - 1}); do",
        f'    engine "$node" $(({first} + index)) $((index * {size})) &',
        f'    URLS="$URLS${{URLS:+,}}http://$node:$(({first} + index))"',
        "  done",
        "done",
    ]
    if slurm.router:
        python = shlex.quote(servers.python or job.python)
        router = [
            "keep", "router", '"${ENGINES[0]}"', *router_command(python, slurm.router_port, servers),
            "--api-key", f'"${key}"', "--worker-urls", "${URLS//,/ }", "&",
        ]  # fmt: skip
        lines += ["# Takes the generate requests; weights and aborts go to the servers themselves.", _wrapped(router)]
    return "\n".join([*lines, ""])


def server_command(job: Job, key: str) -> list[str]:
    """The fleet's own command for a server, as shell words with $2 for the port and $3 for the first GPU."""
    from megatron_dapo.engines.sglang.server_process import sglang_command

    servers = job.config.rollout.servers
    update = {"host": "0.0.0.0", "api_key_env": key, "python": servers.python or job.python}
    command, environment = sglang_command(job.config.policy.model, servers.model_copy(update=update), 0, 0)
    later = {"--port": '"$2"', "--base-gpu-id": '"$3"', "--api-key": f'"${key}"'}
    if servers.admin_key_env:
        later["--admin-api-key"] = f'"${servers.admin_key_env}"'
    words = [later.get(before) or shlex.quote(word) for before, word in zip(["", *command], command, strict=False)]
    return ["env", *(f"{name}={shlex.quote(value)}" for name, value in environment.items()), *words]


def router_command(python: str, port: int, servers: ServerConfig) -> list[str]:
    """Without the servers and the key. It gives up a worker or a request no earlier than we do. Its own way to share
    requests out looks at texts, and sends all to one server where there are only tokens; its metrics take a port."""
    return [
        python, "-m", "sglang_router.launch_router", "--host", "0.0.0.0", "--port", str(port),
        "--prometheus-port", str(port + 1), "--log-level", "warn", "--policy", "power_of_two",
        "--request-timeout-secs", f"{servers.request_timeout:.0f}",
        "--worker-startup-timeout-secs", f"{servers.start_timeout:.0f}", "--worker-startup-check-interval", "5",
    ]  # fmt: skip


def _wrapped(words: list[str], indent: str = "") -> str:
    """Shell words on lines of a readable length; an option stays with its value."""
    lines, line = [], indent
    for word, after in zip(words, [*words[1:], ""], strict=True):
        pair = len(word) + (len(after) + 1 if word.startswith("--") and not after.startswith("--") else 0)
        if line.strip() and len(line) + 1 + pair > WIDTH:
            lines.append(f"{line} \\")
            line = f"{indent}  "
        line += f"{' ' if line.strip() else ''}{word}"
    return "\n".join([*lines, line])


def _trainer(job: Job) -> str:
    slurm = job.config.slurm
    settings = [f"{shlex.quote(job.python)} -u -m megatron_dapo.cli train {shlex.quote(str(job.settings))}"]
    if job.starts_servers:
        settings += ['--set "rollout.servers.urls=[$URLS]"', '--set "rollout.weights.master_address=$MASTER_ADDR"']
        if slurm.router:
            settings.append(f'--set "rollout.servers.router_url=http://${{ENGINES[0]}}:{slurm.router_port}"')
    cpus = f" --cpus-per-task={slurm.cpus_per_task}" if slurm.cpus_per_task else ""
    command = " \\\n  ".join(settings)
    return f"""\
# The trainer, one task per rank. --wait: the seconds that the others have once one rank has ended.
{_overlap(job)}{_leftovers(job)}srun {_step_flags(job)} --nodes={slurm.trainer_nodes} --ntasks={slurm.ranks} \\
  --ntasks-per-node={slurm.ranks_per_node}{cpus} --nodelist="$(IFS=,; echo "${{TRAINERS[*]}}")" \\
  --wait={slurm.end_seconds} --output="$LOGS/rank_%t.log" \\
  {command} &
TRAINER=$!
[ -z "$ASKED" ] || kill -USR1 "$TRAINER"  # it came before there was a trainer
"""


def _overlap(job: Job) -> str:
    """Megatron's own advice for layers that are split; engines are not given it."""
    policy = job.config.policy
    if not job.config.slurm.gpus_per_node or policy.tensor_parallel * policy.context_parallel == 1:
        return ""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    return f'export {name}="${{{name}:-1}}"  # communication starts first, and overlaps\n'


def _leftovers(job: Job) -> str:
    """A trainer that was killed leaves its last weight files behind."""
    folder = Path(job.folder, job.config.rollout.weights.directory)
    if not job.starts_servers or job.run_dir not in folder.parents:
        return ""
    return f"rm -rf {shlex.quote(str(folder))}/megatron-dapo-weights-*  # of a trainer that was killed\n"


def _ending(job: Job) -> str:
    slurm = job.config.slurm
    restarts = 0 if job.chained else slurm.restarts
    bound = "the next job of the chain goes on" if job.chained else f"slurm.restarts is {slurm.restarts}"
    return f"""\
wait "$TRAINER"; CODE=$?
while [ "$CODE" -gt 128 ] && kill -0 "$TRAINER" 2>/dev/null; do wait "$TRAINER"; CODE=$?; done

say "the trainer ended with code $CODE"
[ "$CODE" -eq 0 ] && exit 0
[ -s "$LOGS/heartbeat/ended" ] && cat "$LOGS/heartbeat/ended"
[ "$CODE" -eq 75 ] || tail -n 15 "$LOGS/rank_0.log"
[ "$ASKED" = TERM ] && exit "$CODE"
if [ "$CODE" -ne 75 ] && [ -z "$ASKED" ]; then
  # 2: the configuration is wrong. And a crash that comes again without a new checkpoint would come a third time.
  [ "$CODE" -eq 2 ] && exit 2
  PROBES=()  # a lost node is named here, since Slurm itself may need minutes to notice
  for node in "${{NODES[@]}}"; do
    timeout -k 5 20 srun --overlap --mpi=none --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="$node" true \\
      >/dev/null 2>&1 || say "node $node does not answer" &
    PROBES+=($!)
  done
  wait "${{PROBES[@]}}"
  echo "after $(ls -td "$RUN"/checkpoints/step_* 2>/dev/null | head -n 1)" >> "$RUN/logs/crashes"
  if [ "$(tail -n {slurm.crashes} "$RUN/logs/crashes" | sort | uniq -c | awk '$1 >= {slurm.crashes}')" ]; then
    say "not queued again: {slurm.crashes} crashes without a new checkpoint (slurm.crashes)"
    exit "$CODE"
  fi
fi
if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {restarts} ]; then
  say "not queued again: {bound}"
  exit "$CODE"
fi
say "queueing the job again, restart $((${{SLURM_RESTART_COUNT:-0}} + 1)) of {restarts}"
trap - TERM
if scontrol requeue "$SLURM_JOB_ID"; then
  sleep 120  # Slurm ends this script meanwhile
else
  say "it could not be queued again; where that is not allowed, --chain submits several jobs"
fi
exit "$CODE"
"""


def _step_flags(job: Job) -> str:
    """Steps share the job's nodes, and all see all GPUs: which one is whose is said to the programs."""
    flags = "--overlap --mpi=none --cpu-bind=none"
    return flags + (' "${CONTAINER[@]}"' if job.config.slurm.container_image else "")


def seconds_of(time: str) -> float:
    """A Slurm time limit in seconds."""
    if re.fullmatch("unlimited|infinite", time, re.IGNORECASE):
        return float("inf")
    days, _, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if days:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = [*parts, 0, 0][:3]
        return int(days) * 86400 + hours * 3600 + minutes * 60 + seconds
    if len(parts) == 1:
        return parts[0] * 60
    return float(sum(value * unit for value, unit in zip(reversed(parts), (1, 60, 3600), strict=False)))
