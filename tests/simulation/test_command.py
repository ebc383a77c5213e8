"""`megatron-dapo simulate`: tables, JSON, sweeps, the trace, and lengths from a run."""

import json
from pathlib import Path

import pytest
from published_models import CONFIGS

from megatron_dapo.cli import main
from megatron_dapo.observe.metrics_file import MetricsFile, Record

CONFIG = """
policy: {model: model, micro_batch_tokens: 8192}
rollout:
  samples_per_prompt: 4
  max_prompt_tokens: 256
  max_response_tokens: 1024
  sampler: {oversampling: 1, unfinished: finish, order: prompt}
  servers: {max_running: 32}
  weights: {transport: distributed}
trainer: {prompts_per_step: 16, mini_batch_prompts: 8}
slurm: {nodes: 2, engine_nodes: 1, gpus_per_node: 2}
"""
COMMAND = ["simulate", "run.yaml", "--steps", "3", "--gpu", "h200"]


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIGS["Qwen2.5-1.5B"]))
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)


def test_a_table_and_a_trace(capsys):
    assert main([*COMMAND, "--output", "out/simulation.json"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "2 servers × 32 running, 16 groups × 4 samples of 256 tokens" in said
    assert "as configured" in said and "out/simulation.json" in said
    events = json.loads(Path("out/simulation.json").read_text())["traceEvents"]
    tracks = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert list(tracks.values()) == [f"as configured: {name}" for name in ("trainer", "server 0", "server 1")]
    phases = [event for event in events if event["ph"] == "X"]
    assert [phase["name"] for phase in phases] == ["wait", "train", "sync"] * 3
    assert all(phase["dur"] >= 1 and tracks[phase["pid"]].endswith("trainer") for phase in phases)
    for server in (2, 3):
        of_server = [event for event in events if event["pid"] == server and event["ph"] == "C"]
        counts = [(event["ts"], event["args"]["running"]) for event in of_server]
        assert counts == sorted(counts) and max(running for _, running in counts) == 32 and counts[-1][1] == 0


def test_a_sweep_ranks_every_combination(capsys):
    sweep = ["--sweep", "rollout.sampler.unfinished=finish,continue", "--sweep", "engine_gpus=0,2"]
    assert main([*COMMAND, *sweep, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [item["setting"]["rollout.sampler.unfinished"] for item in found] == ["finish", "finish"] + ["continue"] * 2
    assert all(item["step_seconds"] > item["training_seconds"] for item in found)
    assert main([*COMMAND, *sweep[:2], "--sweep", "rollout.sampler.unfinished=drop", "--json"]) == 0
    again = [item["setting"]["rollout.sampler.unfinished"] for item in json.loads(capsys.readouterr().out)]
    assert again == ["finish", "continue", "drop"]
    # Colocated engines have four GPUs instead of two, but the trainer's state is handed over.
    colocated, split = found[0], found[1]
    assert split["collecting_seconds"] > colocated["collecting_seconds"]


def test_a_sweep_of_models_and_of_nodes_changes_the_numbers(tmp_path, capsys):
    """Engines with 2, 4 and 6 GPUs are one, two and three times as fast; 0.5 B parameters train faster than 1.5 B."""
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(CONFIGS["Qwen2.5-0.5B"]))

    def swept(name, *sweep):
        assert main([*COMMAND, "--json", *sweep]) == 0
        return [item[name] for item in json.loads(capsys.readouterr().out)]

    large, small = swept("training_seconds", "--sweep", "policy.model=model,small")
    assert small < 0.6 * large
    one, two, three = swept("limit_seconds", "--set", "slurm.nodes=4", "--sweep", "slurm.engine_nodes=1,2,3")
    assert one == pytest.approx(2 * two) and one == pytest.approx(3 * three)
    two, three = swept("training_seconds", "--sweep", "slurm.nodes=2,3")
    assert three < 0.7 * two
    assert main([*COMMAND, "--sweep", "policy.model=Qwen2.5-0.5B", "--sweep", "rollout.max_staleness=0,1"]) == 0
    assert capsys.readouterr().err.count("is not here") == 1


def test_a_critic_is_trained_beside_the_next_batch_of_engines_apart(capsys):
    sweep = ["--set", "algorithm.advantage=gae", "--sweep", "rollout.max_staleness=0,1", "--sweep", "engine_gpus=0,2"]
    assert main([*COMMAND, *sweep, "--json"]) == 0
    colocated, apart, *overlapping = json.loads(capsys.readouterr().out)
    assert apart["critic_seconds"] > 0 == colocated["critic_seconds"]
    assert all(item.get("critic_seconds", 0) == 0 for item in overlapping)
    assert main([*COMMAND, *sweep[:2], "--output", "simulation.json"]) == 0
    assert "s beside the next batch" in " ".join(capsys.readouterr().out.split())
    events = json.loads(Path("simulation.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert names[:5] == ["wait", "train", "sync", "critic", "wait"] and names.count("critic") == 2


def test_impossible_settings_are_named(capsys):
    assert main([*COMMAND, "--sweep", "policy.tensor_parallel=1,3,4"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "tensor_parallel 3: policy.tensor_parallel is 3, but the model has" in said
    assert "tensor_parallel 4: 2 ranks cannot hold" in said
    recomputed = ["--set", "policy.recompute=selective", "--sweep", "policy.recompute_modules=[mlp],[nothing]"]
    assert main([*COMMAND, *recomputed]) == 0
    said = capsys.readouterr().out
    assert "[mlp]" in said and "recompute_modules [nothing]: --set" in said  # not a style of the table
    assert main([*COMMAND, "--sweep", "policy.tensor_parallel"]) == 2
    assert "expected KEY=VALUE" in capsys.readouterr().err
    assert main([*COMMAND, "--sweep", "engine_gpus=1,all"]) == 2
    assert "expected numbers of GPUs" in capsys.readouterr().err
    assert main([*COMMAND, "--kept", "0.0001"]) == 2
    assert "0 of 16 groups were kept" in capsys.readouterr().err
    assert main([*COMMAND, "--set", "rollout.engine=embedded"]) == 2
    assert "only SGLang servers are simulated" in capsys.readouterr().err
    assert main([*COMMAND, "--set", "rollout.servers.tensor_parallel=3"]) == 2
    assert "rollout.servers.tensor_parallel is 3: it must divide" in capsys.readouterr().err
    assert main([*COMMAND, "--mfu", "0"]) == 2
    assert "--mfu is 0.0" in capsys.readouterr().err
    assert main([*COMMAND, "--from", "nowhere"]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_lengths_and_yield_of_a_run(tmp_path, capsys):
    file = MetricsFile(tmp_path / "old" / "metrics.jsonl")
    for step in range(8):  # the last five count
        late = step >= 3
        file.append(
            Record(step, "step", {
                "rollout/groups_kept": 16, "rollout/dropped/all right": 48 if late else 0,
                "rollout/length_trained": 400 if late else 100, "rollout/length_dropped": 200 if late else 100,
            })
        )  # fmt: skip
    file.close()
    assert main([*COMMAND, "--from", "old"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "samples of 250 tokens" in said and "25% kept" in said
