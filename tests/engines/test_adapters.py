"""LoRA's adapters in SGLang servers: they change without a pause, and every response has one version."""

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
import signal
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import forked
import numpy as np
import psutil
import pytest
import torch
from connect_engine import connect_engine
from event_loop import until
from fake_server import FakeServer
from installed_sglang import API_KEY_VARIABLE, SGLANG_VERSIONS, require_sglang, start_servers
from long_lists import ALL_CASES, some
from subject import PROMPT, run
from tiny_model import reference_logprobs, tiny_model, write_model
from tiny_run import raw_config
from waiting import free_port

from megatron_dapo import fault_points
from megatron_dapo.config import ConfigError, ModelShape, check_config, parse_config
from megatron_dapo.config.policy import LoraConfig
from megatron_dapo.engines.protocol import SamplingParams, WeightUpdateError
from megatron_dapo.engines.sglang import client, transports
from megatron_dapo.engines.sglang.fleet import Fleet
from megatron_dapo.engines.sglang.in_server import megatron_dapo_checksums
from megatron_dapo.engines.sglang.server_process import IN_SERVER
from megatron_dapo.errors import EngineError
from megatron_dapo.policy.policy import Policy
from megatron_dapo.trainer.signals import FAILED
from megatron_dapo.types import FinishReason
from megatron_dapo.weights.adapters import adapter_mappings, adapter_name

RANK, ALPHA = 4, 8.0
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
VERSION = SGLANG_VERSIONS[-1]
PARAMS = SamplingParams(8)
ADAPTER = [(adapter_name(f"model.layers.0.mlp.{layer}_proj.weight", half), torch.ones(4, 4))
           for layer in ("gate", "up") for half in "AB"]  # fmt: skip


def config_of(targets=(), **servers):
    weights = {"transport": "adapter", "timeout": 30}
    servers = {"sample_timeout": 60, "control_timeout": 20, "attempts": 30, **servers}
    lora = {"rank": RANK, "alpha": ALPHA, "targets": list(targets)}
    return parse_config({"policy": {"lora": lora}, "rollout": {"weights": weights, "servers": servers}}).rollout


def on_fakes(count=1, seconds=0.0, **options):
    """A test of an engine over fake servers."""

    def decorate(test):
        async def main(folder):
            servers = [await FakeServer(seconds).start() for _ in range(count)]
            engine = await connect_engine([s.url for s in servers], config_of(**options), model=folder)
            await test(servers, engine)
            await engine.close()
            assert not any(server.crashes for server in servers)

        def wrapper(tmp_path):
            run(main(str(tmp_path)), 40)

        wrapper.__doc__ = test.__doc__
        return wrapper

    return decorate


def start(engine, name):
    return asyncio.ensure_future(engine.generate(name, PROMPT, PARAMS))


def versions_of(completion):
    return [span.version for span in completion.weight_spans]


@on_fakes(seconds=30, max_running=1)
async def test_requests_end_with_the_version_they_began_with_and_nothing_pauses(servers, engine):
    """Version 0 is the base. With one slot, a second request waits in our queue: it starts with the new version."""
    (server,), (ours,) = servers, engine.servers
    for version in (0, 1, 2):
        old, late = start(engine, f"old-{version}"), start(engine, f"late-{version}")
        await until(lambda: server.adapter_requests)
        used = server.adapter_requests[0]
        assert (used is None) == (version == 0)
        report = await engine.update_weights(version + 1, [ADAPTER])
        assert not report.failed and "checksums of 4 of 4 tensors" in report.proof
        assert not old.done() and not late.done() and used in [None, *server.adapters]
        server._running[f"old-{version}"].set()
        assert versions_of(await old) == [version]
        await until(lambda: server.adapter_requests == [ours.adapter])
        server._running[f"late-{version}"].set()
        assert versions_of(await late) == [version + 1]
        await until(lambda: list(server.adapters) == [ours.adapter])
    assert server.label == "0" and not {"/pause_generation", "/abort_request", "/flush_cache"} & set(server.calls)


@on_fakes(seconds=30)
async def test_requests_that_are_two_versions_old_are_continued_with_the_newest(servers, engine):
    oldest = start(engine, "oldest")
    await until(lambda: len(servers[0].adapter_requests) == 1)
    await engine.update_weights(1, [ADAPTER])
    old = start(engine, "old")
    await until(lambda: len(servers[0].adapter_requests) == 2)
    await engine.update_weights(2, [ADAPTER])
    found = await oldest
    assert found.finish_reason is FinishReason.ABORT and found.moved and versions_of(found) == [0]
    assert not old.done() and len(servers[0].adapters) == 2


