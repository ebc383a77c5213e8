"""`megatron-dapo doctor`: exit codes, JSON output, and time limits of checks."""

import json
import time
from types import SimpleNamespace

import pytest

from megatron_dapo.cli import main
from megatron_dapo.config import Config, parse_config
from megatron_dapo.doctor import command
from megatron_dapo.doctor.check import Check, Probe
from megatron_dapo.doctor.command import probes, run
from megatron_dapo.doctor.machine import bitwise_resume
from megatron_dapo.errors import UserError
from megatron_dapo.planner.models import _configs


def fixed(*statuses):
    def make(config, named):
        return [Probe(f"c{i}", lambda s=s, i=i: Check(f"c{i}", s, "found [this]")) for i, s in enumerate(statuses)]

    return make


@pytest.mark.parametrize(("statuses", "code"), [(["ok"], 0), (["ok", "warn"], 0), (["warn", "fail", "ok"], 1), ([], 0)])
def test_exit_code_is_1_when_a_check_failed(statuses, code, capsys):
    assert run(None, make=fixed(*statuses)) == code
    text = capsys.readouterr().out
    assert f"{statuses.count('fail')} failed" in text
    assert text.count("found [this]") == len(statuses)


def test_json_output(capsys):
    assert run(None, as_json=True, make=fixed("ok", "fail")) == 1
    records = json.loads(capsys.readouterr().out)
    assert [r["status"] for r in records] == ["ok", "fail"]
    assert set(records[0]) == {"name", "status", "found", "remedy"}


def test_a_hanging_check_does_not_stop_the_others(capsys):
    def make(config, named):
        stuck = Probe("stuck", lambda: time.sleep(60) or Check("stuck", "ok", ""), seconds=0.2)
        return [stuck, Probe("after", lambda: Check("after", "ok", "fine"))]

    started = time.monotonic()
    assert run(None, make=make) == 1
    assert time.monotonic() - started < 5
    assert "fine" in capsys.readouterr().out


def test_no_time_limit_is_a_time_limit(capsys):
    assert run(None, timeout=float("inf"), make=fixed("ok")) == 0


def test_lines_fit_100_columns(capsys):
    def make(config, named):
        return [Probe("long", lambda: Check("long", "warn", "word " * 60, "do " * 80))]

    run(None, make=make)
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 100


def test_only_selects_checks_by_name(capsys):
    assert run(None, only="c1", make=fixed("fail", "ok")) == 0
    with pytest.raises(UserError, match="there are c0, c1"):
        run(None, only="c7", make=fixed("ok", "ok"))


def test_the_configuration_selects_the_checks():
    names = {probe.name for probe in probes(Config(), named=False)}
    assert {"python", "packages", "lock", "apex", "gpu", "torch", "attention", "kernels", "run directory", "disk",
            "shared memory", "clock", "limits", "hf cache", "slurm", "ports", "weights"} == names  # fmt: skip
    named = parse_config({"policy": {"model": "somewhere"}, "rollout": {"engine": "sglang"}})
    assert {probe.name for probe in probes(named, named=True)} - names == {"sglang", "bitwise resume", "model"}
    embedded = parse_config({"rollout": {"engine": "embedded"}})
    assert not {"sglang", "ports", "weights"} & {probe.name for probe in probes(embedded, named=True)}


@pytest.mark.parametrize(("rank", "advantage", "gib"), [
    (0, "group-std", 1282), (16, "group-std", 5), (0, "gae", 2563), (16, "gae", 1287)
])  # fmt: skip
def test_the_disk_must_hold_adapters_only_with_lora_and_the_critic(rank, advantage, gib, tmp_path, monkeypatch):
    """Three checkpoints at 14 bytes of 32.8 B parameters; of adapters of rank 16 with 134,217,728 (docs/lora.md). The
    critic is trained as a whole. A model that has several uses is looked for once: it may be on the hub."""
    asked = []
    find = command.local_model
    monkeypatch.setattr(command, "local_model", lambda *args, **more: asked.append(args) or find(*args, **more))
    (tmp_path / "config.json").write_text(json.dumps(_configs()["Qwen2.5-32B"]))
    policy = {"model": str(tmp_path), "lora": {"rank": rank}, "tensor_parallel": 2, "pipeline_parallel": 2}
    algorithm = {"advantage": advantage}
    config = parse_config({"policy": policy, "algorithm": algorithm, "trainer": {"checkpoint": {"keep": 2}}})
    disk = next(probe for probe in probes(config, named=True) if probe.name == "disk")
    assert asked == [(str(tmp_path),)]
    assert f"3 checkpoints take {gib:,} GiB" in disk.look(usage=lambda path: SimpleNamespace(free=2**50)).found


