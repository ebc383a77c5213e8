"""The SGLang versions that the tests use, and a running server of one."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from long_lists import some
from waiting import free_port

ROOT = Path(__file__).resolve().parents[2]
SGLANG_VERSIONS = tuple(some(("0.5.18", "0.5.23"), "0.5.23"))  # oldest first
# The first line of a program that imports SGLang: a search for garbage would visit all that is imported so far, and
# SGLang's dumper would import Megatron.
QUICK_IMPORT = "import gc, sys; gc.disable(); sys.modules['megatron'] = None\n"
API_KEY_VARIABLE = "MEGATRON_DAPO_TEST_KEY"  # environment variable with the key of these servers


def sglang_python(version: str) -> Path:
    return ROOT / f".venv-sglang-{version}" / "bin" / "python"


def require_sglang(version: str) -> Path:
    """Its Python; the test is skipped where this version is not installed."""
    if not (python := sglang_python(version)).exists():
        pytest.skip(f"SGLang {version} is not installed: make sglang-cpu")
    return python


@dataclass
class RealServer:
    """A running server, the HF directory it was started with, and the transformers model with its current weights."""

    process: Any
    config: Any
    directory: Path
    model: Any
    version: int = 0


def start_servers(versions, directory, folders, kind="qwen3", **demands):
    """Yields a server of each version, with a `tiny_model` of this kind, and ends them. `demands`: of a run's other
    settings, see ServerDemands."""
    from tiny_model import tiny_model

    from megatron_dapo.config.rollout import ServerConfig
    from megatron_dapo.engines.sglang.server_process import ServerProcess

    servers: dict[str, RealServer] = {}
    for version in versions:
        # SGLang's own keep-alive, so that tests meet what an external server does.
        config = ServerConfig(
            device="cpu", python=str(sglang_python(version)), dtype="float32", port=free_port(), start_timeout=600,
            api_key_env=API_KEY_VARIABLE, environment={"SGLANG_TIMEOUT_KEEP_ALIVE": "5"},
        )  # fmt: skip
        config.demand(**{"computes_checksums": True, **demands})
        process = ServerProcess(str(directory), config, 0, folders.mktemp(f"sglang-{version}"))
        process.spawn()
        servers[version] = RealServer(process, config, directory, tiny_model(kind))

    async def end() -> None:
        await asyncio.gather(*(server.process.end() for server in servers.values()))

    try:
        for server in servers.values():
            wait_ready(server)
        yield servers
    finally:
        asyncio.run(end())


def wait_ready(server: RealServer) -> None:
    async def ready() -> None:
        client = server.process.client()
        await server.process.wait_ready(client)
        await client.close()

    asyncio.run(ready())
