"""A destination appears complete or not at all, whatever interrupts the conversion, and the next run cleans up."""

import contextlib
import fcntl
import io
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megatron_dapo.weights import command, convert, copy, destination
from megatron_dapo.weights.convert import hf_to_megatron, megatron_to_hf
from megatron_dapo.weights.destination import PROGRESS, CopyGroup, new_directory
from megatron_dapo.weights.formats import torch_dist_writer
from megatron_dapo.weights.mapping import WeightsError
from megatron_dapo.weights.verify import verify


def beside(path):
    return sorted(p.name for p in path.parent.iterdir() if p.name != path.name and path.name in p.name)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(5, "Input/output error"), MemoryError])
@pytest.mark.parametrize("to_hf", [False, True])
def test_an_error_while_writing_leaves_nothing(models, tmp_path, monkeypatch, error, to_hf):
    source, out = models["qwen2"], tmp_path / "out"
    monkeypatch.setattr(copy, "BLOCK", 4096)
    if to_hf:
        hf_to_megatron(source, tmp_path / "megatron")
        source = tmp_path / "megatron"
    real, calls = copy._write, []

    def failing(fd, data, at):
        calls.append(at)
        if len(calls) == 20:
            raise error
        real(fd, data, at)

    monkeypatch.setattr(copy, "_write", failing)
    run = megatron_to_hf if to_hf else hf_to_megatron
    with pytest.raises(
        WeightsError if isinstance(error, OSError) else error, match="error" if isinstance(error, OSError) else None
    ):
        run(source, out)
    assert not out.exists() and beside(out) == []
    monkeypatch.setattr(copy, "_write", real)
    run(source, out)
    assert verify(models["qwen2"], out).same


def killed_while_writing(source, out, overwrite=False, blocks=15, run=hf_to_megatron, number=signal.SIGKILL):
    """A forked conversion that gets a signal after some blocks."""
    pid = os.fork()
    if pid == 0:
        try:
            real, count = copy._write, [0]

            def slow(fd, data, at):
                real(fd, data, at)
                count[0] += 1
                if count[0] > blocks:
                    out.with_name("blocked").touch()
                    time.sleep(60 if number == signal.SIGKILL else 0.1)

            copy._write, copy.BLOCK = slow, 4096
            run(source, out, workers=1, overwrite=overwrite)
        finally:
            os._exit(0)
    temporary = out.with_name(f".{out.name}.incomplete")
    deadline = time.monotonic() + 20
    while not out.with_name("blocked").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(pid, number)
    os.waitpid(pid, 0)
    out.with_name("blocked").unlink()
    return temporary


def test_a_killed_conversion_can_be_run_again(models, tmp_path):
    out = tmp_path / "out"
    temporary = killed_while_writing(models["qwen2"], out)
    assert not out.exists() and temporary.exists()
    assert not any((temporary / "release" / name).exists() for name in ("metadata.json", ".metadata"))
    (temporary / "stale").write_text("from the run that was killed")
    hf_to_megatron(models["qwen2"], out)
    assert verify(models["qwen2"], out).same and not (out / "stale").exists() and beside(out) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("run", [hf_to_megatron, megatron_to_hf])
def test_an_interruption_leaves_nothing_that_loads(models, tmp_path, run, number):
    """Ctrl-C leaves nothing at all; what a kill leaves is not taken for a model, and the next run removes it."""
    source, out = models["qwen2"], tmp_path / "out"
    if run is megatron_to_hf:
        hf_to_megatron(source, tmp_path / "megatron")
        source = tmp_path / "megatron"
    temporary = killed_while_writing(source, out, run=run, number=number)
    assert not out.exists() and beside(out) == ([] if number == signal.SIGINT else [".out.incomplete", ".out.lock"])
    if number == signal.SIGKILL:
        left = {file.name for file in temporary.rglob("*")}
        assert left and not left & {"config.json", ".metadata", "metadata.json"}  # without them nothing loads it
    run(source, out)
    assert verify(models["qwen2"], out).same and beside(out) == []