@pytest.mark.parametrize(("keep", "checkpoints"), [(3, 4), (None, 12)])
def test_the_disk_must_hold_what_the_run_keeps(keep, checkpoints, tmp_path):
    """All of 101 steps, saved every 10: ten, the one at the end, and the one being written."""
    (tmp_path / "config.json").write_text(json.dumps(_configs()["Qwen2.5-32B"]))
    trainer = {"steps": 101, "checkpoint": {"keep": keep, "every": 10}}
    config = parse_config({"policy": {"model": str(tmp_path), "tensor_parallel": 2}, "trainer": trainer})
    disk = next(probe for probe in probes(config, named=True) if probe.name == "disk")
    assert f"but {checkpoints} checkpoints take" in disk.look(usage=lambda path: SimpleNamespace(free=1)).found


def test_the_command_line(tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps({"trainer": {"run_dir": str(tmp_path / "run")}, "policy": {"model": "nowhere"}}))
    assert main(["doctor", str(config), "--json", "--only", "python,packages,disk,model"]) == 1
    status = {record["name"]: record["status"] for record in json.loads(capsys.readouterr().out)}
    assert status["python"] == status["packages"] == "ok" and status["model"] == "fail"
    assert main(["doctor", "--only", "python"]) == 0
    assert main(["doctor", "--only", "nonsense"]) == 2


def test_a_run_directory_is_examined_and_not_changed(tmp_path, capsys):
    for name in ("checkpoints/step_2", "checkpoints/.step_3.tmp", "lock"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "kind": "step", "metrics": {}}\ngarbage\n')
    (tmp_path / "logs").write_text("in the way")
    (tmp_path / "lock/1.json").write_text("garbage")
    before = sorted(tmp_path.rglob("*"))
    assert run(str(tmp_path), as_json=True) == 1
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert {name: check["status"] for name, check in found.items()} == {
        "writing": "ok", "holder": "warn", "checkpoints": "fail", "metrics": "warn", "leftovers": "warn"
    }  # fmt: skip
    assert "step_2/manifest.json cannot be read" in found["checkpoints"]["found"]
    assert "1 records, the last of step 1; no record: line 2" in found["metrics"]["found"]
    assert "logs is in the way; .step_3.tmp is unfinished" in found["leftovers"]["found"]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_of_another_version_is_examined(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("trainer: {stepz: 3}\n")
    assert run(str(tmp_path), as_json=True) == 0
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert "did you mean 'trainer.steps'" in found["config.yaml"]["found"] and found["checkpoints"]["status"] == "ok"
    with pytest.raises(UserError, match="--set"):
        run(str(tmp_path), ["trainer.stepz=3"])


BITWISE = {
    "policy": {"true_on_policy": True},
    "rollout": {"engine": "sglang", "sampler": {"order": "prompt", "unfinished": "finish"}},
}


@pytest.mark.parametrize(
    ("section", "change", "status", "cause"),
    [
        ("policy", {}, "ok", "no setting"),
        ("rollout", {"sampler": {"order": "prompt"}}, "warn", "sampler.unfinished"),
        ("rollout", {"sampler": {"unfinished": "finish"}}, "warn", "sampler.order"),
        ("policy", {"true_on_policy": False}, "ok", "--enable-deterministic-inference"),
        ("policy", {"true_on_policy": False, "deterministic": True}, "warn", "--enable-deterministic-inference"),
    ],
)
def test_what_prevents_a_bitwise_resume_is_named(section, change, status, cause):
    check = bitwise_resume(parse_config(BITWISE | {section: BITWISE[section] | change}))
    assert check.status == status and cause in check.found
