"""wandb and TensorBoard: optional, named if missing, one run across resumes, and a failure never ends a training."""

import importlib.util
import sys
import types
from typing import Any

import pytest
from synthetic_runs import make_groups

from megatron_dapo.config.trainer import ObserveConfig, WandbConfig
from megatron_dapo.errors import UserError
from megatron_dapo.observe.metrics_file import STEP, Record, read_records
from megatron_dapo.observe.observer import Observer
from megatron_dapo.observe.trackers import TensorBoard


class FakeWandb(types.ModuleType):
    """Records the calls in order."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.util.spec_from_loader("wandb", None)
        self.options: list[dict[str, Any]] = []
        self.calls: list[tuple[Any, ...]] = []

    def init(self, **options: Any) -> "FakeWandb":
        self.options.append(options)
        return self

    def Table(self, columns: list[str], data: list[list[Any]]) -> list[dict[str, Any]]:
        return [dict(zip(columns, row, strict=True)) for row in data]

    def define_metric(self, *names: str, **options: str) -> None:
        self.calls.append(("define", *names, *options.values()))

    def log(self, values: dict[str, float]) -> None:
        self.calls.append(("log", values["step"], sorted(values)))

    def finish(self, exit_code: int) -> None:
        self.calls.append(("finish", exit_code))


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def offline(**options: Any) -> ObserveConfig:
    wandb = WandbConfig(mode="offline", project="p", tags=["t"])
    return ObserveConfig(console="off", report=False, wandb=wandb, **options)


def observer(folder, config: ObserveConfig) -> Observer:
    return Observer(config, folder, total_steps=4, settings={"trainer": {"seed": 3}})


@pytest.mark.parametrize(
    ("config", "package"),
    [(ObserveConfig(console="off", wandb=WandbConfig(mode="online")), "wandb"),
     (ObserveConfig(console="off", tensorboard=True), "tensorboard")],
)  # fmt: skip
def test_a_missing_package_is_named_with_its_extra_before_anything_is_written(tmp_path, monkeypatch, config, package):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"{package} is not installed: pip install 'megatron-dapo\[{package}\]'"):
        observer(tmp_path / "run", config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("saved", [True, False], ids=["resumed", "killed before its first checkpoint"])
def test_a_training_has_one_wandb_run(tmp_path, wandb, saved):
    first = observer(tmp_path, offline())
    assert not list(tmp_path.rglob("wandb*")), "before the first metrics"
    first.step(1, {"reward/mean": 0.5})
    first.evaluation(1, {"eval/avg@8": 0.5})
    second = observer(tmp_path, offline())
    if saved:
        second.restore(first.state())
        second.rewind(1)
    second.step(2 if saved else 1, {"reward/mean": 0.6})
    second.close("finished")
    ids = [options["id"] for options in wandb.options]
    assert len(ids) == 2 and ids[0] == ids[1] == (tmp_path / "logs" / "wandb_id").read_text()
    options = wandb.options[0]
    assert (options["mode"], options["project"], options["tags"], options["resume"]) == ("offline", "p", ["t"], "allow")
    assert options["config"] == {"trainer": {"seed": 3}} and options["name"] == tmp_path.name
    assert ("define", "*", "step") in wandb.calls, "our step is the axis"
    logged = [call for call in wandb.calls if call[0] == "log"]
    assert [step for _, step, _ in logged] == [1, 1, 2 if saved else 1]
    assert logged[1][2] == ["eval/avg@8", "step"]
    assert wandb.calls[-1] == ("finish", 0)


def test_two_runs_have_two_ids(tmp_path, wandb):
    for name in ("a", "b"):
        observer(tmp_path / name, offline()).step(1, {"reward/mean": 0.5})
    assert len({options["id"] for options in wandb.options}) == 2


OWN = """
from megatron_dapo.observe.trackers import Tracker

class Mine(Tracker):
    name = "mine"
    def __init__(self, run_dir, settings):
        self.seen, self.seed = [], settings["trainer"]["seed"]
        print("made for", run_dir.name, self.seed)
    def log(self, record):
        print("log", record.step, record.kind, record.metrics["reward/mean"])
    def log_samples(self, samples):
        print("samples", samples.step, len(samples.transcripts))
    def close(self, status):
        print("close", status)

