"""One SGLang server as a child process: the command, its log, and its end.

Only this process and its own children are ever ended: the child leads a process group of its own. When this process
dies, however it dies, the kernel ends the child.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron_dapo.config.rollout import ServerConfig
from megatron_dapo.engines.protocol import EngineError
from megatron_dapo.engines.sglang.client import SGLangServer

LOG_TAIL = 25  # lines of a server's log that an error quotes
CPU_STUBS = Path(__file__).parent / "cpu_stubs"
PR_SET_PDEATHSIG = 1

# (model, configuration, index of the server, port) -> command and what it adds to the environment
CommandMaker = Callable[[str, ServerConfig, int, int], tuple[list[str], dict[str, str]]]


def sglang_command(model: str, config: ServerConfig, index: int, port: int) -> tuple[list[str], dict[str, str]]:
    command = [
        config.python or sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--host", config.host,
        "--port", str(port), "--tp-size", str(config.tensor_parallel), "--dtype", config.dtype,
    ]  # fmt: skip
    for option, variable in (("--api-key", config.api_key_env), ("--admin-api-key", config.admin_key_env)):
        if variable:
            command += [option, os.environ.get(variable, "")]
    environment = {"HF_HUB_OFFLINE": "1"}
    if config.device == "cpu":
        command += [
            "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
            "--grammar-backend", "none", "--disable-overlap-schedule", "--disable-cuda-graph", "--sleep-on-idle",
            "--max-total-tokens", "20000", "--max-running-requests", "16",
        ]  # fmt: skip
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CPU_STUBS)}
    else:
        command += ["--base-gpu-id", str(index * config.tensor_parallel)]
        command += ["--enable-memory-saver"] if config.share_gpus else []
    return [*command, *config.arguments], environment | config.environment


def end_of(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL:]
    except OSError as error:
        return f"its log cannot be read: {error}"
    return f"the end of {log}:\n  " + "\n  ".join(lines)


class ServerProcess:
    def __init__(
        self, model: str, config: ServerConfig, index: int, log_dir: Path, make_command: CommandMaker = sglang_command
    ) -> None:
        self._model, self._config, self._index, self._make_command = model, config, index, make_command
        self._log_dir = log_dir
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.restarts = 0

    @property
    def url(self) -> str:
        return f"http://{self._config.host}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> Path:
        return self._log_dir / f"server-{self._index}.log"

    def spawn(self, taken: set[int] | None = None) -> None:
        """Starts the child on the first free port at or after the configured one (its old one, the second time)."""
        self.port = self.port or _free_port(self._config.host, self._config.port, taken or set())
        command, extra = self._make_command(self._model, self._config, self._index, self.port)
        self._log_dir.mkdir(parents=True, exist_ok=True)
        try:
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    command, env={**os.environ, **extra}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True, preexec_fn=_end_with_parent,
                )  # fmt: skip
        except OSError as error:
            raise EngineError(f"cannot start a server with {command[0]} (rollout.servers.python): {error}") from error

    async def wait_ready(self, server: SGLangServer) -> None:
        """Until the server has answered a first request; an error that quotes its log if it ends or takes too long."""
        began = time.monotonic()
        asking: asyncio.Task[bytes] | None = None
        while True:
            if not self.alive():
                raise EngineError(f"server {self.url} ended with {self._status()} while starting; {self.log_tail()}")
            # A first generation may take long, and another program's port may accept and never answer.
            asking = asking or asyncio.ensure_future(server.connection.call("GET", "/health", None, timeout=60))
            done, _ = await asyncio.wait([asking], timeout=0.25)
            if done:
                if asking.exception() is None:
                    return
                asking = None
            if time.monotonic() - began > self._config.start_timeout:
                raise EngineError(
                    f"server {self.url} was not ready after {self._config.start_timeout:g} s "
                    f"(rollout.servers.start_timeout); {self.log_tail()}"
                )
            await asyncio.sleep(0.25)

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log_tail(self) -> str:
        return end_of(self.log)

    async def end(self, patience: float = 10.0) -> None:
        """Asks the child to end, then insists; the whole process group, which is the child's own."""
        process = self._process
        if process is None:
            return
        for order, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, patience)):
            # Its workers live in the same group and may outlive it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, order)
            deadline = time.monotonic() + seconds
            while process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
        self._process = None

    def _status(self) -> str:
        code = self._process.poll() if self._process else None
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


def _free_port(host: str, first: int, taken: set[int]) -> int:
    for port in range(first, min(first + 1000, 65536)):
        if port in taken:
            continue
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((host, port))
            except OSError:
                continue
        return port
    raise EngineError(f"no free port on {host} from {first} on (rollout.servers.port)")


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # Slurm sends them to all of a step; they mean the trainer
        signal.signal(number, signal.SIG_IGN)