@on_fakes(count=2)
async def test_a_server_without_the_adapter_of_a_request_gets_it_again(servers, engine):
    """Restarted by somebody else: its adapters and its label are gone. Meanwhile another server has the requests."""
    await engine.update_weights(1, [ADAPTER])
    servers[0].adapters.clear()
    servers[0].label = "default"
    found = await asyncio.gather(*(engine.generate(f"{i}", PROMPT + i, PARAMS) for i in range(20)))
    assert {version for one in found for version in versions_of(one)} == {1}
    await until(lambda: engine.servers[0].state.serves(1))
    assert len(servers[0].adapters) == 1


@on_fakes()
async def test_an_update_that_breaks_off_leaves_the_version_before_in_service(servers, engine):
    await engine.update_weights(1, [ADAPTER])

    def buckets():
        yield ADAPTER[:2]
        raise ValueError("rank 3 died")

    with pytest.raises(WeightUpdateError, match="rank 3 died"):
        await engine.update_weights(2, buckets())
    assert versions_of(await engine.generate("a", PROMPT, PARAMS)) == [1] and len(servers[0].adapters) == 1
    await engine.update_weights(2, [ADAPTER[:2], ADAPTER[2:]])
    assert versions_of(await engine.generate("b", PROMPT, PARAMS)) == [2]
    assert sorted(servers[0].adapters[engine.servers[0].adapter]) == sorted(name for name, _ in ADAPTER)


@on_fakes()
async def test_adapters_that_another_trainer_has_left_are_unloaded(servers, engine):
    servers[0].adapters = {f"{client.ADAPTER_PREFIX}3-dead": {}, "somebodys": {}}
    await (await connect_engine([servers[0].url], config_of())).close()
    assert list(servers[0].adapters) == ["somebodys"]


def numbered(version):
    return [(name, torch.full((4, 4), float(version))) for name, _ in ADAPTER]


async def test_the_memory_of_a_version_is_made_before_it_and_written_once(tmp_path, monkeypatch):
    """Servers go on reading the memory of the versions before."""
    monkeypatch.setattr(transports, "MEMORY_DELAY", 0.0)
    server = await FakeServer().start()
    engine = await connect_engine([server.url], config_of(), model=str(tmp_path))
    transport, sent = engine._update._transport, []
    for version in (1, 2, 3, 4):
        if version == 3:
            monkeypatch.setattr(transports, "MEMORY_DELAY", 60.0)  # version 4 comes before there is memory for it
        ahead = [memory.data_ptr() for memory in transport._memory]
        report = await engine.update_weights(version, [numbered(version)])
        assert {"gather", "hash", "load"} <= report.parts.keys()
        sent.append(transport._adapter)
        assert ([sent[-1].flat.data_ptr()] == ahead) == (version in (2, 3))
        if version < 3:
            await until(lambda: transport._memory)
    assert [{float(value) for view in one.views for value in view.flatten()} for one in sent] == [{1}, {2}, {3}, {4}]
    transport._make_memory()
    await engine.update_weights(5, [numbered(5)[:2], numbered(5)[2:]])  # of another size than the memory
    assert all((view == 5).all() for view in transport._adapter.views)
    await engine.close()


# ---- the plugin that compares an adapter in the server ----


def stub_sglang(monkeypatch, *owners):
    """Modules of SGLang, each with one class."""
    for module, name, owner in owners:
        stub = ModuleType(f"sglang.srt.{module}")
        setattr(stub, name, owner)
        monkeypatch.setitem(sys.modules, stub.__name__, stub)
    for package in ("sglang", "sglang.srt", "sglang.srt.lora", "sglang.srt.managers", "sglang.srt.utils"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))


def load_in_plugin(monkeypatch, tensors, expected, loads=True):
    """What SGLang does with a request, and which tensors it has loaded."""

    class Worker:
        def load_lora_adapter_from_tensors(self, request):
            assert request.expected_checksums is None
            return Manager().load_lora_adapter_from_tensors("ref", tensors, {}, None) if loads else "not loaded"

    class Manager:
        def load_lora_adapter_from_tensors(self, ref, tensors, config, tokens):
            return sorted(tensors)

    stub_sglang(
        monkeypatch,
        ("lora.lora_manager", "LoRAManager", Manager),
        ("managers.tp_worker", "BaseTpWorker", Worker),
        ("utils.weight_checker", "WeightChecker", SimpleNamespace(handle=None)),
        ("managers.tokenizer_manager", "TokenizerManager", SimpleNamespace(_release_lora_once=None)),
    )
    monkeypatch.syspath_prepend(IN_SERVER)
    megatron_dapo_checksums.serve_adapters()
    return Worker().load_lora_adapter_from_tensors(SimpleNamespace(expected_checksums=expected))


