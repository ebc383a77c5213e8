"""Which external servers a run uses now: `rollout.servers.urls`. An entry is an address, or a source of addresses that
may change during the run:

- `http://host:port`     one server
- `file:///path`         a file with one address per line, read every second; it may not exist yet
- `dns://name:port`      every address that the name has, such as a headless service of Kubernetes
- `listen://host:port`   this process listens there: POST /servers {"url": …} adds a server, DELETE /servers removes it,
                         GET /servers lists all of them. Each needs the servers' key as bearer token.

A file that is being written may be empty or end in the middle of an address, and a name may resolve to a part of its
addresses. So an address joins or leaves only when two readings in a row agree.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from aiohttp import web

from megatron_dapo.config.rollout import is_source
from megatron_dapo.engines.sglang.http import server_url
from megatron_dapo.errors import EngineError

log = logging.getLogger(__name__)


class Membership:
    def __init__(self, urls: Sequence[str], key: str | None, status: Callable[[], list[dict[str, Any]]]) -> None:
        """`key`: of the servers; whoever has it may add servers. `status`: what GET /servers replies."""
        self.fixed = list(dict.fromkeys(url.rstrip("/") for url in urls if not is_source(url)))
        self._sources = [urlsplit(url) for url in urls if is_source(url)]
        self._key = key
        self._status = status
        self._posted: dict[str, None] = {}
        self._named: dict[str, list[str]] = {}  # by source: its servers
        self._last: dict[str, list[str]] = {}  # likewise: the last reading
        self.unread: dict[str, str] = {}  # by source: why its last reading failed
        self._runner: web.AppRunner | None = None
        self.address = ""  # where it listens

    @property
    def changes(self) -> bool:
        return bool(self._sources)

    async def open(self) -> None:
        """Listens, where a source says so."""
        for source in self._sources:
            if source.scheme == "listen":
                app = web.Application()
                app.router.add_route("*", "/servers", self._handle)
                self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
                await self._runner.setup()
                try:
                    await web.TCPSite(self._runner, source.hostname, source.port).start()
                except OSError as error:
                    raise EngineError(f"cannot listen on {source.netloc} (rollout.servers.urls): {error}") from error
                self.address = server_url(*self._runner.addresses[0][:2])

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def current(self) -> list[str]:
        """Without repetition. A source that cannot be read names the servers that it named before."""
        found = dict.fromkeys([*self.fixed, *self._posted])
        for source in self._sources:
            name = source.geturl()
            try:
                if source.scheme == "file":
                    self._read(name, await asyncio.to_thread(_lines, Path(unquote(source.path))))
                elif source.scheme == "dns":
                    self._read(name, await _resolve(source.hostname or "", source.port or 30000))
                self.unread.pop(name, None)
            except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have
                self.unread[name] = f"{name} cannot be read: {error}"
            found |= dict.fromkeys(self._named.get(name, ()))
        return list(found)

    def _read(self, name: str, found: list[str]) -> None:
        named, last = self._named.get(name, []), self._last.get(name, [])
        self._named[name] = [
            url for url in dict.fromkeys([*named, *found]) if (url in named) + (url in last) + (url in found) >= 2
        ]
        self._last[name] = found

    async def _handle(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not self._key or not hmac.compare_digest(given.encode(), self._key.encode()):
            return web.json_response({"error": "the key of the servers is needed as bearer token"}, status=401)
        if request.method in ("POST", "DELETE"):
            try:
                url = _address((await request.json())["url"])
            except (ValueError, KeyError, TypeError, AttributeError):
                return web.json_response({"error": 'expected {"url": "http://host:port"}'}, status=400)
            if request.method == "POST":
                self._posted[url] = None
            else:
                self._posted.pop(url, None)
        elif request.method != "GET":
            return web.json_response({"error": "use GET, POST or DELETE"}, status=405)
        return web.json_response({"servers": self._status()})


def _lines(path: Path) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in path.read_text(errors="replace").splitlines())
    found = []
    for line in filter(None, lines):
        try:
            found.append(_address(line))
        except ValueError as error:
            log.warning("%s: %s", path, error)
    return found


def _address(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.port == 0:
        raise ValueError(f"not the address of a server: {text!r}")
    return text.rstrip("/")


async def _resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    hosts = sorted({str(entry[4][0]) for entry in found})
    return [server_url(host, port) for host in hosts]
