"""The folder of checkpoints without a model: order, pruning, scores, checksums and what a kill leaves."""

import json
import math

import numpy as np
import pytest
import torch

from megatron_dapo.checkpoints import files, folder
from megatron_dapo.checkpoints.files import CheckpointFile, HostBuffers, damaged_files, write_files
from megatron_dapo.checkpoints.folder import CheckpointFolder, best_metric, read_state, state_files
from megatron_dapo.config.trainer import CheckpointConfig
from megatron_dapo.errors import CheckpointError


def made(tmp_path, scores, **config):
    """A folder with a checkpoint for each (name, score)."""
    checkpoints = CheckpointFolder(tmp_path, CheckpointConfig(**config))
    for name, score in scores.items():
        building = checkpoints.prepare(name, 0)
        written = write_files(building, [CheckpointFile(file, [b"x"]) for file in folder.REQUIRED])
        step = int(name.removeprefix("step_").partition("+")[0])
        checkpoints.publish(name, written, {"score": score, "step": step})
    return checkpoints


def names(checkpoints):
    return [path.name for path in checkpoints.complete()]


def test_a_stop_in_mid_step_comes_after_its_step(tmp_path):
    checkpoints = made(tmp_path, dict.fromkeys(("step_10", "step_9+1", "step_9", "step_10+12", "step_10+2"), 0.0))
    assert names(checkpoints) == ["step_9", "step_9+1", "step_10", "step_10+2", "step_10+12"]


def test_of_equal_scores_an_evaluated_checkpoint_is_the_best(tmp_path):
    """Saved every 5 steps, evaluated every 10: those in between have the score of the evaluation before them."""
    inherited = {"step_5": None, "step_10": None, "step_15": 0.6, "step_20": 0.6}
    checkpoints = made(tmp_path, inherited, keep=1, keep_best=True)
    assert checkpoints.set_score("step_10", 0.6) == [] and names(checkpoints) == ["step_10", "step_20"]
    assert checkpoints.set_score("step_20", 0.6) == [] and names(checkpoints) == ["step_20"]


def test_the_newest_and_the_best_are_kept(tmp_path):
    scores = {"step_1": 0.5, "step_2": 0.9, "step_3": 0.9, "step_4": 0.1, "step_5": 0.2}
    checkpoints = made(tmp_path, scores, keep=2, keep_best=True)
    assert checkpoints.prune() == []
    assert names(checkpoints) == ["step_3", "step_4", "step_5"]  # of the best two the newer
    assert json.loads((checkpoints.path / "best.json").read_text()) == {"checkpoint": "step_3", "score": 0.9}
    assert checkpoints.set_score("step_5", 0.95) == [] and names(checkpoints) == ["step_4", "step_5"]
    assert (checkpoints.path / "latest_checkpointed_iteration.txt").read_text() == "5"


def test_all_are_kept_without_a_limit(tmp_path):
    checkpoints = made(tmp_path, {"step_1": 0.5, "step_2": 0.9, "step_3": 0.1}, keep=None)
    assert checkpoints.prune() == [] and names(checkpoints) == ["step_1", "step_2", "step_3"]


def test_a_look_from_outside_finds_what_a_start_would_use(tmp_path, monkeypatch):
    """A critic whose values are not finite is as bad as such a policy."""
    checkpoints = CheckpointFolder(tmp_path, CheckpointConfig())
    for step in (1, 2, 3):
        rest = [CheckpointFile(file, [b"x"]) for file in (*folder.REQUIRED[2:], "critic/.metadata")]
        written = write_files(checkpoints.prepare(f"step_{step}", 0), [*state_files({}), *rest])
        checkpoints.publish(f"step_{step}", written, {"score": None, "step": step})
    poisoned = ["step_3/policy", "step_2/critic"]
    monkeypatch.setattr(
        folder, "first_not_finite", lambda path: "w" if f"{path.parent.name}/{path.name}" in poisoned else None
    )
    used, rejected = checkpoints.first_usable(lambda state: None)
    assert used.name == "step_1"
    assert [(path.name, why.split(":")[0]) for path, why in rejected.items()] == [
        ("step_3", "poisoned"),
        ("step_2", "poisoned"),
    ]