def test_a_flipped_bit_in_any_tensor_is_found_in_the_server(monkeypatch):
    tensors = {f"t{i}": torch.randn(3, 2 + i).bfloat16().t() for i in range(20)} | {"scale": torch.tensor(2.0)}
    sent = megatron_dapo_checksums.sha256(tensors)
    assert sent["t1"] == hashlib.sha256(tensors["t1"].contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    assert load_in_plugin(monkeypatch, tensors, sent) == sorted(tensors)
    for name, tensor in tensors.items():
        damaged = tensor.contiguous().clone()
        damaged.view(torch.int16 if tensor.dim() else torch.int32).view(-1)[-1] ^= 1
        with pytest.raises(RuntimeError, match=rf"MISMATCH: 1 of 21 tensors differ: \['{name}'\]"):
            load_in_plugin(monkeypatch, tensors | {name: damaged}, sent)


def test_the_plugin_is_as_strict_as_sglang(monkeypatch):
    tensors = {"a": torch.ones(2), "b": torch.ones(2)}
    sent = megatron_dapo_checksums.sha256(tensors)
    for wrong in ({"a": tensors["a"]}, tensors | {"c": tensors["a"]}):
        with pytest.raises(RuntimeError, match=r"MISMATCH: 1 of 2 .*\['[bc]'\]"):
            load_in_plugin(monkeypatch, wrong, sent)
    with pytest.raises(RuntimeError, match="without the comparison"):  # by another way than the one of today
        load_in_plugin(monkeypatch, tensors, sent, loads=False)
    assert load_in_plugin(monkeypatch, tensors, None) == ["a", "b"]  # rollout.weights.proof: version


class OldTokenizerManager:
    """SGLang 0.5.17: every end of a request removes its state, and only the ordinary one releases its adapter."""

    def __init__(self):
        adapters = {"ended": "v1", "queued": "v1", "client gone": "v1", "too early": "v1", "without": None}
        requests = {name: SimpleNamespace(lora_path=path, lora_id=f"of {name}") for name, path in adapters.items()}
        requests["too early"].lora_id = None
        self.rid_to_state = {name: SimpleNamespace(obj=request, finished=False) for name, request in requests.items()}
        self.released, self.lora_registry = [], self

    async def release(self, adapter):
        self.released.append(adapter)

    def _remove_req_state(self, rid):
        return self.rid_to_state.pop(rid, None)

    def end(self, rid):
        state = self.rid_to_state[rid]
        state.finished = True
        self._remove_req_state(rid)
        if state.obj.lora_path:
            asyncio.create_task(self.release(state.obj.lora_id))  # noqa: RUF006

    def abort_in_queue(self, rid):
        self.rid_to_state[rid].finished = True
        self._remove_req_state(rid)


async def test_every_request_releases_its_adapter_once(monkeypatch):
    """Otherwise SGLang 0.5.17 never unloads it, and the next version waits for that."""
    monkeypatch.setattr(OldTokenizerManager, "_remove_req_state", OldTokenizerManager._remove_req_state)
    monkeypatch.setattr(megatron_dapo_checksums, "ABORT_SECONDS", 0.05)
    stub_sglang(monkeypatch, ("managers.tokenizer_manager", "TokenizerManager", OldTokenizerManager))
    megatron_dapo_checksums._release_every_request()
    manager = OldTokenizerManager()
    manager.end("ended")
    manager.abort_in_queue("queued")
    for name in ("queued", "client gone", "too early", "without", "unknown"):
        manager._remove_req_state(name)
    await asyncio.sleep(0)
    assert manager.released == ["of ended", "of queued"]  # the other one may still run
    await asyncio.sleep(0.2)
    assert manager.released == ["of ended", "of queued", "of client gone"] and not manager.rid_to_state


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        ({"policy": {"lora": {"rank": 0}}}, r"policy\.lora\.rank is 0"),
        ({"policy": {"megatron_checkpoint": "m"}}, "convert it to a HF model"),
        ({"servers": {"share_gpus": True}}, r"servers\.share_gpus does not allow: .* loses the base"),
        ({"servers": {"urls": ["http://a:1"], "router_url": "http://a:2"}}, "router_url"),
        ({"servers": {"model": "fp8"}}, r"servers\.model"),
        ({"policy": {"model": "moe"}}, "has experts or linear attention"),
        ({"policy": {"model": "moe", "lora": {"rank": 4, "targets": ["q_proj", "up_proj"]}}}, "has experts"),
    ],
)
def test_refused_configurations(tmp_path, monkeypatch, more, cause):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "moe", "qwen3_moe")
    rollout = {"weights": {"transport": "adapter"}, "max_prompt_tokens": 8, "max_response_tokens": 8}
    raw = {"policy": {"lora": {"rank": 4}} | more.get("policy", {}), "rollout": rollout}
    with pytest.raises(ConfigError, match=cause):
        check_config(parse_config(raw | {"rollout": rollout | {"servers": more.get("servers", {})}}))


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"lora": {}}, "start it with --enable-lora .*--max-lora-rank 4"),
        ({"lora": {"enable_lora": True, "max_lora_rank": 2, "max_loras_per_batch": 2}}, "--max-lora-rank 4"),
        ({"lora": {"enable_lora": True, "max_lora_rank": 8, "max_loras_per_batch": 1}}, "--max-loras-per-batch 2"),
        ({"label": "5"}, "got other weights than those it was started with"),
        ({"label": "updating-to-5"}, "got other weights"),
    ],
)
async def test_refused_servers(change, cause):
    server = await FakeServer().start()
    vars(server).update(change)
    with pytest.raises(EngineError, match=cause):
        await connect_engine([server.url], config_of())


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({"rollout": {"weights": {"transport": "tensor"}}}, "rollout.weights.transport: adapter"),
        ({"trainer": {"ranks": 2}}, "trainer.ranks: 1"),
        ({"algorithm": {"advantage": "gae"}}, "no critic"),
        ({"policy": {"lora": {"rank": RANK}, "precision": "fp32"}}, "rollout.servers.dtype: float32"),
        ({"rollout": {"engine": "embedded", "servers": {"share_base": True}}}, "rollout.engine: sglang"),
        ({"rollout": {"servers": {"share_base": True, "count": 2}}}, "rollout.servers.count: 1"),
        ({"rollout": {"servers": {"share_base": True, "urls": ["http://a:1"]}}}, "a server that this run starts"),
    ],
)
def test_a_shared_base_needs_one_rank_and_one_server_of_its_own(change, missing):
    raw = {
        "policy": {"lora": {"rank": RANK}}, "trainer": {"ranks": 1},
        "rollout": {"engine": "sglang", "weights": {"transport": "adapter"}, "servers": {"share_base": True}},
    }  # fmt: skip
    assert parse_config(raw).rollout.shares_base
    with pytest.raises(ConfigError, match=f"share_base needs .*{missing}"):
        parse_config({section: raw.get(section, {}) | change.get(section, {}) for section in raw.keys() | change})


