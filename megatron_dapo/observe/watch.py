"""`megatron-dapo watch`: the report as a live page, while runs go on; and `/metrics` for Prometheus.

A small web server on the loopback address. It only reads: the methods are GET and HEAD. Addresses begin with a secret
token, which only the owner's terminal or the file of `--token-file` shows: other users of the machine cannot open them.
Prometheus may send the token as a bearer token instead. Requests that name another host are refused, so a web page
elsewhere cannot read it through a browser. The page asks for newer data every second, which is sent only if a file of
the run changed, and for samples when they are looked at. A folder of runs has a list, with a page for each run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from megatron_dapo.errors import UserError
from megatron_dapo.observe import transcripts
from megatron_dapo.observe.metrics_file import RecordError, finite, skipping
from megatron_dapo.observe.report import fill_page, page_of, payload, sample_view
from megatron_dapo.observe.runs import (
    ReportError,
    current_status,
    distinct_names,
    find_runs,
    is_run,
    last_records,
    load_runs,
    named_runs,
    overview,
    read_warnings,
)

ADDRESS = "127.0.0.1"
PORT = 8642
FILES = ("metrics.jsonl", "config.yaml", "environment.json", "logs/warnings.log", "samples", "traces")
HTML, JSON, TEXT = "text/html; charset=utf-8", "application/json", "text/plain; version=0.0.4; charset=utf-8"
Reply = tuple[str, str]  # content type, content
Query = Mapping[str, str]


class WatchedRuns:
    """The pages of some runs. Their data is read again when a file changed."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self.directories = directories
        self._lock = threading.Lock()
        self._version = ""
        self._data: dict[str, Any] = {}

    def answer(self, path: str, query: Query) -> Reply | None:
        """None: there is no such address."""
        if path == "":
            threading.Thread(target=self._newer, args=({},), daemon=True).start()  # ready when the page asks for it
            runs = load_runs(self.directories, running=True, metrics=False)  # the page asks for the rest at once
            return HTML, page_of(payload(runs, live=True), live=True)
        if path == "metrics":
            return TEXT, prometheus_text(dict(zip(distinct_names(self.directories), self.directories, strict=True)))
        answers = {"data": self._newer, "samples": self._index, "sample": self._sample, "history": self._history}
        if path not in answers:
            return None
        try:
            return JSON, json.dumps(answers[path](query), allow_nan=False)
        except (KeyError, ValueError, IndexError):  # a number that is none, a run or a sample that does not exist
            return None

    def _newer(self, query: Query) -> dict[str, Any]:
        """The runs' data is included only if it is newer than the version that the page has."""
        found: dict[str, Any] = {"status": [current_status(directory) for directory in self.directories]}
        with self._lock:
            try:
                version = self._signature()
                if version != self._version:
                    self._data = payload(load_runs(self.directories, running=True), live=True)
                    self._version = version
            except RecordError as error:  # shown in the page; the file may be repaired
                return found | {"version": query.get("version", ""), "data": None, "error": str(error)}
            newer = self._data if self._version != query.get("version") else None
            return found | {"version": self._version, "data": newer, "error": None}

    def _signature(self) -> str:
        text = []
        for file in (directory / name for directory in self.directories for name in FILES):
            with skipping(file):  # a run that has just started has few of them
                stat = file.stat()
                text.append(f"{file} {stat.st_mtime_ns} {stat.st_size}")
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]

    def _folder(self, query: Query) -> Path:
        return self.directories[int(query["run"])] / "samples"

    def _index(self, query: Query) -> list[dict[str, Any]]:
        """The samples of a step, without their texts. With `search`: those whose prompt or response contains it."""
        items, wanted = _read_step(self._folder(query), int(query["step"])), query.get("search", "").lower()
        chosen = [item for item in items if wanted in f"{item.prompt_id}\n{item.prompt}\n{item.text}".lower()]
        return [{k: v for k, v in sample_view(item).items() if k not in ("prompt", "text")} for item in chosen]

    def _sample(self, query: Query) -> dict[str, Any]:
        folder, step, place = self._folder(query), int(query["step"]), int(query["place"])
        (item,) = [item for item in _read_step(folder, step) if item.place == place]
        values = transcripts.token_values(transcripts.read_arrays(folder, step), place)
        return sample_view(item) | {"text": item.text, "values": values}

    def _history(self, query: Query) -> list[list[float]]:
        return transcripts.histories(self._folder(query), [query["prompt"]])[query["prompt"]]


def _read_step(folder: Path, step: int) -> list[transcripts.Transcript]:
    try:
        return _cached_step(folder, step, (folder / f"step_{step:06d}.jsonl").stat().st_mtime_ns)
    except OSError:
        return []


@lru_cache(maxsize=8)
def _cached_step(folder: Path, step: int, changed: int) -> list[transcripts.Transcript]:
    return transcripts.read(folder, [step])