def test_a_full_disk_leaves_nothing(models, tmp_path, monkeypatch):
    """A disk of 256 kB that somebody else fills after the check of its free space."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        with pytest.raises(WeightsError, match="no space"):
            hf_to_megatron(models["qwen2"], disk / "out")
        monkeypatch.setattr(destination, "check_space", lambda parent, need: None)
        with pytest.raises(WeightsError, match="No space left on device"):
            hf_to_megatron(models["qwen2"], disk / "out")
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.fixture
def killed(models, tmp_path, monkeypatch):
    """A conversion of many small files that was killed in the middle: the source, the destination, finished files."""
    monkeypatch.setattr(torch_dist_writer, "MAX_FILE", 40_000)
    out = tmp_path / "out"
    temporary = killed_while_writing(models["qwen2"], out, blocks=60)
    finished = {p.name.removesuffix(".done") for p in (temporary / ".progress").glob("*.done")}
    assert 2 <= len(finished) < len(list((temporary / "release").iterdir()))
    return models["qwen2"], out, temporary, finished


def test_a_killed_conversion_keeps_its_finished_files(killed):
    source, out, temporary, finished = killed
    before = {name: (temporary / "release" / name).stat().st_ino for name in finished}
    report = hf_to_megatron(source, out, workers=1)
    assert report.notes[0] == f"{len(finished)} finished files of an interrupted run were compared and kept"
    assert {name: (out / "release" / name).stat().st_ino for name in finished} == before
    assert verify(source, out).same and beside(out) == [] and not (out / ".progress").exists()


def test_kept_files_are_verified(killed):
    """A byte that changed on disk after the kill is found and written again."""
    source, out, temporary, finished = killed
    file = temporary / "release" / sorted(finished)[1]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    hf_to_megatron(source, out, workers=1)
    assert verify(source, out).same


@pytest.mark.parametrize("change", ["dtype", "files", "source"])
def test_another_plan_starts_again(killed, tmp_path, monkeypatch, change):
    source, out, _, _ = killed
    if change == "source":
        source = shutil.copytree(source, tmp_path / "copy")
    options = {"dtype": "bfloat16"} if change == "dtype" else {}
    if change == "files":
        monkeypatch.setattr(torch_dist_writer, "MAX_FILE", 50_000)
    report = hf_to_megatron(source, out, workers=1, **options)
    assert not any("kept" in note for note in report.notes)
    assert verify(source, out, tolerance=0.01).same and beside(out) == []


def rank_main(rank, source, out):
    environment = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": str(rank)}
    os.environ.update(environment)
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        code = command.hf_to_megatron(str(source), str(out / "m"), allow_nan=False, workers=1)
    megatron_to_hf(out / "m", out / "hf", workers=1, max_shard=60_000)
    (out / f"said_{rank}").write_text(said.getvalue())
    os._exit(code)


def in_ranks(size, function, *args):
    pids = []
    for rank in range(size):
        if (pid := os.fork()) == 0:
            try:
                function(rank, *args)
            except BaseException as error:
                (args[-1] / f"error_{rank}").write_text(str(error))
                os._exit(1)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def test_tasks_of_one_step_share_a_conversion(models, tmp_path, monkeypatch):
    """Three srun tasks write disjoint files, and one of them finds values that are not finite. Rank 0 reports it: an
    exit code of another rank could make srun end rank 0 before."""
    monkeypatch.setattr(torch_dist_writer, "MAX_FILE", 60_000)
    monkeypatch.setattr(convert.HFReader, "where", lambda self, name: "x")
    size = 64 * 96 * 4  # of one MLP matrix
    monkeypatch.setattr(copy, "all_finite", lambda data, _: len(data) != size or os.environ["SLURM_PROCID"] != "2")
    assert in_ranks(3, rank_main, models["qwen2"], tmp_path) == [command.NOT_FINITE, 0, 0], [
        p.read_text() for p in tmp_path.glob("error_*")
    ]
    assert "warning: x has values" in (tmp_path / "said_0").read_text()
    assert (tmp_path / "said_1").read_text() == (tmp_path / "said_2").read_text() == ""
    assert verify(models["qwen2"], tmp_path / "m").same and verify(models["qwen2"], tmp_path / "hf").same
    assert beside(tmp_path / "m") == [] and len(list((tmp_path / "m/release").glob("*.distcp"))) > 6


def test_rank_0_joins_the_notes_of_all(tmp_path):
    CopyGroup(1, 3).hand_in(tmp_path, ["a"], kept=2)
    CopyGroup(2, 3).hand_in(tmp_path, ["b"], kept=3)
    assert CopyGroup(0, 3).collect(tmp_path) == (["a", "b"], 5)


def failing_rank(rank, source, out):
    def fail(fd, data, at):
        raise OSError(28, "No space left on device")

    os.environ.update({"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(rank)})
    if rank == 1:
        copy._write = fail
    hf_to_megatron(source, out / "m", workers=1)


def test_a_task_that_fails_ends_the_others(models, tmp_path, monkeypatch):
    monkeypatch.setattr(torch_dist_writer, "MAX_FILE", 60_000)
    assert in_ranks(2, failing_rank, models["qwen2"], tmp_path) == [1, 1]
    assert "rank 1: WeightsError" in (tmp_path / "error_0").read_text()
    assert "No space left" in (tmp_path / "error_1").read_text()
    assert not (tmp_path / "m").exists() and beside(tmp_path / "m") == []


def test_every_start_of_torchrun_has_its_token(monkeypatch):
    """Without --rdzv-id its id and port are always the same: the ranks would follow what a killed start has left."""
    environment = {"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "2"}
    for name, value in (environment | {"LOCAL_WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    tokens = []
    for launcher in (7, 7, 8):
        monkeypatch.setattr(os, "getppid", lambda launcher=launcher: launcher)
        tokens.append(CopyGroup.from_environment().token)
    assert tokens[0] == tokens[1] != tokens[2]


def test_a_batch_script_is_not_taken_for_a_task(monkeypatch):
    """It has SLURM_NTASKS and SLURM_PROCID, but runs alone."""
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert CopyGroup.from_environment() == CopyGroup()


def test_a_mount_point_is_filled_from_inside(models, tmp_path, monkeypatch):
    out = tmp_path / "mount"
    (out / "lost+found").mkdir(parents=True)
    monkeypatch.setattr(os.path, "ismount", lambda path: path == out)
    hf_to_megatron(models["qwen2"], out)
    assert verify(models["qwen2"], out).same and beside(out) == []
    assert {p.name for p in out.iterdir()} == {"lost+found", "release", "latest_checkpointed_iteration.txt"}
    with pytest.raises(WeightsError, match="is a mount point and not empty; choose a folder in it"):
        hf_to_megatron(models["qwen2"], out, overwrite=True)


def test_overwrite_keeps_the_old_checkpoint_until_the_new_one_is_complete(models, tmp_path):
    out = tmp_path / "out"
    hf_to_megatron(models["qwen2"], out)
    with pytest.raises(WeightsError, match="--overwrite"):
        hf_to_megatron(models["qwen3"], out)
    killed_while_writing(models["qwen3"], out, overwrite=True)
    assert verify(models["qwen2"], out).same
    hf_to_megatron(models["qwen3"], out, overwrite=True)
    assert verify(models["qwen3"], out).same and beside(out) == []


def test_a_kill_between_the_two_renames_of_an_overwrite_is_repaired(models, tmp_path):
    """The old checkpoint has been moved away and the new one is not there yet: the next run restores it first."""
    out = tmp_path / "out"
    hf_to_megatron(models["qwen2"], out)
    out.rename(tmp_path / ".out.replaced")
    with pytest.raises(WeightsError), new_directory(out, 0):
        raise WeightsError("stop")
    assert verify(models["qwen2"], out).same and beside(out) == []


def test_a_second_conversion_to_the_same_destination_is_refused(models, tmp_path):
    out = tmp_path / "out"
    with new_directory(out, 0) as first:
        with pytest.raises(WeightsError, match="another conversion is writing it"):
            hf_to_megatron(models["qwen2"], out)
        assert first.exists()
    assert out.is_dir() and beside(out) == []


@pytest.mark.parametrize("moment", ["before the lock", "while writing"])
def test_what_appears_meanwhile_is_not_replaced(models, tmp_path, monkeypatch, moment):
    """Another conversion that has ended since the destination was found free; something that knows no lock."""
    out, lock = tmp_path / "out", destination._lock

    def after_another(path, name):
        monkeypatch.undo()
        hf_to_megatron(models["qwen3"], out)
        return lock(path, name)

    if moment == "before the lock":
        monkeypatch.setattr(destination, "_lock", after_another)
    with pytest.raises(WeightsError, match="pass --overwrite"), new_directory(out, 0) as folder:
        assert moment == "while writing"
        hf_to_megatron(models["qwen3"], folder / "other")
        (folder / "other").rename(out)
    assert verify(models["qwen3"], out).same and beside(out) == []


def test_an_empty_directory_is_accepted_as_destination(models, tmp_path):
    out = tmp_path / "deep" / "out"
    out.mkdir(parents=True)
    hf_to_megatron(models["qwen2"], out)
    assert verify(models["qwen2"], out).same


def test_everything_is_flushed_before_the_rename(models, tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename
    names = {}
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))[1])
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append(("rename", str(b))), rename(a, b))[1])
    hf_to_megatron(models["qwen2"], tmp_path / "out")
    at = events.index(("rename", str(tmp_path / "out")))
    names = {os.path.basename(e) for e in events[:at] if isinstance(e, str)}
    assert {p.name for p in (tmp_path / "out").rglob("*")} <= names
    assert str(tmp_path) in events[at:]


def test_progress_counts_every_byte_once(models, tmp_path):
    seen = []
    report = convert.hf_to_megatron(models["qwen3-moe"], tmp_path / "m", progress=lambda *x: seen.append(x))
    assert seen[-1] == (report.nbytes, report.nbytes) and [s[0] for s in seen] == sorted(s[0] for s in seen)
    seen.clear()
    report = convert.megatron_to_hf(tmp_path / "m", tmp_path / "h", progress=lambda *x: seen.append(x))
    assert seen[-1] == (report.nbytes, report.nbytes)


def test_a_conversion_may_end_while_the_next_one_begins_in_the_same_folder(models, tmp_path, monkeypatch):
    (tmp_path / ".other.incomplete" / PROGRESS).mkdir(parents=True)
    (tmp_path / ".other.incomplete" / PROGRESS / "plan").write_text("{}")
    listed = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda self, *args: [*listed(self, *args), self / "renamed meanwhile"])
    hf_to_megatron(models["qwen2"], tmp_path / "new")
    assert (tmp_path / "new/release").is_dir() and (tmp_path / ".other.incomplete").is_dir()


def test_an_abandoned_conversion_is_removed_after_a_week(models, tmp_path):
    """Beside a destination, if no run has locked it; a recent one, a locked one and folders of others stay."""
    old, recent, locked, foreign = (tmp_path / f".{name}.incomplete" for name in ("old", "recent", "locked", "foreign"))
    for folder in (old, recent, locked):
        (folder / PROGRESS).mkdir(parents=True)
        (folder / PROGRESS / "plan").write_text("{}")
    (foreign / "weights").mkdir(parents=True)
    for folder in (old, locked, foreign):
        for path in (*folder.rglob("*"), folder):
            os.utime(path, (0, 0))
    with (tmp_path / ".locked.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        hf_to_megatron(models["qwen2"], tmp_path / "new")
    assert not old.exists() and recent.exists() and locked.exists() and foreign.exists()
    assert sorted(path.name for path in tmp_path.glob(".*.lock")) == [".locked.lock"]
