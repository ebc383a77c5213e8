"""One SGLang server as a child process: its command, its log, and its end.

The server runs under a supervisor: when this process dies, however it dies, so does everything that the server has
started, and nothing else. The server gets its API keys in its environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from megatron_dapo.config.rollout import ServerConfig
from megatron_dapo.engines.sglang.client import (
    CHECKSUM_LOADERS,
    EXACT_ARGUMENTS,
    EXPERT_LOADER,
    IN_SERVER,
    SGLangClient,
    adapter_arguments,
)
from megatron_dapo.engines.sglang.http import server_url
from megatron_dapo.engines.sglang.keys import Keys, command_with_keys, key_variables
from megatron_dapo.errors import EngineError
from megatron_dapo.files import read_end
from megatron_dapo.processes.supervised import SupervisedProcess

LOG_TAIL, LINE_LENGTH = 25, 300  # lines of a server's log that an error quotes, and the characters of each
TAIL_BYTES = 1 << 18  # that are read for them: a log may have gigabytes
CPU_STUBS = Path(__file__).parent / "cpu_stubs"
CPU_LAUNCHER = "cpu_launch_server"  # a module in that folder
# Seconds that a server keeps an idle connection, instead of SGLang's 5: longer than any client of ours.
SERVER_KEEP_ALIVE = 60

# (model, configuration, index of the server, port) -> command and additions to the environment
CommandMaker = Callable[[str, ServerConfig, int, int], tuple[list[str], dict[str, str]]]


def sglang_command(
    model: str, config: ServerConfig, index: int, port: int, *, has_package: bool | None = None
) -> tuple[list[str], dict[str, str]]:
    """The keys are not part of it: the environment of the process must hold the variables of `key_variables`."""
    python, has_package = config.python or sys.executable, not config.python if has_package is None else has_package
    demands = config.demands
    launcher = CPU_LAUNCHER if config.device == "cpu" else "sglang.launch_server"
    command = [
        *command_with_keys(python, launcher, key_variables(config), has_package=has_package),
        "--model-path", model, "--host", config.host, "--port", str(port), "--tp-size", str(config.tensor_parallel),
        "--dtype", "bfloat16" if demands.exact else config.dtype,
        *(["--enable-return-routed-experts"] if demands.returns_experts else []),
        *(adapter_arguments(config) if demands.lora.rank else []), *(EXACT_ARGUMENTS if demands.exact else []),
    ]  # fmt: skip
    environment = {"HF_HUB_OFFLINE": "1", "SGLANG_TIMEOUT_KEEP_ALIVE": str(SERVER_KEEP_ALIVE)}
    paths = [str(CPU_STUBS)] if config.device == "cpu" else []
    loaders = [*(CHECKSUM_LOADERS if demands.computes_checksums else ())]
    loaders += [EXPERT_LOADER] if demands.loads_packed_experts else []
    command += ["--custom-weight-loader", *loaders] if loaders else []
    if demands.exact:
        paths.append(str(IN_SERVER / "exact_plugin"))
        environment["SGLANG_PLUGINS"] = "megatron_dapo_exact"
    elif demands.lora.rank:
        paths.append(str(IN_SERVER / "adapter_plugin"))
    if loaders or demands.exact or demands.lora.rank:
        paths.append(str(IN_SERVER))
        if config.device != "cpu" and os.environ.get("PYTHONPATH"):
            paths.append(os.environ["PYTHONPATH"])
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    if config.device == "cpu":
        command += [
            "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
            "--grammar-backend", "none", "--disable-overlap-schedule", "--disable-cuda-graph", "--sleep-on-idle",
            "--max-total-tokens", "20000", "--max-running-requests", "16",
            *(["--lora-backend", "torch_native"] if demands.lora.rank else []),
        ]  # fmt: skip
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    else:
        command += ["--base-gpu-id", str(demands.first_gpu + index * config.tensor_parallel)]
        command += ["--enable-memory-saver"] if config.share_gpus else []
        # SGLang would turn it off, and ranks on one host with different settings cannot share a communicator:
        # weights over NCCL end with "Cuda failure 'invalid argument'".
        environment["NCCL_CUMEM_ENABLE"] = os.environ.get("NCCL_CUMEM_ENABLE", "1")
    return [*command, *config.arguments], environment | config.environment


def log_tail(log: Path) -> str:
    try:
        text = read_end(log, TAIL_BYTES).decode(errors="replace")
        lines = [line[:LINE_LENGTH] for line in text.splitlines()[-LOG_TAIL:]]
    except OSError as error:
        return f"its log cannot be read: {error}"
    return f"the end of {log}:\n  " + "\n  ".join(lines)


class ServerProcess:
    ours = True  # this process may end it

    def __init__(
        self,
        model: str,
        config: ServerConfig,
        index: int,
        log_dir: Path,
        make_command: CommandMaker = sglang_command,
        *,
        keys: Keys | None = None,
    ) -> None:
        self._model = model
        self._config = config
        self._index = index
        self._make_command = make_command
        self._log_dir = log_dir
        self.keys = keys or Keys.of_started_servers(config)
        self.port = 0
        self._process: SupervisedProcess | None = None

    @property
    def url(self) -> str:
        return server_url(self._config.host, self.port)

    @property
    def pid(self) -> int:
        """Of the supervisor, which is also the number of the session."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> Path:
        return self._log_dir / f"server-{self._index}.log"

    def client(self, generate_url: str | None = None) -> SGLangClient:
        return SGLangClient(self.url, self._config, keys=self.keys, generate_url=generate_url)

    def spawn(self, taken: set[int] | None = None) -> None:
        """Starts the server on the first free port at or after the configured one; a restart uses the same port."""
        self.port = self.port or _free_port(self._config.host, self._config.port, taken or set())
        command, extra = self._make_command(self._model, self._config, self._index, self.port)
        self._log_dir.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **extra, **self.keys.environment(self._config)}
        try:
            # Only the owner may read a server's log: it may quote requests.
            with open(self.log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
                self._process = SupervisedProcess(command, environment, output=log)
        except OSError as error:
            raise EngineError(f"cannot start a server with {command[0]} (rollout.servers.python): {error}") from error

    async def wait_ready(self, server: SGLangClient) -> None:
        """Until the server has generated a first token; an error that quotes its log if it ends or takes too long."""
        started = time.monotonic()
        asking: asyncio.Task[bytes] | None = None
        try:
            while True:
                if self._process is None or not self._process.alive():
                    status = self._process.status if self._process else "no process"
                    raise EngineError(f"server {self.url} ended with {status} while starting; {self.log_tail()}")
                # The first token may take long, and another program's port may accept and never reply.
                asking = asking or asyncio.ensure_future(
                    server.connection.control("GET", "/health", None, timeout=60, tries=1)
                )
                done, _ = await asyncio.wait([asking], timeout=0.25)
                if done:
                    if asking.exception() is None:
                        return
                    asking = None
                if time.monotonic() - started > self._config.start_timeout:
                    raise EngineError(
                        f"server {self.url} was not ready after {self._config.start_timeout:g} s "
                        f"(rollout.servers.start_timeout); {self.log_tail()}"
                    )
                await asyncio.sleep(0.25)
        finally:
            if asking is not None:
                asking.cancel()

    def alive(self) -> bool:
        """Whether the server's main process runs. When it has ended, so has everything it started."""
        return self._process is not None and self._process.alive()

    @property
    def lost(self) -> bool:
        """It has ended, and the trainer's base with it: nothing can bring it back."""
        return self._config.share_base and not self.alive()

    def log_tail(self) -> str:
        return log_tail(self.log)

    async def end(self, patience: float = 10.0) -> None:
        """SIGTERM to all processes of the server; SIGKILL to those that remain after `patience` seconds."""
        process = self._process  # by the time this one has ended, another may have been started
        if process is not None:
            process.ask_to_end()
            await process.end(patience)
            if self._process is process:
                self._process = None


def _free_port(host: str, first: int, taken: set[int]) -> int:
    for port in range(first, min(first + 1000, 65536)):
        if port not in taken and is_free(host, port):
            return port
    raise EngineError(f"no free port on {host} from {first} on (rollout.servers.port)")


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError:
            return False
    return True


class ExternalServer:
    """A server that this process did not start (another Slurm step, another team): waited for, watched, never ended."""

    ours = False

    def __init__(self, url: str, config: ServerConfig, log_dir: Path) -> None:
        self.url = url
        self._config = config
        self._keys = Keys.of_external_servers(config)
        parts = urlsplit(url)
        self._log = log_dir / f"engine_{parts.hostname}_{parts.port}.log"
        self.port = 0

    def client(self, generate_url: str | None = None) -> SGLangClient:
        return SGLangClient(self.url, self._config, keys=self._keys, generate_url=generate_url)

    def alive(self) -> bool:
        """Unknown here: only its replies tell."""
        return True

    @property
    def lost(self) -> bool:
        """Its launcher has given it up."""
        return self._log.with_suffix(".given_up").exists()

    def spawn(self, taken: set[int] | None = None) -> None:
        """Its launcher restarts it."""

    async def end(self, patience: float = 0.0) -> None:
        """Not ours to end."""

    def log_tail(self) -> str:
        return log_tail(self._log) if self._log.exists() else "its log is where its launcher writes it"

    async def wait_ready(self, server: SGLangClient) -> None:
        deadline = time.monotonic() + self._config.start_timeout
        while True:
            try:
                await server.connection.control("GET", "/health", None, timeout=60, tries=1)
                return
            except EngineError as error:
                await self._resume(server, error)
                if self.lost:
                    raise EngineError(f"server {self.url} will not be started again; {self.log_tail()}") from error
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"server {self.url} was not ready after {self._config.start_timeout:g} s "
                        f"(rollout.servers.start_timeout); the last: {error}; {self.log_tail()}"
                    ) from error
            await asyncio.sleep(0.5)

    async def _resume(self, server: SGLangClient, error: EngineError) -> None:
        """A trainer that was killed during a weight update has left it paused: it replies, and generates nothing."""
        if getattr(error, "status", None) != 503:
            return
        with contextlib.suppress(EngineError):
            await server.answers()
            await server.resume()
