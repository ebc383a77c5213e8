"""Tools: what they compute, and what hostile code cannot do. One sandbox runs all calls of a test."""

import asyncio
import contextlib
import ctypes
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from long_lists import some

from megatron_dapo.errors import UserError
from megatron_dapo.processes.fork_ranks import run_in_fork
from megatron_dapo.rollout.agents.tools import confinement, tool_worker
from megatron_dapo.rollout.agents.tools import sandbox as sandbox_module
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
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
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


THREADS = "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()"


def test_hostile_code_is_bounded_and_attributed(caplog):
    with caplog.at_level(logging.WARNING):
        results, metrics = python(*HOSTILE, "1 + 1", workers=3)
        (asleep,), _ = python("import time; time.sleep(1000)", limits=ToolLimits(seconds=0.3))
        (threads,), _ = python(THREADS, limits=ToolLimits(seconds=60.0, memory_mb=16 * 1024))
    assert (asleep.limit, asleep.seconds < 60, threads.limit) == ("time", True, "threads")
    assert dict(zip(HOSTILE, (result.limit for result in results), strict=False)) == HOSTILE
    assert all(result.seconds < 60 and len(result.text) <= 202 for result in results)
    assert (results[-1].text, results[-1].limit) == ("2\n", ""), "the calls after them go on"
    for limit in set(HOSTILE.values()):
        assert metrics[f"tools/python/limit/{limit}"] == list(HOSTILE.values()).count(limit)
    for i, limit in enumerate(HOSTILE.values()):
        assert any(f"tool python, prompt prompt{i}: ended by the limit '{limit}'" in m for m in caplog.messages)