def test_what_was_moved_away_comes_back_and_the_rest_is_removed(tmp_path):
    checkpoints = made(tmp_path, {"step_1": 0.0, "step_2": 0.0})
    (checkpoints.path / "step_2" / folder.REPLACED).touch()
    (checkpoints.path / "step_2").rename(checkpoints.path / ".step_2.old")
    (checkpoints.path / ".step_1.old").mkdir()
    (checkpoints.path / ".step_3.tmp").mkdir()
    checkpoints.clean_up()
    assert sorted(path.name for path in checkpoints.path.iterdir()) == ["step_1", "step_2"]


def test_space_is_needed(tmp_path):
    with pytest.raises(CheckpointError, match="GB free, the checkpoint needs"):
        made(tmp_path, {}).prepare("step_1", 1 << 60)


def test_any_other_byte_is_damage(tmp_path, monkeypatch):
    """Files of several blocks; the first, a middle and the last byte differ, or the size."""
    monkeypatch.setattr(files, "BLOCK", 8)
    content = bytes(range(20))
    expected = write_files(
        tmp_path, [CheckpointFile("a", [content[:5], torch.tensor(list(content[5:]), dtype=torch.uint8)])]
    )
    assert damaged_files(tmp_path, expected) == []
    for position in (0, 10, 19):
        (tmp_path / "a").write_bytes(content[:position] + b"\xff" + content[position + 1 :])
        assert "its contents have changed" in damaged_files(tmp_path, expected)[0]
    (tmp_path / "a").write_bytes(content[:19])
    assert "has 19 bytes, 20 were written" in damaged_files(tmp_path, expected)[0]
    (tmp_path / "a").unlink()
    assert "cannot be read" in damaged_files(tmp_path, expected)[0]


def test_arrays_of_any_size_come_back(tmp_path):
    state = {"arrays": [np.arange(n, dtype=kind) for n in (3, 1, 0, 7) for kind in (np.uint8, np.int64, np.float32)]}
    write_files(tmp_path, state_files(state))
    for found, given in zip(read_state(tmp_path)["arrays"], state["arrays"], strict=True):
        assert found.dtype == given.dtype and found.tolist() == given.tolist()


def test_any_value_of_a_row_or_a_metric_comes_back(tmp_path):
    """An environment's seed of 128 bits, half of a surrogate pair, a metric that is NaN, numpy's numbers."""
    state = {"seed": 2**127, "text": "\ud83d", "small": np.float32(0.1), "count": np.int64(3)}
    metrics = {"mean": math.nan, "max": -math.inf}
    write_files(tmp_path, state_files(state | metrics))
    found = read_state(tmp_path)
    assert {name: found.pop(name) for name in state} == state
    assert str(found) == str(metrics)


@pytest.mark.parametrize(("state", "named"), [({"a": {1: "x"}}, r"found \[1\]"), ({"a": b"x"}, "bytes is not")])
def test_what_would_come_back_changed_is_refused(state, named):
    with pytest.raises(TypeError, match=named):
        state_files(state)


def test_copies_in_host_memory_do_not_overlap():
    buffers = HostBuffers(torch.device("cpu"))
    tensors = [torch.full((n,), float(n)) for n in (1, 100, 33)]
    copies = [buffers.copy(tensor) for tensor in tensors]
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))


def test_the_metric_that_decides():
    config = CheckpointConfig()
    step = {"reward/accuracy": 0.5, "reward/accuracy_all": 0.75}
    assert best_metric({**step, "eval/avg@8": 0.25}, config, None) == 0.25
    assert best_metric(step, config, 0.1) == 0.75
    assert best_metric({"loss": 1.0}, config, 0.1) == 0.1
    assert best_metric({"loss": 1.0, "eval/avg@8": 0.25}, CheckpointConfig(best_metric="loss"), None) == 1.0
