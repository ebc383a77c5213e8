"""Fixtures of the checkpoint tests."""

from functools import partial

import pytest
from checkpoint_run import run, saved_steps


@pytest.fixture(scope="session")
def three(tmp_path_factory):
    """A run directory with three checkpoints, and the weights of each. Tests work on a copy (`copy_of`)."""
    run_dir = tmp_path_factory.mktemp("three")
    return run_dir, run(partial(saved_steps, keep=3), run_dir, (1, 2, 3))
