"""Servers that fail: the batch completes, no sample lost or doubled, or the error names the server and the cause."""

import asyncio
import os
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from aiohttp import web
from fake_server import FakeServer, changed
from simulation import Prompts

from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.rollout.engine import EngineError, SamplingParams, WeightUpdateError
from megatron_dapo.rollout.fleet import Fleet
from megatron_dapo.rollout.sampler import Sampler
from megatron_dapo.rollout.sglang import SGLangEngine
from megatron_dapo.types import FinishReason, Grade, WeightSpan, as_tokens

PROMPT = as_tokens([3, 1, 4])


def run(coroutine, seconds=40):
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


def settings(**servers):
    return RolloutConfig(
        samples_per_prompt=4, max_response_tokens=8, dynamic_sampling=False,
        servers={"request_timeout": 1.0, "control_timeout": 2.0, "attempts": 5, **servers},
        weights={"timeout": 5.0},
    )  # fmt: skip


async def grade(prompt, sample):
    return Grade(sample.index % 2 == 0, 1.0)


async def fill_batch(engine, config, groups=6):
    sampler = Sampler(engine, grade, Prompts(), config, groups_per_step=groups)
    batch = await sampler.collect(0)
    assert len(batch.groups) == groups
    names = [(sample.prompt_id, sample.index) for sample in batch.samples]
    assert len(set(names)) == len(names) == groups * 4
    assert batch.metrics["rollout/samples_failed"] == 0
    for sample in batch.samples:
        assert sample.finish_reason is FinishReason.STOP and sample.length == 8
    return batch


async def sleep_for_ever(server, body):
    await asyncio.sleep(1000)


def nothing_but(status):
    return lambda server, body: web.Response(status=status, text="out of order")


def nan_logprob(answer):
    answer["meta_info"]["output_token_logprobs"][3][0] = float("nan")
    return str(answer).replace("'", '"').replace("None", "null").replace("nan", "NaN")


def null_logprob(answer):
    answer["meta_info"]["output_token_logprobs"][3][0] = None


def fewer_logprobs(answer):
    answer["meta_info"]["output_token_logprobs"].pop()


def other_tokens(answer):
    answer["output_ids"][-1] += 1


