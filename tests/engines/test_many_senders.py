"""Several ranks send weights to a real SGLang server. The engine has bitwise the weights that one process sends, and
after the death of a sender, a connection or the engine in mid-update it has a whole version or serves nothing.

Every wait here is bounded by rollout.weights.timeout, 100 s; a failed sender is noticed within a second.
"""

import asyncio
import json
import os
import shutil
import signal

import pytest
import torch
from connect_engine import connect_engine
from engine_thread import EngineThread
from installed_sglang import API_KEY_VARIABLE, require_sglang, start_servers
from safetensors.torch import save_file
from tiny_model import reference_logprobs, write_model
from transformers import AutoModelForCausalLM

from megatron_dapo.config import ModelShape, parse_config
from megatron_dapo.engines.sglang.client import SGLangClient
from megatron_dapo.engines.sglang.weight_proof import PROBE
from megatron_dapo.errors import RankError
from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.policy import Policy
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.sync.remote_sender import GroupSource
from megatron_dapo.trainer.collectives import Collectives, DriverError
from megatron_dapo.trainer.rollouts import WeightSync, weight_buckets
from megatron_dapo.trainer.signals import StopSignal
from megatron_dapo.weights.mapping import hf_shapes

VERSION = "0.5.23"
BUCKET = 20_000


def settings(senders="stage", layout=None, **weights):
    return parse_config(
        {
            "policy": {"precision": "fp32", "timeout_seconds": 200, **(layout or {})},
            "rollout": {
                "servers": {"device": "cpu", "api_key_env": API_KEY_VARIABLE},
                "weights": {
                    "transport": "distributed", "backend": "gloo", "bucket_bytes": BUCKET, "timeout": 100,
                    "senders": senders, "keep_snapshot": False, **weights,
                },
            },
        }
    )  # fmt: skip


def weights_of(directory, seed):
    torch.manual_seed(seed)
    return {name: torch.randn(shape) * 0.1 for name, shape in hf_shapes(ModelShape.from_dir(str(directory))).items()}


class Ranks:
    """One rank: sends versions, and returns the engine's checksums on rank 0."""

    def __init__(self, rendezvous, url, directory, config, version):
        runtime = initialize(config.policy, rendezvous=rendezvous)
        self.policy = Policy(config, ModelShape.from_dir(str(directory)), runtime)
        self.directory, self.version, self.rank = directory, version, rendezvous.rank
        weights = config.rollout.weights
        buckets = self.policy.weight_buckets(weights.bucket_bytes, senders=weights.senders, keep_memory=True)
        self.senders = buckets.senders
        self.sync = WeightSync(buckets, Collectives(runtime, StopSignal()), weights.timeout)
        self.driver = EngineThread([url], config, directory, version) if self.rank == 0 else None

    def send(self, seed):
        self.policy.load_hf(weights_of(self.directory, seed))
        self.version += 1
        self.sync.send(self.version, self.driver)
        report = self.sync.serve(self.version, self.driver)
        assert report is None or (not report.failed and report.parts["proof"] > 0)
        return self.driver.do(self.driver.server.checksums()) if self.driver else None

    def label(self):
        return self.driver.do(self.driver.server.version_label()) if self.driver else None


def from_one_process(url, directory, version, seed):
    """The engine's log-probs of a text and its checksums, after an update that this process sends alone."""

    async def main():
        config = settings("one")
        engine = await connect_engine([url], config.rollout, model=str(directory), version=version - 1)
        report = await engine.update_weights(version, [list(weights_of(directory, seed).items())])
        assert report.served_by == (url,)
        server = engine.servers[0]
        try:
            return (await server.logprobs_of(PROBE)).tolist(), await server.checksums()
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(main(), 300))


