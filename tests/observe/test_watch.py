"""`megatron-dapo watch`: reachable from this machine only, read-only, and it follows the files of the run."""

import json
import re
import runpy
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from synthetic_runs import make_many_samples, make_run, step_metrics

from megatron_dapo import cli
from megatron_dapo.cli import main
from megatron_dapo.config.base import parse_yaml
from megatron_dapo.config.trainer import ObserveConfig
from megatron_dapo.errors import UserError
from megatron_dapo.observe.figures import SECTIONS
from megatron_dapo.observe.metrics_file import STEP, Record
from megatron_dapo.observe.observer import Observer
from megatron_dapo.observe.runs import load_runs
from megatron_dapo.observe.watch import make_server, prometheus_text, read_token

MAKE_DEMO = Path(__file__).parents[2] / "tools" / "make_demo.py"


@contextmanager
def serving(*runs):
    with make_server(runs, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield (*server.server_address, f"/{server.token}")
        finally:
            server.shutdown()
            thread.join()


def ask(address, path="/data", method="GET", host=None, token=None, headers=None):
    """(status, headers, text)"""
    path = (address[2] if token is None else token) + path
    name = host or f"{address[0]}:{address[1]}"
    request = urllib.request.Request(f"http://{address[0]}:{address[1]}{path}", method=method)
    for key, value in {"Host": name, **(headers or {})}.items():
        request.add_header(key, value)
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return reply.status, reply.headers, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


def test_the_page_and_its_data_are_all_there_is(tmp_path):
    run = make_run(tmp_path / "run", 4)
    (tmp_path / "secret").write_text("secret")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with serving(run) as address:
        assert address[0] == "127.0.0.1"
        status, headers, page = ask(address, "/")
        assert status == 200 and "connect-src 'self'" in page and "default-src 'none'" in page
        assert headers["Cache-Control"] == "no-store" and headers["X-Frame-Options"] == "DENY"
        for path in ("/metrics.jsonl", "/../secret", "/data/../../secret", "/%2e%2e/secret", "//etc/passwd"):
            assert ask(address, path)[0] == 404, path
        for path in ("/", "/data", "/missing"):
            (status, headers, _), (again, head, nothing) = ask(address, path), ask(address, path, "HEAD")
            assert (again, head["Content-Type"], nothing) == (status, headers["Content-Type"], ""), path
            assert int(head["Content-Length"]) > 0
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert ask(address, "/data", method)[0] == 501, method
        for host in ("example.org", f"example.org:{address[1]}", "127.0.0.1", f"127.0.0.1.example.org:{address[1]}"):
            assert ask(address, "/data", host=host)[0] == 403, "a page elsewhere cannot read it through a browser"
        assert ask(address, "/data", host=f"localhost:{address[1]}")[0] == 200
        for token in ("", "/", "/x", "//", address[2][:-1], address[2].swapcase(), "/%00"):
            for path in ("/", "/data", ""):
                status, _, text = ask(address, path, token=token)
                assert status in (403, 404) and "reward" not in text, "another user of this machine"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before, "nothing was written"


def test_data_is_sent_again_only_when_a_file_changed(tmp_path):
    run = make_run(tmp_path / "run", 3)
    with serving(run) as address:
        first = json.loads(ask(address)[2])
        assert first["data"]["runs"][0]["last_step"] == 3
        again = json.loads(ask(address, f"/data?version={first['version']}")[2])
        assert again["data"] is None and again["version"] == first["version"]
        make_run(run, 5)
        third = json.loads(ask(address, f"/data?version={first['version']}")[2])
        assert third["data"]["runs"][0]["last_step"] == 5 and third["version"] != first["version"]
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join([*lines[:2], "not a record\n", *lines[2:]]))
        damaged = json.loads(ask(address, f"/data?version={third['version']}")[2])
        assert damaged["error"] is None and damaged["data"]["runs"][0]["steps"] == 5
        assert "metrics.jsonl: skipped line" in damaged["data"]["runs"][0]["warnings"][-1]
        (run / "metrics.jsonl").unlink()
        (run / "metrics.jsonl").mkdir()
        broken = json.loads(ask(address, f"/data?version={third['version']}")[2])
        assert "cannot be read" in broken["error"] and broken["data"] is None


