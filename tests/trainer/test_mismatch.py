"""The mismatch of engine and trainer where the engine's log-probs are the old ones: the first update measures it."""

import pytest
from forked import records, run, run_straight, steps_of
from tiny_run import make_model, raw_config

from megatron_dapo.engines.embedded.engine import EmbeddedEngine
from megatron_dapo.weights.verify import verify


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
        found = steps_of(run_dir)
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


# ---- the gate watches every step ----

BATCH = 16  # responses of a step


def config(folder, run_dir, old_logprobs="recompute"):
    return raw_config(
        folder, run_dir, rollout__dynamic_sampling=False, trainer__old_logprobs=old_logprobs,
        trainer__mini_batch_prompts=4, trainer__max_skipped_updates=1,
    )  # fmt: skip


def bad_engine(first, last):
    """From response `first` to `last` of this process the engine's log-probs are not those of its weights."""

    def plant():
        original, made = EmbeddedEngine.generate, 0

        async def generate(self, *request):
            nonlocal made
            made += 1
            bad, completion = first <= made <= last, await original(self, *request)
            completion.logprobs = completion.logprobs - 3 if bad else completion.logprobs
            return completion

        EmbeddedEngine.generate = generate

    return plant


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return run_straight(config, tmp_path_factory)


def trained(run_dir):
    return [
        {name: value for name, value in metrics.items() if name.startswith(("train/", "reward/"))}
        for _, kind, metrics in records(run_dir) if kind == "step"
    ]  # fmt: skip


def assert_trained_like(run_dir, straight):
    folder, expected = straight
    assert trained(run_dir) == trained(expected)
    assert verify(*(d / "checkpoints" / "step_4" for d in (run_dir, expected)), reference=folder).same


def test_a_bad_batch_is_sampled_again_and_the_run_is_the_same(straight, tmp_path, capfd):
    raw = config(straight[0], tmp_path)
    raw["observe"]["console"] = "plain"
    assert run(raw, bad_engine(2 * BATCH + 1, 3 * BATCH)) == 0
    assert "the batch of step 3 is sampled again: trainer and engine disagree" in "".join(capfd.readouterr())
    assert_trained_like(tmp_path, straight)


def test_an_engine_that_stays_bad_ends_the_run_and_its_batches_are_not_saved(straight, tmp_path, capfd):
    raw = config(straight[0], tmp_path)
    assert run(raw, bad_engine(2 * BATCH + 1, 10**9)) == 1
    assert "the gate rejected 3 batches of step 3" in capfd.readouterr().err
    assert run(raw) == 0
    assert_trained_like(tmp_path, straight)


def test_a_bad_batch_is_skipped_where_the_first_update_measures_the_mismatch(straight, tmp_path, capfd):
    raw = config(straight[0], tmp_path, old_logprobs="engine")
    assert run(raw, bad_engine(2 * BATCH + 1, 3 * BATCH)) == 0
    assert [metrics["train/update_skipped"] for metrics in trained(tmp_path)] == [0, 0, 1, 0]
    raw["trainer"] |= {"run_dir": str(tmp_path / "other")}
    assert run(raw, bad_engine(2 * BATCH + 1, 10**9)) == 1
    assert "2 updates in a row were skipped" in capfd.readouterr().err
