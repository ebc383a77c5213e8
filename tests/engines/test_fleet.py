"""The fleet's processes: started, supervised, restarted and ended, with the cause when that fails."""

import asyncio
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from event_loop import close_at_the_end
from faults import PROMPT, WEIGHTS, fill_batch, settings
from waiting import free_port

from megatron_dapo.engines.protocol import SamplingParams
from megatron_dapo.engines.sglang.fleet import Fleet
from megatron_dapo.errors import EngineError
from megatron_dapo.processes.supervised import members
from megatron_dapo.types import FinishReason

FAKE = Path(__file__).resolve().parents[1] / "support" / "fake_server.py"


def fake_command(seconds):
    def make(model, config, index, port):
        return [sys.executable, str(FAKE), str(port), str(seconds)], {}

    return make


def fleet_settings(**servers):
    chosen = {
        "port": free_port(),
        "heartbeat": 0.2,
        "start_timeout": 30,
        "sample_timeout": 10,
        "attempts": 8,
        **servers,
    }
    return settings(**chosen)


async def test_a_server_killed_during_a_batch_is_restarted_with_the_current_weights(tmp_path):
    """kill -9 on one of two servers while all requests run: every sample completes once, with the current version."""
    config = fleet_settings(count=2)
    config = config.model_copy(update={"weights": config.weights.model_copy(update={"directory": str(tmp_path)})})
    fleet = Fleet(config, str(tmp_path), tmp_path, make_command=fake_command(0.5))
    engine = await fleet.start()
    await engine.update_weights(3, [WEIGHTS])
    collecting = asyncio.ensure_future(fill_batch(engine, config, groups=8))
    await asyncio.sleep(0.25)
    victim = fleet.processes[0].pid
    os.kill(victim, signal.SIGKILL)
    batch = await collecting
    assert {span.version for sample in batch.samples for span in sample.weight_spans} == {3}
    deadline = time.monotonic() + 20
    while not engine.servers[0].state.serves(3):
        assert time.monotonic() < deadline, engine.servers[0].state.why
        await asyncio.sleep(0.1)
    assert await engine.servers[0].version_label() == "3", "it serves before it has the weights"
    assert fleet.processes[0].pid != victim and fleet.supervisors[engine.servers[0].name].restarts == 1
    pids = [process.pid for process in fleet.processes]
    await engine.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_server_killed_while_the_trainer_has_its_gpu_is_restarted_at_the_next_update(tmp_path):
    """It is not started while the memory is in use, and the next update waits for it: it is the only server."""
    config = fleet_settings(count=1)
    weights = {"directory": str(tmp_path), "keep_snapshot": False}
    config = config.model_copy(update={"weights": config.weights.model_copy(update=weights)})
    fleet = Fleet(config, str(tmp_path), tmp_path, make_command=fake_command(0))
    engine = close_at_the_end(await fleet.start())
    await engine.update_weights(1, [WEIGHTS])
    await engine.release_memory()
    process, victim = fleet.processes[0], fleet.processes[0].pid
    os.kill(victim, signal.SIGKILL)
    await asyncio.sleep(1.5)
    assert not process.alive(), "it was started while the trainer had the GPU"
    report = await engine.update_weights(2, [WEIGHTS])
    assert not report.failed and process.alive() and process.pid != victim
    assert fleet.supervisors[engine.servers[0].name].restarts == 1
    assert (await engine.generate("r", PROMPT, SamplingParams(8))).finish_reason == FinishReason.STOP


async def test_a_server_that_stops_replying_is_restarted(tmp_path):
    config = fleet_settings(count=1, control_timeout=0.5, sample_timeout=3)
    fleet = Fleet(config, str(tmp_path), tmp_path, make_command=fake_command(0.0))
    engine = close_at_the_end(await fleet.start())
    first = fleet.processes[0].pid
    for pid in members(first):
        os.kill(pid, signal.SIGSTOP)
    await fill_batch(engine, config)
    assert fleet.processes[0].pid != first


async def test_a_server_that_fails_at_every_start_is_given_up_with_the_reason(tmp_path):
    config = fleet_settings(count=1, restarts=1)
    fleet = Fleet(config, str(tmp_path), tmp_path, make_command=fake_command(0.0))
    engine = close_at_the_end(await fleet.start())
    for process in fleet.processes:
        process._make_command = lambda *_: (
            [sys.executable, "-c", "print('no memory left'); raise SystemExit(3)"],
            {},
        )
    os.kill(fleet.processes[0].pid, signal.SIGKILL)
    await asyncio.sleep(1.5)
    engine.patience = 0.5
    with pytest.raises(EngineError, match=r"(?s)ended with exit code 3.*no memory left.*given up after 1 restarts"):
        await engine.generate("r", PROMPT, SamplingParams(8))


async def test_a_start_fails_with_its_first_server(tmp_path):
    """The others may need minutes until they are ready, and the run cannot start without this one."""
    commands = ["print('no memory left'); raise SystemExit(3)", "import time; time.sleep(600)"]
    fleet = Fleet(
        fleet_settings(count=2), str(tmp_path), tmp_path,
        make_command=lambda model, config, index, port: ([sys.executable, "-c", commands[index]], {}),
    )  # fmt: skip
    async with asyncio.timeout(20):  # start_timeout is 30
        with pytest.raises(EngineError, match=r"(?s)ended with exit code 3.*no memory left"):
            await fleet.start()
    assert not any(process.alive() for process in fleet.processes)


async def test_a_port_in_use_is_skipped(tmp_path):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        config = fleet_settings(count=1, port=port)
        fleet = Fleet(config, str(tmp_path), tmp_path, make_command=fake_command(0.0))
        engine = close_at_the_end(await fleet.start())
        assert fleet.processes[0].port > port
        assert (await engine.generate("r", PROMPT, SamplingParams(8))).finish_reason is FinishReason.STOP


async def test_a_port_that_is_taken_during_the_start_is_an_error_with_the_log(tmp_path):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        config = fleet_settings(count=1)
        fleet = Fleet(config, str(tmp_path), tmp_path, make_command=fake_command(0.0))
        fleet.processes[0].port = holder.getsockname()[1]
        with pytest.raises(EngineError, match=r"(?s)ended with exit code 1 while starting.*Address already in use"):
            await fleet.start()


async def test_a_missing_model_or_python_is_an_error_at_once(tmp_path):
    with pytest.raises(EngineError, match="the model directory /no/such/model does not exist"):
        await Fleet(settings(), "/no/such/model", tmp_path).start()
    with pytest.raises(EngineError, match=r"cannot start a server with /no/python \(rollout.servers.python\)"):
        await Fleet(fleet_settings(python="/no/python"), str(tmp_path), tmp_path).start()


async def test_a_server_that_never_becomes_ready_is_ended_and_its_log_quoted(tmp_path):
    command = [sys.executable, "-c", "import time; print('still loading', flush=True); time.sleep(60)"]
    config = fleet_settings(count=1, start_timeout=1.5)
    fleet = Fleet(config, str(tmp_path), tmp_path, make_command=lambda *_: (command, {}))
    with pytest.raises(EngineError, match=r"(?s)not ready after 1.5 s.*still loading"):
        await fleet.start()
    assert not fleet.processes[0].alive()