def test_a_run_is_followed_from_before_its_first_step_to_its_end(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with serving(run) as address:

        def status():
            (found,) = json.loads(ask(address)[2])["status"]
            return found

        assert status()["state"] == "not started"
        config = ObserveConfig(console="off", report=False, trace_every=1)
        observer = Observer(config, run, total_steps=2, settings={}, ranks=3)
        observer._status._written = 0.0  # a write is due
        with observer.phase("start") as phase:
            observer._status._written = 0.0
            phase.note("starting SGLang: 12 of 600 s")
            (shown,) = status()["phases"]
            assert shown["name"] == "start" and shown["text"] == "starting SGLang: 12 of 600 s"
            assert 0 <= shown["seconds"] < 60 and status()["silent"] is None
        observer.step(1, {"reward/mean": 0.5, "train/batch_tokens": 6000})
        assert (status()["step"], status()["total"]) == (1, 2)
        speed = json.loads((run / "metrics.jsonl").read_text())["metrics"]
        assert speed["time/tokens_per_second_per_gpu"] == pytest.approx(6000 / speed["time/step"] / 3)
        about = dict(json.loads(ask(address)[2])["data"]["runs"][0]["about"])
        assert "megatron-dapo" in about["versions"] and "3 ranks" in about["hardware"] and about["started"]
        observer.close("finished")
        assert status()["state"] == "finished" and status()["phases"] == []


def test_a_run_that_died_is_said_to_be_silent(tmp_path):
    run = make_run(tmp_path / "run", 2)
    (run / "logs").mkdir()
    (run / "logs" / "status.json").write_text(json.dumps({"state": "running", "phases": [], "updated": 1000.0}))
    with serving(run) as address:
        assert json.loads(ask(address)[2])["status"][0]["silent"] > 1e6


def test_wrong_input_is_one_line(tmp_path, capsys):
    assert main(["watch", str(tmp_path / "missing")]) == 2
    assert "no such directory" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="choose another one with --port"):
            make_server([tmp_path], port=taken.getsockname()[1])


def test_samples_are_sent_one_step_and_one_sample_at_a_time(tmp_path):
    run = make_run(tmp_path / "run", 60)
    with serving(run) as address:

        def found(path):
            return json.loads(ask(address, path)[2])

        rows = found("/samples?run=0&step=40")
        assert len(rows) == 18 and [row["place"] for row in rows] == list(range(18))
        assert {(row["verdict"], row["advantage"] > 0) for row in rows} == {("right", True), ("wrong", False)}
        assert not any("text" in row for row in rows) and rows[0]["source"] == "easy" and rows[-1]["source"] == "hard"
        assert [row["place"] for row in found("/samples?run=0&step=40&search=40+%2B+3%3F")] == list(range(12, 18))
        item = found("/sample?run=0&step=40&place=13")
        assert item["prompt"] == "What is 40 + 3?" and "Answer: " in item["text"] and item["verdict"] == "wrong"
        assert len(item["values"]["ratio"]) == 5 == item["tokens"] and item["values"]["mask"] == [1, 1, 1, 1, 0]
        assert found("/history?run=0&prompt=sum-3") == [[step, 3, 6, 6, 5.0] for step in (1, 20, 40, 60)]
        assert found("/samples?run=0&step=41") == [] == found("/history?run=0&prompt=other")
        for path in ("/sample?run=0&step=40&place=99", "/sample?run=7&step=40&place=1", "/samples?run=x", "/history"):
            assert ask(address, path)[0] == 404, path


def make_folder(tmp_path):
    """Two runs and something else, two levels deep; one of them runs."""
    runs = [make_run(tmp_path / "a" / "dapo", 5), make_run(tmp_path / "grpo", 3, seed=1, clip_higher=False)]
    (tmp_path / "notes").mkdir()
    for run, state, left in ((runs[0], "running", 90.0), (runs[1], "failed: no room", None)):
        (run / "logs").mkdir()
        status = {"state": state, "phases": [], "step": 5, "total": 9, "remaining": left, "updated": time.time()}
        (run / "logs" / "status.json").write_text(json.dumps(status))
    (runs[1] / "logs" / "warnings.log").write_text("step 1: a\nstep 2: b. See docs/diagnosis.md#grad-norm\n")
    return runs


