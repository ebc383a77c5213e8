"""Fixtures of several folders: real SGLang servers, one per installed version, started together and shared by the whole
session; and the directory in which the commands of the documentation are given."""

import asyncio
import os
import signal
import socket

import pytest
import torch
from installed_sglang import API_KEY_VARIABLE, SGLANG_VERSIONS, RealServer, sglang_python
from workplace import sparse_models, workplace  # noqa: F401  (fixtures)


def pytest_configure() -> None:
    torch.set_num_threads(1)
    # A shell ignores SIGINT in the processes that it starts in the background, as `make test` does. Tests send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault(API_KEY_VARIABLE, "key-of-the-test-servers")


@pytest.fixture(scope="session")
def sglang_servers(tmp_path_factory):
    from tiny_model import tiny_model, write_model

    from megatron_dapo.config.rollout import ServerConfig
    from megatron_dapo.engines.sglang.server_process import ServerProcess

    directory = write_model(tmp_path_factory.mktemp("tiny-qwen3"))
    servers: dict[str, RealServer] = {}
    for index, version in enumerate(v for v in SGLANG_VERSIONS if sglang_python(v).exists()):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        # SGLang's own keep-alive, so that tests meet what an external server does.
        config = ServerConfig(
            device="cpu", python=str(sglang_python(version)), dtype="float32", port=port, start_timeout=600,
            api_key_env=API_KEY_VARIABLE, environment={"SGLANG_TIMEOUT_KEEP_ALIVE": "5"},
        )  # fmt: skip
        process = ServerProcess(str(directory), config, index, tmp_path_factory.mktemp(f"sglang-{version}"))
        process.spawn()
        servers[version] = RealServer(process, config, directory, tiny_model())

    async def ready() -> None:
        for server in servers.values():
            client = server.process.client()
            await server.process.wait_ready(client)
            await client.close()

    async def end() -> None:
        await asyncio.gather(*(server.process.end() for server in servers.values()))

    try:
        asyncio.run(ready())
        yield servers
    finally:
        asyncio.run(end())


@pytest.fixture(params=SGLANG_VERSIONS)
def sglang_server(request) -> RealServer:
    if not sglang_python(request.param).exists():
        pytest.skip(f"SGLang {request.param} is not installed: make sglang-cpu")
    return request.getfixturevalue("sglang_servers")[request.param]
