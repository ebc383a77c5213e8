"""The webhook: every warning of diagnosis is posted within 60 s, also over an outage; the URL is never shown."""

import json
import math
import threading
import urllib.error
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from synthetic_runs import step_metrics

from megatron_dapo.config import ConfigError, parse_config
from megatron_dapo.config.trainer import ObserveConfig
from megatron_dapo.errors import UserError
from megatron_dapo.observe import observer as observer_module
from megatron_dapo.observe.diagnosis import RULES
from megatron_dapo.observe.observer import Observer
from megatron_dapo.observe.trackers import Webhook

HEALTHY, FAULT, AFTER = 8, 30, 60.0  # steps, steps, seconds
FAULTS = {
    "entropy-collapse": {"train/entropy": 0.02},
    "entropy-explosion": {"train/entropy": 6.0},
    "mismatch": {"train/mismatch_kl": 0.4},
    "mismatch: a jump": {"train/mismatch_kl": 0.05},
    "importance-cap": {"train/mismatch_over_cap": 0.2},
    "clip-fraction": {"train/clip_fraction_high": 0.3},
    "clip-fraction: low": {"train/clip_fraction_low": 0.25},
    "policy-shift": {"train/approx_kl": 0.5},
    "nothing-kept": {"rollout/groups_kept": 0},
    "filter-yield": {"rollout/groups_kept": 2, "rollout/dropped/all-wrong": 900},
    "truncated": {"rollout/truncated_share": 0.8},
    "truncated: more than at the start": {"rollout/truncated_share": 0.3},
    "length-collapse": {"rollout/length_trained": 30.0},
    "grad-norm": {"train/grad_norm": 40.0},
    "flat-reward": {"reward/accuracy_all": 0.0},
    "flat-reward: nothing left to learn": {"reward/accuracy_all": 1.0},
    "accuracy-drop": {"reward/accuracy_all": 0.15},
    "ungraded": {"reward/ungraded_share": 0.1},
    "not-finite": {"train/loss": math.nan},
    "not-finite: tokens": {"train/nonfinite_tokens": 3.0},
    "skipped-update": {"train/update_skipped": 1.0},
    "useless-critic": {"critic/explained_variance": -0.1},
    "failed-groups": {"rollout/groups_failed": 60, "rollout/groups_submitted": 100},
}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Endpoint(Webhook):
    """Posts to a list instead, on a fake clock, and refuses until `works_from`."""

    def __init__(self, url, run, clock, works_from):
        super().__init__(url, run, clock)
        self.posted, self.works_from = [], works_from

    def start(self):
        """No thread: the test calls `deliver` when the thread would."""

    def _post(self, entry):
        if self._clock() < self.works_from:
            raise urllib.error.URLError("refused")
        self.posted.append((self._clock(), entry))


def test_there_are_twenty_faults_and_more_of_all_rules():
    assert len(FAULTS) >= 20 and {name.split(":")[0] for name in FAULTS} == {rule.name for rule in RULES}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_posted_within_a_minute_of_its_diagnosis(fault, tmp_path, monkeypatch):
    """The endpoint is down for 45 s after the diagnosis."""
    clock, hook = Clock(), None

    def make(variable, run):
        nonlocal hook
        hook = Endpoint("https://secret.invalid/T0KEN", run, clock, works_from=math.inf)
        return hook

    monkeypatch.setattr(observer_module, "make_webhook", make)
    config = ObserveConfig(console="off", report=False, webhook_env="HOOK")
    observer = Observer(config, tmp_path / "run", total_steps=99, settings={})
    diagnosed = None
    for step in range(1, HEALTHY + FAULT + 1):
        clock.now += 100.0
        values = step_metrics(step, 99, 0) | {"reward/accuracy_all": 0.4, "rollout/truncated_share": 0.02}
        observer.step(step, values | (FAULTS[fault] if step > HEALTHY else {}))
        assert step > HEALTHY or not hook._waiting, "a healthy run is silent"
        if hook._waiting:
            diagnosed, hook.works_from = clock.now, clock.now + 45.0
            break
    assert diagnosed is not None
    while not hook.deliver():
        clock.now += Webhook.PAUSE
    (when, entry), rule = hook.posted[0], fault.split(":")[0]
    assert when - diagnosed <= AFTER
    assert rule in [posted["rule"] for _, posted in hook.posted] and entry["run"] == "run"
    assert f"docs/diagnosis.md#{entry['rule']}" in entry["text"] and entry["step"] == step
    observer.close("finished")
    kept = "".join(p.read_text(errors="replace") for p in (tmp_path / "run").rglob("*") if p.is_file())
    assert "T0KEN" not in kept, "the address is a secret"


def test_warnings_and_the_end_arrive_at_a_server(tmp_path, monkeypatch, capsys):
    got, calls = [], iter([503, 200, 200, 200])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            status = next(calls)
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if status == 200:
                got.append(json.loads(body)["text"])
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_): ...

    monkeypatch.setattr(Webhook, "PAUSE", 0.01)
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("HOOK", f"http://127.0.0.1:{server.server_port}/T0KEN")
        observer = Observer(ObserveConfig(report=False, webhook_env="HOOK"), tmp_path, total_steps=9, settings={})
        observer.warn("one")
        observer.warn("two")
        observer.close("failed: no room")
        server.shutdown()
        thread.join()
    assert [text.split(": ", 1)[1] for text in got] == ["one", "two", "run failed: no room"]
    assert "T0KEN" not in capsys.readouterr().out


def test_what_nobody_takes_is_given_up_after_ten_minutes():
    clock = Clock()
    hook = Endpoint("https://secret.invalid/", "run", clock, works_from=math.inf)
    hook.send(1, "x")
    assert not hook.deliver()
    clock.now = Webhook.GIVE_UP
    assert hook.deliver() and not hook.posted


def test_the_url_belongs_into_the_environment(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="name of an environment variable") as found:
        parse_config({"observe": {"webhook_env": "https://hooks.example.com/T0KEN"}})
    monkeypatch.delenv("HOOK", raising=False)
    with pytest.raises(UserError, match="HOOK has no http address"):
        Observer(ObserveConfig(console="off", webhook_env="HOOK"), tmp_path, total_steps=1, settings={})
    assert "T0KEN" not in str(found.value)
