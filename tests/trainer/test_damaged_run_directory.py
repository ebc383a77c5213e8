"""Damage to a run directory: the next start names it, sets it aside, and continues from the newest good checkpoint.

One run was stopped in the middle of its fourth step. Each case damages a copy of its directory, which one process then
opens as a start does: lock, settings, metrics, checkpoint, weights. A few are resumed to the end.
"""

import hashlib
import json
import os
import shutil
import signal
import zlib
from functools import partial
from pathlib import Path

import pytest
import torch
from forked import assert_same, at_point, records, run, run_straight, send_signal
from long_lists import some
from tiny_run import environment, evaluated_config, make_model

from megatron_dapo.checkpoints.folder import check_resume
from megatron_dapo.config import check_config, parse_config
from megatron_dapo.doctor import run_directory
from megatron_dapo.files import remove
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.trainer.loop import Trainer
from megatron_dapo.trainer.run_lock import RunLock
from megatron_dapo.trainer.saves import Saves
from megatron_dapo.trainer.signals import REQUEUE, StopSignal
from megatron_dapo.trainer.watchdog import Watchdog, log_folder

STEPS = 4
NEWEST, BEFORE = "step_3+1", "step_3"


def config(folder, run_dir):
    if not (folder / "config.json").exists():
        make_model(folder, layers=1)  # each of 80 starts reads all tensors
    return evaluated_config(folder, run_dir, STEPS, trainer__checkpoint={"keep": 3})


# ---- damage: functions of the run directory; those of a checkpoint's file get its path ----


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    os.truncate(path, 0)


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0")


def as_folder(path):
    path.unlink(missing_ok=True)
    path.mkdir()


def as_pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def as_file(path):
    shutil.rmtree(path, ignore_errors=True)
    path.write_text("in the way")


def as_broken_link(path):
    remove(path)
    path.symlink_to("nowhere/at/all")


def garbage(path):
    path.write_bytes(b"\xff\x00{not JSON")


def newest(run_dir):
    return run_dir / "checkpoints" / NEWEST


def edit_manifest(change):
    def damage(run_dir):
        path = newest(run_dir) / "manifest.json"
        content = json.loads(path.read_bytes())
        path.write_text(json.dumps(change(content) or content))

    return damage


def edit_state(change):
    """The checksum is that of the new state: it was saved like this."""

    def damage(run_dir):
        path = newest(run_dir) / "trainer.json"
        state = json.loads(path.read_bytes())
        path.write_text(json.dumps(change(state) or state))
        content = path.read_bytes()
        record = {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
        edit_manifest(lambda manifest: manifest["files"].update({"trainer.json": record}))(run_dir)

    return damage


def forget(file):
    return lambda manifest: manifest["files"].pop(file) and None


def batch(state):
    return state["current"]["batch"]["groups"][0]["samples"][0]


def set_grade(score):
    return lambda state: batch(state).update(grade=[True, score, None, "", {}, []])


def poison(value, where):
    """A checkpoint of the next step whose checksums are right and whose weights, or moments, are not finite. It takes
    the place of the one within the step before."""

    def damage(run_dir):
        trainer = TRAINER[0]
        weights = next(trainer.policy.model[0].parameters())
        state = next(iter(trainer.policy.optimizer.chained_optimizers[0].optimizer.state.values())) if (
            hasattr(trainer.policy.optimizer, "chained_optimizers")
        ) else next(iter(trainer.policy.optimizer.optimizer.state.values()))  # fmt: skip
        with torch.no_grad():
            (weights if where == "weights" else state["exp_avg"]).view(-1)[0] = value
        (report,) = trainer.saves.checkpoints.save(trainer.policy, 4, None, trainer.state, None, wait=True)
        assert report.error is None

    return damage


def rename_to_later_step(run_dir):
    shutil.copytree(run_dir / "checkpoints" / BEFORE, run_dir / "checkpoints" / "step_9")


def swap_for_replaced(run_dir):
    """A kill between the two renames of a checkpoint that replaces another one."""
    folder = run_dir / "checkpoints"
    (folder / NEWEST).rename(folder / f".{NEWEST}.old")
    (folder / f".{NEWEST}.old" / ".replaced").touch()


def append(text):
    def damage(run_dir):
        with (run_dir / "metrics.jsonl").open("ab") as file:
            file.write(text)

    return damage


def in_the_middle(run_dir):
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"half a rec\n", *lines[2:]]))


def dead_lock(content):
    def damage(run_dir):
        (run_dir / "lock" / "77.json").write_text(content)

    return damage