# What runs before each attack. `call` makes a system call by its numbers on x86_64 and aarch64.
PRELUDE = """
import ctypes, fcntl, mmap, os, platform, resource, signal, socket, struct, subprocess, sys, threading, time
TARGET, TRAINER, WORKER = {target!r}, {trainer}, os.getppid()
libc = ctypes.CDLL(None, use_errno=True)
def call(x86, arm, *values):
    if libc.syscall(x86 if platform.machine() == "x86_64" else arm, *values) >= 0: return "DONE"
    return os.strerror(ctypes.get_errno())
"""
DENIED, EPERM, ANYTHING = "PermissionError", "Operation not permitted", ""
FLOOD = "parts = []\nfor i in range(600):\n  {}\n  os.write(parts[-1], bytes(2**20)); print(i + 1, flush=True)"
HIDDEN = (
    "libc.prctl(4, 0)\nparts = []\nfor i in range(9):\n  parts.append(os.open('x', os.O_CREAT | os.O_WRONLY))\n"
    "  os.remove('x'); os.write(parts[-1], bytes(10**6))\ntime.sleep(9)"
)
# One page in each GiB has page tables of its own, two of them.
TABLES = """
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 4]
for i in range(1, 65536):
    page = libc.mmap(i << 30, mmap.PAGESIZE, 1, 0x100022, -1, 0)
    if page == i << 30: ctypes.string_at(page, 1)
print([line for line in open('/proc/self/status') if 'VmPTE' in line]); time.sleep(1)
"""
BYTE = "x = ctypes.create_string_buffer(9); at = ctypes.addressof(x); "
NESTED = "import os\nfor i in range(3000): os.mkdir('d' * 9); os.chdir('d' * 9)\n'deep'"
SEARCH = """
import re
memory = open('/proc/self/mem', 'rb', 0)
for line in open('/proc/self/maps'):
    first, last = (int(number, 16) for number in line.split()[0].split('-'))
    if ' r' in line and last - first < 2**24:
        try:
            memory.seek(first)
            for _ in re.findall(b'ATTACKED_[K]EY=', memory.read(last - first)): print('FOUND')
        except (OSError, ValueError, OverflowError):
            pass
'searched'"""
# Code, and what its result must contain: text, or the name of a limit. Nothing may contain the trainer's key.
ATTACKS = [
    # keys of the trainer
    ("'PATH=' in open('/proc/self/environ').read(), 'EY=s3' in open('/proc/self/environ').read()", "(True, False)"),
    ("open('/proc/thread-self/environ').read()", "PATH=|" + DENIED),
    ("open(f'/proc/{WORKER}/environ').read()", DENIED), ("open(f'/proc/{TRAINER}/environ').read()", DENIED),
    ("open('/proc/1/environ').read()", DENIED), ("os.execv('/usr/bin/env', ['env'])", "PATH="),
    ("open(f'/proc/{TRAINER}/mem', 'rb')", DENIED), ("open(f'/proc/{WORKER}/maps')", DENIED),
    ("open(f'/proc/{TRAINER}/cmdline').read()", DENIED), ("os.readlink(f'/proc/{TRAINER}/cwd')", DENIED),
    ("os.listdir(f'/proc/{WORKER}/fd')", DENIED), ("os.listdir('/proc')", DENIED),
    (SEARCH, "'searched'"),
    ("import gc\nfor x in gc.get_objects():\n  if type(x).__name__ == 'Channel': x.send({'number': 0, 'text': 'x'})",
     "Bad file descriptor"),
    ("for fd in range(3, 999):\n  try: os.write(fd, b'x'); print('WROTE', fd)\n  except OSError: pass", ANYTHING),
    # files
    ("open(TARGET)", DENIED), ("open(TARGET, 'w')", DENIED), ("open(TARGET, 'a')", DENIED),
    ("os.remove(TARGET)", DENIED), ("os.rename(TARGET, 'mine')", DENIED + "|cross-device"),
    ("os.symlink(TARGET, 'link'); open('link', 'a')", DENIED), ("os.link(TARGET, 'link')", "Error"),
    ("os.chmod(TARGET, 0)", DENIED), ("os.chown(TARGET, 1, 1)", DENIED), ("os.utime(TARGET)", DENIED),
    ("os.truncate(TARGET, 0)", DENIED), ("os.setxattr(TARGET, 'user.x', b'x')", DENIED),
    ("open('/proc/self/root' + TARGET)", DENIED), ("open('/proc/self/cwd/../..' + TARGET)", "Error"),
    ("call(437, 437, -100, TARGET.encode(), struct.pack('QQQ', 0, 0, 0), 24)", "Permission denied"),
    ("call(304, 265, -100, struct.pack('Ii8s', 8, 1, b''), 0)", EPERM), ("os.listdir('/root')", DENIED),
    ("os.listdir(os.path.dirname(TARGET))", DENIED), ("open('/etc/shadow')", DENIED), ("open('/etc/passwd')", DENIED),
    ("os.mkdir(f'/tmp/made-by-a-tool-{TRAINER}')", DENIED), ("open(f'/dev/shm/made-by-a-tool-{TRAINER}', 'w')", DENIED),
    ("os.open('/tmp', os.O_TMPFILE | os.O_RDWR)", DENIED), ("os.mknod('disk', 0o60600, os.makedev(8, 0))", DENIED),
    ("open(os.__file__, 'a')", DENIED), ("os.chroot('.')", DENIED), ("open('/proc/self/oom_score_adj', 'w')", DENIED),
    ("open('/proc/sys/kernel/core_pattern', 'w')", "Error"), ("os.listdir('/dev/shm')", DENIED),
    ("open('x', 'w').write('#!/bin/sh'); os.execv('./x', ['x'])", DENIED),
    (BYTE + "call(463, 463, -100, TARGET.encode(), 0, b'user.x', struct.pack('QII', at, 1, 0), 16)", "not implemented"),
    ("call(469, 469, -100, TARGET.encode(), bytes(24), 24, 0)", "not implemented"),
    # processes
    ("os.fork()", DENIED), ("while True: os.fork()", DENIED), ("subprocess.run(['true'])", DENIED),
    ("os.posix_spawn('/bin/true', ['true'], {})", DENIED), ("call(56, 220, 17, 0, 0, 0, 0)", EPERM),
    ("call(435, 435, bytes(88), 88)", "not implemented"),
    ("os.execv(sys.executable, ['python', '-Ic', 'import os; os.fork()'])", DENIED),
    ("os.kill(TRAINER, 9)", DENIED), ("os.kill(WORKER, 9)", DENIED),
    ("os.kill(-1, 9)", DENIED), ("os.killpg(os.getpgid(WORKER), 9)", DENIED),
    ("call(234, 131, WORKER, WORKER, 9)", EPERM),
    ("call(424, 424, os.pidfd_open(WORKER), 9, 0, 0)", EPERM), ("call(129, 138, WORKER, 9, bytes(128))", EPERM),
    ("r, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, WORKER)", DENIED),
    ("r, w = os.pipe()\nfcntl.fcntl(r, 10, signal.SIGKILL)", DENIED),
    ("r, w = os.pipe()\nfcntl.fcntl(r, 15, struct.pack('ii', 1, WORKER))", DENIED),
    ("a, b = socket.socketpair()\nfcntl.ioctl(a, 0x8901, struct.pack('i', WORKER))", DENIED),
    ("fcntl.ioctl(0, 0x5412, b'x')", DENIED), ("call(101, 117, 16, WORKER, 0, 0)", EPERM),
    ("call(310, 270, WORKER, 0, 0, 0, 0, 0)", EPERM), ("call(311, 271, TRAINER, 0, 0, 0, 0, 0)", EPERM),
    ("call(312, 272, WORKER, WORKER, 0, 0, 0)", EPERM), ("call(438, 438, os.pidfd_open(WORKER), 0, 0)", EPERM),
    ("resource.prlimit(TRAINER, resource.RLIMIT_CPU, (1, 1))", DENIED),
    ("os.sched_setaffinity(WORKER, {0})", DENIED), ("os.setpriority(os.PRIO_PROCESS, WORKER, 19)", DENIED),
    # privileges and namespaces
    ("call(272, 97, 0x10000000)", EPERM), ("call(308, 268, 0, 0)", EPERM), ("call(165, 40, 0, b'/', 0, 32, 0)", EPERM),
    ("call(165, 40, b'x', os.getcwd().encode(), b'tmpfs', 32, b'size=1g')", EPERM),
    ("call(166, 39, os.getcwd().encode(), 2)", EPERM), ("call(430, 430, b'tmpfs', 0)", EPERM),
    ("call(428, 428, -100, b'/', 1)", EPERM), ("call(321, 280, 0, bytes(64), 64)", EPERM),
    ("call(126, 91, struct.pack('Ii', 0x20080522, 0), struct.pack('6I', *[2**32 - 1] * 6))", EPERM),
    ("os.execv('/usr/bin/grep', ['grep', 'Cap[PE]', '/proc/self/status'])", "CapEff:\t0000000000000000"),
    ("call(425, 425, 8, bytes(120))", EPERM),
    ("call(323, 282, 0)", EPERM), ("call(298, 241, bytes(128), 0, -1, -1, 0)", EPERM),
    ("call(250, 219, 0, -3, 1)", EPERM),
    ("resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))", "ValueError"),
    # shared memory, network
    ("os.memfd_create('x')", DENIED), ("call(29, 194, 0, 4096, 0o1600)", EPERM), ("call(30, 196, 0, 0, 0)", EPERM),
    ("call(31, 195, 0, 0, 0)", EPERM), ("call(68, 186, 0, 0o1600)", EPERM),
    ("call(240, 180, b'x', 66, 0o600, 0)", EPERM),
    ("socket.socket()", DENIED), ("socket.create_connection(('127.0.0.1', 80))", DENIED),
    ("import urllib.request; urllib.request.urlopen('http://example.com')", "URLError"),
    ("socket.socket(socket.AF_UNIX).connect('/var/run/docker.sock')", DENIED), ("socket.socket(16, 3)", DENIED),
    ("socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)", DENIED),
    ("socket.socketpair()[0].connect('/dev/log')", DENIED), ("socket.socketpair()[0].sendto(b'x', '/dev/log')", DENIED),
    ("socket.socketpair()[0].bind('\\0x')", DENIED),
    ("socket.send_fds(socket.socketpair()[0], [b'x'], [0])", DENIED),
    # what ends a run, or a worker
    ("os._exit(78)", ANYTHING), ("os._exit(77)", "memory"),
    ("print('unconfined x', flush=True); os._exit(1)", "unconfined"),
    ("print('{\"text\": \"\", \"limit\": \"unconfined\"}')", "unconfined"), ("def f(): f()\nf()", "RecursionError"),
    # Out of memory, Python may have none left for the exception that says so.
    ("sys.setrecursionlimit(10**9)\ndef f(): f()\nf()", "memory|crashed|cpu-time|error return without exception set"),
    ("10 ** 10 ** 9", "cpu-time|memory"),
    ("signal.raise_signal(signal.SIGSTOP)", "Error"), ("os.write(2, b'unconfined by standard error')", "28"),
    ("os.mkdir('d', 0o300); os.chdir('d')\nfor i in range(9): open(str(i), 'w').write('x' * 10**6)\ntime.sleep(9)",
     "disk"),
    ("for i in range(10**5): open(str(i), 'w').close()", "disk"),
    ("for i in range(10**5): os.mkdir(str(i))", "disk"),
    ("os.posix_fallocate(os.open('x', os.O_CREAT | os.O_RDWR), 0, 2**30)", "disk"),
    (FLOOD.format("parts.append(os.open('x', os.O_CREAT | os.O_WRONLY)); os.remove('x')"), "disk|Too many open files"),
    (FLOOD.format("parts.append(os.open('.', os.O_TMPFILE | os.O_WRONLY, 0o600))"), "disk|Too many open files"),
    (FLOOD.format("parts.append(os.open(str(i), os.O_CREAT | os.O_WRONLY)); os.rename(str(i), 'x')"), "disk|Too many"),
    ("parts = []\nfor i in range(999): parts += os.pipe(); os.write(parts[-1], bytes(2**16))", "Too many open files"),
    ("libc.mlockall(3); x = bytearray(2**30)", "memory"),
    # memory of the kernel
    (BYTE + "call(278, 75, os.pipe()[1], struct.pack('QQ', at, 1), 1, 0)", EPERM),
    (TABLES, "memory"), (HIDDEN, "disk"), ("os.splice(0, os.pipe()[1], 1)", DENIED),
    ("r, w = os.pipe(); os.write(w, b'x'); call(276, 77, r, os.pipe()[1], 1, 0)", EPERM),
    ("call(294, 26, 0)", EPERM), ("call(444, 444, struct.pack('Q', 1), 8, 0)", EPERM),
    ("fcntl.fcntl(os.pipe()[1], 1031, 2**20)", DENIED),
]  # fmt: skip

