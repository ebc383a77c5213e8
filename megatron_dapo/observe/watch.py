"""`megatron-dapo watch`: the report as a live page, while the run goes on.

A small web server on the loopback address. It only reads: the methods are GET and HEAD, and there are two addresses,
the page and its data. Both begin with a random token, which only the owner's terminal shows: other users of the machine
cannot open them. Requests that name another host are refused, so a web page elsewhere cannot read it through a browser.
The page asks for newer data every second; the data is sent only if a file of the run changed.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from megatron_dapo.errors import UserError
from megatron_dapo.observe.console import read_status
from megatron_dapo.observe.metrics_file import RecordError
from megatron_dapo.observe.report import payload, render
from megatron_dapo.observe.runs import ReportError, load_runs

ADDRESS = "127.0.0.1"
PORT = 8642
FILES = ("metrics.jsonl", "config.yaml", "environment.json", "logs/warnings.log", "samples", "traces")
SILENT_AFTER = 120.0  # seconds without a sign of life; the longest part of a step that reports nothing


class WatchedRuns:
    """The runs' data, read again when a file changed."""

    def __init__(self, directories: Sequence[str | Path]) -> None:
        self._directories = [Path(directory) for directory in directories]
        for directory in self._directories:
            if not directory.is_dir():
                raise ReportError(f"{directory}: no such directory; name the run's directory (trainer.run_dir)")
        self._lock = threading.Lock()
        self._version = ""
        self._data: dict[str, Any] = {}

    def page(self) -> str:
        return render(load_runs(self._directories, running=True), live=True)

    def data(self, known: str) -> dict[str, Any]:
        """`known`: the version that the page has. The runs' data is included only if there is a newer version."""
        found: dict[str, Any] = {"status": [self._status(directory) for directory in self._directories]}
        with self._lock:
            version = self._signature()
            if version != self._version:
                try:
                    self._data = payload(load_runs(self._directories, running=True))
                    self._version = version
                except RecordError as error:  # shown in the page; the file may be repaired
                    return found | {"version": known, "data": None, "error": str(error)}
            newer = self._data if self._version != known else None
            return found | {"version": self._version, "data": newer, "error": None}

    def _signature(self) -> str:
        text = []
        for directory in self._directories:
            for name in FILES:
                try:
                    stat = (directory / name).stat()
                    text.append(f"{name} {stat.st_mtime_ns} {stat.st_size}")
                except OSError:
                    text.append(f"{name} -")
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]

    def _status(self, directory: Path) -> dict[str, Any]:
        """What the run does now. `silent`: seconds since the last sign of life, if there should have been one."""
        status = read_status(directory) or {"state": "not started", "phases": []}
        age = time.time() - float(status.get("updated") or 0.0)
        running = status.get("state") == "running"
        for phase in status["phases"]:
            phase["seconds"] = max(0.0, time.time() - phase.pop("since"))
        return status | {"silent": age if running and age > SILENT_AFTER else None}


class Handler(BaseHTTPRequestHandler):
    runs: WatchedRuns
    server: Server
    server_version, sys_version = "megatron-dapo", ""
    timeout = 60

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        port = self.server.server_port
        if self.headers.get("Host") not in (f"{ADDRESS}:{port}", f"localhost:{port}"):
            return self._send(HTTPStatus.FORBIDDEN, "text/plain", b"this page is served to this machine only\n")
        address = urlsplit(self.path)
        _, _, rest = address.path.partition("/")
        token, _, path = rest.partition("/")
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            return self._send(
                HTTPStatus.FORBIDDEN, "text/plain", b"open the address that megatron-dapo watch printed\n"
            )
        try:
            if path == "" and rest.endswith("/"):
                return self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.runs.page().encode())
            if path == "data":
                known = parse_qs(address.query).get("version", [""])[0]
                content = json.dumps(self.runs.data(known), allow_nan=False).encode()
                return self._send(HTTPStatus.OK, "application/json", content)
        except UserError as error:
            return self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", f"{error}\n".encode())
        return self._send(HTTPStatus.NOT_FOUND, "text/plain", b"not found\n")

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind, "Content-Length": str(len(content)), "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin",
            "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer",
        }.items():  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None: ...


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, handler: type[Handler]) -> None:
        super().__init__((ADDRESS, port), handler)
        self.token = secrets.token_urlsafe(16)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes its connection is no error."""


def make_server(directories: Sequence[str | Path], port: int = PORT) -> Server:
    """`port` 0: any free port."""
    handler = type("RunHandler", (Handler,), {"runs": WatchedRuns(directories)})
    try:
        return Server(port, handler)
    except OSError as error:
        raise UserError(f"port {port} cannot be used ({error.strerror}): choose another one with --port") from None


def watch(directories: Sequence[str | Path], port: int = PORT) -> int:
    """Serves until Ctrl-C."""
    with make_server(directories, port) as server:
        port = server.server_port
        print(f"{server.url}  (for you only; Ctrl-C ends it, the run goes on)", flush=True)
        print(f"from another machine: ssh -L {port}:localhost:{port} THIS_MACHINE, then the same address", flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            return 0
    return 0