# ---- on a real server ----


@contextlib.contextmanager
def served(folders, kind, targets=()):
    """A server, the settings of a run that sends adapters to it, and its model's directory."""
    require_sglang(VERSION)
    directory = write_model(folders.mktemp(f"lora-{kind}"), kind)
    adapters = LoraConfig(rank=RANK, alpha=ALPHA, targets=list(targets))
    for servers in start_servers([VERSION], directory, folders, kind, computes_checksums=False, lora=adapters):
        patient = {"heartbeat": 0.5, "attempts": 30, "sample_timeout": 60.0, "control_timeout": 20.0}
        config = servers[VERSION].config.model_copy(update=patient)
        yield servers[VERSION].process, config_of(targets).model_copy(update={"servers": config}), directory


@pytest.fixture(scope="module")
def lora_server(tmp_path_factory):
    with served(tmp_path_factory, "qwen3") as found:
        yield found


def random_adapter(directory, targets=()):
    mappings = adapter_mappings(ModelShape.from_dir(directory), RANK, targets)
    return [(name, torch.randn(mapping.shape) * 0.3) for name, mapping in mappings.items()]


def merged_model(tensors, kind="qwen3"):
    model = tiny_model(kind)
    weights = dict(model.state_dict())
    for name, weight in weights.items():
        if adapter_name(name, "A") in tensors:
            weight += ALPHA / RANK * tensors[adapter_name(name, "B")] @ tensors[adapter_name(name, "A")]
    return model


