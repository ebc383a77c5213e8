"""JSON over HTTP to one server. Every call has a timeout; every failure names the server, the call and the cause."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson

from megatron_dapo.engines.protocol import EngineError

LOOK = 300  # characters of a reply that an error message quotes


class ServerFailure(EngineError):
    """The server (or the way to it) failed: unreachable, 5xx, too slow, or an answer that makes no sense.

    The same request may succeed elsewhere or later. A refusal (4xx) is a plain EngineError and is final.
    """


class Connection:
    def __init__(
        self, url: str, *, api_key: str | None = None, admin_key: str | None = None, timeout: float = 60.0
    ) -> None:
        self.url = url.rstrip("/")
        self._api_key, self._admin_key, self._timeout = api_key, admin_key or api_key, timeout
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, *, timeout: float | None = None) -> Any:
        return self.decode(path, await self.call("GET", path, None, timeout=timeout))

    async def post(self, path: str, body: Any, *, timeout: float | None = None, admin: bool = False) -> Any:
        return self.decode(path, await self.call("POST", path, body, timeout=timeout, admin=admin))

    async def call(
        self, method: str, path: str, body: Any, *, timeout: float | None = None, admin: bool = False
    ) -> bytes:
        """The body of a 2xx reply."""
        seconds = timeout or self._timeout
        headers = {"Content-Type": "application/json"} | self._authorization(admin)
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        try:
            async with self._open().request(
                method, self.url + path, data=data, headers=headers, timeout=aiohttp.ClientTimeout(total=seconds)
            ) as response:
                content = await response.read()
                status = response.status
        except TimeoutError as error:
            raise ServerFailure(f"server {self.url}: {path} did not answer within {seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            cause = str(error) or type(error).__name__
            raise ServerFailure(f"server {self.url}: {path} failed: {type(error).__name__}: {cause}") from error
        if status >= 300:
            kind = ServerFailure if status >= 500 else EngineError
            raise kind(f"server {self.url}: {path} answered {status}: {_message(content)}")
        return content

    def decode(self, path: str, content: bytes) -> Any:
        try:
            return orjson.loads(content) if content else None
        except orjson.JSONDecodeError as error:
            look = content[:LOOK].decode("utf-8", "replace")
            raise ServerFailure(f"server {self.url}: {path} answered something that is not JSON: {look!r}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _authorization(self, admin: bool) -> dict[str, str]:
        key = self._admin_key if admin else self._api_key
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            # The engine bounds concurrency; a second bound here would only hide requests from it.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
            self._session = aiohttp.ClientSession(connector=connector, read_bufsize=1 << 20, auto_decompress=True)
        return self._session


def _message(content: bytes) -> str:
    """The readable part of an error reply."""
    try:
        found = orjson.loads(content)
        error = found.get("error", found)
        message = error.get("message", error) if isinstance(error, dict) else error
        return str(message)[: 2 * LOOK]
    except (orjson.JSONDecodeError, AttributeError):
        return content[:LOOK].decode("utf-8", "replace")


async def wait_all(calls: dict[str, Any]) -> dict[str, BaseException | Any]:
    """Awaits every call; its result or its exception under the same name."""
    results = await asyncio.gather(*calls.values(), return_exceptions=True)
    return dict(zip(calls, results, strict=True))


def failures(results: Mapping[str, object]) -> dict[str, BaseException]:
    """Of what `wait_all` returns, the exceptions."""
    return {name: result for name, result in results.items() if isinstance(result, BaseException)}


def reasons(results: Mapping[str, object]) -> dict[str, str]:
    """The same in words."""
    return {name: str(error) or repr(error) for name, error in failures(results).items()}
