"""External servers, which another Slurm step runs: one that dies and comes back serves only with current weights."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from fake_server import FakeServer
from waiting import free_port

from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.doctor.run_directory import paused_servers
from megatron_dapo.engines import open_engine
from megatron_dapo.engines.protocol import SamplingParams
from megatron_dapo.errors import EngineError
from megatron_dapo.types import as_tokens

FAKE = Path(__file__).resolve().parents[1] / "support" / "fake_server.py"
WEIGHTS = [("a.weight", torch.ones(2, 3))]


def settings(port, tmp_path, **servers):
    urls = [f"http://127.0.0.1:{port}"]
    # The heartbeat is never due: only a failed request makes the fleet check the server.
    chosen = {"urls": urls, "heartbeat": 600, "start_timeout": 60, "attempts": 2, **servers}
    return RolloutConfig(servers=chosen, weights={"directory": str(tmp_path), "timeout": 10})


async def serve(port):
    """Starts a server that the engine does not own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(FAKE), str(port), "0.5", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    return process


async def end(process):
    process.kill()
    await process.wait()


async def test_requests_wait_until_the_only_server_is_back_with_current_weights(tmp_path):
    port = free_port()
    first = await serve(port)
    engine = await open_engine(settings(port, tmp_path), str(tmp_path), tmp_path)
    await engine.update_weights(3, [WEIGHTS])
    running = [asyncio.ensure_future(engine.generate(f"x{i}", as_tokens([i]), SamplingParams(8))) for i in range(8)]
    await asyncio.sleep(0.2)
    os.kill(first.pid, signal.SIGKILL)
    await first.wait()
    await asyncio.sleep(1)
    assert engine.servers[0].state.version is None and not any(task.done() for task in running)
    second = await serve(port)
    completions = await asyncio.gather(*running)
    assert {span.version for completion in completions for span in completion.weight_spans} == {3}
    assert await engine.servers[0].version_label() == "3"
    await engine.close()
    assert second.returncode is None  # the engine does not end it
    await end(second)


async def test_a_server_that_a_killed_trainer_left_paused_is_resumed(tmp_path, monkeypatch):
    """Its /health is 503 until then, and start_timeout would be over. A proxy of the site is not for servers."""
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    server = await FakeServer().start()
    server.paused = True
    config = settings(int(server.url.rpartition(":")[2]), tmp_path, start_timeout=20)
    assert "paused" in (await asyncio.to_thread(paused_servers, config.servers.urls, None)).found
    engine = await open_engine(config, str(tmp_path), tmp_path)
    assert not server.paused
    assert (await asyncio.to_thread(paused_servers, config.servers.urls, None)).status == "ok"
    await engine.close()
    await server.stop()


async def test_a_server_that_never_replies_is_an_error_after_start_timeout(tmp_path):
    with pytest.raises(EngineError, match="was not ready after 1 s") as caught:
        await open_engine(settings(free_port(), tmp_path, start_timeout=1), str(tmp_path), tmp_path)
    assert "Cannot connect" in str(caught.value)


async def test_a_server_that_its_launcher_gave_up_is_an_error_at_once(tmp_path):
    """The batch script leaves a file; the error quotes the server's log."""
    port = free_port()
    (tmp_path / f"engine_127.0.0.1_{port}.log").write_text("one line\nno kernel image for this device\n")
    waiting = asyncio.ensure_future(open_engine(settings(port, tmp_path), str(tmp_path), tmp_path))
    await asyncio.sleep(1)
    assert not waiting.done()
    (tmp_path / f"engine_127.0.0.1_{port}.given_up").touch()
    with pytest.raises(EngineError, match="will not be started again") as caught:
        await asyncio.wait_for(waiting, 20)
    assert "no kernel image for this device" in str(caught.value)


async def test_requests_do_not_wait_for_a_server_that_its_launcher_gave_up(tmp_path):
    port = free_port()
    first = await serve(port)
    engine = await open_engine(settings(port, tmp_path), str(tmp_path), tmp_path)
    (tmp_path / f"engine_127.0.0.1_{port}.given_up").touch()
    await end(first)
    async with asyncio.timeout(20):  # start_timeout is 60
        with pytest.raises(EngineError, match="will not be started again"):
            await engine.generate("x", as_tokens([1]), SamplingParams(8))
    await engine.close()
