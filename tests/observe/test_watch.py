"""`megatron-dapo watch`: reachable from this machine only, read-only, and it follows the files of the run."""

import json
import socket
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
from synthetic_runs import make_run

from megatron_dapo.cli import main
from megatron_dapo.config.trainer import ObserveConfig
from megatron_dapo.errors import UserError
from megatron_dapo.observe.observer import Observer
from megatron_dapo.observe.watch import make_server


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


def ask(address, path="/data", method="GET", host=None, token=None):
    """(status, headers, text)"""
    path = (address[2] if token is None else token) + path
    name = host or f"{address[0]}:{address[1]}"
    request = urllib.request.Request(f"http://{address[0]}:{address[1]}{path}", method=method, headers={"Host": name})
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
        (run / "metrics.jsonl").write_text("not a record\n")
        broken = json.loads(ask(address, f"/data?version={third['version']}")[2])
        assert "line 1" in broken["error"] and broken["data"] is None


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
