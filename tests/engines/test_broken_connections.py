"""Real SGLang servers behind a proxy that loses replies, after idle times, and without the key.

This file's name puts it before the tests that kill the servers.
"""

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from fake_server import Proxy
from installed_sglang import SGLANG_VERSIONS
from subject import PROMPT, Subject, settings

from megatron_dapo.engines.protocol import SamplingParams
from megatron_dapo.engines.sglang import http
from megatron_dapo.processes.supervised import members

CALLS = {
    "disk": (
        "/pause_generation", "/release_memory_occupation", "/resume_memory_occupation", "/update_weight_version",
        "/update_weights_from_disk", "/flush_cache", "/model_info", "/continue_generation",
    ),
    "tensor": ("/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"),
    "distributed": ("/init_weights_update_group", "/update_weights_from_distributed"),
}  # fmt: skip


@pytest.mark.parametrize("transport", CALLS)
async def test_a_lost_reply_to_any_call_costs_neither_the_update_nor_the_server(sglang_server, transport, monkeypatch):
    """Each call has run when its reply is lost. What may run twice does; the others are settled without that."""
    monkeypatch.setattr(http, "PAUSES", (0.01, 0.02, 0.04))
    subject = Subject(sglang_server)
    proxy = await Proxy(sglang_server.process.url).start()
    async with subject.open(transport, url=proxy.url) as engine:
        brackets = (await engine.servers[0].capabilities()).bracketed_updates
        for seed, path in enumerate(CALLS[transport]):
            if "weight_update" in path and not brackets:
                continue  # this version has no such call
            proxy.drop[path] = ["after"]
            if transport == "disk":
                await engine.release_memory()
            assert not (await subject.update(engine, seed=seed)).failed, path
            assert engine._update._last.failed == {}, "it needed the snapshot"
            found = await engine.generate(f"{transport}{seed}", PROMPT, SamplingParams(8, ignore_eos=True))
            subject.assert_agrees(PROMPT, found)
            assert not proxy.drop[path], f"{path} was not called"
    await proxy.stop()
    assert sglang_server.process.alive()


@pytest.mark.parametrize("sglang_server", SGLANG_VERSIONS[-1:], indirect=True)
async def test_calls_after_idle_times_around_the_servers_keep_alive(sglang_server):
    """SGLang closes a connection that was idle for 5 s: no call may be sent on one, just before or after."""
    subject = Subject(sglang_server)
    config = settings()
    once = config.servers.model_copy(update={"attempts": 1})
    async with subject.open(config=config.model_copy(update={"servers": once})) as engine:
        for idle in (4.99, 5.01):
            many = (engine.generate(f"{idle}-{i}", PROMPT, SamplingParams(4)) for i in range(8))
            await asyncio.gather(*many)
            await asyncio.sleep(idle)
            await asyncio.gather(*(engine.generate(f"{idle}+{i}", PROMPT, SamplingParams(4)) for i in range(8)))
            await engine.servers[0].pause()
            await engine.servers[0].resume()


def test_nobody_without_the_key_can_change_a_started_server(sglang_server):
    """The door that a keyless local server leaves open: new weights from somebody else's directory."""
    process, key = sglang_server.process, sglang_server.process.keys.api

    def post(path, authorization):
        body = json.dumps({"model_path": str(sglang_server.directory), "weight_version": "666"}).encode()
        request = urllib.request.Request(
            process.url + path, body, {"Content-Type": "application/json", **authorization}
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        return refused.value.code

    for path in ("/update_weights_from_disk", "/generate", "/release_memory_occupation", "/update_weight_version"):
        assert post(path, {}) == 401
        assert post(path, {"Authorization": "Bearer guessed"}) == 401
    for pid in members(process.pid):
        assert key not in Path(f"/proc/{pid}/cmdline").read_text()
    assert key not in process.log.read_text() and process.log.stat().st_mode & 0o77 == 0