def not_a_tracker(run_dir, settings):
    return object()
"""


def test_a_custom_tracker_gets_records_samples_and_the_end(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_tracker.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    config = ObserveConfig(console="off", report=False, tracker="python:own_tracker.Mine", samples_responses=2)
    watched = observer(tmp_path / "run", config)
    watched.step(1, {"reward/mean": 0.5}, make_groups(1))
    watched.step(2, {"reward/mean": 0.6}, make_groups(2))  # not due
    watched.close("finished")
    said = capsys.readouterr().out.splitlines()
    expected = ["made for run 3", "log 1 step 0.5", "samples 1 4", "log 2 step 0.6", "close finished"]
    assert said == expected
    with pytest.raises(UserError, match=r"not_a_tracker must be a class derived from .*Tracker"):
        observer(tmp_path / "run", ObserveConfig(tracker="python:own_tracker.not_a_tracker"))


def test_wandb_gets_a_table_of_samples(tmp_path, wandb, monkeypatch):
    tables = {}
    monkeypatch.setattr(wandb, "log", lambda values: tables.update({values["step"]: values.get("samples")}))
    watched = observer(tmp_path, offline(samples_groups=0, samples_responses=0))
    groups = make_groups(1) * 30
    watched.step(1, {"reward/mean": 0.5}, groups)
    assert len(tables[1]) == 64 < sum(len(group.samples) for group in groups)
    row, sample = tables[1][0], groups[0].samples[0]
    shown = (row["prompt"], row["reference"], row["score"], row["text"])
    assert shown == (groups[0].prompt.text, groups[0].prompt.answer, sample.grade.score, sample.text)


def test_a_failing_tracker_is_tried_again_with_growing_pauses_and_gets_every_step(tmp_path, wandb, monkeypatch):
    tries, logged = [], []

    def log(values: dict[str, float]) -> None:
        tries.append(values["step"])
        if values["step"] >= 3 and len(tries) <= 4:
            raise ConnectionError("no route")
        logged.append(values["step"])

    monkeypatch.setattr(wandb, "log", log)
    watched = observer(tmp_path, offline())
    for step in range(1, 20):
        watched.step(step, {"reward/mean": 0.5})
        assert len(read_records(tmp_path / "metrics.jsonl")) == step, "the training goes on"
    assert tries == [1, 2, 3, 3, *range(3, 20)], "attempts after steps 3, 8 and 17"
    watched.close("finished")
    assert logged == list(range(1, 20))
    log_file = (tmp_path / "logs" / "warnings.log").read_text()
    assert log_file.count("wandb failed: ConnectionError: no route") == log_file.count("wandb works again") == 1


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_real_wandb_offline(tmp_path):
    watched = observer(tmp_path, offline())
    watched.step(1, {"reward/mean": 0.5})
    watched.close("finished")
    assert list(tmp_path.glob("logs/wandb/offline-run-*/*.wandb"))
    assert not (tmp_path / "logs" / "warnings.log").exists()


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_holds_each_step_once_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoard(tmp_path)
    for step in (1, 2, 3):
        first.log(Record(step, STEP, {"reward/mean": step / 10}))
    first.close("failed")
    second = TensorBoard(tmp_path)
    second.rewind(2)
    for step in (3, 4):
        second.log(Record(step, STEP, {"reward/mean": step / 10}))
    second.close("finished")
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("reward/mean")
    assert [(e.step, round(e.value, 6)) for e in events] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's writer
def test_tensorboard_holds_each_step_once_after_a_failed_write(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer.record_writer import RecordWriter

    config = ObserveConfig(console="off", report=False, tensorboard=True)
    watched = observer(tmp_path, config)
    watched.step(1, {"reward/mean": 0.1})

    def full(self: RecordWriter, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(RecordWriter, "write", full)
        watched.step(2, {"reward/mean": 0.2})
    for step in range(3, 9):
        watched.step(step, {"reward/mean": step / 10})
    watched.close("finished")
    folder = tmp_path / "logs" / "tensorboard"
    events = EventAccumulator(str(folder)).Reload().Scalars("reward/mean")
    assert [(e.step, round(e.value, 6)) for e in events] == [(step, step / 10) for step in range(1, 9)]
    assert "tensorboard works again" in (tmp_path / "logs" / "warnings.log").read_text()
