"""Tools: what they compute, and what hostile code cannot do. One sandbox runs all calls of a test."""

import asyncio
import logging
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megatron_dapo.errors import UserError
from megatron_dapo.rollout.agents.tools import confinement
from megatron_dapo.rollout.agents.tools.sandbox import Sandbox, ToolLimits

LIMITS = ToolLimits(seconds=60.0, cpu_seconds=1, memory_mb=64, disk_mb=2, characters=200)


def run(calls, limits=LIMITS, workers=2):
    """(results, metrics) of [(tool, code)], at the same time."""

    async def main():
        sandbox = Sandbox(limits, workers)
        try:
            found = await asyncio.gather(
                *(sandbox.run(tool, code, f"prompt{i}") for i, (tool, code) in enumerate(calls))
            )
            return found, sandbox.take_metrics()
        finally:
            await sandbox.close()

    return asyncio.run(main())


def python(*codes, **settings):
    return run([("python", code) for code in codes], **settings)


CALCULATIONS = {
    "12*34": "408", " 7 - 10 ": "-3", "2^10": "1024", "(1+2)*-3": "-9", "10/4": "2.5", "10/5": "2", "7//2": "3",
    "sqrt(16)": "4.0", "max(2, 3)": "3", "1/0": "ZeroDivisionError: division by zero", "7%4": "3",
    "": "SyntaxError: invalid syntax",
    "open('/etc/passwd')": "ValueError: not arithmetic: open('/etc/passwd')",
    "(1).__class__": "ValueError: not arithmetic: 1 .__class__", "'a'*3": "ValueError: not arithmetic: 'a'",
    "True+1": "ValueError: not arithmetic: True",
}  # fmt: skip


def test_the_calculator_computes_arithmetic_and_nothing_else():
    results, metrics = run([("calculator", code) for code in CALCULATIONS])
    assert [result.text.strip() for result in results] == list(CALCULATIONS.values())
    assert not any(result.limit for result in results)
    assert metrics["tools/calls"] == metrics["tools/calculator/calls"] == len(CALCULATIONS)


PROGRAMS = {
    "print('a')\nx = 3\nx * 2": "a\n6", "None": "", "import json; json.dumps([1])": "'[1]'",
    "def f():\n  return 1\nf() + g()": "NameError: name 'g' is not defined (line 3)",
    "import sys; sys.exit('bye')": "bye", "import sys; print('x', file=sys.stderr)": "x",
    "open('a.txt', 'w').write('hello'); print(open('a.txt').read())": "hello",
    "import os; os.listdir('.')": "[]", "1 +": "SyntaxError: invalid syntax",
    "import threading; t = threading.Thread(target=print, args=('in a thread',)); t.start(); t.join()": "in a thread",
    "import os; sorted(os.environ)": "['HOME', 'LANG', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PATH', 'TMPDIR']",
    "input()": "EOFError: EOF when reading a line (line 1)",
}  # fmt: skip


def test_python_runs_and_prints_the_value_of_its_last_line(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "secret")
    results, _ = python(*PROGRAMS)
    assert dict(zip(PROGRAMS, (r.text.strip() for r in results), strict=True)) == PROGRAMS
    assert not any(result.limit for result in results)


HOSTILE = {
    "while True: print('x' * 1000)": "output",
    "while True: pass": "cpu-time",
    "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass": "killed",
    "x = bytearray(10 * 2**30)": "memory",
    "x = []\nwhile True: x.append(' ' * 10**6)": "memory",
    "i = 0\nwhile True:\n  open(str(i), 'w').write('x' * 10**6); i += 1": "disk",
    "import os; os.close(1); os.close(2)\nimport time; time.sleep(1000)": "killed",
    "import ctypes; ctypes.string_at(0)": "crashed",
}


