"""Experts as few large tensors: the engine gets bitwise what SGLang's own loader would have written, in any layout."""

import re
import sys
from pathlib import Path

import pytest
import torch
from connect_engine import connect_engine
from fake_server import FakeServer
from torch import nn

from megatron_dapo.config import ConfigError, parse_config
from megatron_dapo.engines.sglang.client import CHECKSUM_LOADERS
from megatron_dapo.engines.sglang.server_process import IN_SERVER, sglang_command
from megatron_dapo.errors import EngineError
from megatron_dapo.sync.bucket import FlatBucket, bucket_in, flatten
from megatron_dapo.sync.shared_bucket import packed
from megatron_dapo.weights.fp8 import quantised_specs
from megatron_dapo.weights.tensor_spec import TensorSpec, flat_size

sys.path.insert(0, str(Path(IN_SERVER)))
import megatron_dapo_experts

LAYERS, EXPERTS, ROWS, COLUMNS = 2, 5, 8, 6
NAME = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.(\w+)")


def experts(layer, numbers=range(EXPERTS)):
    for expert in numbers:
        for matrix, shape in (("gate", (ROWS, COLUMNS)), ("up", (ROWS, COLUMNS)), ("down", (COLUMNS, ROWS))):
            yield f"model.layers.{layer}.mlp.experts.{expert}.{matrix}_proj.weight", torch.randn(shape).bfloat16()


def weights(seed):
    torch.manual_seed(seed)
    return [("model.norm.weight", torch.randn(COLUMNS)), *(pair for n in range(LAYERS) for pair in experts(n))]


def on_the_wire(pairs) -> FlatBucket:
    bucket = flatten(pairs)
    specs = packed(bucket.specs)
    assert flat_size(specs) == len(bucket.flat)
    return bucket_in(bucket.flat, specs)


def test_a_run_of_experts_is_one_tensor_of_the_same_memory():
    torch.manual_seed(0)
    # Expert 0 lacks its gate, expert 4 its down projection, and expert 2 is elsewhere.
    pairs = [*[*experts(0, [0])][1:], *experts(0, [1, 3]), *[*experts(0, [4])][:2], *experts(1, [0, 1])]
    found = dict(on_the_wire(pairs))
    prefix, whole = "model.layers.0.mlp.experts", (3 * ROWS, COLUMNS)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        f"{prefix}.0.up_proj.weight": (ROWS, COLUMNS), f"{prefix}.0.down_proj.weight": (COLUMNS, ROWS),
        f"experts::{prefix}::1::weight": (1, *whole), f"experts::{prefix}::3::weight": (1, *whole),
        f"{prefix}.4.gate_proj.weight": (ROWS, COLUMNS), f"{prefix}.4.up_proj.weight": (ROWS, COLUMNS),
        "experts::model.layers.1.mlp.experts::0::weight": (2, *whole),
    }  # fmt: skip
    up = found["experts::model.layers.1.mlp.experts::0::weight"][1, ROWS : 2 * ROWS]
    assert torch.equal(up, dict(pairs)["model.layers.1.mlp.experts.1.up_proj.weight"])


def test_matrices_in_another_order_keep_their_names():
    gate, up, down, *_ = (TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in experts(0))
    for order in ([up, gate, down], [gate, down, up], [gate, gate, up], [down, gate, up]):
        assert packed(order) == tuple(order)
    other = TensorSpec(down.name, torch.float32, down.shape)
    assert packed([gate, up, other]) == (gate, up, other)


def test_the_scales_of_fp8_weights_are_packed_too():
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in experts(0)]
    found = packed(quantised_specs(specs))
    layer = "experts::model.layers.0.mlp.experts::0"
    assert [(spec.name, spec.shape) for spec in found] == [
        (f"{layer}::weight_scale_inv", (EXPERTS, 3, 1)), (f"{layer}::weight", (EXPERTS, 3 * ROWS, COLUMNS)),
    ]  # fmt: skip


class Fused(nn.Module):
    """One layer's experts as SGLang has them. `up_first` and `moe_ep_size` are layouts that some of its kernels use."""

    def __init__(self, rank, size, up_first, ep):
        super().__init__()
        self.moe_tp_rank, self.moe_tp_size, self.moe_ep_size, self.up_first = rank, size, ep, up_first
        rows = ROWS // size
        for name, shape in (("w13_weight", (2 * rows, COLUMNS)), ("w2_weight", (COLUMNS, rows))):
            self.register_parameter(name, nn.Parameter(torch.zeros(EXPERTS, *shape).bfloat16(), requires_grad=False))

    def load(self, expert, matrix, loaded):
        rows = ROWS // self.moe_tp_size
        part = slice(self.moe_tp_rank * rows, (self.moe_tp_rank + 1) * rows)
        if matrix == "down":
            self.w2_weight.data[expert].copy_(loaded[:, part])
        else:
            start = rows if (matrix == "up") != self.up_first else 0
            self.w13_weight.data[expert, start : start + rows].copy_(loaded[part])