def at(name, damage):
    return lambda run_dir: damage(run_dir / name)


def both_newest(run_dir):
    flip(newest(run_dir) / "policy/common.pt")
    (run_dir / "checkpoints" / BEFORE / "manifest.json").unlink()


def cut_heartbeat(run_dir):
    (run_dir / "logs/heartbeat").mkdir(exist_ok=True)
    (run_dir / "logs/heartbeat/rank_0.json").write_text('{"pid": ')
    (run_dir / "logs/heartbeat/ended").write_text("hanging: rank 0\n")


def earlier_memory(run_dir):
    """A block of a rank that was killed with its whole job. A pid of this size cannot exist."""
    (run_dir / "logs/heartbeat").mkdir(exist_ok=True)
    rank = {"pid": 4_999_999, "host": os.uname().nodename}
    (run_dir / "logs/heartbeat/rank_0.json").write_text(json.dumps(rank))
    Path("/dev/shm/torch_4999999_1_0").write_bytes(b"x")


BEYOND = {"$array": ["<i4", [9], 1 << 40]}
FILES = ("policy/__0_0.distcp", "policy/.metadata", "policy/common.pt", "policy/metadata.json", "policy/hf/config.json",
         "trainer.json", "trainer.arrays", "rng/rank_0.json", "manifest.json")  # fmt: skip
