"""benchmarks/idle_trainer.py: servers on the trainer's GPUs that generate while it waits."""

from dataclasses import replace

import pytest
from published_models import benchmark
from test_run import ENGINE, FINISH, WORK, setting

from megatron_dapo.planner.server_model import FleetModel, Sequence, ServerModel

idle = benchmark("idle_trainer")
EQUAL = replace(WORK, kept=1.0, sigma=0.0, mean_response=1024)  # 256 samples on 4 × 16 slots
ROUND = 1024 * 2.6e-3  # seconds


@pytest.mark.parametrize(("seconds", "rounds", "on_helper"), [(0.0, 2.0, 16), (9 * ROUND, 4.5, 0)])
def test_helpers_share_the_rounds_of_a_batch(seconds, rounds, on_helper):
    """Four servers more than the four, all the time: half of the four rounds, and the pauses of the weight updates. A
    hand-over of nine rounds helps nobody: the trainer waits for its end, and then has two batches."""
    waits = setting(EQUAL, training=0.0, sync=0.0, staleness=1, **FINISH)
    found = idle.simulate(waits, 4, idle.Helpers(4, 10**6, seconds))
    assert rounds <= found.step_seconds / ROUND < rounds + 0.25
    assert all(step.trained_tokens == 256 * 1024 for step in found.steps)
    assert on_helper * 0.85 <= idle.running(found, "wait", range(4, 8)) <= on_helper


def test_requests_of_a_server_that_leaves_keep_their_tokens():
    model = FleetModel(ServerModel(ENGINE, 10**6, 16) for _ in range(2))
    requests = [Sequence(1000, 100, 0) for _ in range(2)]
    model.submit(requests)
    model.run_until(0.55)  # 500 tokens of 1.1 ms
    (moved,) = idle.leave(model, 1)
    assert (moved.generated, moved.remaining, moved.prefill) == (500, 500, 600)
    ended = model.run_until(10.0)
    assert {id(sequence) for _, sequence in ended} == {id(sequence) for sequence in requests}
    # 1.2 ms for two; the moved one computes its 600 tokens again first.
    assert ended[-1][0] == pytest.approx(0.55 + 600e-6 + 500 * 1.2e-3, rel=0.01)
