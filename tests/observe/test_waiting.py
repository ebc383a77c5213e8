"""What a command waits for before a run has its console, and while the engines start."""

import gc
import io
import os
import threading
import time

import pytest

from megatron_dapo.config.trainer import ObserveConfig
from megatron_dapo.observe import console as module
from megatron_dapo.observe.console import PlainConsole, importing, waiting
from megatron_dapo.observe.observer import Observer
from megatron_dapo.trainer.rollout_driver import newest_line


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_it_at_once(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with waiting("importing torch", stream):
        pass
    assert "importing torch" in stream.getvalue()


def test_elsewhere_a_line_is_printed_only_if_it_takes_long(monkeypatch):
    short, long = io.StringIO(), io.StringIO()
    with waiting("reading the prompts", short):
        pass
    assert short.getvalue() == ""
    monkeypatch.setattr(module, "FIRST_LINE", 0.0)
    with waiting("reading the prompts", long):
        while not long.getvalue():
            time.sleep(0.001)
    assert long.getvalue() == "megatron-dapo: reading the prompts, for 0 s\n"
    assert not [thread for thread in threading.enumerate() if thread.name == "waiting"], "what follows may fork"


def test_the_last_line_of_the_log_that_was_written_to_last(tmp_path):
    assert newest_line(tmp_path) == ""
    for index, (text, age) in enumerate([("old\n", 100), ("Loading weights: 40%\n\n", 0), ("", 50)]):
        log = tmp_path / f"server-{index}.log"
        log.write_bytes(b"x" * 5000 + b"\n" + text.encode())
        os.utime(log, (time.time() - age,) * 2)
    assert newest_line(tmp_path) == "Loading weights: 40%"


def test_the_console_shows_how_long_the_engines_have_been_starting(tmp_path, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(PlainConsole, "HEARTBEAT", 0.0)
    monkeypatch.setattr("megatron_dapo.observe.observer.make_console", lambda *_: PlainConsole(stream))
    observer = Observer(ObserveConfig(report=False), tmp_path, total_steps=1, settings={})
    with observer.phase("start") as phase:
        phase.note("waiting for the engines")
        observer.starting(12.3, 900.0, "Load weight begin. avail mem=139 GB")
    observer.close("stopped")
    said = stream.getvalue()
    assert "start: waiting for the engines" in said
    assert ": 12/900 s for the engines; their log: Load weight begin. avail mem=139 GB" in said


def test_garbage_is_collected_again_after_imports_also_after_a_failed_one():
    with importing("torch"):
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), importing("nothing"):
        raise ImportError
    assert gc.isenabled()
