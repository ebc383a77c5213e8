"""Runs tool calls, each in a process of its own that is confined and limited. One call at a time.

    python -I tool_worker.py FD

Reads frames from the socket FD: {"tool", "code", "seconds", "cpu_seconds", "memory_mb", "disk_mb", "characters",
"network"}, and writes {"text", "limit", "watched"} for each. `limit` names what ended the call: time, cpu-time, memory,
output, disk, threads, killed, crashed; empty: the code ran to its end, or raised. "unconfined": this machine cannot run
tools safely, and nothing was run. `watched`: why the scratch directory is not a file system of its own. Runs under a
supervisor, by path and without this package. It must be started without secrets in its environment, which a call can
read in /proc/self/environ.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import math
import operator
import os
import secrets
import select
import signal
import sys
import tempfile
import time
import traceback
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(sys.path[0], *[os.pardir] * 3, "processes"))
import confinement  # type: ignore[import-not-found]
import frames  # type: ignore[import-not-found]

LOOK_SECONDS = 0.02  # between two looks at the call's threads and files
OUT_OF_MEMORY, OUT_OF_DISK = 77, 76  # exit codes of a call
MOST_THREADS, MOST_FILES = 64, 64
MOST_WATCHED_FILES = 24  # each may have half of the size, until the next look
LONGEST_PATH = 3000


def main() -> None:
    channel = frames.parent_channel()
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has closed the socket
        while True:
            call, _ = channel.receive()
            channel.send({"number": call["number"], **run(call)})


def run(call: dict[str, Any]) -> dict[str, str]:
    scratch = tempfile.mkdtemp(prefix="tool-")
    try:
        return _run(call, scratch)
    finally:
        _remove(scratch)


def _run(call: dict[str, Any], scratch: str) -> dict[str, str]:
    output, theirs = os.pipe()
    start, their_start = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(theirs, 1)
            os.dup2(their_start, 2)
            _child(call, scratch)
        finally:
            os._exit(1)
    os.close(theirs)
    os.close(their_start)
    limit = "crashed"
    try:
        with open(start, "rb") as report:  # before the code runs, which could write anything
            state, _, why = report.read().decode(errors="replace").partition(" ")
        if state == "unconfined":
            return {"text": why, "limit": state, "watched": ""}
        text, limit = _watch(call, scratch, output, pid, watched=bool(why))
    finally:
        os.close(output)
        status = _end(pid, grace=0.0 if limit else 1.0)
    return {"text": text, "limit": limit or _limit_of(status), "watched": why}


def _end(pid: int, grace: float) -> int:
    """Waits a moment for a call that has closed its output, then kills it. Returns its status."""
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _watch(call: dict[str, Any], scratch: str, output: int, pid: int, watched: bool) -> tuple[str, str]:
    """Collects the output until the call ends or hits a limit: (text, limit)."""
    parts: list[bytes] = []
    disk = call["disk_mb"] * 2**20
    deadline, most, size = time.monotonic() + call["seconds"], 4 * call["characters"], 0
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return _text(parts, call), "time"
        if select.select([output], [], [], min(left, LOOK_SECONDS))[0]:
            part = os.read(output, 65536)
            if not part:
                return _text(parts, call), ""
            parts.append(part)
            size += len(part)
            if size > most:
                return _text(parts, call), "output"
        if os.stat(f"/proc/{pid}/task").st_nlink - 2 > MOST_THREADS:
            return _text(parts, call), "threads"
        if _page_tables(pid) > call["memory_mb"] * 2**20:
            return _text(parts, call), "memory"
        if watched and _size(scratch, disk) + _deleted_size(pid) > disk:
            return _text(parts, call), "disk"


def _text(parts: list[bytes], call: dict[str, Any]) -> str:
    text = b"".join(parts).decode(errors="replace")
    if len(text) > call["characters"]:
        return text[: call["characters"]] + " …"
    return text


def _size(folder: str, most: int) -> float:
    """Of all files. Infinite if a folder cannot be read or lies too deep, which only hides files."""
    total, folders = 0, [folder]
    while folders and total <= most:
        where = folders.pop()
        try:
            with os.scandir(where) as entries:
                for entry in entries:
                    total += max(4096, entry.stat(follow_symlinks=False).st_size)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except FileNotFoundError:
            continue
        except OSError:
            return math.inf
        if len(where) > LONGEST_PATH:
            return math.inf
    return total


def _deleted_size(pid: int) -> float:
    """Of files that the call has deleted but still holds open. Infinite if it hides them (PR_SET_DUMPABLE)."""
    found = {}
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                file = os.stat(f"/proc/{pid}/fd/{name}")
                found[file.st_dev, file.st_ino] = file.st_size if not file.st_nlink else 0
    except PermissionError:
        return math.inf if _page_tables(pid) else 0  # without memory it is just ending, and shows nothing either
    except OSError:  # it has ended
        return 0
    return sum(found.values())


def _page_tables(pid: int) -> int:
    """Bytes. Its limit of memory counts the pages themselves, of which each may need a table of its own."""
    with open(f"/proc/{pid}/status") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("VmPTE"))


def _remove(folder: str) -> None:
    """However deep it is: what lies in a subfolder is moved up, and the subfolder removed. No code of the call runs."""
    with contextlib.suppress(OSError):
        while entries := list(os.scandir(folder)):
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                for inner in list(os.scandir(entry.path)):
                    if inner.is_dir(follow_symlinks=False):
                        os.chmod(inner.path, 0o700)
                    os.rename(inner.path, os.path.join(folder, secrets.token_hex(8)))
                os.rmdir(entry.path)
        os.rmdir(folder)


def _limit_of(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        # SIGKILL: the hard limit of CPU time, the system's memory, or it ran on after it had closed its output.
        return {int(signal.SIGXCPU): "cpu-time", int(signal.SIGKILL): "killed"}.get(number, "crashed")
    return {OUT_OF_MEMORY: "memory", OUT_OF_DISK: "disk"}.get(os.WEXITSTATUS(status), "")


# ---- in the process of the call ----


def _child(call: dict[str, Any], scratch: str) -> None:
    """Reports to descriptor 2 how it is confined, before it runs the code."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.closerange(3, 4096)  # the socket, and whatever else
    for number in frames.FOR_THE_TRAINER:
        signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the first to be killed where memory is short
    disk = call["disk_mb"] * 2**20
    try:
        why = confinement.private_scratch(scratch, disk)
        os.chdir(scratch)
        confinement.confine(scratch, confinement.system_directories(call["network"]), call["network"])
        largest, files = (disk // 2, MOST_WATCHED_FILES) if why else (disk, MOST_FILES)
        confinement.limit(call["cpu_seconds"], call["memory_mb"] * 2**20, largest, files)
        os.write(2, f"confined {why}".encode())
    except BaseException as error:
        os.write(2, f"unconfined {_message(error)}".encode())
        os._exit(1)
    os.dup2(1, 2)
    os.environ.update(HOME=scratch, TMPDIR=scratch)
    tempfile.tempdir = None
    code = 0
    try:
        TOOLS[call["tool"]](call["code"])
    except MemoryError:
        code = OUT_OF_MEMORY
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code)
    except BaseException as error:
        print(_message(error))
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EFBIG):
            code = OUT_OF_DISK
    try:
        sys.stdout.flush()
    finally:
        os._exit(code)


