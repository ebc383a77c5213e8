"""A real sglang-router between the engine and two servers: requests and replies pass through it unchanged."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fake_server import FakeServer

from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines import open_engine
from megatron_dapo.engines.protocol import SamplingParams
from megatron_dapo.errors import EngineError
from megatron_dapo.launch.slurm_script import router_command
from megatron_dapo.types import as_tokens

KEY = "of-the-router"
HAS_ROUTER = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang_router') is None)"


def router_python():
    """A Python with sglang-router: ours, or that of an SGLang environment."""
    candidates = [sys.executable, *map(str, sorted(Path(__file__).parents[2].glob(".venv-sglang-*/bin/python")))]
    for python in candidates:
        if subprocess.run([python, "-c", HAS_ROUTER], capture_output=True).returncode == 0:
            return python
    pytest.skip("sglang-router is not installed: pip install sglang-router")


class Locked(FakeServer):
    """Refuses requests without the key."""

    async def _handle(self, request):
        if request.path != "/health" and request.headers.get("Authorization") != f"Bearer {KEY}":
            self.calls.append("refused")
            from aiohttp import web

            return web.json_response({}, status=401)
        return await super()._handle(request)


def free_ports():
    """Two consecutive ports: for requests and for metrics."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            try:
                second.bind(("127.0.0.1", first.getsockname()[1] + 1))
            except OSError:
                continue
            return first.getsockname()[1]


def settings(urls, port, **more):
    servers = {"urls": urls, "router_url": f"http://127.0.0.1:{port}", "api_key_env": "ROUTER_TEST_KEY", **more}
    return RolloutConfig(servers=servers, weights={"proof": "version"})


async def test_completions_through_the_router_are_those_of_the_servers(tmp_path, monkeypatch):
    python, port = router_python(), free_ports()
    monkeypatch.setenv("ROUTER_TEST_KEY", KEY)
    servers = [await Locked().start() for _ in range(2)]
    for server in servers:
        server.label = "0"
    config = settings([server.url for server in servers], port, start_timeout=60)
    command = router_command(python, port, config.servers.model_copy(update={"python": python}), "ROUTER_TEST_KEY")
    with (tmp_path / "router.log").open("w") as log:
        router = subprocess.Popen([*command, "--worker-urls", *config.servers.urls], stdout=log, stderr=log)
    assert KEY not in Path(f"/proc/{router.pid}/cmdline").read_text()
    try:
        engine = await open_engine(config, str(tmp_path), tmp_path)
        assert not any("/generate" in server.calls for server in servers)  # it waited for the router instead
        prompts = [as_tokens([5, 6, 7, number]) for number in range(40)]
        answers = await asyncio.gather(
            *(engine.generate(f"r{i}", p, SamplingParams(max_new_tokens=4)) for i, p in enumerate(prompts))
        )
        await engine.close()
    finally:
        router.kill()  # how it ends is not ours
        router.wait(10)
        for server in servers:
            await server.stop()
    assert all(answer.weight_spans[0].version == 0 and len(answer.logprobs) == 4 for answer in answers)
    served = [server.calls.count("/generate") for server in servers]
    assert sum(served) == 40 and min(served) > 0, served
    assert not any("refused" in server.calls for server in servers)
    assert KEY not in (tmp_path / "router.log").read_text()


async def test_a_router_that_is_never_ready_is_an_error_with_its_url(tmp_path, monkeypatch):
    monkeypatch.setenv("ROUTER_TEST_KEY", KEY)
    server = await Locked().start()
    server.label = "0"
    port = free_ports()
    try:
        with pytest.raises(EngineError, match=rf"the router http://127.0.0.1:{port} was not ready after 1 s"):
            await open_engine(settings([server.url], port, start_timeout=1), str(tmp_path), tmp_path)
    finally:
        await server.stop()
