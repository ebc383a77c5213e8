"""Trainer and engines that take turns on the same GPUs: the same run, and nobody has memory that is another's.

On the CPU nothing is short of memory, but everything else is as on a GPU: storages are emptied and filled again, and
whoever touches what is away fails.
"""

import re
import subprocess

import pytest
from forked import assert_same, at_call, records, run
from tiny_run import HERE, command, environment, raw_config, write_config

from megatron_dapo.config import check_config, parse_config
from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.embedded.engine import EmbeddedEngine
from megatron_dapo.policy.fork_ranks import run_ranks
from megatron_dapo.policy.policy import Policy
from megatron_dapo.trainer.loop import train

STEPS = 3


def config(folder, run_dir, **changes):
    raw = raw_config(folder, run_dir, trainer__steps=STEPS, evaluate__every=2, **changes)
    raw["evaluate"] |= {"data": {"path": str(folder / "problems.jsonl"), "template": "plain"}, "samples": 2}
    return raw


def bytes_on_device(policy):
    return sum(parameter.untyped_storage().nbytes() for parameter in policy._parameters())


def take_turns():
    """Makes the embedded engine one that shares the device, and checks at every call whose turn it is."""
    RolloutConfig.shares_gpus = property(lambda self: True)
    policies, holds = [], {"memory": None}  # only rank 0 has an engine
    init, generate, release = Policy.__init__, EmbeddedEngine.generate, EmbeddedEngine.release_memory
    update_policy, update_weights = Policy.update, EmbeddedEngine.update_weights

    def remember(self, *args):
        init(self, *args)
        policies.append(self)

    async def checked_generate(self, *args):
        assert holds["memory"], "the engine generates without its memory"
        assert not any(map(bytes_on_device, policies)), "the engine generates while the trainer has the device"
        return await generate(self, *args)

    async def checked_release(self):
        assert holds["memory"] is not False, "the engine is told twice"
        holds["memory"] = False
        await release(self)

    async def checked_weights(self, version, buckets):
        report = await update_weights(self, version, buckets)
        assert not any(map(bytes_on_device, policies)), "the KV cache comes back while the trainer has its weights"
        holds["memory"] = True
        return report

    def checked_update(self, *args):
        assert not holds["memory"] and bytes_on_device(self), "the trainer works without the device"
        return update_policy(self, *args)

    Policy.__init__, Policy.update = remember, checked_update
    EmbeddedEngine.generate, EmbeddedEngine.release_memory = checked_generate, checked_release
    EmbeddedEngine.update_weights = checked_weights


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder, run_dir = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("alone")
    assert run(config(folder, run_dir)) == 0
    return folder, run_dir


def test_taking_turns_changes_no_number(alone, tmp_path):
    assert run(config(alone[0], tmp_path), take_turns) == 0
    assert_same(tmp_path, alone, STEPS)


def test_a_run_that_takes_turns_resumes_exactly(alone, tmp_path):
    def killed_in_the_second_step():
        take_turns()
        at_call(Policy, "update", 4)()

    assert run(config(alone[0], tmp_path), killed_in_the_second_step) == -9
    assert run(config(alone[0], tmp_path), take_turns) == 0
    assert_same(tmp_path, alone, STEPS)


def rank(place, raw):
    take_turns()
    parsed = parse_config(raw)
    return train(parsed, check_config(parsed, place.world_size), place)


def test_all_ranks_take_turns(alone, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    raw = config(alone[0], tmp_path, policy__tensor_parallel=2)
    assert run_ranks(2, rank, raw) == [0, 0]
    for ours, theirs in zip(records(tmp_path), records(alone[1]), strict=True):
        assert ours[:2] == theirs[:2]
        for name in ("reward/mean", "rollout/length_mean"):
            assert ours[2].get(name) == theirs[2].get(name)
        if ours[1] == "step":
            assert ours[2]["train/loss"] == pytest.approx(theirs[2]["train/loss"], rel=1e-4, abs=1e-6)


def test_a_trainer_that_keeps_its_weights_is_found(alone, tmp_path, capfd):
    """The check above can fail: without offloading, the run ends with its message."""

    def forgetful():
        take_turns()
        Policy.offload_weights = lambda self: 0

    assert run(config(alone[0], tmp_path), forgetful) != 0
    assert "trainer has" in capfd.readouterr().err


def test_without_sharing_nothing_moves(alone, tmp_path):
    def refuse():
        Policy.offload_training_state = Policy.offload_weights = Policy.onload = None

    assert run(config(alone[0], tmp_path), refuse) == 0


SGLANG = HERE.parents[1] / ".venv-sglang-0.5.18" / "bin" / "python"


@pytest.mark.skipif(not SGLANG.exists(), reason="SGLang for the CPU is not installed: make sglang-cpu")
def test_a_real_server_takes_turns_with_two_ranks(tmp_path):
    """Three steps; the checkpoint after the second is the trainer's turn, so the same weights go over again."""
    raw = raw_config(
        tmp_path / "model", tmp_path / "run", trainer__steps=3, trainer__ranks=2, trainer__checkpoint={"every": 2},
        policy__tensor_parallel=2, rollout__engine="sglang", rollout__weights={"transport": "tensor"},
        rollout__servers={"device": "cpu", "dtype": "float32", "python": str(SGLANG), "share_gpus": True},
    )  # fmt: skip
    path = write_config(raw, tmp_path / "config.yaml")
    done = subprocess.run(command(path), env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    log = (tmp_path / "run" / "logs" / "trainer.log").read_text()
    assert re.findall(r"version (\d) acknowledged by 1 of 1", log) == ["0", "1", "2", "2", "3"]
    assert log.count("GPU to the engines") == 5 and log.count("GPU to the trainer") == 6
    gaps = [metrics["train/mismatch_max"] for _, kind, metrics in records(tmp_path / "run") if kind == "step"]
    assert len(gaps) == 3 and max(gaps) < 1e-2 and "trainer and engine agree" in log