def _message(error: BaseException) -> str:
    """The last line of a traceback, and the line of the code."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == "<tool>"]
    where = f" (line {frames[-1].lineno})" if frames else ""
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[-1] + where


def run_python(code: str) -> None:
    """Runs it as a script. A value in the last line is printed, as in an interactive session."""
    tree = ast.parse(code, "<tool>")
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<tool>", "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "<tool>", "eval"), names)
        if value is not None:
            print(repr(value))


_OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Pow: operator.pow, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
_FUNCTIONS = {
    name: getattr(math, name) for name in ("sqrt", "exp", "log", "log2", "sin", "cos", "tan", "factorial", "gcd")
} | {"abs": abs, "round": round, "min": min, "max": max}  # fmt: skip
_CONSTANTS = {"pi": math.pi, "e": math.e}


def run_calculator(expression: str) -> None:
    """Prints the value of an arithmetic expression; nothing else can be evaluated."""
    sys.set_int_max_str_digits(100_000)
    print(calculate(ast.parse(expression.strip().replace("^", "**"), "<tool>", "eval").body))


def calculate(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        left, right = calculate(node.left), calculate(node.right)
        whole = isinstance(left, int) and isinstance(right, int) and right and left % right == 0
        return left // right if whole else left / right
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](calculate(node.left), calculate(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](calculate(node.operand))
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        return _FUNCTIONS[node.func.id](*map(calculate, node.args))
    raise ValueError(f"not arithmetic: {ast.unparse(node)[:40]}")


TOOLS = {"python": run_python, "calculator": run_calculator}

if __name__ == "__main__":
    main()
