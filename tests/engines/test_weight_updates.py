"""Weight updates over several servers: each serves all of a version or nothing, whatever fails."""

import asyncio

import pytest
from fake_server import FakeServer
from faults import PROMPT, WEIGHTS, connect, fill_batch, settings

from megatron_dapo.engines.protocol import SamplingParams, WeightUpdateError
from megatron_dapo.errors import EngineError
from megatron_dapo.types import FinishReason, WeightSpan


async def fake_fleet(tmp_path, count=3, **weights):
    servers = [await FakeServer().start() for _ in range(count)]
    base = settings()
    config = base.model_copy(
        update={"weights": base.weights.model_copy(update={"directory": str(tmp_path), **weights})}
    )
    return servers, await connect(servers, config, model=str(tmp_path))


async def test_an_update_that_fails_on_one_of_three_servers(tmp_path):
    """The failed server serves nothing, the others serve the new version, and the next update includes it again."""
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
    assert engine.servers[1].state.serves(3) and servers[1].label == "3"
    assert [server.label for server in servers] == ["3", "3", "3"]


async def test_an_update_that_fails_everywhere_is_an_error_with_every_cause(tmp_path):
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


async def test_memory_is_released_when_idle_and_resumed_in_the_order_weights_kv_cache(tmp_path):
    """Running requests are aborted. Memory for weights is resumed before they arrive, that of the KV cache after."""
    servers, engine = await fake_fleet(tmp_path, count=2)
    for server in servers:
        server.seconds, server.busy = 30, 3
    running = asyncio.ensure_future(engine.generate("r", PROMPT, SamplingParams(8)))
    await asyncio.sleep(0.1)
    await engine.release_memory()
    assert (await running).finish_reason == FinishReason.ABORT
    assert [server.memory for server in servers] == [set(), set()] and engine.memory_released
    engine.patience = 0.3
    with pytest.raises(EngineError, match="the trainer has its GPUs"):
        await engine.generate("s", PROMPT, SamplingParams(8))
    for server in servers:
        server.seconds = 0
        server.calls.clear()
    report = await engine.update_weights(1, [WEIGHTS])
    assert not report.failed and not engine.memory_released
    for server in servers:
        order = [
            server.calls.index(path)
            for path in (
                "/resume_memory_occupation weights", "/update_weights_from_disk",
                "/resume_memory_occupation kv_cache", "/continue_generation",
            )
        ]  # fmt: skip
        assert order == sorted(order)
        assert "/flush_cache" not in server.calls  # releasing the KV cache has emptied it
        assert "/pause_generation" not in server.calls  # it has been paused since
    await engine.update_weights(2, [WEIGHTS])  # nothing to take back this time
    assert all({"/flush_cache", "/pause_generation"} <= set(server.calls) for server in servers)
    assert (await engine.generate("t", PROMPT, SamplingParams(8))).finish_reason == FinishReason.STOP


async def test_a_server_that_cannot_release_memory_is_an_error_with_the_remedy(tmp_path):
    servers, engine = await fake_fleet(tmp_path, count=2)
    servers[1].memory_saver = False
    servers[1].label = "0"
    engine.servers[1]._capabilities = None
    with pytest.raises(EngineError, match="start it with --enable-memory-saver") as caught:
        await engine.release_memory()
    assert servers[1].url in str(caught.value)


async def test_memory_can_be_released_again_after_an_update_that_failed(tmp_path):
    """Only what the server has taken back: releasing memory twice ends it."""
    servers, engine = await fake_fleet(tmp_path, count=1)
    await engine.release_memory()

    def buckets():
        yield [WEIGHTS[0]]
        raise ValueError("rank 3 died")

    with pytest.raises(WeightUpdateError):
        await engine.update_weights(1, buckets())
    assert servers[0].memory == {"weights"}
    await engine.release_memory()
    await engine.release_memory()
    assert not servers[0].memory and not servers[0].crashes
    assert not (await engine.update_weights(2, [WEIGHTS])).failed


async def test_after_a_failed_producer_no_server_serves(tmp_path):
    servers, engine = await fake_fleet(tmp_path, count=2)
    await engine.update_weights(1, [WEIGHTS])

    def buckets():
        yield [WEIGHTS[0]]
        raise ValueError("rank 3 died")

    with pytest.raises(WeightUpdateError, match="rank 3 died"):
        await engine.update_weights(2, buckets())
    assert all(server.state.version is None for server in engine.servers)
    assert not any(server.label.isdigit() for server in servers)


async def test_buckets_are_read_to_their_end_when_the_disk_is_full(tmp_path):
    """Producing a bucket is a collective: the other ranks would wait for ever for a rank that stops."""
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


async def test_a_server_with_other_weights_fails_the_probe(tmp_path):
    servers, engine = await fake_fleet(tmp_path)
    servers[2].bias = 3.0
    report = await engine.update_weights(1, [WEIGHTS])
    assert set(report.failed) == {servers[2].url} and "differ" in report.failed[servers[2].url]


@pytest.mark.parametrize("proof", ["version", "checksum", "probe"])
async def test_a_server_that_reports_another_version_after_an_update_does_not_serve(tmp_path, proof):
    """It took the call that sets the version, and did not do what it says."""
    servers, engine = await fake_fleet(tmp_path, proof=proof)
    forgetful, label = servers[1], servers[1]._label

    async def ignore_versions(request, body):
        return await label(request, {"new_version": "default"} if body["new_version"].isdigit() else body)

    forgetful._label = ignore_versions
    report = await engine.update_weights(1, [WEIGHTS])
    assert set(report.failed) == {forgetful.url} and len(report.served_by) == 2
    assert "it reports weight version 'default', expected 1" in report.failed[forgetful.url]


async def test_a_server_with_old_weights_gets_the_current_ones(tmp_path):
    """It restarted without our knowledge: its completions have another version and are not used."""
    servers, engine = await fake_fleet(tmp_path, count=2)
    await engine.update_weights(5, [WEIGHTS])
    servers[0].label = "default"
    batch = await fill_batch(engine, engine.config, groups=12)
    assert {span for sample in batch.samples for span in sample.weight_spans} == {WeightSpan(5, 0, 8)}
    for _ in range(100):
        await asyncio.sleep(0.05)
        if engine.servers[0].state.serves(5):
            break
    assert servers[0].label == "5" and servers[0].calls.count("/update_weights_from_disk") == 2


async def test_a_server_never_runs_two_updates_at_once(tmp_path):
    """SGLang 0.5.23 ends when that happens."""
    servers, engine = await fake_fleet(tmp_path, count=2)
    await engine.update_weights(1, [WEIGHTS])
    for server, client in zip(servers, engine.servers, strict=True):
        server.label = "default"
        client.state.withdrawn("restarted")
    again = [engine.admit(client) for client in engine.servers for _ in range(3)]
    await asyncio.gather(*again, engine.update_weights(2, [WEIGHTS]), *(engine.admit(c) for c in engine.servers))
    assert [server.most_updates for server in servers] == [1, 1]
    assert [server.label for server in servers] == ["2", "2"]


async def test_running_requests_return_before_the_weights_change(tmp_path):
    servers, engine = await fake_fleet(tmp_path, count=1)
    servers[0].seconds = 30
    task = asyncio.ensure_future(engine.generate("r", PROMPT, SamplingParams(8)))
    await asyncio.sleep(0.1)
    await engine.update_weights(1, [WEIGHTS])
    completion = await asyncio.wait_for(task, 5)
    assert completion.finish_reason is FinishReason.ABORT and completion.weight_spans[0].version == 0