# Runs the worker without namespaces (as in most containers), or as another user.
AS_IN = """
import os, sys
sys.path.insert(0, {folder!r})
import confinement
if "no namespaces" in {place!r}:
    number = confinement.FORBIDDEN["unshare"][confinement._ARCHITECTURES[os.uname().machine][0]]
    confinement._LIBC.prctl(38, 1, 0, 0, 0)
    ends = [(6, 0, 0, confinement._DENY), (6, 0, 0, confinement._ALLOW)]
    confinement._install([(0x20, 0, 0, 0), (0x15, 0, 1, number), *ends])
if "ordinary user" in {place!r}:
    os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
os.execv(sys.argv[1], sys.argv[1:])
"""
PLACES = ["here", "no namespaces", "ordinary user", "ordinary user, no namespaces"]


def python_of_an_ordinary_user():
    if os.getuid() != 0:
        pytest.skip("only root can become another user; 'here' runs as an ordinary one")
    for python in (sys.executable, "/usr/bin/python3"):
        code = f"import sys; open({confinement.__file__!r}); assert sys.version_info >= (3, 11)"
        with contextlib.suppress(OSError):
            if subprocess.run([python, "-Ic", code], user=65534, group=65534, extra_groups=[]).returncode == 0:
                return python
    return pytest.skip("other users can read neither a Python >= 3.11 nor this checkout")


