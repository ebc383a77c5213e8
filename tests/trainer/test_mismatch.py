"""The mismatch of engine and trainer where the engine's log-probs are the old ones: the first update measures it."""

import pytest
from forked import records, run
from tiny_run import make_model, raw_config


@pytest.fixture(scope="module")
def mismatch(tmp_path_factory):
    """The metrics of a run's steps. From the second step on, samples are one weight version old."""
    folder = make_model(tmp_path_factory.mktemp("model"))

    def of(old_logprobs, mini_batch):
        run_dir = tmp_path_factory.mktemp("run")
        raw = raw_config(
            folder, run_dir, trainer__steps=3, trainer__old_logprobs=old_logprobs, rollout__max_staleness=1,
            trainer__mini_batch_prompts=mini_batch, rollout__weights={"in_flight": False},
            rollout__dynamic_sampling=False, trainer__gate={"enabled": False},
        )  # fmt: skip
        assert run(raw) == 0
        found = [metrics for _, kind, metrics in records(run_dir) if kind == "step"]
        return [{n: v for n, v in metrics.items() if "/mismatch" in n} for metrics in found]

    return of


def test_with_one_update_it_is_that_of_a_recomputed_pass(mismatch):
    ours, recomputed = mismatch("engine", 4), mismatch("recompute", 4)
    assert 0 < ours[0]["train/mismatch_mean"] < 1e-5  # the same weights: rounding
    for step in (1, 2):
        assert ours[step]["train/mismatch_mean"] > 1e-3
        assert ours[step] == pytest.approx(recomputed[step], rel=0.01)


def test_with_several_updates_it_is_that_of_the_first(mismatch):
    """The later ones would add what the step itself has changed."""
    fresh, stale, _ = mismatch("engine", 2)
    assert 0 < fresh["train/mismatch_max"] < 1e-4
    assert stale["train/mismatch_max"] > 1e-3