class Engine(nn.Module):
    def __init__(self, rank=0, size=1, up_first=False, ep=1):
        super().__init__()
        layers = [nn.ModuleDict({"mlp": nn.ModuleDict({"experts": Fused(rank, size, up_first, ep)})}) for _ in range(2)]
        self.model = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.norm = nn.Parameter(torch.zeros(COLUMNS), requires_grad=False)
        self.names = []  # that its own loader was given

    def load_weights(self, pairs):
        for name, loaded in pairs:
            self.names.append(name)
            if match := NAME.match(name):
                self.model["layers"][int(match[1])]["mlp"]["experts"].load(int(match[2]), match[3], loaded)
            else:
                assert name == "model.norm.weight"
                self.norm.data.copy_(loaded)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ({}, ""),
        ({"rank": 1, "size": 2}, ""),
        ({"up_first": True}, "another way"),
        ({"ep": 2}, "expert parallelism"),
    ],
    ids=str,
)
def test_the_parameters_are_those_of_the_engines_own_loader(layout, reason, caplog):
    engine, own = Engine(**layout), Engine(**layout)
    megatron_dapo_experts.install(engine, [])
    megatron_dapo_experts.install(engine, [])  # repeatable
    for seed in (1, 2):
        engine.names.clear()
        engine.load_weights(iter(on_the_wire(weights(seed))))
        own.load_weights(weights(seed))
        for ours, theirs in zip(engine.parameters(), own.parameters(), strict=True):
            assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
    assert engine.names == ([name for name, _ in weights(2)] if reason else ["model.norm.weight"])
    (said,) = (record.getMessage() for record in caplog.records)  # once, not for each layer
    assert said.endswith("is loaded at once") if not reason else "expert by expert: " in said and reason in said


def test_a_layer_with_other_parameters_is_loaded_expert_by_expert(caplog):
    """As where SGLang pads them, or transposes them."""
    engine = Engine()
    for layer in engine.model["layers"]:
        layer["mlp"]["experts"].w13_weight.data = torch.zeros(EXPERTS, 2 * ROWS, COLUMNS + 2).bfloat16()
        layer["mlp"]["experts"].load = lambda expert, matrix, loaded: None
    megatron_dapo_experts.install(engine, [])
    engine.load_weights(on_the_wire(weights(1)))
    assert len(engine.names) == 1 + LAYERS * EXPERTS * 3
    assert caplog.text.count("an expert has the shapes ((16, 6), (6, 8)), in the layer ((16, 8), (6, 8)) × 5") == 1


def test_one_switch_starts_servers_with_the_loader():
    weights = {"pack_experts": True, "transport": "tensor"}
    config = parse_config({"rollout": {"weights": weights}}).rollout
    assert (
        config.servers.demands.loads_packed_experts
        and not parse_config({}).rollout.servers.demands.loads_packed_experts
    )
    command, environment = sglang_command("model", config.servers, 0, 30000)
    at = command.index("--custom-weight-loader")
    assert command[at + 1 : at + 4] == [*CHECKSUM_LOADERS, "megatron_dapo_experts.install"]
    unproven = parse_config({"rollout": {"weights": {"proof": "probe"}}}).rollout.servers
    assert "--custom-weight-loader" not in sglang_command("model", unproven, 0, 30000)[0]
    assert str(IN_SERVER) in environment["PYTHONPATH"]
    with pytest.raises(ConfigError, match="packed_experts"):
        parse_config({"rollout": {"servers": {"packed_experts": True}}})


@pytest.mark.parametrize(
    ("raw", "remedy"),
    [
        ({"rollout": {"weights": {"pack_experts": True, "transport": "tensor"}}}, "--custom-weight-loader megatron"),
        ({"policy": {"routing_replay": "engine"}}, "--enable-return-routed-experts"),
    ],
)
async def test_an_external_server_that_lacks_what_a_run_needs_is_refused(raw, remedy):
    server = await FakeServer().start()
    with pytest.raises(EngineError, match=remedy):
        await connect_engine([server.url], parse_config(raw).rollout)