def test_all_runs_of_a_folder_are_listed_with_what_differs(tmp_path, capsys):
    make_folder(tmp_path)
    assert main(["runs", str(tmp_path)]) == 0
    lines = capsys.readouterr().out
    assert re.search(r"dapo +step 5/9 +ETA 90.0s +\d+\.\d% +running\n", lines)
    assert re.search(r"grpo .*failed: no room\n +warning: step 2: b\. See", lines)
    assert "algorithm.clip_high=0.28" in lines and "algorithm.clip_high=0.2 " in lines and "policy.model" not in lines
    with serving(tmp_path) as address:
        rows = {row["name"]: row for row in json.loads(ask(address)[2])["runs"]}
        assert rows.keys() == {"a/dapo", "grpo"} and rows["grpo"]["warning"].startswith("step 2: b")
        dapo = rows["a/dapo"]
        assert dapo["settings"]["trainer.seed"] == "0" and dapo["remaining"] == 90.0
        assert "connect-src 'self'" in ask(address, "/")[2]
        assert json.loads(ask(address, f"/{dapo['page']}data")[2])["data"]["runs"][0]["last_step"] == 5
        assert len(json.loads(ask(address, f"/{dapo['page']}samples?run=0&step=1")[2])) == 18
        for path in ("/run/notes/", "/run/..%2f..%2fetc/", "/run/grpo", "/run//data", "/other/grpo/", "/run/dapo/"):
            assert ask(address, path)[0] == 404, path
        make_run(tmp_path / "later", 2)
        assert len(json.loads(ask(address)[2])["runs"]) == 3, "a run that starts later"
    assert main(["runs", str(tmp_path / "notes")]) == 2 and "no run in" in capsys.readouterr().err


def test_a_run_that_starts_later_renames_no_other(tmp_path, monkeypatch):
    """Pages that are open, and the labels of Prometheus, go on."""
    first, alone = make_run(tmp_path / "all" / "exp1" / "seed_0", 2), make_run(tmp_path / "seed_0", 2)
    monkeypatch.chdir(tmp_path)

    def names(address):
        rows = json.loads(ask(address)[2])["runs"]
        assert all(ask(address, f"/{row['page']}")[0] == 200 for row in rows)
        labels = set(re.findall(r'_step\{run="(.*)"\}', ask(address, "/metrics")[2]))
        assert labels == {row["name"] for row in rows}
        return labels

    with serving("all") as one, serving(tmp_path / "all", alone) as two, serving(alone) as single:
        assert names(one) == {"exp1/seed_0"} and names(two) == {"all/exp1/seed_0", "seed_0"}
        assert json.loads(ask(single)[2])["data"]["runs"][0]["name"] == "seed_0"
        shutil.copytree(first, tmp_path / "all" / "exp2" / "seed_0")
        assert names(one) == {"exp1/seed_0", "exp2/seed_0"}
        assert names(two) == {"all/exp1/seed_0", "all/exp2/seed_0", "seed_0"}


def test_a_configuration_is_parsed_again_only_when_its_file_changed(tmp_path, monkeypatch):
    make_folder(tmp_path)
    parsed = []
    monkeypatch.setattr("megatron_dapo.observe.runs.parse_yaml", lambda text: parsed.append(text) or parse_yaml(text))
    with serving(tmp_path) as address:

        def seeds():
            return [row["settings"]["trainer.seed"] for row in json.loads(ask(address)[2])["runs"]]

        assert sorted(seeds()) == sorted(seeds()) == ["0", "1"] and len(parsed) <= 4  # the server reads ahead
        parsed.clear()
        file = tmp_path / "grpo" / "config.yaml"
        file.write_text(file.read_text().replace("seed: 1", "seed: 17"))
        assert sorted(seeds()) == ["0", "17"] and len(parsed) == 1


BOARD = Path(__file__).resolve().parents[2] / "examples" / "monitoring"


