"""The sbatch script of a run, rendered from `job.sbatch.j2`.

`render` is a pure function of the configuration and of the run's paths. The script starts the engines (unless the
trainer starts them itself), then the trainer under srun, one task per rank. It passes the signal before the time limit
on to the trainer, and queues the job again, a bounded number of times, when the trainer has saved, crashed or hung.

No value can add a line to the script: each one is quoted for the shell, and a line break is an error.
The script does not depend on the environment it is submitted from: every step gets the script's own environment, also
where the site or the user submits with --export=NONE.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from megatron_dapo.config import Config, ConfigError
from megatron_dapo.config.rollout import ServerConfig
from megatron_dapo.config.trainer import NAME
from megatron_dapo.engines.sglang.keys import API_KEY_VARIABLE, RUN_WITH_KEYS, command_with_keys

WIDTH = 118  # columns of a wrapped command


class Shell(str):
    """Shell text of our own, such as `"$1"`, that must not be quoted. Never holds a value from the configuration."""


def quote(value: object) -> str:
    """One shell word that stands for exactly this value."""
    return value if isinstance(value, Shell) else shlex.quote(one_line(value))


def quote_words(words: Iterable[object]) -> str:
    return " ".join(quote(word) for word in words)


def one_line(value: object) -> str:
    """The value as text. Comments and #SBATCH lines end at a line break, quoted or not: such a value is an error."""
    text = str(value)
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        raise ConfigError(f"{text!r} has a line break or a control character, which cannot be in a batch script")
    return text


