"""Families beside Qwen3 on a real SGLang: it starts from our files and computes with the weights that it is sent."""

import asyncio
import socket

import pytest
from conftest import wait_ready
from installed_sglang import API_KEY_VARIABLE, SGLANG_VERSIONS, RealServer, sglang_python
from long_lists import some
from subject import PROMPT, Subject, run
from tiny_model import tiny_model, write_model

from megatron_dapo.config.rollout import ServerConfig
from megatron_dapo.engines.protocol import SamplingParams
from megatron_dapo.engines.sglang.server_process import ServerProcess


@pytest.fixture(params=some(["llama", "mistral"], "llama"))
def server(request, tmp_path):
    version = SGLANG_VERSIONS[-1]
    if not sglang_python(version).exists():
        pytest.skip(f"SGLang {version} is not installed: make sglang-cpu")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    config = ServerConfig(
        device="cpu", python=str(sglang_python(version)), dtype="float32", port=port, start_timeout=600,
        api_key_env=API_KEY_VARIABLE,
    )  # fmt: skip
    config.demand(checksums=True)
    directory = write_model(tmp_path / "model", request.param)
    server = RealServer(
        ServerProcess(str(directory), config, 0, tmp_path), config, directory, tiny_model(request.param)
    )
    server.process.spawn()
    try:
        wait_ready(server)
        yield server
    finally:
        asyncio.run(server.process.end())


def test_a_server_follows_weight_updates(server):
    subject, params = Subject(server), SamplingParams(20, temperature=0.8, ignore_eos=True)

    async def main():
        async with subject.open() as engine:
            subject.assert_agrees(PROMPT, await engine.generate("before", PROMPT, params), params.temperature)
            report = await subject.update(engine, seed=1)
            subject.assert_agrees(PROMPT, await engine.generate("after", PROMPT, params), params.temperature)
            return report

    report = run(main())
    assert not report.failed and report.tensors == len(subject.model.state_dict())
