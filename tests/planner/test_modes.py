"""`megatron-dapo plan --compare`: ways to divide the GPUs."""

import json

import pytest
from published_models import CONFIGS, published

from megatron_dapo.cli import main
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.config.rollout import WeightTransportConfig
from megatron_dapo.planner.hardware import Cluster, find_gpu
from megatron_dapo.planner.sync import sync_time

RUN = {
    "rollout": {"samples_per_prompt": 4, "max_prompt_tokens": 256, "max_response_tokens": 2048},
    "trainer": {"prompts_per_step": 32, "mini_batch_prompts": 8},
}


@pytest.fixture
def command(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIGS["Qwen2.5-1.5B"]))
    policy = {"model": str(tmp_path / "model"), "micro_batch_tokens": 4096}
    (tmp_path / "run.yaml").write_text(json.dumps({**RUN, "policy": policy}))
    return ["plan", str(tmp_path / "run.yaml"), "--gpus", "4", "--compare", "--top", "50"]


def test_without_servers_those_of_sglang_are_compared(command, capsys):
    assert main([*command, "--json", "--set", "rollout.engine=embedded"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 7


@pytest.mark.parametrize("advantage", ["group-std", "gae"])
def test_every_division_is_ranked(advantage, command, capsys):
    """With a critic, too, whose updates are made while engines with GPUs of their own generate the next batch."""
    assert main([*command, "--json", "--set", f"algorithm.advantage={advantage}"]) == 0
    modes = json.loads(capsys.readouterr().out)
    seconds = [mode["seconds"] for mode in modes]
    assert seconds == sorted(seconds)
    assert {(mode["engine_gpus"], mode["staleness"]) for mode in modes} == {(0, 0)} | {
        (gpus, staleness) for gpus in (1, 2, 3) for staleness in (0, 1)
    }
    for mode in modes:
        phases, total = mode["phases"], mode["seconds"]
        if mode["staleness"]:  # the longer side, and the weight update
            training = sum(phases.values()) - phases["generation"] - phases["weight sync"]
            assert total == pytest.approx(max(phases["generation"], training) + phases["weight sync"])
        else:
            hidden = min(phases["generation"], phases["critic"]) if advantage == "gae" and mode["engine_gpus"] else 0
            assert total == pytest.approx(sum(phases.values()) - hidden)
    assert all(("values" in mode["phases"]) == ("critic" in mode["phases"]) == (advantage == "gae") for mode in modes)


def test_the_table_names_the_settings(command, capsys):
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "colocated" in said and "3 GPUs serve" in said and "best TP and max_running" in said
    assert "disk to colocated engines" in said and "disk to separate engines" in said


def test_no_division_fits(command, capsys):
    assert main([*command, "--gpu-memory", "8"]) == 1
    assert "No division of 4 × h100 between trainer and engines fits" in capsys.readouterr().out


def test_every_row_is_priced_with_a_transport_that_works_for_it(command, capsys):
    """NCCL refuses two ranks on one GPU, so colocated engines get tensors. CUDA IPC stays in a node."""

    def rows(transport, gpus, **weights):
        words = [f"rollout.weights.{key}={value}" for key, value in ({"transport": transport} | weights).items()]
        assert main([*command, "--gpus", f"{gpus}", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    for given in ("tensor", "distributed"):
        found = rows(given, 16, keep_snapshot="false")
        assert {row["engine_gpus"]: row["transport"] for row in found} == {0: "tensor", 8: "distributed"}
        for row in found:
            weights = WeightTransportConfig(transport=row["transport"], keep_snapshot=False)
            cluster = Cluster(find_gpu("h100"), 16, 8, row["engine_gpus"])
            nodes, size = (16 - row["engine_gpus"]) // 8, row["server_tensor_parallel"]
            expected = sync_time(published("Qwen2.5-1.5B"), PolicyConfig(), weights, cluster, nodes, size)
            assert row["phases"]["weight sync"] == pytest.approx(expected.total)
    # Across nodes no rank has all weights to keep. With gloo, and in a node, the configured transport works.
    kept, dropped = (rows("distributed", 16, keep_snapshot=keep) for keep in ("true", "false"))
    assert [row["phases"] for row in kept if not row["engine_gpus"]] == [
        row["phases"] for row in dropped if not row["engine_gpus"]
    ]
    assert {row["transport"] for row in rows("distributed", 4, backend="gloo")} == {"distributed"}
    assert {row["transport"] for row in rows("tensor", 4)} == {"tensor"}
    assert {row["transport"] for row in rows("disk", 4)} == {"disk"}
