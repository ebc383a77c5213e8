"""Which checkpoints are used and kept: damaged ones are found and set aside, old ones are pruned."""

import errno
import os
import shutil
from dataclasses import replace

import checkpoint_run
import orjson
import pytest
from checkpoint_run import SHAPE, Checks, copy_of, names, only_newest, resumed, run, same
from long_lists import some

from megatron_dapo.checkpoints.folder import CheckpointFolder
from megatron_dapo.config import ConfigError
from megatron_dapo.config.trainer import CheckpointConfig
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.weights.locate import locate

# ---- damage ----


def test_the_manifest_lists_every_file(three):
    folder = three[0] / "checkpoints" / "step_3"
    listed = orjson.loads((folder / "manifest.json").read_bytes())["files"]
    on_disk = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    del on_disk["manifest.json"]
    assert {name: record["bytes"] for name, record in listed.items()} == on_disk
    assert {"policy/__0_0.distcp", "policy/.metadata", "trainer.json", "rng/rank_0.json"} <= set(listed)


def test_megatron_lm_finds_the_checkpoints(three, tmp_path):
    """Links and tracker file follow pruning and damage."""
    run_dir, _ = copy_of(three, tmp_path)
    folder = run_dir / "checkpoints"

    def found():
        links = {p.name: os.readlink(p) for p in folder.glob("iter_*")}
        assert all((folder / name / "common.pt").is_file() for name in links)
        return links, (folder / "latest_checkpointed_iteration.txt").read_text()

    assert found() == ({f"iter_000000{i}": f"step_{i}/policy" for i in (1, 2, 3)}, "3")
    assert locate(run_dir) == locate(folder) == folder / "step_3/policy"
    kept = CheckpointFolder(run_dir, CheckpointConfig(keep=2))
    assert kept.prune() == [] and found() == ({f"iter_000000{i}": f"step_{i}/policy" for i in (2, 3)}, "3")
    kept.set_aside(folder / "step_3")
    assert found() == ({"iter_0000002": "step_2/policy"}, "2")


FILES = [
    "policy/__0_0.distcp", "policy/.metadata", "policy/common.pt", "policy/metadata.json", "trainer.json",
    "trainer.arrays", "rng/rank_0.json", "manifest.json",
]  # fmt: skip


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", some([flip_a_bit, truncate, os.unlink], flip_a_bit, os.unlink))
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(damage, three, tmp_path):
    """Every kind of file, all in one run: the newest checkpoint is damaged, found and set aside, file after file."""
    run_dir, weights = copy_of(three, tmp_path)
    newest = run_dir / "checkpoints" / "step_3"
    for file in FILES:
        if not (newest / file).stat().st_size:
            continue
        whole = (newest / file).read_bytes()
        damage(newest / file)
        folder = Checks(run_dir)
        assert folder.newest() == "step_2", file
        (warning,) = folder.warnings
        assert f"{newest} is damaged" in warning and file in warning and "It is now step_3.damaged" in warning
        (run_dir / "checkpoints" / "step_3.damaged").rename(newest)
        (newest / file).write_bytes(whole)
        assert Checks(run_dir).newest() == "step_3"
    damage(newest / FILES[0])
    name, state, found, _ = run(resumed, run_dir)
    assert name == "step_2" and state["step"] == 2 and same(found, weights[2])


def test_ranks_share_the_check(three, tmp_path):
    run_dir, _ = copy_of(three, tmp_path)
    for file in ("policy/__0_0.distcp", "policy/common.pt"):
        flip_a_bit(run_dir / "checkpoints" / "step_3" / file)
    (first, warnings), (second, others) = run_ranks(2, only_newest, run_dir)
    assert first == second == "step_2" and "(and 1 more)" in warnings[0] and others == []


def test_without_a_usable_checkpoint_nothing_starts_from_scratch(three, tmp_path):
    run_dir, _ = copy_of(three, tmp_path)
    for step in (1, 2, 3):
        flip_a_bit(run_dir / "checkpoints" / f"step_{step}" / FILES[0])
    for _ in range(2):  # the second start says the same
        with pytest.raises(ConfigError, match=r"no checkpoint in .* can be used: .*step_3 is dam.*; .*step_1 is dam"):
            Checks(run_dir).newest()
    assert names(run_dir) == ["step_1", "step_2", "step_3"]