def test_a_run_trains_with_adapters_on_a_real_server(lora_server, tmp_path):
    """Generation goes on while the weights change. Then the same run goes on where it ended: the adapters that its
    first trainer left in the server are replaced."""
    process, _, directory = lora_server
    model = shutil.copytree(directory, tmp_path / "model")
    raw = raw_config(
        model, tmp_path / "run", trainer__steps=3, policy__lora={"rank": RANK, "alpha": ALPHA},
        rollout__engine="sglang", rollout__weights={"transport": "adapter"}, rollout__max_staleness=1,
        rollout__servers={
            "device": "cpu", "dtype": "float32", "api_key_env": API_KEY_VARIABLE, "start_timeout": 20,
            "urls": [process.url],
        },
    )  # fmt: skip
    for steps, versions in some(((3, "0123"), (4, "34")), (3, "0123")):
        raw["trainer"]["steps"] = steps
        assert forked.run(raw) == 0
        log = (tmp_path / "run" / "logs" / "trainer.log").read_text()
        found = re.findall(r"version (\d) acknowledged by 1 of 1, 1 with the checksums of (\d+) of \2 tensors", log)
        assert "".join(version for version, _ in found).endswith(versions) and "trainer and engine agree" in log


def note_what_is_shared(note, killed):
    """`note` gets the parameters of the base, and whether their memory is shared. `killed`: when the server is."""
    use = Policy.use_base

    def noted(policy, references):
        use(policy, references)
        base = {name: weight for name, weight in policy.model[0].named_parameters() if not name.startswith("adapters")}
        note.write_text("\n".join(f"{name} {weight.is_shared()}" for name, weight in base.items()))

    def kill():
        (server,) = (p for p in psutil.Process().children(recursive=True) if "sglang::scheduler" in p.name())
        server.kill()

    Policy.use_base = noted
    if killed:
        fault_points.on(killed, kill, count=5 if killed == "loop/before_update" else 3)  # two updates in each step


@pytest.mark.parametrize("killed", some(("", "loop/before_update", "rollouts/before_collect"), ""))
def test_a_run_computes_with_the_base_in_its_servers_memory(tmp_path, capfd, killed):
    """Only q, k and v, whose rows Megatron orders differently, are the trainer's own. Without the server there is no
    base: the run saves its adapter and ends."""
    python = require_sglang(VERSION)
    raw = raw_config(
        write_model(tmp_path / "model"), tmp_path / "run", trainer__steps=4 if killed else 2, trainer__ranks=1,
        policy__lora={"rank": RANK, "alpha": ALPHA}, rollout__engine="sglang",
        rollout__max_staleness=int(killed != "rollouts/before_collect"), rollout__weights={"transport": "adapter"},
        rollout__servers={
            "device": "cpu", "dtype": "float32", "python": str(python), "port": free_port(), "share_base": True,
            "heartbeat": 0.5,
        },
    )  # fmt: skip
    assert forked.run(raw, partial(note_what_is_shared, tmp_path / "base", killed)) == (FAILED if killed else 0)
    base = dict(line.split() for line in (tmp_path / "base").read_text().splitlines())
    assert {name.split(".", 3)[-1] for name, shared in base.items() if shared == "False"} == {
        "self_attention.linear_qkv.weight"
    }
    steps = forked.steps_of(tmp_path / "run")
    assert len(steps) == (3 if killed == "loop/before_update" else 2) and steps[0]["train/mismatch_max"] < 1e-4
    assert (tmp_path / "run" / "checkpoints" / f"step_{len(steps)}" / "policy" / "adapter").is_dir()
    assert ("the trainer computes with its memory (rollout.servers.share_base)" in capfd.readouterr().err) == bool(
        killed
    )


