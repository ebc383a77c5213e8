"""One real Slurm cluster for the whole session."""

import pytest


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    from mini_slurm import MiniSlurm, unavailable

    reason = unavailable()
    if reason:
        pytest.skip(f"no Slurm cluster can be started: {reason}")
    found = MiniSlurm(tmp_path_factory.mktemp("slurm")).start()
    try:
        yield found
    finally:
        found.stop()
