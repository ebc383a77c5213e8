"""Waiting for another process, and a port for one."""

import contextlib
import socket
import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], seconds: float, what: str, pause: float = 0.25) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(RuntimeError):
            if condition():
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(pause)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
