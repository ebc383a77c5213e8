"""Memory formulas against numbers derived by hand."""

import dataclasses

import pytest
from published_models import published

from megatron_dapo.config import ModelShape
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.planner.hardware import GIB
from megatron_dapo.planner.memory import head_memory, in_flight, layer_saved, stage_memory, trainer_memory

SHAPE = ModelShape(
    "qwen2", layers=4, hidden=8, ffn_hidden=12, heads=4, kv_heads=2, head_dim=2, vocab=10, max_positions=512,
    rope_theta=1e4, norm_eps=1e-6, tied_embeddings=False, qkv_bias=False, qk_norm=False,
)  # fmt: skip
# One layer: qkv 16·8 + proj 64 + mlp 288 + norms 16 = 496. Embedding and output 80 each, final norm 8.
ALL = 4 * 496 + 80 + 80 + 8


def one_gpu(**keys):
    return trainer_memory(SHAPE, PolicyConfig(micro_batch_tokens=128, **keys), world=1, micro_batches=1)


NARROW = {"main_params_dtype": "fp16", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8"}


@pytest.mark.parametrize(
    ("keys", "weights", "gradients", "optimizer", "step"),
    [
        ({}, 2, 4, 12, 0),
        ({"precision": "fp32"}, 4, 4, 8, 0),  # no second copy of the weights
        ({"gradient_reduction": "bf16"}, 2, 2, 12, 4),  # the step copies the gradients
        ({"optimizer": {"cpu_offload": 1.0}}, 2, 4, 0, 0),
        ({"optimizer": {"cpu_offload": 0.25}}, 2, 4, 0.75 * 12, 0),
        ({"optimizer": {"precision_aware": True}}, 2, 4, 4 + 4 + 4, 0),
        # It reads bf16 gradients, so the step copies nothing.
        ({"optimizer": {"precision_aware": True, **NARROW}, "gradient_reduction": "bf16"}, 2, 2, 2 + 2 + 1, 0),
    ],
)
def test_bytes_per_parameter_on_one_gpu(keys, weights, gradients, optimizer, step):
    memory = one_gpu(**keys)
    found = memory.weights, memory.gradients, memory.optimizer, memory.step
    assert found == (weights * ALL, gradients * ALL, optimizer * ALL, step * ALL)


@pytest.mark.parametrize(("distributed", "share"), [(True, 4), (False, 1)])
def test_optimizer_is_sharded_over_data_and_context_ranks(distributed, share):
    policy = PolicyConfig(micro_batch_tokens=100, context_parallel=2, distributed_optimizer=distributed)
    memory = trainer_memory(SHAPE, policy, world=4, micro_batches=1)  # CP 2 × DP 2
    assert memory.optimizer == 12 * ALL / share
    assert memory.gradients == 4 * ALL  # never sharded


def test_expert_optimizer_is_sharded_over_ranks_with_the_same_experts():
    """8 ranks, TP 2, EP 4: dense parameters on 4 data ranks, each expert on 2."""
    shape = dataclasses.replace(SHAPE, architecture="qwen3_moe", experts=4, experts_per_token=2, expert_ffn_hidden=6)
    policy = PolicyConfig(micro_batch_tokens=100, tensor_parallel=2, expert_parallel=4)
    memory = trainer_memory(shape, policy, world=8, micro_batches=1)
    # Dense: 4·((128 + 64)/2 + 16 + router 32) + 2·40 + 8; experts: one of 3·8·6 = 144 per layer.
    dense, experts = 4 * (96 + 16 + 32) + 88, 4 * 144
    assert memory.weights == 2 * (dense + experts)
    assert memory.optimizer == 12 * (dense / 4 + experts / 2)


def test_activations_saved_by_a_transformer_engine_layer():
    """100 tokens, bf16: two norms keep input and output, 4·800; q, out 800 each, k, v 400 each; fc1 2400, fc2 1200."""
    saved = layer_saved(SHAPE, PolicyConfig(micro_batch_tokens=100), "te")
    assert saved == {
        "norms": 2 * (4 * 800),
        "attention": 2 * (2 * 800 + 2 * 400) + 4 * 4 * 100,
        "mlp": 2 * (2400 + 1200),
    }


def test_tensor_and_sequence_parallelism_divide_activations():
    whole = layer_saved(SHAPE, PolicyConfig(micro_batch_tokens=100), "te")
    halved = layer_saved(SHAPE, PolicyConfig(micro_batch_tokens=100, tensor_parallel=2), "te")
    without = layer_saved(SHAPE, PolicyConfig(micro_batch_tokens=100, tensor_parallel=2, sequence_parallel=False), "te")
    assert halved == {part: size / 2 for part, size in whole.items()}
    assert without == {**halved, "norms": whole["norms"]}


def test_selective_frees_only_the_statistics_of_fused_attention():
    none = layer_saved(SHAPE, PolicyConfig(micro_batch_tokens=100), "te")
    selective = layer_saved(SHAPE, PolicyConfig(micro_batch_tokens=100, recompute="selective"), "te")
    assert none["attention"] - selective["attention"] == 4 * 4 * 100


def test_full_recompute_keeps_inputs_and_one_layer():
    policy = PolicyConfig(micro_batch_tokens=100, recompute="full")
    memory = trainer_memory(SHAPE, policy, world=1, micro_batches=1)
    # Four layer inputs of 800, and the scored hidden states.
    assert memory.activations == 2 * 800 * (4 + 1)
    one = sum(layer_saved(SHAPE, PolicyConfig(micro_batch_tokens=100), "te").values())
    assert memory.layer == one + 2 * (3 * 1200 + 2 * 800)


def test_head_memory_derived_by_hand():
    """100 tokens in chunks of 40, vocabulary 10, all in bf16: logits, a placeholder for the weight, hidden states."""
    policy = PolicyConfig(micro_batch_tokens=100, head_chunk_tokens=40)
    head = head_memory(SHAPE, policy)
    assert head.work == 2 * (40 * 10 + 10 * 8 + 100 * 8)
    assert head.kept_gradient == 0
    tied = head_memory(dataclasses.replace(SHAPE, tied_embeddings=True), policy)
    assert tied.work == 2 * (40 * 10 + 100 * 8)  # the embedding's own gradient stands in for the placeholder
    assert tied.kept_gradient == 10 * 8 * 2
    unset = head_memory(SHAPE, PolicyConfig(micro_batch_tokens=100))
    assert unset.work == 2 * (100 * 10 + 10 * 8 + 100 * 8)  # all tokens fit into one chunk


@pytest.mark.parametrize(
    ("pp", "vpp", "stage", "micro_batches", "expected"),
    [
        (4, 1, 0, 8, 4), (4, 1, 3, 8, 1), (4, 1, 0, 2, 2), (1, 1, 0, 9, 1),
        # Interleaved: 2(pp − stage − 1) + (vpp − 1)·pp + 1 chunks of 1/vpp.
        (4, 2, 0, 8, 11 / 2), (4, 2, 3, 8, 5 / 2), (2, 2, 0, 1, 1),
    ],
)  # fmt: skip
def test_micro_batches_in_flight(pp, vpp, stage, micro_batches, expected):
    assert in_flight(PolicyConfig(pipeline_parallel=pp, virtual_pipeline=vpp), stage, micro_batches) == expected


def test_only_the_last_stage_has_a_head():
    policy = PolicyConfig(micro_batch_tokens=100, pipeline_parallel=2)
    first, last = (stage_memory(SHAPE, policy, 2, 4, stage) for stage in (0, 1))
    assert first.head == 0 < last.head
    assert first.activations == 2 * last.activations - 2 * 1600  # two in flight against one; the head keeps 1600


def test_parts_add_up_to_the_total():
    memory = trainer_memory(SHAPE, PolicyConfig(micro_batch_tokens=100, pipeline_parallel=2), 8, 4)
    assert sum(memory.parts.values()) == pytest.approx(memory.total)


def test_prediction_agrees_with_an_h200_measurement():
    """1.5B, 8192 tokens, no optimizer, plain cross-entropy, TE: 26 GiB were measured.

    Our parts without optimizer, with bf16 instead of fp32 gradients, and the logits of all tokens (bf16 and fp32).
    """
    shape = published("Qwen2.5-1.5B")
    memory = trainer_memory(shape, PolicyConfig(micro_batch_tokens=8192), 1, 1)
    logits = 8192 * shape.vocab * (2 + 4)
    total = memory.weights + memory.gradients / 2 + memory.activations + logits
    assert total / GIB == pytest.approx(26, rel=0.15)


# ---- Megatron options ----

MOE = dataclasses.replace(SHAPE, architecture="qwen3_moe", experts=4, experts_per_token=2, expert_ffn_hidden=6)


def test_unfused_adam_has_temporaries():
    policy = PolicyConfig(micro_batch_tokens=128, optimizer={"fused": False})
    assert trainer_memory(SHAPE, policy, world=1, micro_batches=1, layers="local").step == 4 * ALL


def test_fp8_keeps_two_copies_of_the_matrices_and_saves_smaller_inputs():
    memory = one_gpu(fp8={"recipe": "blockwise"})
    assert memory.weights == 2 * ALL + 2 * 4 * (16 * 8 + 64 + 288)
    saved = layer_saved(SHAPE, PolicyConfig(micro_batch_tokens=128, fp8={"recipe": "blockwise"}), "te")
    assert saved["norms"] == 2 * 128 * 8 * (2 + 1)
    assert saved["mlp"] == 128 * 12 * (2 * 2 + 1)


def test_uneven_stages():
    policy = PolicyConfig(micro_batch_tokens=100, pipeline_parallel=2, first_stage_layers=3)
    first, last = (stage_memory(SHAPE, policy, 2, 1, stage) for stage in (0, 1))
    assert (first.weights, last.weights) == (2 * (3 * 496 + 80), 2 * (496 + 80 + 8))
    one = sum(layer_saved(SHAPE, policy, "te").values())
    assert first.activations == 3 * one


def test_shared_experts_are_split_and_get_more_tokens():
    """TP 2, ETP 2: each rank holds half of every expert, and gets the tokens of both ranks."""
    whole, split = (
        PolicyConfig(micro_batch_tokens=100, tensor_parallel=2, expert_tensor_parallel=etp) for etp in (1, 2)
    )
    difference = trainer_memory(MOE, whole, 2, 1).weights - trainer_memory(MOE, split, 2, 1).weights
    assert difference == 2 * 4 * 4 * 144 / 2
    routed = 50 * 2 * 1.25
    parts = [layer_saved(MOE, policy, "te")["mlp"] for policy in (whole, split)]
    assert parts[0] == routed * (8 + 3 * 6) * 2 + 50 * 4 * 4 * 2
    assert parts[1] == 2 * routed * (8 + 3 * 3) * 2 + 50 * 4 * 4 * 2


@pytest.mark.parametrize(
    ("modules", "part", "freed"),
    [(["mlp"], "mlp", 2 * 3 * 1200), (["mlp"], "norms", 2 * 800), (["layernorm"], "norms", 0),
     (["core_attn"], "attention", 4 * 4 * 100)],
)  # fmt: skip
def test_recomputed_modules_of_a_dense_layer_save_nothing(modules, part, freed):
    none = layer_saved(SHAPE, PolicyConfig(micro_batch_tokens=100), "te")
    policy = PolicyConfig(micro_batch_tokens=100, recompute="selective", recompute_modules=modules)
    assert none[part] - layer_saved(SHAPE, policy, "te")[part] == freed
    memory = trainer_memory(SHAPE, policy, world=1, micro_batches=1)
    freed_in_all = sum(none.values()) - sum(layer_saved(SHAPE, policy, "te").values())
    assert memory.layer == 2 * (3 * 1200 + 2 * 800) + freed_in_all  # for one layer at a time


def test_recomputed_modules_of_a_moe_layer():
    def saved(*modules):
        recompute = {"recompute": "selective", "recompute_modules": list(modules)} if modules else {}
        return layer_saved(MOE, PolicyConfig(micro_batch_tokens=100, **recompute), "te")

    routed = 100 * 2 * 1.25
    assert saved()["mlp"] - saved("moe_act")["mlp"] == routed * 6 * 2
    assert saved("moe")["mlp"] == saved("moe", "moe_act")["mlp"] == 0
    assert saved()["norms"] - saved("layernorm")["norms"] == 100 * 8 * 2


def test_full_recomputation_of_some_layers():
    policy = PolicyConfig(micro_batch_tokens=100, recompute="full", recompute_layers=3)
    memory = trainer_memory(SHAPE, policy, world=1, micro_batches=1)
    one = sum(layer_saved(SHAPE, PolicyConfig(micro_batch_tokens=100), "te").values())
    assert memory.activations == 2 * 800 * (3 + 1) + one


def test_key_value_heads_below_tensor_parallel_are_whole():
    policy = PolicyConfig(micro_batch_tokens=100, tensor_parallel=4)
    assert layer_saved(SHAPE, policy, "te")["attention"] == 2 * 100 * (2 * 2 + 2 * 2) + 4 * 100
