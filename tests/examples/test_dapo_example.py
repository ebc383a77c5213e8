"""examples/dapo.py trains as `train` does, and runs as it says."""

import importlib
import re
import sys
from functools import partial

import pytest
from forked import run, steps_of
from tiny_reward import even_characters
from tiny_run import make_model, raw_config
from workplace import ROOT

from megatron_dapo.data import arithmetic_problems, arithmetic_prompts, arithmetic_tokenizer
from megatron_dapo.processes.fork_ranks import run_ranks

TINY = {
    "steps": 5, "prompts_per_step": 4, "samples_per_prompt": 4, "mini_batch_prompts": 1, "max_response_tokens": 16,
    "lr": 5e-3, "overlong_cache": 8,
}  # fmt: skip
# The example pads where `train` packs, and its attention and output layer are Megatron's, so both round differently.
# The loss is a sum of terms of size 1 that nearly cancel: its error is absolute. Adam moves a weight that has hardly
# any gradient by the sign of its rounding error, which shows in the gradients of later updates.
TOLERANCE = {"train/loss": {"abs": 1e-6}, "train/entropy": {"rel": 1e-6}, "train/grad_norm": {"rel": 1e-5}}


@pytest.fixture
def dapo(monkeypatch):
    """The example as a module; `python examples/dapo.py` has the same import path."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("dapo")


def example_steps(rendezvous, dapo, settings):
    prompts = arithmetic_prompts(arithmetic_problems(2, 64, seed=1), arithmetic_tokenizer())  # those of raw_config
    return list(dapo.dapo(settings, prompts, even_characters))


def train_steps(folder, run_dir, mask_truncated):
    """`train` with the settings TINY."""
    raw = raw_config(
        folder, run_dir,
        policy__optimizer={"lr": TINY["lr"], "weight_decay": 0.0},
        rollout__samples_per_prompt=TINY["samples_per_prompt"],
        rollout__max_response_tokens=TINY["max_response_tokens"],
        rollout__embedded={"batch_tokens": 64},
        algorithm__overlong={"penalty": "soft", "cache_length": TINY["overlong_cache"], "filter": mask_truncated},
        trainer__steps=TINY["steps"], trainer__prompts_per_step=TINY["prompts_per_step"],
        trainer__mini_batch_prompts=TINY["mini_batch_prompts"], trainer__checkpoint={"every": 100},
    )  # fmt: skip
    assert run(raw) == 0
    return steps_of(run_dir)


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_metrics_of_five_steps_equal_those_of_train(mask_truncated, dapo, tmp_path):
    """Both sample the same tokens, so rewards and token counts are equal; the others agree to rounding."""
    folder = make_model(tmp_path / "model")
    theirs = train_steps(folder, tmp_path / "run", mask_truncated)
    (ours,) = run_ranks(1, example_steps, dapo, dapo.Settings(folder, mask_truncated=mask_truncated, **TINY))
    assert len(ours) == len(theirs) == 5
    for step, (example, train) in enumerate(zip(ours, theirs, strict=True)):
        assert example["reward/mean"] == train["reward/mean"], step
        assert example["train/tokens"] == train["train/tokens"], step
        for name, tolerance in TOLERANCE.items():  # missing from both if all responses of a step are masked
            assert (name in example) == (name in train), (step, name)
            assert example.get(name, 0.0) == pytest.approx(train.get(name, 0.0), **tolerance), (step, name)
    # Each of DAPO's changes made a difference in this run.
    assert sum(train.get("train/clip_fraction_high", 0) for train in theirs) > 0
    assert sum(train["rollout/samples_dropped"] for train in theirs) > 0
    assert any(train["rollout/length_mean"] < train["rollout/length_max"] for train in theirs)
    assert all(train["reward/penalty"] < 0 for train in theirs)
    assert all((train["rollout/masked_share"] > 0) == mask_truncated for train in theirs)


def run_script(rendezvous, dapo, folder):
    from quickstart import quickstart

    quickstart.PRETRAINING_BATCH = 32
    quickstart.make_model = partial(quickstart.make_model, updates=75)  # right in one response of twenty
    sys.argv = ["dapo.py", "--steps", "2", "--folder", str(folder)]
    dapo.main()


def test_script_pretrains_a_model_and_trains_it(dapo, tmp_path, capfd):
    run_ranks(1, run_script, dapo, tmp_path / "model")
    assert (tmp_path / "model" / "config.json").exists()
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("step")]
    assert len(lines) == 2
    for line in lines:
        assert re.search(r"reward/mean -?\d.*loss -?\d.*entropy \d.*grad_norm \d.*tokens \d", line), line


def test_first_file_to_read_is_short():
    assert len((ROOT / "examples" / "dapo.py").read_text().splitlines()) <= 300
