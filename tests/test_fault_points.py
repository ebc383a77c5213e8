"""Fault points: declared, reached from the source, and inert without a registered action."""

import ast

import pytest
from test_imports import FILES

from megatron_dapo import fault_points
from megatron_dapo.fault_points import POINTS, on, reach


@pytest.fixture(autouse=True)
def nothing_registered():
    fault_points.clear()
    yield
    fault_points.clear()


def reached_in_source():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("reach", "fault_points.reach"):
                assert isinstance(node.args[0], ast.Constant), f"{path}: a fault point has a literal name"
                yield node.args[0].value


def test_declared_points_are_exactly_those_in_the_source():
    assert set(reached_in_source()) == set(POINTS)


def test_an_action_runs_at_its_arrival_only():
    seen = []
    on("checkpoint/before_publish", lambda: seen.append("second"), count=2)
    reach("checkpoint/before_prune")
    reach("checkpoint/before_publish")
    assert seen == []
    reach("checkpoint/before_publish")
    reach("checkpoint/before_publish")
    assert seen == ["second"]


def test_an_unknown_point_cannot_be_registered():
    with pytest.raises(KeyError, match="no fault point 'checkpoint/typo'; declared are checkpoint/before_stage"):
        on("checkpoint/typo", fault_points.kill)