def several_updates(rendezvous, url, directory, config, version):
    """An update, one whose second sender loses its connection, and another one."""
    ranks = Ranks(rendezvous, url, directory, config, version)
    first = ranks.send(seed=1)
    original, calls = GroupSource.send, []

    def broken(group, flat):
        calls.append(1)
        if ranks.rank == ranks.senders[-1] and len(calls) == 2:
            group.leave()
            raise ConnectionResetError("the connection was lost")
        original(group, flat)

    GroupSource.send = broken
    try:
        ranks.send(seed=2)
        raise AssertionError("the update was served")
    except DriverError as error:
        cause = str(error)
    finally:
        GroupSource.send = original
    label = ranks.label()
    ranks.version += 1
    return first, cause, label, ranks.send(seed=0), ranks.senders, ranks.version


def killed_sender(rendezvous, url, directory, config, version):
    ranks = Ranks(rendezvous, url, directory, config, version)
    if ranks.rank == ranks.senders[-1]:
        GroupSource.send = lambda group, flat: os.kill(os.getpid(), signal.SIGKILL)
    ranks.send(seed=3)


def test_two_pipeline_stages_send_the_weights_of_a_single_process(server_of_version):
    """TP2·PP2: two senders. Then one of them is killed, and the next update makes the engine whole again."""
    server = server_of_version(VERSION)
    url, directory = server.process.url, server.directory
    _, expected = from_one_process(url, directory, server.version + 1, seed=0)
    config = settings("stage", {"tensor_parallel": 2, "pipeline_parallel": 2})
    results = run_ranks(4, several_updates, url, directory, config, server.version + 1, timeout=500)
    other, cause, label, found, senders, version = results[0]
    assert senders == [0, 2]
    assert found == expected and len(expected[0]) > 15
    assert other != expected
    assert "broadcasting weights failed" in cause and label.startswith("updating-to-"), (cause, label)
    with pytest.raises(RankError):
        run_ranks(4, killed_sender, url, directory, config, version, timeout=300)
    server.version = version + 2
    assert from_one_process(url, directory, server.version, seed=0)[1] == expected
    server.model.load_state_dict(weights_of(directory, 0))


def expert_parallel(rendezvous, url, directory, config, version, pid):
    """Two updates; then the engine is killed while it receives the third."""
    ranks = Ranks(rendezvous, url, directory, config, version)
    other, found = ranks.send(seed=1), ranks.send(seed=0)
    original, calls = SGLangClient.receive_broadcast, []

    async def kill_it(client, *arguments):
        calls.append(1)
        if len(calls) == 3:
            os.killpg(pid, signal.SIGKILL)
        await original(client, *arguments)

    SGLangClient.receive_broadcast = kill_it
    try:
        ranks.send(seed=2)
        raise AssertionError("a dead engine served an update")
    except DriverError as error:
        cause = str(error)
    return other, found, ranks.senders, cause


def packed_experts(url, directory, version, expected, snapshots):
    """Twice by each transport. The snapshot has the names of a checkpoint."""

    async def main(version):
        for transport in ("tensor", "distributed"):
            kept = {"keep_snapshot": True, "directory": str(snapshots)}
            config = settings("one", transport=transport, pack_experts=True, **kept)
            engine = await connect_engine([url], config.rollout, model=str(directory), version=version)
            for seed in (9, 0):
                weights, version = weights_of(directory, seed), version + 1
                whole = list(weights.items())
                half = len(whole) // 2  # in the middle of an expert
                report = await engine.update_weights(version, [whole[:half], whole[half:]])
                assert not report.failed and report.tensors == len(weights)
                found = await engine.servers[0].checksums()
                assert (found == expected) == (seed == 0), transport
            engine.snapshot.wait()
            index = json.loads((engine.snapshot.current / "model.safetensors.index.json").read_text())
            assert index["weight_map"].keys() == weights.keys()
            await engine.close()
        return version

    return asyncio.run(asyncio.wait_for(main(version), 300))