def test_hostile_code_is_bounded_and_attributed(caplog):
    with caplog.at_level(logging.WARNING):
        results, metrics = python(*HOSTILE, "1 + 1", workers=3)
        (asleep,), _ = python("import time; time.sleep(1000)", limits=ToolLimits(seconds=0.3))
    assert (asleep.limit, asleep.seconds < 60) == ("time", True)
    assert dict(zip(HOSTILE, (result.limit for result in results), strict=False)) == HOSTILE
    assert all(result.seconds < 60 and len(result.text) <= 202 for result in results)
    assert (results[-1].text, results[-1].limit) == ("2\n", ""), "the calls after them go on"
    for limit in set(HOSTILE.values()):
        assert metrics[f"tools/python/limit/{limit}"] == list(HOSTILE.values()).count(limit)
    for i, limit in enumerate(HOSTILE.values()):
        assert any(f"tool python, prompt prompt{i}: ended by the limit '{limit}'" in m for m in caplog.messages)


REFUSED = {
    "import os; os.fork()": "PermissionError",
    "import os\nwhile True: os.fork()": "PermissionError",
    "import subprocess; subprocess.run(['true'])": "PermissionError",
    "import os; os.posix_spawn('/bin/true', ['true'], {})": "PermissionError",
    "import socket; socket.socket()": "PermissionError",
    "import socket; socket.create_connection(('127.0.0.1', 80))": "PermissionError",
    "import urllib.request; urllib.request.urlopen('http://example.com')": "URLError",
    "open(TARGET, 'w')": "PermissionError",
    "open(TARGET)": "PermissionError",
    "import os; os.remove(TARGET)": "PermissionError",
    "import os; os.rename(TARGET, 'mine')": "PermissionError",
    "import os; os.symlink(TARGET, 'link'); open('link', 'a')": "PermissionError",
    "import os; os.link(TARGET, 'link')": "OSError",
    "import os; os.chmod(TARGET, 0)": "PermissionError",
    "import os; os.truncate(TARGET, 0)": "PermissionError",
    "import os; os.mkdir(f'/tmp/made-by-a-tool-{PARENT}')": "PermissionError",
    "open(f'/dev/shm/made-by-a-tool-{PARENT}', 'w')": "PermissionError",
    "import os; os.kill(PARENT, 9)": "PermissionError",
    "import os; os.kill(os.getppid(), 9)": "PermissionError",
    "open(f'/proc/{PARENT}/environ', 'rb').read()": "PermissionError",
    "import resource; resource.prlimit(PARENT, resource.RLIMIT_CPU, (1, 1))": "PermissionError",
    "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))": "ValueError",
    "import ctypes; print(ctypes.CDLL(None).ptrace(16, PARENT, 0, 0))": "-1",
    "import os; os.memfd_create('x')": "PermissionError",
}  # fmt: skip


def test_what_a_tool_may_not_do_is_refused(tmp_path):
    target = tmp_path / "target.txt"
    target.write_text("kept")
    mode = target.stat().st_mode
    names = f"TARGET, PARENT = {str(target)!r}, {os.getpid()}\n"
    results, _ = python(*(names + code for code in REFUSED))
    wrong = {code: r.text for (code, name), r in zip(REFUSED.items(), results, strict=True) if name not in r.text}
    assert not wrong
    assert target.read_text() == "kept" and target.stat().st_mode == mode and list(tmp_path.iterdir()) == [target]
    assert not [path for folder in ("/tmp", "/dev/shm") for path in Path(folder).glob(f"made-by-a-tool-{os.getpid()}")]


def test_scratch_directories_and_processes_are_gone_afterwards():
    results, _ = python(
        "import os; print(os.getcwd()); open('x', 'w').write('x')",
        "import time; time.sleep(9)",
        limits=ToolLimits(seconds=0.5),
    )
    assert not Path(results[0].text.splitlines()[0]).exists()
    left = [p for p in psutil.Process().children(recursive=True) if "tool_worker" in " ".join(p.cmdline())]
    assert not left