DAMAGES = (flip, cut, empty, lengthen, Path.unlink, as_folder, as_pipe)
DAMAGED_FILES = {
    f"{damage.__name__} {file}": partial(lambda damage, file, run_dir: damage(newest(run_dir) / file), damage, file)
    for file in FILES
    for damage in DAMAGES
    if not (file == "manifest.json" and damage is flip)  # one bit of a checksum, or of a name: see below
}
EACH_FILE = (f"{DAMAGES[i % 7].__name__} {file}" for i, file in enumerate(FILES))
CHECKPOINT = {  # the newest checkpoint cannot be used
    **some(DAMAGED_FILES, *EACH_FILE, "unlink manifest.json"),
    "an empty folder": lambda run_dir: shutil.rmtree(newest(run_dir)) or newest(run_dir).mkdir(),
    "a file": at(f"checkpoints/{NEWEST}", as_file),
    "no policy": lambda run_dir: shutil.rmtree(newest(run_dir) / "policy"),
    "a manifest that lists nothing": edit_manifest(lambda manifest: manifest.update(files={})),
    "a manifest without the weights": edit_manifest(forget("policy/__0_0.distcp")),
    "a manifest without a random state": edit_manifest(forget("rng/rank_0.json")),
    "a manifest of another step": edit_manifest(lambda manifest: manifest.update(step=2)),
    "a manifest that is a list": edit_manifest(lambda manifest: [1]),
    "a state that is a list": edit_state(lambda state: [1]),
    "a state without its step": edit_state(lambda state: state.pop("step") and None),
    "a state without its cursor": edit_state(lambda state: state["rollouts"].pop("cursor") and None),
    "a state without its batches": edit_state(lambda state: state.pop("batches", None) and None),
    "a sample without tokens": edit_state(lambda state: batch(state).pop("response_tokens") and None),
    "a sample with an unknown end": edit_state(lambda state: batch(state).update(finish_reason="exploded")),
    "an array beyond its file": edit_state(lambda state: batch(state).update(response_tokens=BEYOND)),
    "a score that was NaN": edit_state(set_grade(None)),  # JSON has none
    "a carried group that is no group": edit_state(lambda state: state["rollouts"]["sampler"].update(surplus=[7])),
    "an unwritten record that is none": edit_state(lambda state: state["observer"].update(unwritten=["{"])),
}  # fmt: skip
OTHER = {  # expected checkpoint, damage
    "weights that are NaN": (BEFORE, poison(float("nan"), "weights")),
    "weights that are infinite": (BEFORE, poison(float("inf"), "weights")),
    "moments that are NaN": (BEFORE, poison(float("nan"), "moments")),
    "two damaged checkpoints": ("step_2", both_newest),
    "a later checkpoint that is a renamed one": (NEWEST, rename_to_later_step),
    "a later, empty checkpoint": (NEWEST, at("checkpoints/step_9", Path.mkdir)),
    "a file with the name of the next checkpoint": (NEWEST, at("checkpoints/step_4", as_file)),
    "a broken link with its name": (NEWEST, at("checkpoints/step_4", as_broken_link)),
    "an unfinished checkpoint": (NEWEST, at("checkpoints/.step_4.tmp", Path.mkdir)),
    "a file with the name of an unfinished one": (NEWEST, at("checkpoints/.step_4.tmp", as_file)),
    "a checkpoint moved away by a killed save": (NEWEST, swap_for_replaced),
    "scores that are garbage": (NEWEST, at("checkpoints/scores.json", garbage)),
    "scores that are a folder": (NEWEST, at("checkpoints/scores.json", as_folder)),
    "a tracker that is garbage": (NEWEST, at("checkpoints/latest_checkpointed_iteration.txt", garbage)),
    "a link that is a folder": (NEWEST, at("checkpoints/iter_0000003", as_folder)),
    "metrics: a line of garbage": (NEWEST, append(b"garbage\n")),
    "metrics: half a record": (NEWEST, append(b'{"step": 4, "kind": "st')),
    "metrics: half a record with its newline": (NEWEST, append(b'{"step": 4, "kind": "st\n')),
    "metrics: zeros, as after a power failure": (NEWEST, append(bytes(512) + b"\n")),
    "metrics: no text": (NEWEST, append(b"\xff\xfe\r\r\n")),
    "metrics: a record of another type": (NEWEST, append(b'{"step": 4, "kind": "step", "metrics": {"x": [1]}}\n')),
    "metrics: no metrics": (NEWEST, append(b'{"step": 4, "kind": "step"}\n')),
    "metrics: steps that were not saved": (NEWEST, append(b'{"step": 4, "kind": "step", "metrics": {}}\n')),
    "metrics: garbage in the middle": (NEWEST, in_the_middle),
    "settings that are garbage": (NEWEST, at("resume.json", garbage)),
    "settings that are empty": (NEWEST, lambda run_dir: (run_dir / "resume.json").write_text("{}")),
    "settings that are a list": (NEWEST, lambda run_dir: (run_dir / "resume.json").write_text("[1]")),
    "settings that are a folder": (NEWEST, at("resume.json", as_folder)),
    "a configuration that is a folder": (NEWEST, at("config.yaml", as_folder)),
    "an environment that is garbage": (NEWEST, at("environment.json", garbage)),
    "logs that are a file": (NEWEST, at("logs", as_file)),
    "logs that are a broken link": (NEWEST, at("logs", as_broken_link)),
    "a heartbeat folder that is a file": (NEWEST, at("logs/heartbeat", as_file)),
    "a heartbeat that was cut": (NEWEST, cut_heartbeat),
    "warnings that are a folder": (NEWEST, at("logs/warnings.log", as_folder)),
    "a status that is a pipe": (NEWEST, at("logs/status.json", as_pipe)),
    "samples that are a file": (NEWEST, at("samples", as_file)),
    "samples of a later step that are a folder": (NEWEST, at("samples/step_9.txt", partial(Path.mkdir, parents=True))),
    "evaluations that are a file": (NEWEST, at("evaluations", as_file)),
    "an evaluation that is a file": (NEWEST, at("evaluations/step_4", as_file)),
    "a lock that is a file": (NEWEST, at("lock", as_file)),
    "a lock that is garbage": (NEWEST, dead_lock("garbage")),
    "a lock that is empty": (NEWEST, dead_lock("")),
    "a lock of another version": (NEWEST, dead_lock('{"pid": 1}')),
    "no lock": (NEWEST, at("lock", shutil.rmtree)),
    "shared memory of a killed rank": (NEWEST, earlier_memory),
}  # fmt: skip
CASES = {name: (BEFORE, damage) for name, damage in CHECKPOINT.items()} | OTHER


# ---- one process that starts again and again ----

TRAINER: list[Trainer] = []


def weights_of(policy):
    digest = hashlib.blake2b()
    for parameter in policy.model[0].parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def start(trainer, run_dir, raw):
    """As `train` and the command before it, up to the engines. Name, step, weights, records."""
    trainer.config = parse_config(raw | {"trainer": raw["trainer"] | {"run_dir": str(run_dir)}})
    with RunLock(run_dir, beat=0.1, stale=0.3) as lock:
        check_resume(trainer.config, trainer.policy.shape)
        with Watchdog(trainer.config.trainer.heartbeat, log_folder(run_dir), 0, 1) as watchdog:
            trainer.saves = Saves(trainer.config.trainer, trainer.collectives, lock, watchdog)
            trainer._open_run()
            path = trainer.saves.checkpoints.newest(trainer._check_state)
            assert path is not None
            path, trainer.state = trainer.saves.checkpoints.load(trainer.policy, path, trainer._check_state)
            trainer.observer.restore(trainer.state["observer"])
            trainer.observer.rewind(trainer.state["step"])
            trainer.observer.close("tested")
    return path.name, trainer.state["step"], weights_of(trainer.policy), records(run_dir)