@pytest.fixture(params=some(PLACES, PLACES[0], PLACES[-1]))  # with every means of confinement, and with the fewest
def place(request, monkeypatch, tmp_path):  # tmp_path exists before the folder for temporary files changes
    python = python_of_an_ordinary_user() if "ordinary" in request.param else sys.executable
    if request.param != "here":
        code = AS_IN.format(folder=str(Path(confinement.__file__).parent), place=request.param)
        command = [sys.executable, "-Ic", code, python, *sandbox_module.COMMAND[1:]]
        monkeypatch.setattr(sandbox_module, "COMMAND", command)
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch).chmod(0o777)
        monkeypatch.setattr(tempfile, "tempdir", scratch)
        yield request.param


def test_no_attack_escapes(place, tmp_path, monkeypatch, caplog):
    assert len(ATTACKS) >= 60
    monkeypatch.setenv("ATTACKED_KEY", "s3cr3t")
    target = tmp_path / "target.txt"
    target.write_text("kept")
    mode = target.stat().st_mode
    prelude = PRELUDE.format(target=str(target), trainer=os.getpid())
    results, _ = python(*(prelude + code for code, _ in ATTACKS))
    (nested,), _ = python(NESTED, limits=ToolLimits(seconds=60.0, cpu_seconds=30))
    assert nested.text == "'deep'\n" or nested.limit == "disk", "deep folders crash no worker"
    texts = {code: f"{r.text} [{r.limit}]" for (code, _), r in zip(ATTACKS, results, strict=True)}
    escaped = ("DONE", "s3cr3t", "ATTACKED", "FOUND", "WROTE")
    wrong = {
        code: texts[code]
        for code, expected in ATTACKS
        if not any(part in texts[code] for part in expected.split("|")) or any(part in texts[code] for part in escaped)
    }
    assert not wrong
    watched = any("their scratch directories are watched" in message for message in caplog.messages)
    assert watched >= ("no namespaces" in place), "the weaker limit is said"
    written = [sum(map(str.isdigit, text.split())) for code, text in texts.items() if "bytes(2**20)" in code]
    assert len(written) == 3 and max(written) <= LIMITS.disk_mb * (12 if watched else 1)
    assert target.read_text() == "kept" and target.stat().st_mode == mode and list(tmp_path.iterdir()) == [target]
    assert not list(Path(tempfile.gettempdir()).iterdir()), "scratch directories are removed"
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
    codes = (
        "socket.socket(); socket.gethostbyname('localhost')",
        "socket.socket(socket.AF_UNIX)",
        "socket.socket(16, 3)",
    )
    results, _ = python(*(f"import socket; {code}" for code in codes), limits=ToolLimits(network=True))
    assert [result.text.partition(":")[0] for result in results] == ["'127.0.0.1'\n", *["PermissionError"] * 2]