def test_prometheus_gets_every_metric_of_board_and_alerts(tmp_path):
    runs = make_folder(tmp_path)
    names = [name for specs in SECTIONS.values() for spec in specs for name in spec.metrics if not name.endswith("*")]
    known = step_metrics(6, 9, 0) | dict.fromkeys(names, 0.25) | {"train/loss": float("nan")}
    with (runs[0] / "metrics.jsonl").open("a") as file:
        file.write(Record(6, STEP, known).to_line())
    (runs[0] / "logs" / "heartbeat").mkdir()
    gpu = {"memory_used_bytes": 9e9, "memory_total_bytes": 1e10, "utilization_ratio": 0.5}
    for rank in (0, 1):
        beat = {"time": time.time(), "progress": 7, "host": 'node"1', "gpu": gpu}
        (runs[0] / "logs" / "heartbeat" / f"rank_{rank}.json").write_text(json.dumps(beat))
    text = prometheus_text({run.name: run for run in runs})
    sample = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)\{(?:\w+="(?:[^"\\]|\\.)*",?)*\} (\S+)')
    lines = [line for line in text.splitlines() if not line.startswith("# TYPE ")]
    found = [sample.fullmatch(line) for line in lines]
    assert all(found) and all(float(match[2]) is not None for match in found), "the format of Prometheus"
    assert re.search(r'^megatron_dapo_step\{run="dapo"\} 5.0$', text, re.M)
    assert re.search(r'^megatron_dapo_warnings_total\{run="grpo",rule="grad-norm"\} 1.0$', text, re.M)
    assert re.search(r'_rank_gpu_utilization_ratio\{run="dapo",rank="1",host="node\\"1"\} 0.5$', text, re.M)
    assert re.search(r'^megatron_dapo_running\{run="grpo"\} 0.0$', text, re.M)
    exported = {match[1] for match in found}
    for file in ("grafana.json", "alerts.yml"):
        asked = set(re.findall(r"megatron_dapo_\w+", (BOARD / file).read_text()))
        assert len(asked) >= 5 and asked <= exported, asked - exported
    board = (BOARD / "grafana.json").read_text()
    for name in ("step", "rollout_tokens_per_second", "rollout_queue", "rollout_staleness_max", "warnings_total"):
        assert f"megatron_dapo_{name}" in board


def test_prometheus_may_send_the_token_as_a_bearer(tmp_path):
    run = make_run(tmp_path / "run", 2)
    with serving(run) as address:
        token = address[2].strip("/")
        for path, headers, status in (
            (f"/{token}/metrics", {}, 200),
            ("/metrics", {"Authorization": f"Bearer {token}"}, 200),
            ("/metrics", {"Authorization": f"Bearer {token[:-1]}"}, 403),
            ("/metrics", {}, 403),
            ("/data", {"Authorization": f"Bearer {token}"}, 403),
        ):
            assert ask(address, path, token="", headers=headers)[0] == status, (path, headers)


def test_a_token_file_keeps_the_address(tmp_path):
    file = tmp_path / "token"
    first = read_token(file)
    assert read_token(file) == first and len(first) >= 16 and file.stat().st_mode & 0o077 == 0
    with make_server([tmp_path], port=0, token=first) as server:
        assert f"/{first}/" in server.url
    file.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        read_token(file)
    file.chmod(0o600)
    file.write_text("short")
    with pytest.raises(UserError, match="at least 16"):
        read_token(file)


def test_a_demo_is_made_from_a_run_and_shown_by_name(tmp_path, monkeypatch):
    run, made = make_run(tmp_path / "run", 400, samples_every=0), tmp_path / "demos" / "gsm8k"
    make_many_samples(run / "samples", 40)
    (run / "environment.json").write_text('[{"started": "today", "hardware": "one H200"}]')
    with (run / "config.yaml").open("a") as file:
        file.write("directory: /dev/shm\n")  # on every machine
    make_demo = runpy.run_path(str(MAKE_DEMO))["make_demo"]
    shutil.copytree(run, tmp_path / "local")
    (tmp_path / "local" / "config.yaml").write_text("policy: {model: /data/models/qwen}\n")
    with pytest.raises(SystemExit, match="/data/models/qwen"):
        make_demo(tmp_path / "local", made, [])
    assert 550_000 < make_demo(run, made, ["models/=Qwen/"]) <= 600_000
    (before,), (after,) = load_runs([run]), load_runs([made])
    assert after.config["policy.model"] == "Qwen/qwen" and len(after.steps) == len(before.steps) == 400
    assert after.series("train/entropy")[1] == pytest.approx(before.series("train/entropy")[1], rel=1e-5)
    steps = {item.step for item in after.transcripts}
    assert len(steps) == 12 and {1, 40} < steps
    assert {item.verdict for item in after.transcripts} == {"right", "wrong"}

    shown = []
    monkeypatch.setattr(cli, "DEMOS", tmp_path / "demos")
    monkeypatch.setattr("megatron_dapo.observe.watch.watch", lambda runs, port, token_file: shown.append(runs) or 0)
    assert main(["watch", "--demo", "gsm8k"]) == 0 and shown == [[made]]
    with pytest.raises(SystemExit):
        main(["watch", "--demo", "other"])
