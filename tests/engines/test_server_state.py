"""The state of a server: what it may be sent, and why not, after every event."""

import pytest

from megatron_dapo.engines.sglang import server_state
from megatron_dapo.engines.sglang.server_state import Phase, ServerState


def after(*events):
    state = ServerState()
    for event in events:
        name, *arguments = event if isinstance(event, tuple) else (event,)
        getattr(state, name)(*arguments)
    return state


SERVED = ("served", 3)


@pytest.mark.parametrize(
    ("events", "phase", "takes", "serves", "down", "why"),
    [
        ([], Phase.STARTING, False, False, False, ""),
        ([("withdrawn", "old weights"), SERVED], Phase.SERVING, True, True, False, ""),
        ([SERVED, "suspected"], Phase.SUSPECT, False, True, False, ""),
        ([SERVED, "suspected", "cleared"], Phase.SERVING, True, True, False, ""),
        (["suspected"], Phase.STARTING, False, False, False, ""),
        ([SERVED, ("withdrawn", "updating")], Phase.STARTING, False, False, False, "updating"),
        ([SERVED, ("recovering", "it died")], Phase.RECOVERING, False, False, True, "it died"),
        ([("recovering", "it died"), ("withdrawn", "no GPU")], Phase.RECOVERING, False, False, True, "no GPU"),
        ([("recovering", "it died"), SERVED, "recovery_ended"], Phase.SERVING, True, True, False, ""),
        ([("recovering", "it died"), "recovery_ended"], Phase.STARTING, False, False, False, "it died"),
        ([("given_up", "too often"), "recovery_ended"], Phase.GIVEN_UP, False, False, True, "too often"),
    ],
)
def test_what_a_server_may_be_sent(events, phase, takes, serves, down, why):
    state = after(*events)
    assert (state.phase, state.takes_requests(3, now=0.0), state.serves(3)) == (phase, takes, serves)
    assert (state.down, state.why, state.serves(2), state.takes_requests(2, now=0.0)) == (down, why, False, False)


def test_a_server_that_fails_requests_gets_none_for_longer_and_longer(monkeypatch):
    monkeypatch.setattr(server_state.random, "uniform", lambda low, high: high)
    state, now, pauses = after(SERVED), 100.0, []
    for _ in range(7):
        state.failed_request(now)
        state.failed_request(now)  # together with the first
        pauses.append(next(step * 0.25 for step in range(1000) if state.takes_requests(3, now + step * 0.25)))
        now += 100
    assert pauses == [0.25, 0.5, 1, 2, 4, 8, 8]
    state.completed_request()
    state.failed_request(now)
    assert not state.takes_requests(3, now + 0.2) and state.takes_requests(3, now + 0.25)
    state.failed_request(now + 1)
    state.served(3)
    assert state.takes_requests(3, now + 1)