def test_network_can_be_allowed():
    results, _ = python("import socket; socket.socket(); print('made')", limits=ToolLimits(network=True))
    assert results[0].text == "made\n"


def test_without_landlock_nothing_can_be_written(tmp_path):
    """The filter for kernels without it, in a process of its own."""
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(confinement.__file__).parent)!r})
import confinement
confinement.landlock_version = lambda: 0
confinement.confine({str(tmp_path)!r}, [], False)
print(open({str(tmp_path / "there")!r}).read())
for attempt in (lambda: open({str(tmp_path / "x")!r}, "w"), lambda: os.mkdir({str(tmp_path / "d")!r}), os.fork,
                lambda: os.unlink({str(tmp_path / "there")!r}), lambda: open({str(tmp_path / "there")!r}, "r+")):
    try:
        attempt()
        print("done")
    except PermissionError:
        print("refused")
"""
    (tmp_path / "there").write_text("readable")
    found = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60)
    assert found.stdout.split() == ["readable", *["refused"] * 5], found.stderr


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_refuses_the_calls_of_both_machines(machine):
    """Interprets the program as the kernel does; only one of the two machines can run it here."""
    column = ("x86_64", "aarch64").index(machine)
    architecture = confinement._ARCHITECTURES[machine][1]

    def decide(number, *arguments, architecture=architecture, **options):
        words = [number, architecture, 0, 0, *(w for a in (*arguments, *[0] * (6 - len(arguments))) for w in (a, 0))]
        program, at, value = confinement.filter_program(machine=machine, **options), 0, 0
        while True:
            code, yes, no, operand = program[at]
            if code == 0x06:
                return operand
            if code == 0x20:
                value, step = words[operand // 4], 0
            else:
                holds = {0x15: value == operand, 0x45: bool(value & operand), 0x35: value >= operand}[code]
                step = yes if holds else no
            at += 1 + step

    allow, deny, kill = confinement._ALLOW, confinement._DENY, confinement._KILL
    usual = {"network": False, "writing": True}
    for name, numbers in (confinement.FORBIDDEN | confinement.NETWORK).items():
        if numbers[column] is not None:
            assert decide(numbers[column], **usual) == deny, name
    assert decide(confinement.NETWORK["socket"][column], network=True, writing=True) == allow
    for name, numbers in confinement.WRITING.items():
        if numbers[column] is not None:
            assert decide(numbers[column], **usual) == allow, name
            assert decide(numbers[column], network=False, writing=False) == deny, name
    clone, openat, prlimit = (
        table[column] for table in (confinement._CLONE, confinement._OPENAT, confinement._PRLIMIT)
    )
    assert decide(clone, 0x3D0F00, **usual) == allow and decide(clone, 17, **usual) == deny
    assert decide(435, **usual) == confinement._ABSENT
    assert decide(prlimit, 0, **usual) == allow and decide(prlimit, 4711, **usual) == deny
    assert decide(openat, 0, 0, os.O_RDONLY, network=False, writing=False) == allow
    assert decide(openat, 0, 0, os.O_WRONLY, network=False, writing=False) == deny
    assert decide(openat, 0, 0, os.O_WRONLY, **usual) == allow
    assert decide(0, architecture=0x40000003, **usual) == kill


def test_a_tool_that_does_not_exist_and_limits_of_zero_are_errors():
    with pytest.raises(UserError, match="no tool 'shell'; there are calculator, python"):
        run([("shell", "ls")])
    with pytest.raises(UserError, match="seconds is 0"):
        ToolLimits(seconds=0)


def test_an_interrupted_call_does_not_disturb_the_next_one():
    async def main():
        sandbox = Sandbox(LIMITS, workers=1)
        try:
            first = asyncio.ensure_future(sandbox.run("python", "import time; time.sleep(0.3); 'first'"))
            await asyncio.sleep(0.15)
            first.cancel()
            return await sandbox.run("python", "'second'")
        finally:
            await sandbox.close()

    assert asyncio.run(main()).text == "'second'\n"