def findings(run_dir):
    """What `doctor RUN_DIR` has to say."""
    checks = [look(run_dir) for look in (run_directory.checkpoints, run_directory.metrics, run_directory.leftovers)]
    return [f"{check.found}: {check.remedy}" for check in checks if check.status != "ok"]


def start_each(rendezvous, base, raw, folder):
    """By case: what a start found, or its error; what `doctor` says before and after; what was set aside. And what a
    start finds where only one checkpoint is left, by its name."""
    os.environ.update(environment())
    raw["observe"]["console"] = "off"
    trainer = Trainer(
        parse_config(raw), check_config(parse_config(raw), 1), rendezvous, StopSignal(), Watchdog(
            parse_config(raw).trainer.heartbeat, folder, 0, 1))  # fmt: skip
    TRAINER.append(trainer)
    found = {}
    for name in ("", *CASES):
        run_dir = folder / "run"
        shutil.copytree(base, run_dir, symlinks=True)
        if "that are NaN" in name or "that are infinite" in name:
            start(trainer, run_dir, raw)  # its weights are made worse
        if name:
            CASES[name][1](run_dir)
        before = findings(run_dir)
        try:
            said = start(trainer, run_dir, raw)
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        found[name] = said, before, findings(run_dir), [path.name for path in run_dir.rglob("*.damaged*")]
        shutil.rmtree(run_dir)
    good = {}
    for name in ("step_2", BEFORE, NEWEST):  # alone
        shutil.copytree(base, run_dir, symlinks=True)
        for other in {"step_2", BEFORE, NEWEST} - {name}:
            shutil.rmtree(run_dir / "checkpoints" / other)
        good[name] = start(trainer, run_dir, raw)
        shutil.rmtree(run_dir)
    return found, good


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The run without interruption."""
    return run_straight(config, tmp_path_factory)


@pytest.fixture(scope="module")
def stopped(straight, tmp_path_factory):
    """The run after an update of its fourth step."""
    run_dir = tmp_path_factory.mktemp("stopped") / "run"
    raw = config(straight[0], run_dir)
    assert run(raw, at_point("loop/before_update", 7, send_signal(signal.SIGTERM))) == REQUEUE
    return run_dir, raw


@pytest.fixture(scope="module")
def starts(stopped, tmp_path_factory):
    run_dir, raw = stopped
    return run_ranks(1, start_each, run_dir, raw, tmp_path_factory.mktemp("starts"), timeout=900)[0]


def test_there_are_60_kinds_and_more(starts):
    found, good = starts
    assert len(found) - 1 == len(CASES) >= 60
    assert found[""][0] == good[NEWEST] and [good[n][1] for n in ("step_2", BEFORE, NEWEST)] == [2, 3, 3]
    assert len({weights for _, _, weights, _ in good.values()}) == 3


@pytest.mark.parametrize("case", CASES)
def test_a_start_continues_from_the_newest_good_checkpoint(case, starts):
    found, good = starts
    said, before, after, aside = found[case]
    assert said == good[CASES[case][0]], said
    assert not after, "the second start has something to say"
    if any(word in case for word in ("NaN", "infinite")):
        assert "poisoned: " in before[0], before
    if case in CHECKPOINT:
        assert before
        assert any(name.startswith(f"{NEWEST}.damaged") for name in aside)


WHOLE = {
    "weights without a manifest": CHECKPOINT["unlink manifest.json"],
    "a batch that cannot be trained on": CHECKPOINT["a score that was NaN"],
    "a garbage line": OTHER["metrics: garbage in the middle"][1],
    "files in the way": lambda run_dir: [as_file(run_dir / name) for name in ("logs", "samples", "checkpoints/step_4")],
}


@pytest.mark.parametrize("case", some(WHOLE, "a batch that cannot be trained on", "files in the way"))
def test_resumed_to_the_end_its_numbers_are_those_of_the_undisturbed_run(case, stopped, straight, tmp_path):
    shutil.copytree(stopped[0], tmp_path / "run", symlinks=True)
    WHOLE[case](tmp_path / "run")
    assert run(config(straight[0], tmp_path / "run")) == 0
    assert_same(tmp_path / "run", straight, STEPS)
