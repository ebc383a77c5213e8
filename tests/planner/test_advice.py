"""Advice: every piece is accepted by the configuration and fits; what it must find."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from long_lists import ALL_CASES
from published_models import CONFIGS, published

from megatron_dapo.cli import main
from megatron_dapo.config import load_config, parse_config
from megatron_dapo.config.load import as_settings
from megatron_dapo.config.schema import check_model, check_world
from megatron_dapo.planner.advice import advise
from megatron_dapo.planner.assumptions import MARGIN
from megatron_dapo.planner.hardware import Cluster, find_gpu
from megatron_dapo.planner.plan import Planner, make_plan, task_of
from megatron_dapo.planner.report import layout_name
from megatron_dapo.planner.search import Task, candidates, rank
from megatron_dapo.planner.workload import Workload


def planned(raw, name, cluster, **estimates):
    """(configuration, plan with advice)."""
    config = parse_config(raw)
    work, shape = Workload.of(config, **estimates), published(name)
    task = task_of(config, shape, cluster, work, 0.65, "te")
    plan = make_plan(config, shape, cluster, work, 0.65)
    return config, task, plan, advise(config, plan, task)


POLICIES = st.fixed_dictionaries(
    {"tensor_parallel": st.sampled_from([1, 2, 8]), "recompute": st.sampled_from(["none", "full"])},
    optional={
        "pipeline_parallel": st.sampled_from([2, 4]), "context_parallel": st.just(2), "lora": st.just({"rank": 16}),
        "gradient_reduction": st.just("bf16"), "optimizer": st.just({"cpu_offload": 0.5}),
        "micro_batch_tokens": st.just(32768),
    },
)  # fmt: skip
ODD = st.sampled_from([
    {}, {"sequence_parallel": True, "tensor_parallel": 2}, {"cp_comm_type": "p2p", "context_parallel": 2},
    {"recompute": "selective", "recompute_modules": ["core_attn", "layernorm"]}, {"fp8": {"recipe": "blockwise"}},
    {"recompute": "full", "recompute_layers": 2}, {"tp_comm_overlap": True, "tensor_parallel": 4},
])  # fmt: skip
MODELS = st.sampled_from(["Qwen2.5-7B", "Qwen2.5-32B", "Qwen3-30B-A3B"])


@settings(max_examples=12 if ALL_CASES else 5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(MODELS, POLICIES, ODD, st.sampled_from([(8, 0), (24, 8), (64, 32)]), st.sampled_from(["disk", "distributed"]))
def test_every_piece_of_advice_is_accepted_and_fits(tmp_path_factory, name, policy, odd, gpus, transport):
    policy = {"micro_batch_tokens": 8192} | policy | odd
    if policy.get("fp8") or policy.get("tp_comm_overlap"):  # not with LoRA
        policy.pop("lora", None)
    raw = {
        "policy": policy, "trainer": {"prompts_per_step": 64, "mini_batch_prompts": 32},
        "rollout": {"samples_per_prompt": 8, "max_prompt_tokens": 1024, "max_response_tokens": 7168,
                    "weights": {"transport": transport}, "servers": {"tensor_parallel": 4}},
    }  # fmt: skip
    cluster = Cluster(find_gpu("h100"), gpus[0], 8, gpus[1])
    config, task, plan, advice = planned(raw, name, cluster)
    file = tmp_path_factory.mktemp("advice") / "run.yaml"
    file.write_text(json.dumps(raw))
    pieces = [plan.changes] if plan.changes else []
    pieces += [piece.changes for piece in advice]
    pieces += [candidate.changes(config.policy) for candidate in plan.ranking[:3]]
    for changes in pieces:
        changed = load_config(file, as_settings(changes))
        check_model(changed.policy, task.shape, task.work.longest)
        check_world(changed.policy, task.world)
        again = Planner(changed, task_of(changed, task.shape, cluster, task.work, 0.65, "te"))
        # A ranked layout is for the chosen engine; the others say which engine.
        assert again.step() is not None or changes in [c.changes(config.policy) for c in plan.ranking[:3]], changes


RL_235B = {
    "rollout": {"samples_per_prompt": 32, "max_prompt_tokens": 118, "max_response_tokens": 8074,
                "dynamic_sampling": False, "servers": {"tensor_parallel": 8}},
    "trainer": {"prompts_per_step": 16, "mini_batch_prompts": 16, "old_logprobs": "recompute"},
    "algorithm": {"kl": {"coefficient": 0.01}},
    "policy": {"micro_batch_tokens": 8192, "tensor_parallel": 4, "pipeline_parallel": 8, "expert_parallel": 16,
               "first_stage_layers": 11, "last_stage_layers": 11, "recompute": "full"},
}  # fmt: skip


def test_235b_with_uneven_stages():
    """NeMo-RL's run with 128 H100s that train. Megatron-Bridge's recipe (qwen3_235b_a22b_pretrain: TP4 PP16 CP2 EP8,
    embedding and loss count as layers: ends of 5) is among the first three; NeMo-RL's PP8, ends of 11, is found."""
    config = parse_config(RL_235B)
    cluster = Cluster(find_gpu("h100"), 256, 8, 128)
    task = Task(published("Qwen3-235B-A22B"), Workload.of(config, mean_response=5721), cluster, 0.65)
    ranking = rank(list(candidates(task, config.policy)))
    first = [(layout_name(c.policy, 128), c.policy.first_stage_layers, c.policy.last_stage_layers) for c in ranking[:3]]
    assert ("TP4 PP16 CP2 EP8", 5, 5) in first
    by_name = {layout_name(c.policy, 128): c for c in ranking}
    eight = by_name["TP4 PP8 EP16 DP4"].policy
    assert (eight.first_stage_layers, eight.last_stage_layers) == (11, 11)
    assert {c.policy.pipeline_parallel for c in ranking} >= {2, 4, 8, 16}
    assert all(c.memory.total <= (1 - MARGIN) * cluster.gpu.memory for c in ranking)


