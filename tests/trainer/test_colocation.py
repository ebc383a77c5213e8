"""Colocated trainer and engines: the same run as without, and no side uses memory that the other one holds.

On a CPU memory is not scarce, but everything else is as on a GPU: storages are emptied and filled again, and any use of
offloaded memory fails.
"""

from functools import partial

import pytest
from forked import assert_same, at_point, records, run, run_in_ranks, run_straight
from tiny_run import evaluated_config

from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.embedded.engine import EmbeddedEngine
from megatron_dapo.engines.protocol import WeightUpdateError
from megatron_dapo.errors import EngineError
from megatron_dapo.policy.policy import Policy

STEPS = 3


config = partial(evaluated_config, steps=STEPS)


def bytes_on_device(policy):
    return sum(parameter.untyped_storage().nbytes() for parameter in policy._parameters())


engine_has = {"weights": None, "kv_cache": None}  # None: unknown, or another rank's engine


def colocate():
    """Makes the embedded engine one that shares the device, and checks at every call who holds its memory."""
    RolloutConfig.shares_gpus = property(lambda self: True)
    policies = []
    init, update = Policy.__init__, Policy.update
    generate, release = EmbeddedEngine.generate, EmbeddedEngine.release_memory
    load, serve = EmbeddedEngine.load_weights, EmbeddedEngine.serve_weights

    def remember(self, *args):
        init(self, *args)
        policies.append(self)

    async def checked_generate(self, *args):
        assert engine_has["kv_cache"], "the engine generates without its memory"
        assert not any(map(bytes_on_device, policies)), "the engine generates while the trainer has the device"
        return await generate(self, *args)

    async def checked_release(self):
        assert engine_has["kv_cache"] is not False, "the engine is told to release twice"
        engine_has.update(weights=False, kv_cache=False)
        await release(self)

    async def checked_load(self, version, buckets):
        assert all(map(bytes_on_device, policies)), "the trainer sends weights that it has offloaded"
        assert not engine_has["kv_cache"], "the KV cache is on the device while weights are sent"
        await load(self, version, buckets)
        engine_has["weights"] = True

    async def checked_serve(self, version):
        assert engine_has["weights"], "the engine serves without weights"
        assert not any(map(bytes_on_device, policies)), "the KV cache is allocated while the trainer has its weights"
        engine_has["kv_cache"] = True
        return await serve(self, version)

    def checked_update(self, *args, **options):
        assert not engine_has["weights"] and not engine_has["kv_cache"], "the engine has memory while the trainer works"
        assert bytes_on_device(self), "the trainer works without its weights"
        return update(self, *args, **options)

    Policy.__init__, Policy.update = remember, checked_update
    EmbeddedEngine.generate, EmbeddedEngine.release_memory = checked_generate, checked_release
    EmbeddedEngine.load_weights, EmbeddedEngine.serve_weights = checked_load, checked_serve


def colocated_and(plant):
    def before():
        colocate()
        plant()

    return before


@pytest.fixture(scope="module")
def separate(tmp_path_factory):
    """The same run with memory of its own for everybody."""
    return run_straight(config, tmp_path_factory)


def test_colocation_changes_no_number(separate, tmp_path):
    assert run(config(separate[0], tmp_path), colocate) == 0
    assert_same(tmp_path, separate, STEPS)
    log = (tmp_path / "logs" / "trainer.log").read_text()
    assert log.count("weights: ") == STEPS + 1  # a save needs no second sync


def test_killed_colocated_run_resumes_exactly(separate, tmp_path):
    assert run(config(separate[0], tmp_path), colocated_and(at_point("loop/before_update", 4))) == -9
    assert run(config(separate[0], tmp_path), colocate) == 0
    assert_same(tmp_path, separate, STEPS)


def fail_twice(name):
    """The engine's method fails at its second and third call, as an engine does whose servers are restarting."""
    method, calls = getattr(EmbeddedEngine, name), []

    async def failing(self, *args):
        calls.append(1)
        if len(calls) in (2, 3):
            engine_has.update(weights=None, kv_cache=None)
            raise WeightUpdateError("planted: no server took the weights")
        return await method(self, *args)

    setattr(EmbeddedEngine, name, failing)


@pytest.mark.parametrize("half", ["load_weights", "serve_weights"])
def test_weights_are_sent_again_when_no_engine_takes_them(half, separate, tmp_path):
    raw = config(separate[0], tmp_path)
    assert run(raw, colocated_and(lambda: fail_twice(half))) == 0
    assert_same(tmp_path, separate, STEPS)
    warnings = (tmp_path / "logs" / "warnings.log").read_text()
    assert "weight sync, attempt 1 of 3" in warnings and "weight sync, attempt 2 of 3" in warnings


def never_release():
    """From the second hand-over on the engine cannot release its memory, as one whose servers do not respond."""
    release, calls = EmbeddedEngine.release_memory, []

    async def failing(self):
        calls.append(1)
        if len(calls) > 2:
            raise EngineError("planted: the server does not release its memory")
        await release(self)

    EmbeddedEngine.release_memory = failing


def test_a_run_whose_engine_keeps_its_memory_closes_it_and_saves(separate, tmp_path, capfd):
    """The batch that was sampled is in the checkpoint: nothing is sampled twice."""
    assert run(config(separate[0], tmp_path), colocated_and(never_release)) == 1
    said = capfd.readouterr().err
    assert "waiting until the engines release their GPU memory" in said and "does not release its memory" in said
    assert f"Saved first: {tmp_path / 'checkpoints' / 'step_1+0'};" in said
    assert "closing the engines instead" in (tmp_path / "logs" / "trainer.log").read_text()
    assert run(config(separate[0], tmp_path), colocate) == 0
    assert_same(tmp_path, separate, STEPS)


def test_all_ranks_offload_before_the_engine_takes_memory(separate, tmp_path):
    raw = config(separate[0], tmp_path, policy__tensor_parallel=2)
    assert run_in_ranks(raw, lambda _: colocate()) == [0, 0]
    for ours, theirs in zip(records(tmp_path), records(separate[1]), strict=True):
        assert ours[:2] == theirs[:2]
        for name in ("reward/mean", "rollout/length_mean"):
            assert ours[2].get(name) == theirs[2].get(name)
        if ours[1] == "step":
            assert ours[2]["train/loss"] == pytest.approx(theirs[2]["train/loss"], rel=1e-4, abs=1e-6)


def test_trainer_that_keeps_its_weights_is_found(separate, tmp_path, capfd):
    """The checks above can fail: without offloading, the run ends with their message."""

    def forgetful():
        Policy.offload_weights = lambda self: 0

    assert run(config(separate[0], tmp_path), colocated_and(forgetful)) != 0
    assert "trainer has" in capfd.readouterr().err


def test_nothing_is_offloaded_without_colocation(separate, tmp_path):
    def refuse():
        Policy.offload_training_state = Policy.offload_weights = Policy.onload = None

    assert run(config(separate[0], tmp_path), refuse) == 0