async def test_a_real_server_agrees_with_the_merged_model_and_gets_its_adapter(lora_server, tmp_path, monkeypatch):
    """A request that runs during the update ends with its own version, and the adapter of its version is unloaded. One
    flipped bit is found: SGLang ends. It is restarted with the right adapter."""
    process, config, directory = lora_server
    torch.manual_seed(0)
    adapters = {version: random_adapter(directory) for version in (1, 2, 3)}
    gaps = []

    def check(completion, version):
        assert versions_of(completion) == [version]
        merged = merged_model(dict(adapters[version]))
        gaps.append(np.abs(completion.logprobs - reference_logprobs(merged, PROMPT, completion.tokens)).max())

    fleet = Fleet(config, str(directory), tmp_path)
    fleet.processes = [process]
    engine = await fleet.start()
    (server,) = engine.servers
    await engine.update_weights(1, [adapters[1]])
    running = asyncio.ensure_future(engine.generate("long", PROMPT, SamplingParams(300, ignore_eos=True)))
    await asyncio.sleep(0.3)
    assert server.on_this_host
    server.on_this_host = False  # as if it were not: the tensors are part of the request
    report = await engine.update_weights(2, [adapters[2][:5], adapters[2][5:]])
    server.on_this_host = True
    assert not report.failed and not running.done()
    check(await engine.generate("new", PROMPT, SamplingParams(16, ignore_eos=True)), 2)
    assert not running.done() and len(server.adapters) == 2
    old = await running
    assert len(old.tokens) == 300
    check(old, 1)
    names = []
    while len(names) != 2:  # the base and version 2
        names = [model["id"] for model in (await server.connection.get("/v1/models"))["data"]]

    send, first = client.SGLangClient.load_adapter, process.pid

    async def damaged(server, name, version, body, timeout):
        monkeypatch.setattr(client.SGLangClient, "load_adapter", send)
        other = [(name, tensor.clone()) for name, tensor in adapters[3]]
        other[7][1].view(torch.int32)[-1, -1] ^= 1
        shared = transports.share(transports.flatten(other))
        await send(server, name, version, body | {"serialized_named_tensors": [shared.payload]}, timeout)

    monkeypatch.setattr(client.SGLangClient, "load_adapter", damaged)
    report = await engine.update_weights(3, [adapters[3]])
    log, count = process.log.read_text(), len(adapters[3])
    assert f"adapter sync MISMATCH: 1 of {count} tensors differ: ['{adapters[3][7][0]}']" in log
    assert f"adapter sync: compared {count} of {count} tensors" in log and process.pid != first
    check(await engine.generate("after", PROMPT, SamplingParams(16, ignore_eos=True)), 3)
    if ALL_CASES:  # a start costs 12 CPU seconds; test_conformance.py kills a server that has no adapters
        os.kill(process.pid, signal.SIGKILL)
        check(await engine.generate("killed", PROMPT, SamplingParams(16, ignore_eos=True)), 3)
    fleet.processes = []  # it would end them
    await engine.close()
    print(f"largest difference between adapter serving and the merged model in fp32: {max(gaps):.1e}")
    assert max(gaps) < 1e-4


def test_a_model_with_experts_may_have_adapters_in_its_attention(tmp_path):
    policy = {"model": str(write_model(tmp_path, "qwen3_moe")), "lora": {"rank": RANK, "targets": list(ATTENTION)}}
    rollout = {"weights": {"transport": "adapter"}, "max_prompt_tokens": 8, "max_response_tokens": 8}
    check_config(parse_config({"policy": policy, "rollout": rollout}))
    names = {name.rsplit(".", 3)[1] for name in adapter_mappings(ModelShape.from_dir(tmp_path), RANK, ATTENTION)}
    assert names == set(ATTENTION)


@pytest.mark.skipif(not ALL_CASES, reason="ALL_CASES=1: a server's start; its layers are those of the dense model")
def test_a_server_has_adapters_in_the_attention_of_a_model_with_experts(tmp_path_factory, monkeypatch):
    """Without our plugin SGLang compares the adapter itself."""
    monkeypatch.setenv("SGLANG_PLUGINS", "none")
    torch.manual_seed(0)
    with served(tmp_path_factory, "qwen3_moe", ATTENTION) as (process, config, directory):
        adapter = random_adapter(directory, ATTENTION)

        async def with_the_adapter():
            engine = await connect_engine([process.url], config, model=str(directory))
            await engine.update_weights(1, [adapter])
            found = await engine.generate("a", PROMPT, SamplingParams(16, ignore_eos=True))
            await engine.close()
            return found

        found = run(with_the_adapter(), 60)
        log = process.log.read_text()
        assert f"[LORA-CHECK] rank0 adapter sync OK: {len(adapter)}/{len(adapter)}" in log and "compared" not in log
    gap = np.abs(found.logprobs - reference_logprobs(merged_model(dict(adapter), "qwen3_moe"), PROMPT, found.tokens))
    assert versions_of(found) == [1] and gap.max() < 1e-4
