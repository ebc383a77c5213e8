"""The queue of batches: admission by weight version, order, interruption, errors; with the sampler on a virtual clock,
staleness and the ledger."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Prompts, SimulatedEngine, assert_whole, coin_grader, rollout, run_virtually, through_json

from megatron_dapo.rollout.sampler import Sampler
from megatron_dapo.trainer.rollout_driver import BatchQueue
from megatron_dapo.types import StepBatch


class Engines:
    """Collects a batch per `finish` call; notes the version at which each batch was started."""

    def __init__(self, max_staleness):
        self.version, self.started, self.interrupted = 0, {}, []
        self.gates: dict[int, asyncio.Future] = {}
        self.queue = BatchQueue(self.collect, lambda: self.version, max_staleness)

    async def collect(self, step):
        self.started.setdefault(step, self.version)
        self.gates[step] = asyncio.get_running_loop().create_future()
        try:
            await self.gates[step]
        except asyncio.CancelledError:
            self.interrupted.append(step)
            raise
        return StepBatch(step, [])

    async def finish(self, step):
        self.gates[step].set_result(None)
        await settle()

    async def serve(self, version):
        self.version = version
        self.queue.notify()
        await settle()


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
async def test_a_batch_starts_when_its_oldest_token_cannot_become_too_old(max_staleness):
    """Batch N is trained at version N. As fast as possible, it starts at version N − max_staleness, not earlier."""
    engines = Engines(max_staleness)
    engines.queue.run_to(7)
    await settle()
    for version in range(8):
        for step in range(8):
            if step in engines.gates and not engines.gates[step].done():
                await engines.finish(step)
        assert max(engines.started) == min(7, version + max_staleness)
        assert engines.queue.has(version)
        await engines.serve(version + 1)
    assert engines.started == {step: max(0, step - max_staleness) for step in range(8)}


async def test_weights_that_change_during_a_batch_do_not_end_it():
    engines = Engines(2)
    engines.queue.run_to(5)
    await settle()
    await engines.serve(1)
    await engines.serve(2)
    assert engines.interrupted == [] and list(engines.started) == [0]
    await engines.finish(0)
    assert engines.started == {0: 0, 1: 2}


async def test_a_waiting_trainer_gets_its_batch_and_it_stays_until_removed():
    engines = Engines(1)
    waiting = asyncio.ensure_future(engines.queue.get(1))
    engines.queue.run_to(1)
    await settle()
    await engines.finish(0)
    assert not waiting.done()
    await engines.finish(1)
    assert (await waiting).step == 1
    assert [batch["step"] for batch in engines.queue.state()] == [0, 1]
    engines.queue.remove(0)
    assert [batch["step"] for batch in engines.queue.state()] == [1]
    await engines.queue.idle()


async def test_an_interrupted_batch_is_collected_again_and_complete_ones_stay():
    engines = Engines(4)
    engines.queue.run_to(4)
    await settle()
    await engines.finish(0)
    await engines.queue.interrupt()
    assert engines.interrupted == [1] and engines.queue._task is None
    await engines.queue.interrupt()  # nothing runs: nothing happens
    saved = engines.queue.state()
    engines.queue.run_to(0)  # never less than was asked for
    await settle()
    await engines.finish(1)
    assert engines.queue.has(1)
    for state, step in ((saved, 1), ([], 3)):  # the trainer has the batches of earlier steps
        resumed = Engines(4)
        resumed.queue.restore(state, step)
        resumed.queue.run_to(step)
        await settle()
        assert resumed.queue.has(0) == (step == 1) and list(resumed.started) == [step]


async def test_an_interruption_while_no_batch_is_admitted():
    engines = Engines(1)
    engines.queue.run_to(9)
    await settle()
    for step in (0, 1):
        await engines.finish(step)
    await engines.queue.interrupt()
    assert engines.interrupted == []
    engines.queue.run_to(9)
    await engines.serve(1)
    assert engines.started[2] == 1


async def test_an_error_reaches_whoever_waits_and_is_not_retried():
    engines = Engines(1)
    engines.queue.run_to(3)
    await settle()
    await engines.finish(0)
    waiting = asyncio.ensure_future(engines.queue.get(1))
    await settle()
    engines.gates[1].set_exception(RuntimeError("no server"))
    with pytest.raises(RuntimeError, match="no server"):
        await waiting
    engines.queue.run_to(3)
    assert engines.queue._task is None
    with pytest.raises(RuntimeError, match="no server"):
        await engines.queue.idle()
    assert (await engines.queue.get(0)).step == 0  # a complete batch can still be trained


# ---- with the sampler, on a virtual clock ----


async def train_in_flight(config, steps, needed, training, seed):
    """Trains one batch after another; requests are aborted and continued at every update. Returns what was trained, the
    number of updates that met running requests, and the prompts."""
    engine = SimulatedEngine(12, longest=config.max_response_tokens)
    prompts = Prompts()
    sampler = Sampler(engine, coin_grader(0.6), prompts, config, groups_per_step=needed, seed=seed)
    queue = BatchQueue(sampler.collect, lambda: engine.weight_version, config.max_staleness)
    queue.run_to(steps - 1)
    batches, overlapped = [], 0
    for step in range(steps):
        batches.append(await queue.get(step))
        queue.remove(step)
        await asyncio.sleep(training)
        overlapped += engine.running > 0
        engine.weight_version = step + 1
        await engine.abort()
        queue.notify()
        if step % 3 == 2:  # a checkpoint
            await queue.interrupt()
            sampler.restore(through_json(sampler.state()))
            queue.run_to(steps - 1)
    return batches, overlapped, prompts


@settings(max_examples=30)
@given(
    staleness=st.sampled_from([1, 2, 4]), training=st.sampled_from([0.5, 4.0, 15.0, 60.0]), seed=st.integers(0, 99),
    unfinished=st.sampled_from(["finish", "continue", "restart", "drop"]),
    oversampling=st.sampled_from([1, 2.5, "adaptive"]), order=st.sampled_from(["prompt", "completion"]),
)  # fmt: skip
def test_no_token_is_too_old_and_no_sample_is_lost_or_trained_twice(
    staleness, training, seed, unfinished, oversampling, order
):
    sampler = {"unfinished": unfinished, "oversampling": oversampling, "order": order}
    config = rollout(samples=3, longest=40, **sampler).model_copy(update={"max_staleness": staleness})
    batches, _, prompts = run_virtually(train_in_flight(config, 9, 3, training, seed))
    trained = [group.prompt.id for batch in batches for group in batch.groups]
    assert len(trained) == len(set(trained)) == 9 * 3
    carried = 0
    for step, batch in enumerate(batches):
        for group in batch.groups:
            assert_whole(group, 40)
            assert all(step - staleness <= s.version <= step for x in group.samples for s in x.weight_spans)
        found = {name.removeprefix("rollout/samples_"): value for name, value in batch.metrics.items()}
        assert found["carried_in"] == carried
        carried = found["carried_over"]
        assert batch.metrics["rollout/staleness_max"] <= staleness
    submitted = sum(batch.metrics["rollout/samples_submitted"] for batch in batches)
    assert submitted == 3 * prompts.drawn


def test_weights_change_while_requests_run_and_generation_does_not_wait():
    config = rollout(samples=3, longest=40, oversampling=1).model_copy(update={"max_staleness": 2})
    batches, overlapped, _ = run_virtually(train_in_flight(config, 9, 3, 1.0, 0))
    assert overlapped >= 8
    assert any(len({span.version for span in sample.weight_spans}) > 1 for b in batches for sample in b.samples)