def test_expert_groups_send_the_weights_of_a_single_process(tmp_path_factory, tmp_path):
    """The server computes with the weights that it is sent. On the way it gets updates with packed experts."""
    require_sglang(VERSION)
    directory = write_model(tmp_path / "model", "qwen3_moe")
    for servers in start_servers([VERSION], directory, tmp_path_factory, "qwen3_moe", loads_packed_experts=True):
        process = servers[VERSION].process
        logprobs, expected = from_one_process(process.url, directory, 1, seed=0)
        sent = shutil.copytree(directory, tmp_path / "sent")
        save_file(weights_of(directory, 0), sent / "model.safetensors", {"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(sent, dtype=torch.float32)
        assert logprobs == pytest.approx(reference_logprobs(model, PROBE[:1], PROBE[1:]), abs=1e-4)
        version = packed_experts(process.url, directory, 1, expected, tmp_path / "snapshots")
        said = [line for line in process.log.read_text().splitlines() if "experts::" in line]
        assert len(said) == 1 and said[0].endswith("is loaded at once"), said
        chosen = settings("expert_group", {"expert_parallel": 2}, pack_experts=True)
        arguments = (process.url, directory, chosen, version, process.pid)
        other, found, senders, cause = run_ranks(2, expert_parallel, *arguments, timeout=400)[0]
        assert senders == [0, 1]
        assert found == expected and other != expected
        assert process.url in cause


def hand_over(rendezvous, urls, directory, config, version):
    """Two hand-overs from the ranks of two nodes to the engines on both; the engines' memory is released before."""
    os.environ["SLURM_NODEID"] = str(rendezvous.rank // 2)
    runtime = initialize(config.policy, rendezvous=rendezvous)
    policy = Policy(config, ModelShape.from_dir(str(directory)), runtime)
    buckets = weight_buckets(policy, config)
    sync = WeightSync(buckets, Collectives(runtime, StopSignal()), config.rollout.weights.timeout)
    driver = EngineThread(urls, config, directory, version) if rendezvous.rank == 0 else None
    found = []
    for seed in (1, 0):
        policy.load_hf(weights_of(directory, seed))
        version += 1
        if driver:
            driver.do(driver.engine.release_memory())
        sync.send(version, driver)
        report = sync.serve(version, driver)
        if driver:
            assert not report.failed and len(report.served_by) == 2
            older = driver.do(driver.engine.servers[0].logprobs_of(PROBE))
            found.append((older.tolist(), driver.do(driver.server.checksums())))
    return found, buckets.nodes, buckets.senders, len(buckets.plans)


def test_ranks_of_two_nodes_hand_all_weights_to_the_engines_of_their_node(two_servers):
    """Shared memory crosses no nodes: each engine reads from a rank of its own node, in turn from all of them."""
    urls, directory = [server.process.url for server in two_servers], two_servers[0].directory
    version = max(server.version for server in two_servers) + 1
    alone = [from_one_process(url, directory, version, seed=0) for url in urls]
    chosen = settings("stage", {"tensor_parallel": 2, "pipeline_parallel": 2})
    weights = chosen.rollout.weights.model_copy(update={"transport": "tensor"})
    shared = chosen.rollout.servers.model_copy(update={"share_gpus": True, "urls": urls})
    rollout = chosen.rollout.model_copy(update={"weights": weights, "servers": shared, "engine": "sglang"})
    config = chosen.model_copy(update={"rollout": rollout})
    found, nodes, senders, count = run_ranks(4, hand_over, urls, directory, config, version, timeout=500)[0]
    assert nodes == [[0, 1], [2, 3]] and senders == [0, 1, 2, 3] and count > 4
    (other_logprobs, other), (logprobs, checksums) = found
    assert checksums == alone[1][1] and other != checksums
    assert logprobs == pytest.approx(alone[0][0], abs=1e-5) and other_logprobs != pytest.approx(logprobs, abs=1e-2)
    for server in two_servers:
        server.version = version + 2
        server.model.load_state_dict(weights_of(directory, 0))