FAULTS = {
    "hangs": (sleep_for_ever, "did not answer within 1 s"),
    "answers 500": (nothing_but(500), "answered 500: out of order"),
    "garbage": (changed(lambda answer: "<html>proxy error</html>"), "not JSON"),
    "empty object": (changed(lambda answer: "{}"), "lacks 'meta_info'"),
    "truncated body": (lambda server, body: "truncate", "/generate failed"),
    "NaN log-prob": (changed(nan_logprob), "not JSON"),
    "null log-prob": (changed(null_logprob), "log-prob 3 of 8"),
    "fewer log-probs than tokens": (changed(fewer_logprobs), "8 tokens but 7 log-probs"),
    "log-probs of other tokens": (changed(other_tokens), "other tokens than output_ids"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_one_bad_server_of_two_costs_no_sample(name):
    async def main():
        bad, good = await FakeServer(fault=FAULTS[name][0]).start(), await FakeServer().start()
        engine = await SGLangEngine.connect([bad.url, good.url], settings())
        batch = await fill_batch(engine, settings())
        assert "/generate" in bad.calls and not bad.served
        await engine.close()
        await bad.stop()
        await good.stop()
        return batch

    run(main())


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_server_alone_is_named_with_its_cause(name):
    async def main():
        bad = await FakeServer(fault=FAULTS[name][0]).start()
        config = settings(attempts=2, request_timeout=1.0)
        engine = await SGLangEngine.connect([bad.url], config)
        began = time.monotonic()
        with pytest.raises(EngineError, match=FAULTS[name][1]) as caught:
            await engine.generate("r1", PROMPT, SamplingParams(8))
        assert bad.url in str(caught.value) and "2 tries failed" in str(caught.value)
        assert time.monotonic() - began < 10
        await engine.close()
        await bad.stop()

    run(main())


def test_a_refusal_is_final_and_not_repeated():
    async def main():
        server = await FakeServer(fault=nothing_but(400)).start()
        engine = await SGLangEngine.connect([server.url], settings())
        with pytest.raises(EngineError, match="answered 400"):
            await engine.generate("r1", PROMPT, SamplingParams(8))
        assert server.calls.count("/generate") == 1
        await engine.close()
        await server.stop()

    run(main())


def test_a_server_that_fails_now_and_then_costs_no_sample():
    failures = iter([True, False, True, True, False] * 100)

    def sometimes(server, body):
        return web.Response(status=503) if next(failures) else None

    async def main():
        servers = [await FakeServer(fault=sometimes).start() for _ in range(3)]
        config = settings(attempts=10)
        engine = await SGLangEngine.connect([server.url for server in servers], config)
        await fill_batch(engine, config, groups=10)
        served = [name.split("-try")[0] for server in servers for name in server.served]
        assert len(served) == len(set(served)) == 40
        await engine.close()

    run(main())


def test_requests_never_exceed_the_bound_and_prompts_stay_together():
    async def main():
        running = most = 0

        async def count(server, body):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.02)
            running -= 1

        servers = [await FakeServer(fault=count).start() for _ in range(2)]
        engine = await SGLangEngine.connect([server.url for server in servers], settings(max_running=3))
        await asyncio.gather(*(engine.generate(f"r{i}", PROMPT, SamplingParams(8)) for i in range(40)))
        assert most <= 6 and sum(len(server.served) for server in servers) == 40
        await engine.close()

    run(main())


def test_abort_reaches_running_and_queued_requests():
    async def main():
        server = await FakeServer(seconds=30).start()
        engine = await SGLangEngine.connect([server.url], settings(max_running=3, request_timeout=60))
        tasks = [asyncio.ensure_future(engine.generate(f"r{i}", PROMPT, SamplingParams(8))) for i in range(10)]
        await asyncio.sleep(0.2)
        await engine.abort("r0")
        first = await asyncio.wait_for(tasks[0], 5)
        assert first.finish_reason is FinishReason.ABORT and len(first.tokens) == 4
        await engine.abort()
        done = await asyncio.wait_for(asyncio.gather(*tasks), 5)
        assert all(c.finish_reason is FinishReason.ABORT for c in done)
        assert sorted(len(c.tokens) for c in done) == [0] * 6 + [4] * 4
        await engine.close()
        await server.stop()

    run(main())


def test_behind_a_router_generation_goes_to_it_and_the_rest_to_the_servers():
    async def main():
        router = await FakeServer(seconds=30).start()
        servers = [await FakeServer().start() for _ in range(2)]
        urls = [server.url for server in servers]
        engine = await SGLangEngine.connect(urls, settings(router_url=router.url, urls=urls, request_timeout=60))
        task = asyncio.ensure_future(engine.generate("r1", PROMPT, SamplingParams(8)))
        await asyncio.sleep(0.1)
        await engine.abort("r1")
        await engine.abort()
        assert router.calls == ["/generate"]
        for server in servers:
            assert "/generate" not in server.calls and server.calls.count("/abort_request") == 2
        task.cancel()
        await engine.close()

    run(main())


def test_a_cancelled_request_is_aborted_on_the_server():
    async def main():
        server = await FakeServer(seconds=30).start()
        engine = await SGLangEngine.connect([server.url], settings(request_timeout=60))
        task = asyncio.ensure_future(engine.generate("r1", PROMPT, SamplingParams(8)))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.sleep(0.1)
        assert "/abort_request" in server.calls and engine.servers[0].in_flight == 0
        await engine.close()
        await server.stop()

    run(main())


# ---- weight updates over a fleet ----

WEIGHTS = [("a.weight", torch.ones(2, 3)), ("b.weight", torch.zeros(4))]


async def fake_fleet(tmp_path, count=3, **weights):
    servers = [await FakeServer().start() for _ in range(count)]
    base = settings()
    config = base.model_copy(
        update={"weights": base.weights.model_copy(update={"directory": str(tmp_path), **weights})}
    )
    return servers, await SGLangEngine.connect([server.url for server in servers], config, model=str(tmp_path))


def test_an_update_that_fails_on_one_of_three_servers(tmp_path):
    """The failed one serves nothing; the others serve the new version; the next update brings it back."""

    async def main():
        servers, engine = await fake_fleet(tmp_path)
        await engine.update_weights(1, [WEIGHTS])
        servers[1].broken_calls["/update_weights_from_disk"] = (400, {"success": False, "message": "out of memory"})
        report = await engine.update_weights(2, [WEIGHTS])
        assert set(report.failed) == {servers[1].url} and "out of memory" in report.failed[servers[1].url]
        assert set(report.served_by) == {servers[0].url, servers[2].url} and report.tensors == 2
        before = len(servers[1].served)
        await fill_batch(engine, engine.config)
        assert len(servers[1].served) == before and not servers[1].label.isdigit()
        servers[1].broken_calls.clear()
        assert not (await engine.update_weights(3, [WEIGHTS])).failed
        await asyncio.gather(*(engine.generate(f"x{i}", as_tokens([i]), SamplingParams(8)) for i in range(30)))
        assert servers[1].served
        assert [server.label for server in servers] == ["3", "3", "3"]
        await engine.close()

    run(main())


def test_an_update_that_no_server_takes_is_an_error_with_every_cause(tmp_path):
    async def main():
        servers, engine = await fake_fleet(tmp_path, count=2)
        for server in servers:
            server.broken_calls["/update_weights_from_disk"] = (500, {"message": f"{server.url} is full"})
        made = []

        def buckets():
            for pair in WEIGHTS:
                made.append(pair[0])
                yield [pair]

        with pytest.raises(WeightUpdateError, match="no server took weight version 1") as caught:
            await engine.update_weights(1, buckets())
        assert all(f"{server.url} is full" in str(caught.value) for server in servers) and len(made) == 2
        engine.patience = 0.5
        with pytest.raises(EngineError, match="no server serves weight version 1"):
            await engine.generate("r", PROMPT, SamplingParams(8))
        await engine.close()

    run(main())


def test_memory_is_released_when_idle_and_comes_back_around_the_weights(tmp_path):
    """Running requests are cut; weights have room before they come, the KV cache only afterwards."""

    async def main():
        servers, engine = await fake_fleet(tmp_path, count=2)
        for server in servers:
            server.seconds, server.busy = 30, 3
        running = asyncio.ensure_future(engine.generate("r", PROMPT, SamplingParams(8)))
        await asyncio.sleep(0.1)
        await engine.release_memory()
        assert (await running).finish_reason == FinishReason.ABORT
        assert [server.memory for server in servers] == [set(), set()] and engine.resting
        engine.patience = 0.3
        with pytest.raises(EngineError, match="the trainer has its GPUs"):
            await engine.generate("s", PROMPT, SamplingParams(8))
        for server in servers:
            server.seconds = 0
            server.calls.clear()
        report = await engine.update_weights(1, [WEIGHTS])
        assert not report.failed and not engine.resting
        for server in servers:
            order = [
                server.calls.index(path)
                for path in (
                    "/resume_memory_occupation weights", "/update_weights_from_disk",
                    "/resume_memory_occupation kv_cache", "/flush_cache", "/continue_generation",
                )
            ]  # fmt: skip
            assert order == sorted(order)
        await engine.update_weights(2, [WEIGHTS])  # nothing to take back this time
        assert (await engine.generate("t", PROMPT, SamplingParams(8))).finish_reason == FinishReason.STOP
        await engine.close()

    run(main())


def test_a_server_that_cannot_release_memory_is_named_with_the_remedy(tmp_path):
    async def main():
        servers, engine = await fake_fleet(tmp_path, count=2)
        servers[1].memory_saver = False
        servers[1].label = "0"
        engine.servers[1]._capabilities = None
        with pytest.raises(EngineError, match="start it with --enable-memory-saver") as caught:
            await engine.release_memory()
        assert servers[1].url in str(caught.value)
        await engine.close()

    run(main())


def test_a_producer_that_breaks_off_leaves_no_server_serving(tmp_path):
    async def main():
        servers, engine = await fake_fleet(tmp_path, count=2)
        await engine.update_weights(1, [WEIGHTS])

        def buckets():
            yield [WEIGHTS[0]]
            raise ValueError("rank 3 died")

        with pytest.raises(WeightUpdateError, match="rank 3 died"):
            await engine.update_weights(2, buckets())
        assert all(server.serves is None for server in engine.servers)
        assert not any(server.label.isdigit() for server in servers)
        await engine.close()

    run(main())


def test_the_buckets_are_read_to_their_end_when_the_disk_is_full(tmp_path):
    """Making a bucket is a collective: the other ranks would wait for ever for a rank that stops."""

    async def main():
        _, engine = await fake_fleet(tmp_path, count=1)
        made = []

        def buckets():
            for number in range(5):
                made.append(number)
                yield [WEIGHTS[0]]

        def full(bucket):
            raise OSError("no space left on device")

        engine.snapshot.add = full
        with pytest.raises(WeightUpdateError, match="no space left on device"):
            await engine.update_weights(1, buckets())
        assert made == [0, 1, 2, 3, 4]
        await engine.close()

    run(main())


def test_a_server_with_other_weights_fails_the_probe(tmp_path):
    async def main():
        servers, engine = await fake_fleet(tmp_path)
        servers[2].bias = 3.0
        report = await engine.update_weights(1, [WEIGHTS])
        assert set(report.failed) == {servers[2].url} and "differ" in report.failed[servers[2].url]
        await engine.close()

    run(main())


def test_a_server_with_other_weights_fails_the_checksum(tmp_path):
    async def main():
        servers, engine = await fake_fleet(tmp_path, proof="checksum")
        for server, value in zip(servers, ("aa", "aa", "bb"), strict=True):
            server.checksum = value
        report = await engine.update_weights(1, [WEIGHTS])
        assert set(report.failed) == {servers[2].url} and "1 tensors differ" in report.failed[servers[2].url]
        assert "same checksums" in report.proof
        await engine.close()

    run(main())


def test_a_server_that_lost_its_weights_is_given_them_again(tmp_path):
    """It restarted behind our back: its answers carry another version, are not used, and it gets the snapshot."""

    async def main():
        servers, engine = await fake_fleet(tmp_path, count=2)
        await engine.update_weights(5, [WEIGHTS])
        servers[0].label = "default"
        batch = await fill_batch(engine, engine.config, groups=12)
        assert {span for sample in batch.samples for span in sample.weight_spans} == {WeightSpan(5, 0, 8)}
        for _ in range(100):
            await asyncio.sleep(0.05)
            if engine.servers[0].serves == 5:
                break
        assert servers[0].label == "5" and servers[0].calls.count("/update_weights_from_disk") == 2
        await engine.close()

    run(main())


def test_a_server_is_never_updated_twice_at_the_same_time(tmp_path):
    """SGLang 0.5.23 ends when that happens."""

    async def main():
        servers, engine = await fake_fleet(tmp_path, count=2)
        await engine.update_weights(1, [WEIGHTS])
        for server, client in zip(servers, engine.servers, strict=True):
            server.label, client.serves = "default", None
        again = [engine.admit(client) for client in engine.servers for _ in range(3)]
        await asyncio.gather(*again, engine.update_weights(2, [WEIGHTS]), *(engine.admit(c) for c in engine.servers))
        assert [server.most_updates for server in servers] == [1, 1]
        assert [server.label for server in servers] == ["2", "2"]
        await engine.close()

    run(main())


def test_running_requests_return_before_the_weights_change(tmp_path):
    async def main():
        servers, engine = await fake_fleet(tmp_path, count=1)
        servers[0].seconds = 30
        task = asyncio.ensure_future(engine.generate("r", PROMPT, SamplingParams(8)))
        await asyncio.sleep(0.1)
        await engine.update_weights(1, [WEIGHTS])
        completion = await asyncio.wait_for(task, 5)
        assert completion.finish_reason is FinishReason.ABORT and completion.weight_spans[0].version == 0
        await engine.close()

    run(main())


# ---- the fleet: processes ----

FAKE = Path(__file__).parent / "fake_server.py"


def fake_command(seconds):
    def make(model, config, index, port):
        return [sys.executable, str(FAKE), str(port), str(seconds)], {}

    return make


def fleet_settings(**servers):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    chosen = {"port": port, "heartbeat": 0.2, "start_timeout": 30, "request_timeout": 10, "attempts": 8, **servers}
    return settings(**chosen)


def test_killed_in_mid_batch_the_server_comes_back_with_the_weights(tmp_path):
    """kill -9 on one of two servers while all requests run: every sample arrives once, at the current version."""

    async def main():
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
        while engine.servers[0].serves != 3:
            assert time.monotonic() < deadline, engine.servers[0].trouble
            await asyncio.sleep(0.1)
        assert await engine.servers[0].version_label() == "3", "it serves before it has the weights"
        assert fleet.processes[0].pid != victim and fleet.processes[0].restarts == 1
        pids = [process.pid for process in fleet.processes]
        await engine.close()
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    run(main(), 60)


def test_killed_while_the_trainer_has_its_gpu_the_server_waits_for_its_turn(tmp_path):
    """It is not started into memory that is in use, and the next update waits for it: it is the only one there is."""

    async def main():
        config = fleet_settings(count=1)
        weights = {"directory": str(tmp_path), "keep_snapshot": False}
        config = config.model_copy(update={"weights": config.weights.model_copy(update=weights)})
        fleet = Fleet(config, str(tmp_path), tmp_path, make_command=fake_command(0))
        engine = await fleet.start()
        await engine.update_weights(1, [WEIGHTS])
        await engine.release_memory()
        process, victim = fleet.processes[0], fleet.processes[0].pid
        os.kill(victim, signal.SIGKILL)
        await asyncio.sleep(1.5)
        assert not process.alive(), "it was started while the trainer had the GPU"
        report = await engine.update_weights(2, [WEIGHTS])
        assert not report.failed and process.alive() and process.pid != victim and process.restarts == 1
        assert (await engine.generate("r", PROMPT, SamplingParams(8))).finish_reason == FinishReason.STOP
        await engine.close()

    run(main(), 60)


def test_a_server_that_stops_answering_is_replaced(tmp_path):
    async def main():
        config = fleet_settings(count=1, control_timeout=0.5, request_timeout=3)
        fleet = Fleet(config, str(tmp_path), tmp_path, make_command=fake_command(0.0))
        engine = await fleet.start()
        first = fleet.processes[0].pid
        os.kill(first, signal.SIGSTOP)
        await fill_batch(engine, config)
        assert fleet.processes[0].pid != first
        await engine.close()

    run(main(), 60)


def test_a_server_that_cannot_come_back_is_given_up_and_named(tmp_path):
    async def main():
        config = fleet_settings(count=1, restarts=1)
        fleet = Fleet(config, str(tmp_path), tmp_path, make_command=fake_command(0.0))
        engine = await fleet.start()
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
        await engine.close()

    run(main(), 60)


def test_a_taken_port_is_skipped(tmp_path):
    async def main():
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            holder.listen()
            port = holder.getsockname()[1]
            config = fleet_settings(count=1, port=port)
            fleet = Fleet(config, str(tmp_path), tmp_path, make_command=fake_command(0.0))
            engine = await fleet.start()
            assert fleet.processes[0].port > port
            await engine.health()
            await engine.close()

    run(main())


def test_a_port_taken_while_starting_is_an_error_with_the_log(tmp_path):
    async def main():
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            holder.listen()
            config = fleet_settings(count=1)
            fleet = Fleet(config, str(tmp_path), tmp_path, make_command=fake_command(0.0))
            fleet.processes[0].port = holder.getsockname()[1]
            with pytest.raises(EngineError, match=r"(?s)ended with exit code 1 while starting.*address already in use"):
                await fleet.start()

    run(main())


def test_a_missing_model_or_python_is_an_error_at_once(tmp_path):
    async def main():
        with pytest.raises(EngineError, match="the model directory /no/such/model does not exist"):
            await Fleet(settings(), "/no/such/model", tmp_path).start()
        with pytest.raises(EngineError, match=r"cannot start a server with /no/python \(rollout.servers.python\)"):
            await Fleet(fleet_settings(python="/no/python"), str(tmp_path), tmp_path).start()

    run(main())


def test_a_server_that_never_gets_ready_is_ended_and_its_log_quoted(tmp_path):
    async def main():
        command = [sys.executable, "-c", "import time; print('still loading', flush=True); time.sleep(60)"]
        config = fleet_settings(count=1, start_timeout=1.5)
        fleet = Fleet(config, str(tmp_path), tmp_path, make_command=lambda *_: (command, {}))
        with pytest.raises(EngineError, match=r"(?s)not ready after 1.5 s.*still loading"):
            await fleet.start()
        assert not fleet.processes[0].alive()

    run(main())


def test_the_world_may_not_reach_a_server_without_a_key():
    with pytest.raises(ValueError, match="needs a key"):
        settings(host="0.0.0.0")
    assert settings(host="0.0.0.0", api_key_env="KEY").servers.host == "0.0.0.0"


def test_keys_are_sent_and_a_missing_one_is_an_error(monkeypatch):
    seen = {}

    async def main():
        server = await FakeServer().start()

        async def look(request):
            seen[request.path] = request.headers.get("Authorization")
            return await original(request)

        original = server._handle
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", look)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        config = settings(api_key_env="TEST_API_KEY", admin_key_env="TEST_ADMIN_KEY")
        with pytest.raises(EngineError, match="TEST_API_KEY, which is not set"):
            await SGLangEngine.connect([url], config)
        monkeypatch.setenv("TEST_API_KEY", "one")
        monkeypatch.setenv("TEST_ADMIN_KEY", "two")
        engine = await SGLangEngine.connect([url], config)
        await engine.generate("r", PROMPT, SamplingParams(8))
        await engine.pause()
        await engine.close()
        await runner.cleanup()

    run(main())
    assert seen["/generate"] == "Bearer one" and seen["/pause_generation"] == "Bearer two"


def test_big_prompts_travel_as_numbers():
    bodies = []

    async def main():
        server = await FakeServer(fault=lambda server, body: bodies.append(body)).start()
        engine = await SGLangEngine.connect([server.url], settings())
        prompt = as_tokens(np.arange(2000) % 250)
        params = SamplingParams(
            8, temperature=0.5, top_p=0.9, top_k=7, stop=("a", "b"), stop_token_ids=(5,), seed=2**62
        )
        await engine.generate("r", prompt, params)
        await engine.close()

    run(main())
    sent = bodies[0]
    assert sent["input_ids"] == (np.arange(2000) % 250).tolist() and sent["return_logprob"] is True
    assert sent["sampling_params"] == {
        "max_new_tokens": 8, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.0, "ignore_eos": False,
        "stop": ["a", "b"], "stop_token_ids": [5], "sampling_seed": 2**62,
    }  # fmt: skip