def test_a_slow_weight_sync_is_named():
    """235B over files: a large part of the step; the advice is the network, with packed experts."""
    config, _, plan, advice = planned(
        RL_235B, "Qwen3-235B-A22B", Cluster(find_gpu("h100"), 256, 8, 128), mean_response=5721
    )
    seconds = {phase.name: phase.seconds for phase in plan.phases}
    assert config.rollout.weights.transport == "disk" and seconds["weight sync"] > 0.3 * plan.step_seconds
    (piece,) = [piece for piece in advice if "rollout.weights.transport" in piece.changes]
    assert piece.changes == {"rollout.weights.transport": "distributed", "rollout.weights.pack_experts": True}
    assert plan.step_seconds - piece.seconds > 0.9 * seconds["weight sync"]


def test_the_command_prints_advice_band_and_totals(tmp_path, capsys):
    model = tmp_path / "Qwen2.5-32B"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIGS["Qwen2.5-32B"]))
    file = tmp_path / "run.yaml"
    raw = {
        "policy": {"model": str(model), "tensor_parallel": 8, "micro_batch_tokens": 22528, "recompute": "full"},
        "rollout": {"samples_per_prompt": 16, "max_prompt_tokens": 2048, "max_response_tokens": 20480,
                    "servers": {"tensor_parallel": 4}},
        "trainer": {"prompts_per_step": 512, "mini_batch_prompts": 32, "steps": 100},
        "data": {"path": "dapo-math-17k.parquet"},
    }  # fmt: skip
    file.write_text(json.dumps(raw))
    assert main(["plan", str(file), "--gpus", "128", "--engine-gpus", "64", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    low, high = record["likely_seconds"]
    assert low < record["step_seconds"] < high
    assert record["days"] == pytest.approx(100 * record["step_seconds"] / 86400)
    assert record["gpu_hours"] == pytest.approx(128 * 24 * record["days"])
    assert {"rollout.max_staleness": 1} in [piece["changes"] for piece in record["advice"]]
    assert any("typical for Qwen2.5-32B with dapo-math" in line for line in record["assumptions"])
    assert main(["plan", str(file), "--gpus", "128", "--engine-gpus", "64"]) == 0
    said = capsys.readouterr().out
    assert "What to change for time" in said and "GPU-hours" in said and "likely" in said


@pytest.mark.parametrize(("data", "response"), [("data/dapo-math-17k.parquet", 2700), ("data/other.jsonl", 5120)])
def test_typical_lengths_are_the_default(data, response):
    raw = {"policy": {"model": "models/Qwen2.5-32B"}, "data": {"path": data},
           "rollout": {"max_prompt_tokens": 2048, "max_response_tokens": 20480}}  # fmt: skip
    assert Workload.of(parse_config(raw)).mean_response == response
    assert Workload.of(parse_config(raw), mean_response=123).mean_response == 123
