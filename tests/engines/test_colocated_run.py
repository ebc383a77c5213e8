"""A training run whose ranks share their nodes with real SGLang servers."""

import os
import re
import shutil

from forked import records
from installed_sglang import API_KEY_VARIABLE
from subject import run, send_first_weights
from tiny_run import environment, raw_config

from megatron_dapo.config import check_config, parse_config
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.trainer.loop import train

STEPS = 3


def rank_of_its_own_node(rendezvous, raw):
    os.environ["SLURM_NODEID"] = str(rendezvous.rank)
    parsed = parse_config(raw)
    return train(parsed, check_config(parsed, rendezvous.world_size), rendezvous)


def test_real_servers_are_colocated_with_the_ranks_of_two_nodes(two_servers, tmp_path, monkeypatch):
    """Three steps, with a checkpoint after the second and at the end. Each server gets its weights from the rank on its
    own node; tensor-parallel halves of every tensor cross the nodes first."""
    model = shutil.copytree(two_servers[0].directory, tmp_path / "model")
    raw = raw_config(
        model, tmp_path / "run", trainer__steps=STEPS, trainer__ranks=2, trainer__checkpoint={"every": 2},
        policy__tensor_parallel=2, rollout__engine="sglang",
        rollout__weights={"transport": "tensor", "keep_snapshot": False},
        rollout__servers={
            "device": "cpu", "dtype": "float32", "api_key_env": API_KEY_VARIABLE, "share_gpus": True,
            "urls": [server.process.url for server in two_servers],
        },
    )  # fmt: skip
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    try:
        assert run_ranks(2, rank_of_its_own_node, raw, timeout=240) == [0, 0]
    finally:
        for server in two_servers:
            server.version = STEPS
            run(send_first_weights(server))
    log = (tmp_path / "run" / "logs" / "trainer.log").read_text()
    assert re.findall(r"version (\d) acknowledged by 2 of 2", log) == ["0", "1", "2", "3"]
    assert log.count("GPU to the engines") == 5 and log.count("GPU to the trainer") == 4
    gaps = [metrics["train/mismatch_max"] for _, kind, metrics in records(tmp_path / "run") if kind == "step"]
    assert len(gaps) == STEPS and max(gaps) < 1e-2 and "trainer and engine agree" in log