class RunList:
    """All runs in some folders, also those that start later; each has the pages of `WatchedRuns` under run/NAME/."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._pages: dict[Path, WatchedRuns] = {}

    def answer(self, path: str, query: Query) -> Reply | None:
        runs = named_runs(self._folders)
        if path == "metrics":
            return TEXT, prometheus_text(runs)
        if path in ("", "data"):
            rows = overview(runs)
            for row in rows:
                row["page"] = f"run/{quote(row['name'], safe='')}/"
            title = ", ".join(folder.name or str(folder) for folder in self._folders)
            data = {"title": title, "runs": rows, "now": time.time()}
            if path == "data":
                return JSON, json.dumps(data)
            return HTML, fill_page(title, ["chart.js", "runs.js"], ["report.css"], data, connect="connect-src 'self'; ")
        kind, _, rest = path.partition("/")
        name, slash, below = rest.partition("/")
        found = runs.get(unquote(name))
        if kind != "run" or not slash or found is None:
            return None
        return self._pages.setdefault(found, WatchedRuns([found])).answer(below, query)


# Prometheus -----------------------------------------------------------------------------------------------------------


def prometheus_text(runs: Mapping[str, Path]) -> str:
    """All runs in the text format of Prometheus: every metric of the newest step and evaluation as
    megatron_dapo_<its name>, state and warnings of the run, memory and utilisation of every rank's GPU."""
    samples: dict[str, list[str]] = {}
    for run, directory in runs.items():
        for name, labels, value in _measurements(directory):
            text = ",".join(f'{key}="{_escaped(label)}"' for key, label in {"run": run, **labels}.items())
            samples.setdefault(name, []).append(f"{name}{{{text}}} {value!r}")
    kinds = {name: "counter" if name.endswith("_total") else "gauge" for name in samples}
    return "".join(f"# TYPE {name} {kinds[name]}\n" + "\n".join(lines) + "\n" for name, lines in samples.items())


def _escaped(label: object) -> str:
    return str(label).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _measurements(directory: Path) -> Iterator[tuple[str, dict[str, object], float]]:
    status, own = current_status(directory), "megatron_dapo_"
    for record in last_records(directory / "metrics.jsonl").values():
        for name, value in record.metrics.items():
            yield own + re.sub(r"\W", "_", name), {}, float(value)
    yield own + "running", {}, float(status["state"] == "running" and not status["silent"])
    yield own + "step", {}, float(status.get("step", 0))
    yield own + "steps_planned", {}, float(status.get("total", 0))
    yield own + "remaining_seconds", {}, float(status.get("remaining") or 0.0)
    yield own + "status_age_seconds", {}, time.time() - float(status.get("updated") or 0.0)
    rules = (re.search(r"diagnosis\.md#([\w-]+)", line) for line in read_warnings(directory))
    for rule, count in ({"other": 0} | Counter(found[1] if found else "other" for found in rules)).items():
        yield own + "warnings_total", {"rule": rule}, float(count)
    logs = directory / "logs"
    logs = logs / "latest" if (logs / "latest").exists() else logs  # the newest attempt
    for path in sorted((logs / "heartbeat").glob("rank_*.json")):
        with skipping(path):
            found = json.loads(path.read_text())
            labels = {"rank": path.stem.removeprefix("rank_"), "host": found.get("host", "")}
            values = {"heartbeat_age_seconds": time.time() - finite(found.get("time", 0.0))}
            values["progress"] = found.get("progress", 0)
            values |= {f"gpu_{name}": value for name, value in found.get("gpu", {}).items()}
            yield from [(f"{own}rank_{name}", labels, float(finite(value))) for name, value in values.items()]


# Server ---------------------------------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    site: WatchedRuns | RunList
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
        token, slash, path = rest.partition("/")
        if rest == "metrics" and (bearer := self.headers.get("Authorization", "")).startswith("Bearer "):
            token, slash, path = bearer.removeprefix("Bearer "), "/", rest
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            return self._send(
                HTTPStatus.FORBIDDEN, "text/plain", b"open the address that megatron-dapo watch printed\n"
            )
        query = {name: values[0] for name, values in parse_qs(address.query).items()}
        try:
            reply = self.site.answer(path, query) if slash else None
        except UserError as error:
            return self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", f"{error}\n".encode())
        if reply is None:
            return self._send(HTTPStatus.NOT_FOUND, "text/plain", b"not found\n")
        return self._send(HTTPStatus.OK, reply[0], reply[1].encode(errors="replace"))

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

    def __init__(self, port: int, handler: type[Handler], token: str) -> None:
        super().__init__((ADDRESS, port), handler)
        self.token = token

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes its connection is no error."""


def make_server(directories: Sequence[str | Path], port: int = PORT, token: str = "") -> Server:
    """`port` 0: any free port. `token`: a random one if it is empty. A folder of runs is listed."""
    paths = [Path(directory) for directory in directories]
    for path in paths:
        if not path.is_dir():
            raise ReportError(f"{path}: no such directory; name the run's directory (trainer.run_dir)")
    lists = any(not is_run(path) and find_runs(path) for path in paths)
    site = RunList(paths) if lists else WatchedRuns(paths)
    threading.Thread(target=site.answer, args=("data", {}), daemon=True).start()  # read before the first visit
    try:
        return Server(port, type("RunHandler", (Handler,), {"site": site}), token or secrets.token_urlsafe(16))
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", error)
        raise UserError(f"port {port} cannot be used ({why}): choose another one with --port") from None


def read_token(file: Path) -> str:
    """The token in this file, which is created if it does not exist; only its owner may read it."""
    try:
        if not file.exists():
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as new:
                new.write(secrets.token_urlsafe(16))
        if file.stat().st_mode & 0o077:
            raise UserError(f"{file}: other users can read it; chmod 600 {file}")
        token = file.read_text().strip()
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    if not re.fullmatch(r"[\w-]{16,}", token):
        raise UserError(f"{file}: expected at least 16 letters, digits, - and _; remove it to get a new one")
    return token


def watch(directories: Sequence[str | Path], port: int = PORT, token_file: str | None = None) -> int:
    """Serves until Ctrl-C."""
    token = read_token(Path(token_file)) if token_file else ""
    with make_server(directories, port, token) as server:
        port = server.server_port
        url = server.url.replace(token, "TOKEN") if token_file else server.url
        where = f", TOKEN is in {token_file}" if token_file else ""
        print(f"{url}  (for you only{where}; Ctrl-C ends it, the run goes on)", flush=True)
        print(f"from another machine: ssh -L {port}:localhost:{port} THIS_MACHINE, then the same address", flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            return 0
    return 0
