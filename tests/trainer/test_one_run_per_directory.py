"""`train` twice in one run directory: the second one is refused, and a run that has lost its lock saves nothing."""

import json
import os
import shutil

import pytest
from forked import at_point, run, start_command
from tiny_run import environment, make_model, raw_config, write_config
from waiting import wait_for

from megatron_dapo import cli


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def test_second_command_is_refused_until_the_first_is_killed(folder, tmp_path, capsys, monkeypatch):
    """Two ranks on this machine: their launcher holds the lock."""
    monkeypatch.syspath_prepend(environment()["PYTHONPATH"].split(os.pathsep)[0])
    raw = raw_config(folder, tmp_path / "run", trainer__steps=1000, trainer__ranks=2)
    path = write_config(raw, tmp_path / "config.yaml")
    first = start_command(path)
    try:
        metrics = tmp_path / "run/metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.stat().st_size, 120, "the first step")
        assert cli.main(["train", str(path)]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert f"is in use by another run (pid {first.pid} on " in said and "set another trainer.run_dir" in said
    finally:
        first.kill()
        first.join()
    # Its ranks may live a little longer; the lock is free at once.
    raw["trainer"]["steps"] = len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) + 2
    assert run(raw) == 0


def test_run_whose_lock_was_removed_ends_before_it_saves(folder, tmp_path, capfd):
    raw = raw_config(folder, tmp_path, trainer__steps=3)
    assert run(raw, at_point("loop/before_update", 3, lambda: shutil.rmtree(tmp_path / "lock"))) == 1
    said = capfd.readouterr().err
    assert "of this run was removed" in said and "Not saved: the run directory belongs to another run now" in said
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step_*")) == ["step_1"]


def test_run_whose_lock_was_taken_over_ends_before_it_saves(folder, tmp_path, capfd):
    def take_over():
        (path,) = (tmp_path / "lock").glob("*.json")
        holder = json.loads(path.read_text()) | {"host": "node9", "token": "other"}
        (path.parent / f"{int(path.stem) + 1}.json").write_text(json.dumps(holder))

    raw = raw_config(folder, tmp_path, trainer__steps=3)
    assert run(raw, at_point("loop/before_update", 3, take_over)) == 1
    assert "was taken over by another run (pid" in capfd.readouterr().err
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step_*")) == ["step_1"]
