"""What must hold for every layout and length: more ranks never need more, longer never needs less."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_models import published

from megatron_dapo.config import Config
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.planner.engine import fleet_of, plan_engine
from megatron_dapo.planner.generation import generate
from megatron_dapo.planner.hardware import Cluster, find_gpu
from megatron_dapo.planner.memory import trainer_memory
from megatron_dapo.planner.parameters import trained_parameters
from megatron_dapo.planner.server_model import decode_model
from megatron_dapo.planner.timing import most_micro_batches, pass_time
from megatron_dapo.planner.workload import Workload

SHAPES = st.sampled_from(["Qwen2.5-7B", "Qwen2.5-32B", "Qwen3-8B", "Qwen3-30B-A3B"]).map(published)
POWER = st.sampled_from([1, 2, 4])
TOKENS = st.integers(1, 64).map(lambda n: n * 1024)
RECOMPUTE = st.sampled_from(["none", "selective", "full"])


def layout(tp=1, pp=1, cp=1, tokens=32768, **more):
    return PolicyConfig(
        tensor_parallel=tp, pipeline_parallel=pp, context_parallel=cp, micro_batch_tokens=tokens, **more
    )


@given(SHAPES, POWER, st.sampled_from([1, 2]), RECOMPUTE)
def test_more_tensor_parallelism_never_needs_more(shape, pp, cp, recompute):
    memories = [trainer_memory(shape, layout(tp, pp, cp, recompute=recompute), 64, 8) for tp in (1, 2, 4)]
    for less, more in pairwise(memories):
        assert more.weights <= less.weights
        assert more.gradients <= less.gradients
        assert more.total <= less.total


@given(SHAPES, POWER, POWER)
def test_more_pipeline_stages_never_need_more_static_memory(shape, tp, cp):
    memories = [trainer_memory(shape, layout(tp, pp, cp), 64, 8) for pp in (1, 2, 4)]
    for less, more in pairwise(memories):
        assert more.weights <= less.weights


@given(SHAPES, POWER, POWER, st.tuples(TOKENS, TOKENS), RECOMPUTE)
def test_longer_micro_batches_never_need_less(shape, tp, pp, tokens, recompute):
    short, long = (trainer_memory(shape, layout(tp, pp, tokens=n, recompute=recompute), 64, 8) for n in sorted(tokens))
    assert short.total <= long.total


@given(SHAPES, st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_recomputation_takes_the_time_of_what_it_computes_again(shape, tp, cp):
    """In units of a forward pass of the layers: full recomputation costs one, its parts add up to less."""
    cluster, work = Cluster(find_gpu("h100"), 64, 8, engine_gpus=0), Workload(512, 16, 16, 256, 5000, 2048, 20480)

    def seconds(train=True, **recompute):
        time = pass_time(shape, layout(tp, 1, cp, **recompute), cluster, work, 64, 0.5, train=train)
        return time.arithmetic + time.tensor + time.context + time.expert

    mlp = "moe" if shape.is_moe else "mlp"
    none, full, half = (
        seconds(),
        seconds(recompute="full"),
        seconds(recompute="full", recompute_layers=shape.layers // 2),
    )
    attention, experts, both, norms = (
        seconds(recompute="selective", recompute_modules=modules)
        for modules in (["core_attn"], [mlp], ["core_attn", mlp], ["layernorm"])
    )
    assert norms == none < attention < both < full and none < experts < both
    assert both - none == pytest.approx(attention - none + experts - none)
    assert half - none == pytest.approx((full - none) / 2)
    forward = seconds(train=False)
    assert 0.8 * forward < full - none < forward  # the head is no part of it


@given(SHAPES, POWER)
def test_gradients_in_bf16_are_reduced_in_less_time(shape, tp):
    """An update of 16 short samples: its backward pass hides little of the reduction."""
    cluster, work = Cluster(find_gpu("h100"), 64), Workload(16, 1, 1, 16, 16, 64, 64)
    fp32, bf16 = (
        pass_time(shape, layout(tp, gradient_reduction=kind), cluster, work, 64, 0.5, train=True).data
        for kind in ("fp32", "bf16")
    )
    assert 0.5 * fp32 < bf16 < fp32


@given(SHAPES, POWER, POWER, TOKENS)
def test_recomputation_never_needs_more_activations(shape, tp, pp, tokens):
    none, selective, full = (
        trainer_memory(shape, layout(tp, pp, tokens=tokens, recompute=mode), 64, 8).activations
        for mode in ("none", "selective", "full")
    )
    assert full <= selective <= none


@given(SHAPES, POWER, st.sampled_from([(16, 32), (16, 64), (32, 128)]))
def test_more_data_parallel_ranks_never_need_more_optimizer_memory(shape, tp, worlds):
    few, many = (trainer_memory(shape, layout(tp), world, 8) for world in worlds)
    assert many.optimizer < few.optimizer
    assert many.weights == few.weights


@given(SHAPES, st.integers(1, 512), st.integers(1, 512))
def test_a_decoding_step_grows_with_running_sequences_and_context(shape, a, b):
    decode = decode_model(shape, Cluster(find_gpu("h100"), 8), 1)
    few, many = sorted((a, b))
    assert decode.step(few, few * 2048) <= decode.step(many, many * 2048)
    assert decode.step(few, 2048) <= decode.step(few, 2049)


@settings(max_examples=40)
@given(SHAPES, st.integers(1, 5), st.floats(0.1, 1.0), st.booleans())
def test_time_falls_with_mfu_and_rises_with_length(shape, factor, mfu, train):
    cluster, policy = Cluster(find_gpu("h100"), 64), layout(4, 2)
    work = Workload.of(Config(), mean_response=1024)
    longer = replace(work, mean_response=1024 * factor)
    base = pass_time(shape, policy, cluster, work, 64, mfu, train).total
    assert pass_time(shape, policy, cluster, longer, 64, mfu, train).total >= base
    assert pass_time(shape, policy, cluster, work, 64, mfu / 2, train).total > base


@given(st.integers(1, 512), st.sampled_from([22528, 33792, 45056, 90112]))
def test_worst_case_micro_batches_hold_every_sample(samples, budget):
    work = replace(Workload.of(Config()), prompts=samples, samples_per_prompt=1, updates=1)
    count = most_micro_batches(layout(tokens=budget), work, world=1)
    assert count * (budget // work.longest) >= samples > (count - 1) * (budget // work.longest)


@settings(max_examples=5)
@given(st.floats(0.1, 0.9))
def test_keeping_fewer_groups_takes_longer(kept):
    shape, config, cluster = published("Qwen2.5-7B"), Config(), Cluster(find_gpu("h100"), 16)
    seconds = []
    for share in (kept, 1.0):
        work = replace(Workload.of(config, kept=share), prompts=64)
        fleet = fleet_of(shape, plan_engine(shape, config.rollout, cluster, work), config.rollout, cluster)
        seconds.append(generate(work, config.rollout.sampler, fleet).seconds)
    assert seconds[0] > seconds[1]


@given(SHAPES, POWER, st.sampled_from(["tensorwise", "blockwise"]))
def test_fp8_speeds_up_wide_layers_and_not_attention(shape, tp, recipe):
    cluster, work = Cluster(find_gpu("h100"), 64), Workload(64, 8, 4, 256, 3000, 1024, 8192)
    bf16, fp8 = (
        pass_time(shape, layout(tp, fp8={"recipe": kind}), cluster, work, 64, 0.65, train=True).arithmetic
        for kind in ("none", recipe)
    )
    assert bf16 / 1.66 < fp8 < bf16


@given(SHAPES, st.sampled_from([0.25, 0.5, 1.0]))
def test_an_offloaded_step_takes_longer(shape, share):
    cluster, work = Cluster(find_gpu("h100"), 64), Workload(64, 8, 4, 256, 3000, 1024, 8192)
    here, there = (
        pass_time(shape, layout(4, optimizer={"cpu_offload": part}), cluster, work, 64, 0.65, train=True).data
        for part in (0.0, share)
    )
    # 28 bytes of memory traffic for each parameter at 25 GB/s instead of 3.35 TB/s, on 16 data-parallel ranks.
    held = trained_parameters(shape, layout(4), 0).total / 16
    assert there - here == pytest.approx(share * held * (28 / 25e9 + 6 / 40e9 - 28 / 3.35e12), rel=0.01)


@given(st.integers(1, 4000), st.integers(1, 2000), st.floats(0.3, 1.5))
def test_attention_is_over_the_length_that_the_average_token_sees(mean, prompt, sigma):
    """E[L²] / E[L] is at least E[L], and equals it when all lengths are equal."""
    work = Workload(8, 8, 1, prompt, mean, 2048, 20480, sigma=sigma)
    equal = replace(work, sigma=0.0)
    assert equal.attended_length == pytest.approx(prompt + mean)
    assert prompt + mean < work.attended_length < 2048 + 20480


@given(st.sampled_from(["Qwen2.5-7B", "Qwen3-30B-A3B"]).map(published), st.sampled_from([1, 2, 4]))
def test_lora_needs_less_memory_and_time(shape, tp):
    plain, lora = layout(tp), layout(tp, lora={"rank": 16})
    whole, adapters = (trainer_memory(shape, policy, 8, 4, "local") for policy in (plain, lora))
    assert adapters.gradients + adapters.optimizer < 0.05 * (whole.gradients + whole.optimizer)
    assert whole.weights < adapters.weights < 1.05 * whole.weights
    cluster, work = Cluster(find_gpu("h100"), 8), Workload(64, 8, 4, 256, 3000, 1024, 8192)
    full, part = (pass_time(shape, p, cluster, work, 8, 0.65, train=True) for p in (plain, lora))
    assert 0.6 < part.arithmetic / full.arithmetic < 0.85


def test_a_pipeline_waits_for_its_largest_stage():
    """94 layers: ends of 11 and six stages of 12 take as long as 12 layers a stage; one less has the head."""
    shape = published("Qwen3-235B-A22B")
    cluster, work = Cluster(find_gpu("h100"), 64), Workload(64, 8, 1, 256, 3000, 1024, 8192)
    policy = layout(4, 8, first_stage_layers=11, last_stage_layers=11, expert_parallel=8)
    time = pass_time(shape, policy, cluster, work, 64, 0.65, train=True)
    more = pass_time(shape, layout(4, 2, expert_parallel=8), cluster, work, 64, 0.65, train=True)  # 47 layers, 4 × data
    assert time.arithmetic / more.arithmetic == pytest.approx(4 * 12 / 47, rel=0.08)