def resume_another_model(rendezvous, run_dir, shape):
    checkpoint_run.SHAPE = shape
    return resumed(rendezvous, run_dir)


@pytest.mark.parametrize("change", [{"ffn_hidden": 2 * SHAPE.ffn_hidden}, {"qk_norm": not SHAPE.qk_norm}])
def test_a_checkpoint_that_does_not_fit_is_refused_and_keeps_its_name(change, three, tmp_path):
    run_dir, _ = copy_of(three, tmp_path)
    with pytest.raises(ConfigError, match=r"cannot resume: .*step_3/policy does not fit this model: .*Use the saved"):
        run(resume_another_model, run_dir, replace(SHAPE, **change))
    assert names(run_dir) == ["step_1", "step_2", "step_3"]


def test_an_empty_run_has_no_checkpoint(tmp_path):
    assert Checks(tmp_path).newest() is None


# ---- pruning ----


def test_pruning_survives_old_and_foreign_files(three, tmp_path):
    run_dir, _ = copy_of(three, tmp_path)
    folder = run_dir / "checkpoints"
    (folder / "step_9").write_text("a file")
    (folder / "step_x").mkdir()
    (folder / "scores.json").write_text("{")
    (folder / "step_0").mkdir()
    (folder / "step_0" / "trainer.json").write_text("not JSON")
    (folder / "step_1" / "manifest.json").write_text("[]")
    (folder / "step_2" / "manifest.json").write_text('{"score": "high"}')
    assert CheckpointFolder(run_dir, CheckpointConfig(keep=1)).prune() == []
    assert names(run_dir) == ["scores.json", "step_3", "step_9", "step_x"]


def test_the_best_checkpoint_is_kept(three, tmp_path):
    run_dir, _ = copy_of(three, tmp_path)
    folder = CheckpointFolder(run_dir, CheckpointConfig(keep=1))
    assert folder.set_score("step_2", 0.5) == []  # known after the save
    assert names(run_dir) == ["best.json", "scores.json", "step_2", "step_3"]
    assert orjson.loads((run_dir / "checkpoints" / "best.json").read_bytes()) == {"checkpoint": "step_2", "score": 0.5}
    assert folder.set_score("step_3", 0.7) == []
    assert names(run_dir) == ["best.json", "scores.json", "step_3"]


def test_stops_within_a_step_do_not_push_out_complete_steps(three, tmp_path):
    run_dir, _ = copy_of(three, tmp_path)
    folder = run_dir / "checkpoints"
    for step in ("step_2", "step_3"):
        shutil.copytree(folder / step, folder / f"{step}+1")
    assert CheckpointFolder(run_dir, CheckpointConfig(keep=2)).prune() == []
    assert names(run_dir) == ["step_2", "step_3", "step_3+1"]


def test_every_nth_step_is_kept(three, tmp_path):
    run_dir, _ = copy_of(three, tmp_path)
    assert CheckpointFolder(run_dir, CheckpointConfig(every=1, keep=1, keep_every=2)).prune() == []
    assert names(run_dir) == ["step_2", "step_3"]
    with pytest.raises(ValueError, match=r"keep_every \(7\) must be a multiple of every \(5\)"):
        CheckpointConfig(every=5, keep_every=7)


def test_a_checkpoint_that_cannot_be_removed_is_reported(three, tmp_path, monkeypatch):
    run_dir, _ = copy_of(three, tmp_path)
    rename = type(run_dir).rename

    def refuse(self, target):
        if self.name == "step_1":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return rename(self, target)

    monkeypatch.setattr(type(run_dir), "rename", refuse)
    (problem,) = CheckpointFolder(run_dir, CheckpointConfig(keep=1)).prune()
    assert "step_1 cannot be removed: Permission denied" in problem and names(run_dir) == ["step_1", "step_3"]


def test_only_the_newest_damaged_checkpoint_is_kept(three, tmp_path):
    run_dir, _ = copy_of(three, tmp_path)
    for name in ("step_2.damaged", "step_2.damaged2", "step_2.damaged10", "step_1+3.damaged", "step_1.damaged"):
        (run_dir / "checkpoints" / name).mkdir()
    assert CheckpointFolder(run_dir, CheckpointConfig(keep=1)).prune() == []
    assert names(run_dir) == ["step_2.damaged10", "step_3"]