def test_nothing_runs_where_tools_could_read_the_keys_of_other_processes():
    """An ordinary user on a kernel without Landlock and without user namespaces."""
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(confinement.__file__).parent)!r})
import confinement
confinement.landlock_version = lambda: 0
if os.fork() == 0:
    try:
        confinement.confine("/tmp", [], False)
        print("confined")
    except confinement.CannotConfine as error:
        print(error.strerror)
    sys.stdout.flush()
    os._exit(0)
os.wait()
"""
    command, options = [python_of_an_ordinary_user(), "-Ic", code], {"user": 65534, "group": 65534, "extra_groups": []}
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, **options)
    assert "tools could read the keys of other processes" in found.stdout, found.stderr


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
        values = (*arguments, *[0] * (6 - len(arguments)))
        words = [number, architecture, 0, 0, *(half for value in values for half in (value % 2**32, value >> 32))]
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
    for family, decision in {1: deny, 2: allow, 10: allow, 16: deny, 17: deny}.items():
        assert decide(confinement._SOCKET[column], family, network=True, writing=True) == decision, family
    for kind, decision in {1: allow, 2: deny, 3: deny, 5: allow, 0x80801: allow, 0x80802: deny}.items():
        assert decide(confinement._SOCKETPAIR[column], 1, kind, **usual) == decision, kind
    send, fcntl, ioctl = (table[column] for table in (confinement._SENDTO, confinement._FCNTL, confinement._IOCTL))
    assert decide(send, **usual) == allow and decide(send, 0, 0, 0, 0, 1 << 40, **usual) == deny
    assert [command for command in range(16) if decide(fcntl, 0, command, **usual) == deny] == [8, 10, 15]
    assert decide(ioctl, 0, 0x5401, **usual) == allow and decide(ioctl, 0, 0x8902, **usual) == deny
    for name, numbers in confinement.WRITING.items():
        if numbers[column] is not None:
            assert decide(numbers[column], **usual) == allow, name
            assert decide(numbers[column], network=False, writing=False) == deny, name
    clone, openat, prlimit = (
        table[column] for table in (confinement._CLONE, confinement._OPENAT, confinement._PRLIMIT)
    )
    assert decide(clone, 0x3D0F00, **usual) == allow and decide(clone, 17, **usual) == deny
    assert decide(435, **usual) == decide(463, **usual) == confinement._ABSENT
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


def sizes_of_deleted_files():
    """As an ordinary user: of a call that has just ended, and of one that hides its files."""
    library, found = ctypes.CDLL(None), []
    if not os.getuid():
        os.setuid(65534)
    for hides in (False, True):
        if not (pid := os.fork()):
            library.prctl(4, 0)  # PR_SET_DUMPABLE
            time.sleep(9 * hides)
            os._exit(0)
        while not hides and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        time.sleep(0.2)
        found.append(tool_worker._deleted_size(pid))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return found


def test_a_call_that_is_ending_hides_no_files():
    """Its memory goes before its files, which nobody may list then, as after PR_SET_DUMPABLE: it was called full."""
    assert run_in_fork(sizes_of_deleted_files) == [0, math.inf]