def variable(name: str) -> str:
    """The name of an environment variable, which cannot be quoted."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not the name of an environment variable")
    return name


def wrap(words: Iterable[object], indent: str = "") -> str:
    """Quoted words on lines of a readable length; an option stays with its value."""
    quoted = [quote(word) for word in words]
    lines, line = [], indent
    for word, after in zip(quoted, [*quoted[1:], ""], strict=True):
        pair = len(word) + (len(after) + 1 if word.startswith("--") and not after.startswith("--") else 0)
        if line.strip() and len(line) + 1 + pair > WIDTH:
            lines.append(f"{line} \\")
            line = f"{indent}  "
        line += f"{' ' if line.strip() else ''}{word}"
    return "\n".join([*lines, line])


GPU_REQUEST = "gpus-per-node"  # what most clusters take
TEMPLATES = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Component:
    """Nodes of one kind. A job with several components is heterogeneous."""

    role: str  # head, trainers, engines; "all" for both kinds in one component
    nodes: int
    partition: str | None
    gpus: int
    tasks: int  # per node


@dataclass(frozen=True, slots=True)
class Job:
    """A run as a Slurm job. Relative paths of the configuration start at `folder`."""

    config: Config
    run_dir: Path
    folder: Path
    modules: Path | None = None  # where the user's Python modules are besides `folder`
    chained: bool = False  # a later job takes over, so this one does not queue itself again
    gpu_request: str = GPU_REQUEST  # or gres, none: what the cluster offers
    excluded: tuple[str, ...] = ()  # nodes that an earlier attempt found slow
    seeds: tuple[int, ...] = ()  # an array of jobs, one run in seed_N for each

    def of_seed(self, seed: int) -> Job:
        """One run of the array, with its own run directory and weights directory."""
        run_dir = self.run_dir / f"seed_{seed}"
        weights = Path(self.folder, self.config.rollout.weights.directory)
        inside = self.run_dir in weights.parents
        weights = run_dir / weights.relative_to(self.run_dir) if inside else weights / f"seed_{seed}"
        trainer = self.config.trainer.model_copy(update={"run_dir": str(run_dir), "seed": seed})
        update = {"weights": self.config.rollout.weights.model_copy(update={"directory": str(weights)})}
        rollout = self.config.rollout.model_copy(update=update)
        config = self.config.model_copy(update={"trainer": trainer, "rollout": rollout})
        return replace(self, config=config, run_dir=run_dir, seeds=())

    @property
    def settings(self) -> Path:
        return self.run_dir / "submitted.yaml"

    @property
    def script(self) -> Path:
        return self.run_dir / "job.sbatch"

    @property
    def starts_servers(self) -> bool:
        """Whether the script starts servers. On a single node the trainer does; the embedded engine has none."""
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

    @property
    def restarts(self) -> int:
        return 0 if self.chained else self.config.slurm.restarts

    @property
    def api_key(self) -> str:
        """The environment variable with the servers' key."""
        return variable(self.config.rollout.servers.api_key_env or API_KEY_VARIABLE)

    @property
    def components(self) -> list[Component]:
        """In the order of their het groups. Slurm runs the script on the first node of the first component."""
        slurm = self.config.slurm
        ranks, gpus = slurm.ranks_per_node, slurm.gpus_per_node
        head = [Component("head", 1, slurm.head_partition, 0, 1)] if slurm.head_partition else []
        if not slurm.engine_partition:
            return [*head, Component("all", slurm.nodes + slurm.spare_nodes, slurm.partition, gpus, ranks)]
        return [
            *head, Component("trainers", slurm.trainer_nodes, slurm.partition, gpus, ranks),
            Component("engines", slurm.engine_nodes, slurm.engine_partition, gpus, 1),
        ]  # fmt: skip

    def group(self, role: str) -> int | None:
        """The het group of head, trainers or engines; None: the job has only one component, or no head."""
        roles = [component.role for component in self.components]
        found = role if role in roles else "all"
        return roles.index(found) if len(roles) > 1 and found in roles else None

    @property
    def options(self) -> dict[str, Any]:
        """sbatch's long options of the whole job; None: not given."""
        slurm = self.config.slurm
        return {
            "job-name": slurm.job_name or self.run_dir.name,
            "time": slurm.time, "signal": f"B:USR1@{slurm.signal_seconds}", "chdir": self.folder,
            "output": self.run_dir / "logs" / ("slurm_%A_%a.log" if self.seeds else "slurm_%j.log"),
            "open-mode": "append", "array": ",".join(map(str, self.seeds)) or None,
            "mail-user": slurm.mail_user, "mail-type": slurm.mail_type if slurm.mail_user else None,
        }  # fmt: skip

    def component_options(self, component: Component) -> dict[str, Any]:
        slurm = self.config.slurm
        memory = slurm.memory if slurm.memory is not None or not slurm.exclusive else "0"
        kind = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
        requests = {"gpus-per-node": f"{kind}{component.gpus}", "gres": f"gpu:{kind}{component.gpus}"}
        is_head = component.role == "head"
        return {
            "partition": component.partition, "account": slurm.account, "qos": slurm.qos,
            "reservation": slurm.reservation, "exclude": None if is_head else ",".join(self.excluded) or None,
            "nodes": component.nodes, "ntasks-per-node": component.tasks,
            "cpus-per-task": None if is_head else slurm.cpus_per_task, "mem": None if is_head else memory,
            **({self.gpu_request: requests[self.gpu_request]} if component.gpus and self.gpu_request != "none" else {}),
        }  # fmt: skip

    @property
    def mounts(self) -> list[str]:
        folders = [self.folder, *([] if self.run_dir.is_relative_to(self.folder) else [self.run_dir])]
        return self.config.slurm.container_mounts or [f"{folder}:{folder}" for folder in folders]

    @property
    def container_flags(self) -> list[str]:
        """Options of srun that run a step in the container (pyxis)."""
        slurm = self.config.slurm
        if not slurm.container_image or slurm.container_runtime != "pyxis":
            return []
        return [
            f"--container-image={slurm.container_image}", f"--container-workdir={self.folder}",
            f"--container-mounts={','.join(self.mounts)}", *slurm.container_arguments,
        ]  # fmt: skip

    @property
    def container_command(self) -> list[str]:
        """The command before each command of a step that runs it in the container (Apptainer, Singularity). It passes
        the environment on, so no key is on a command line."""
        slurm = self.config.slurm
        if not slurm.container_image or slurm.container_runtime == "pyxis":
            return []
        return [
            slurm.container_runtime, "exec", *(["--nv"] if slurm.gpus_per_node else []), "--pwd", str(self.folder),
            "--bind", ",".join(self.mounts), *slurm.container_arguments, slurm.container_image,
        ]  # fmt: skip

    @property
    def overlaps_communication(self) -> bool:
        """Megatron recommends CUDA_DEVICE_MAX_CONNECTIONS=1 for split layers; engines must not inherit it."""
        policy = self.config.policy
        return bool(self.config.slurm.gpus_per_node) and policy.tensor_parallel * policy.context_parallel > 1

    @property
    def leftover_weights(self) -> Path | None:
        """Where in the run directory a killed trainer leaves weight files; None: outside of it, not ours to clean."""
        folder = Path(self.folder, self.config.rollout.weights.directory)
        return folder.relative_to(self.run_dir) if self.starts_servers and self.run_dir in folder.parents else None

    @property
    def name_in_json(self) -> str:
        """The job's name inside a JSON text."""
        return json.dumps(self.config.slurm.job_name or self.run_dir.name)[1:-1]

    def server_command(self) -> list[str]:
        """The fleet's own command for a server; the shell fills in $2, the port, and $3, the first GPU."""
        from megatron_dapo.engines.sglang.server_process import sglang_command

        servers = self.config.rollout.servers
        update = {"host": "0.0.0.0", "api_key_env": self.api_key, "python": servers.python or self.python}
        if servers.admin_key_env:
            update["admin_key_env"] = variable(servers.admin_key_env)
        command, environment = sglang_command(
            self.config.policy.model, servers.model_copy(update=update), 0, 0, has_package=not servers.python
        )
        later = {"--port": '"$2"', "--base-gpu-id": '"$3"'}
        words = [
            Shell(later[before]) if before in later else word
            for before, word in zip(["", *command], self._visible(command), strict=False)
        ]
        settings = [Shell(f"{name}={quote(value)}") for name, value in environment.items()]
        return [*self.container_words, "env", *settings, *words]

    def router_command(self) -> list[str]:
        servers, slurm = self.config.rollout.servers, self.config.slurm
        command = router_command(servers.python or self.python, slurm.router_port, servers, self.api_key)
        return [*self.container_words, *self._visible(command), "--worker-urls", Shell("${URLS//,/ }")]

    def network_command(self) -> list[str]:
        slurm = self.config.slurm
        return [
            *self.container_words, self.python, "-u", "-m", "megatron_dapo.doctor.network", Shell('"$LOGS"'),
            "--slow", str(slurm.network_slow), "--minimum", str(slurm.network_minimum),
        ]  # fmt: skip

    @property
    def container_words(self) -> list[str]:
        return [Shell('"${CONTAINER[@]}"')] if self.container_command else []

    @property
    def key_wrapper(self) -> Path | None:
        """A copy of run_with_keys.py, for a container whose SGLang has its own Python; None where it is not needed."""
        needed = self.config.slurm.container_image and self.config.rollout.servers.python
        return self.run_dir / RUN_WITH_KEYS.name if needed else None

    def _visible(self, command: list[str]) -> list[str]:
        """The command with a path to run_with_keys.py that the nodes' processes can see."""
        return [str(self.key_wrapper) if word == str(RUN_WITH_KEYS) and self.key_wrapper else word for word in command]


def router_command(python: str, port: int, servers: ServerConfig, key: str) -> list[str]:
    """Without the servers. `key`: the environment variable with the API key. The router's timeouts are not shorter than
    ours. Its default policy compares texts and, given tokens only, sends everything to one server; its metrics need
    their own port."""
    return [
        *command_with_keys(python, "sglang_router.launch_router", {"api-key": key}, has_package=not servers.python),
        "--host", "0.0.0.0", "--port", str(port),
        "--prometheus-port", str(port + 1), "--log-level", "warn", "--policy", "power_of_two",
        "--request-timeout-secs", f"{servers.sample_timeout or 86400:.0f}",
        "--worker-startup-timeout-secs", f"{servers.start_timeout:.0f}", "--worker-startup-check-interval", "5",
    ]  # fmt: skip


def render(job: Job) -> str:
    slurm, servers = job.config.slurm, job.config.rollout.servers
    return _environment().get_template("job.sbatch.j2").render(job=job, slurm=slurm, servers=servers, shell=Shell)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {
        "q": quote, "q_words": quote_words, "split_words": shlex.split, "wrap": wrap, "one_line": one_line,
        "variable": variable,
    }  # fmt: skip
    return environment


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
