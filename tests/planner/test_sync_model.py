"""The planner's model of a weight update: counts as in the code, and the times of large models."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_dapo.config import ModelShape
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.config.rollout import WeightTransportConfig
from megatron_dapo.planner import assumptions
from megatron_dapo.planner.hardware import Cluster, find_gpu
from megatron_dapo.planner.parameters import count_parameters
from megatron_dapo.planner.sync import (
    buffer_bytes,
    count_names,
    count_senders,
    sent,
    sync_time,
)
from megatron_dapo.selfcheck.synthetic import synthetic_shape
from megatron_dapo.sync.shared_bucket import packed
from megatron_dapo.weights.fp8 import quantised_specs
from megatron_dapo.weights.mapping import hf_shapes
from megatron_dapo.weights.tensor_spec import TensorSpec, flat_size

COMMON = {
    "kv_heads": 8, "head_dim": 128, "vocab": 151936, "max_positions": 40960, "rope_theta": 1e6, "norm_eps": 1e-6,
    "tied_embeddings": False, "qkv_bias": False, "qk_norm": True,
}  # fmt: skip
QWEN3_32B = ModelShape("qwen3", layers=64, hidden=5120, ffn_hidden=25600, heads=64, **COMMON)
QWEN3_235B = ModelShape(
    "qwen3_moe", layers=94, hidden=4096, ffn_hidden=12288, heads=64, experts=128, experts_per_token=8,
    expert_ffn_hidden=1536, **(COMMON | {"kv_heads": 4}),
)  # fmt: skip
LAYOUT_32B = PolicyConfig(tensor_parallel=4, pipeline_parallel=4)
LAYOUT_235B = PolicyConfig(tensor_parallel=4, pipeline_parallel=8, expert_parallel=8)


def predicted(shape, policy, gpus, engine_gpus, tensor_parallel, **weights):
    transport = "distributed" if engine_gpus else "tensor"
    chosen = WeightTransportConfig(**{"transport": transport, "keep_snapshot": False, "senders": "stage"} | weights)
    cluster = Cluster(find_gpu("h100"), gpus, 8, engine_gpus)
    return sync_time(shape, policy, chosen, cluster, (engine_gpus or gpus) // 8, tensor_parallel)


@pytest.mark.parametrize(
    "shape",
    [*map(synthetic_shape, ("dense", "tied", "moe", "moe-shared", "hybrid")), QWEN3_32B, QWEN3_235B,
     replace(synthetic_shape("hybrid"), linear=replace(synthetic_shape("hybrid").linear, fused=False))],
)  # fmt: skip
def test_tensors_are_counted_as_the_mapping_lists_them(shape):
    found = hf_shapes(shape)
    assert count_parameters(shape).tensors == len(found)
    specs = quantised_specs(TensorSpec(name, torch.bfloat16, size) for name, size in found.items())
    size, tensors = sent(shape, WeightTransportConfig(quantization="fp8"))
    assert tensors == len(specs)
    if shape.hidden % 128 == 0 and shape.experts in (0, 128):  # whole blocks
        assert size == pytest.approx(flat_size(specs), rel=1e-9)


def test_names_of_packed_experts_are_counted_as_the_sender_packs_them():
    """235B in buckets that hold 14 whole experts (37.7 MB each)."""
    weights = WeightTransportConfig(pack_experts=True)
    names, held, bucket = 0, 0, []
    for name, size in hf_shapes(QWEN3_235B).items():
        held += name.endswith("gate_proj.weight")
        if held > 14:
            names, held, bucket = names + len(packed(bucket)), 1, []
        bucket.append(TensorSpec(name, torch.bfloat16, size))
    names += len(packed(bucket))
    assert names == pytest.approx(sum(count_names(QWEN3_235B, weights)), rel=0.02)
    assert 15 * names < count_parameters(QWEN3_235B).tensors
    assert count_names(QWEN3_32B, weights) == (0, count_parameters(QWEN3_32B).tensors)
    assert count_names(QWEN3_235B, WeightTransportConfig()) == (94 * 128 * 3, 36_945 - 94 * 128 * 3)
    one_by_one, at_once = (predicted(QWEN3_235B, LAYOUT_235B, 256, 0, 8, pack_experts=pack) for pack in (False, True))
    assert at_once.names < one_by_one.names / 10 and at_once.load == one_by_one.load


QWEN2 = COMMON | {"qkv_bias": True, "qk_norm": False}
QWEN2_1_5B = ModelShape("qwen2", layers=28, hidden=1536, ffn_hidden=8960, heads=12, **(QWEN2 | {"kv_heads": 2}))
QWEN2_7B = ModelShape("qwen2", layers=28, hidden=3584, ffn_hidden=18944, heads=28, **(QWEN2 | {"kv_heads": 4}))
SIXTEEN_LAYERS_OF_30B_A3B = ModelShape(
    "qwen3_moe", layers=16, hidden=2048, ffn_hidden=6144, heads=32, experts=128, experts_per_token=8,
    expert_ffn_hidden=768, **(COMMON | {"kv_heads": 4}),
)  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "weights", "size", "measured"),
    [
        (QWEN2_1_5B, {"bucket_bytes": 4 << 30, "keep_snapshot": True}, 3.55, 0.068),  # median of a run's updates
        (QWEN2_7B, {}, 15.23, 0.256),
        (SIXTEEN_LAYERS_OF_30B_A3B, {"bucket_bytes": 2 << 30}, 21.18, 0.898),
        (SIXTEEN_LAYERS_OF_30B_A3B, {"bucket_bytes": 2 << 30, "pack_experts": True}, 21.18, 0.320),
    ],
)
def test_measured_updates_are_predicted(shape, weights, size, measured):
    """One H200, benchmarks/RESULTS.md, without taking memory back."""
    chosen = WeightTransportConfig(**{"transport": "tensor", "keep_snapshot": False} | weights)
    found = sync_time(shape, PolicyConfig(), chosen, Cluster(find_gpu("h200"), 1), 1)
    assert found.bytes / 1e9 == pytest.approx(size, abs=0.01)
    assert found.total == pytest.approx(measured, rel=0.25)
    if shape is QWEN2_7B:
        page = re.sub("<!--.*?-->", "", (Path(__file__).resolve().parents[2] / "docs" / "results.md").read_text())
        assert f"15.23 GB | {measured:.3f} s | {found.total:.3f} s |" in page


def test_an_adapter_is_a_hundredth_of_the_model():
    """Rank 32 in Qwen3-32B, by hand: inputs and outputs of q, k, v, o, gate, up and down, 64 times, in 2 bytes each.
    Every layout sends the same."""
    heads, kv, hidden, units = 64 * 128, 8 * 128, 5120, 25600
    sides = 2 * (hidden + heads) + 2 * (hidden + kv) + 3 * (hidden + units)
    layouts = ({}, {"tensor_parallel": 4, "pipeline_parallel": 4})
    found = [predicted(QWEN3_32B, PolicyConfig(lora={"rank": 32}, **layout), 128, 64, 4, transport="adapter")
             for layout in layouts]  # fmt: skip
    assert {one.bytes for one in found} == {64 * sides * 32 * 2} and found[0].tensors == 64 * 7 * 2
    assert found[0].total < predicted(QWEN3_32B, LAYOUT_32B, 128, 64, 4).total / 2


def test_large_models_reach_their_engines_in_seconds():
    """docs/planning.md has the assumptions."""
    separate = predicted(QWEN3_32B, LAYOUT_32B, 128, 64, 4)
    assert (separate.senders, separate.tensors) == (4, 707) and separate.total < 3
    assert separate.send == pytest.approx(separate.bytes / (50e9 * assumptions.WIRE_SHARE))
    colocated = predicted(QWEN3_235B, LAYOUT_235B, 256, 0, 8)
    assert (colocated.senders, colocated.tensors) == (8, 36_945) and colocated.total < 8
    assert colocated.send == pytest.approx(colocated.bytes / 8 / (50e9 * assumptions.WIRE_SHARE))
    assert predicted(QWEN3_32B, LAYOUT_32B, 128, 0, 4).total < 3


def test_the_documentation_has_these_times():
    page = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text()
    separate, colocated = predicted(QWEN3_32B, LAYOUT_32B, 128, 64, 4), predicted(QWEN3_32B, LAYOUT_32B, 128, 0, 4)
    assert f"| {separate.total:.1f} s: broadcast {separate.send:.1f} s, load {separate.load:.1f} s |" in page
    assert f"TP4, `tensor` | {colocated.total:.1f} s |" in page
    large, apart = (
        predicted(QWEN3_235B, LAYOUT_235B, 256, engine_gpus, 8, pack_experts=True) for engine_gpus in (0, 128)
    )
    assert f"packed experts | {large.total:.1f} s: between nodes {large.send:.1f} s |" in page
    assert f"packed experts | {apart.total:.1f} s: an engine receives one broadcast at a time" in page
    named = predicted(QWEN3_235B, LAYOUT_235B, 256, 0, 8)
    assert f"| {named.total:.1f} s: between nodes {named.send:.1f} s, names {named.names:.1f} s |" in page
    small = predicted(QWEN3_235B, LAYOUT_235B, 256, 128, 8, quantization="fp8", pack_experts=True)
    assert f"packed experts, fp8 | {small.total:.1f} s |" in page and small.total < 8
    small = predicted(QWEN3_32B, LAYOUT_32B, 128, 64, 4, quantization="fp8")
    assert f"TP4, `distributed`, fp8 | {small.total:.1f} s |" in page
    # Not built: all GPUs of the sender's node in the group, so that the broadcast leaves through all of its networks.
    node = apart.bytes / assumptions.BROADCAST_LIMIT + apart.load + apart.names + apart.fixed
    assert f"predicted at {node:.1f} s" in page


def test_more_senders_shorten_the_gather_and_not_the_broadcast():
    one, stage, groups = (
        predicted(QWEN3_235B, LAYOUT_235B, 256, 128, 8, senders=senders) for senders in ("one", "stage", "expert_group")
    )
    assert [time.senders for time in (one, stage, groups)] == [1, 8, 64]
    assert one.gather > 5 * stage.gather > 50 * groups.gather
    assert one.send == stage.send == groups.send
    colocated = [predicted(QWEN3_235B, LAYOUT_235B, 256, 0, 8, senders=senders).total for senders in ("one", "stage")]
    assert colocated[0] > 3 * colocated[1]  # between trainer nodes more senders do add bandwidth


def test_a_snapshot_overlaps_with_the_update_and_each_sender_keeps_its_part():
    without, with_ = (
        predicted(QWEN3_32B, PolicyConfig(), 8, 0, 1, senders="one", keep_snapshot=k) for k in (False, True)
    )
    assert with_.snapshot == pytest.approx((with_.bytes - (1 << 30)) / assumptions.SNAPSHOT_BYTES_PER_SECOND)
    assert without.snapshot == 0 and with_.total == max(without.total, with_.snapshot + with_.names + with_.fixed)


def test_the_copy_of_the_last_two_buckets_delays_nothing():
    held = predicted(QWEN2_7B, PolicyConfig(), 8, 0, 1, senders="one", keep_snapshot=True, bucket_bytes=8 << 30)
    assert held.snapshot == 0


def test_a_sender_holds_two_buckets():
    weights = WeightTransportConfig(bucket_bytes=1 << 31)
    node, nodes = Cluster(find_gpu("h100"), 8), Cluster(find_gpu("h100"), 16)
    assert buffer_bytes(QWEN3_32B, "bf16", weights, node) == buffer_bytes(QWEN3_32B, "bf16", weights, nodes) == 2 << 31
    small = weights.model_copy(update={"bucket_bytes": 1 << 29})
    largest = 151936 * 5120  # a parameter that is larger is a bucket of its own
    assert buffer_bytes(QWEN3_32B, "bf16", small, node) == 2 * 2 * largest
    assert buffer_bytes(QWEN3_32B, "fp32", small, node) == 2 * 4 * largest
    # A third block: what is quantised is assembled there, and what goes to the ranks of other nodes passes through it.
    fp8, tensor = (weights.model_copy(update=u) for u in ({"quantization": "fp8"}, {"transport": "tensor"}))
    assert buffer_bytes(QWEN3_32B, "bf16", fp8, node) == buffer_bytes(QWEN3_32B, "bf16", tensor, nodes) == 3 << 31
    assert buffer_bytes(QWEN3_32B, "bf16", tensor, node) == 2 << 31
    tiny = replace(QWEN3_32B, layers=1, hidden=64, ffn_hidden=64, vocab=64)
    assert buffer_bytes(tiny, "bf16", weights, node) == 4 * count_parameters(tiny).total
    assert count_senders(QWEN3_32B, LAYOUT_32B, weights) == 1
