"""`explain RUN STEP SAMPLE`: sums recomputed in fp64 from samples/ equal metrics.jsonl; recording changes no weight."""

import json

import numpy as np
import pytest
from forked import assert_same, run, run_in_ranks, run_straight
from long_lists import some
from tiny_run import raw_config

from megatron_dapo.cli import main
from megatron_dapo.config import parse_config
from megatron_dapo.data import arithmetic_tokenizer
from megatron_dapo.observe import transcripts
from megatron_dapo.policy.batch import TrainBatch
from megatron_dapo.trainer.explain import explain_step, recorded_arrays
from megatron_dapo.types import FinishReason, Group, Prompt, Sample, StepBatch, as_logprobs, as_tokens

ALL = {"observe__samples_every": 1, "observe__samples_groups": 0, "observe__samples_responses": 0}
RECORD = ALL | {"observe__samples_tokens": True, "trainer__steps": 2}
OPTIONS = {
    "dapo": {},
    "engine log-probs": {"trainer__old_logprobs": "engine"},
    "sequence means": {"algorithm__aggregation": "seq-mean-token-mean"},
    "whole sequences": {"algorithm__objective": "gspo", "algorithm__kl": {"coefficient": 0.1}},
    "off-policy masks": {
        "algorithm__off_policy": {"importance_weight": "token", "token_mask": [0.99999999, 1.0000001]},
        "algorithm__overlong": {"filter": True},
        "algorithm__entropy_coefficient": 0.01,
    },
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The same run without a record of its tokens."""
    return run_straight(lambda folder, run_dir: raw_config(folder, run_dir, trainer__steps=2), tmp_path_factory)


@pytest.mark.parametrize("option", OPTIONS)
def test_sums_equal_the_metrics_of_the_run(option, straight, tmp_path, capsys):
    assert run(raw_config(straight[0], tmp_path, **RECORD, **OPTIONS[option])) == 0
    for step in (1, 2):
        found = explain_step(tmp_path, step)
        assert found.differences == {} and found.compared >= 12 and "train/loss" in found.metrics
        arrays = transcripts.read_arrays(tmp_path / "samples", step)
        assert len(found.values["loss"]) == arrays["response_lengths"].sum() > 0
        active = found.values["masked"] == ""
        assert not found.values["loss"][~active].any()
        assert (active <= arrays["loss_mask"]).all()
        if option == "off-policy masks":
            assert {"truncated", "token mask"} & set(found.values["masked"][~active])
    assert main(["explain", str(tmp_path), "2", "3"]) == 0
    said = capsys.readouterr().out
    own = int(arrays["response_lengths"][3])
    assert f"{found.compared} metrics, recomputed in fp64, equal those of metrics.jsonl to 1e-09" in said
    assert len([line for line in said.splitlines() if line.split()[:1] and line.split()[0].isdigit()]) >= own
    if option == "dapo":
        records = (tmp_path / "metrics.jsonl").read_text()
        (tmp_path / "metrics.jsonl").write_text(records.replace('{"step": 2, "kind": "step"', "{"))
        assert main(["explain", str(tmp_path), "2", "3"]) == 0
        assert "metrics.jsonl has no record of step 2 to compare with." in capsys.readouterr().out
        (tmp_path / "metrics.jsonl").write_text(records)
        _without_and_with_a_planted_error(straight, tmp_path)


def _without_and_with_a_planted_error(straight, run_dir):
    """Weights are bitwise those of the run without a record; metrics too, up to fp32. A wrong number is noticed."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    plain = [json.loads(line) for line in (straight[1] / "metrics.jsonl").read_text().splitlines()]
    for a, b in zip(lines, plain, strict=True):
        names = [name for name in a["metrics"] if name.startswith("train/") and "second" not in name]
        assert [a["metrics"][n] for n in names] == pytest.approx([b["metrics"][n] for n in names], rel=1e-5, abs=1e-7)
    (run_dir / "metrics.jsonl").write_text((straight[1] / "metrics.jsonl").read_text())
    assert_same(run_dir, straight, 2)
    assert explain_step(run_dir, 1).differences, "fp32 sums are not equal to 1e-9: the comparison is sharp"


LAYOUTS = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data")  # the first has all tokens on each rank


@pytest.mark.parametrize("layout", some(LAYOUTS, *LAYOUTS[1:]))
def test_ranks_gather_their_tokens(layout, straight, tmp_path):
    options = {} if layout == "data" else {f"policy__{layout}": 2}
    assert run_in_ranks(raw_config(straight[0], tmp_path, **RECORD, **options)) == [0, 0]
    assert explain_step(tmp_path, 2).differences == {}


def test_what_is_not_recorded_is_said(straight, capsys):
    assert main(["explain", str(straight[1]), "1", "0"]) == 2
    assert "set observe.samples_tokens=true" in capsys.readouterr().err


def test_a_step_that_uses_a_part_of_the_vocabulary_has_its_pieces(straight):
    sample = Sample("p", 0, as_tokens([3]), as_tokens([5, 4]), as_logprobs([0, 0]), FinishReason.STOP)
    source = StepBatch(1, [Group(Prompt("p", "", as_tokens([3])), [sample])])
    batch, scores = TrainBatch.from_samples([sample], [1.0], [True]), np.zeros((2, 2), np.float32)
    config = parse_config(raw_config(*straight))
    shown = transcripts.token_values(recorded_arrays(batch, [1], [scores], source, config), 0)
    assert shown["text"] == [arithmetic_tokenizer().decode([token]) for token in (5, 4)]
