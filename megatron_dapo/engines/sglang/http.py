"""JSON over HTTP to one server. Every call has a timeout; every error names the server, the call and the cause.

Two connection pools. Samples (`generate`) use keep-alive connections that are dropped after KEEP_ALIVE idle seconds,
earlier than any server drops them: a request sent on a connection that the server is closing is lost. Control calls
open a connection each, so for them a broken connection always means that something failed.

A control call whose connection breaks is sent again a few times. Whether it may run twice is the caller's knowledge
(`repeatable`). If it may not, it is sent again only when the server cannot have received it; otherwise the outcome is
unknown and the error is `OutcomeUnknown`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
import orjson

from megatron_dapo.errors import EngineError

QUOTED = 300  # characters of a reply that an error message quotes
KEEP_ALIVE = 2.0  # seconds; uvicorn, and with it SGLang, closes idle connections after 5
LONGEST_RETRY_AFTER = 60.0  # seconds that a server may ask for
PAUSES = (0.1, 0.4, 1.5)  # seconds before the second, third and last try of a control call
PROBE_PAUSE, PROBE_SECONDS = 0.2, 0.75  # a server that others wait for is asked whether it lives; it has so long


class ServerFailure(EngineError):
    """The server or the network failed: unreachable, 5xx, too slow, or a reply that makes no sense.

    The same request may succeed later or on another server. `status`: of the HTTP reply, if there was one.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ServerBusy(ServerFailure):
    """429, or 503 with Retry-After: the server has not started the request and takes it later."""

    def __init__(self, message: str, status: int | None = None, retry_after: float = 0.0) -> None:
        super().__init__(message, status)
        self.retry_after = retry_after


class NotSent(ServerFailure):
    """No connection: the server has not received the request."""


class BrokenConnection(ServerFailure):
    """The connection broke before the reply was complete: the server may or may not have run the call."""


class Unresponsive(ServerFailure):
    """Others have replied long ago."""


class OutcomeUnknown(ServerFailure):
    """A call that must not run twice got no reply: the server is in one of two states."""


class RequestRefused(EngineError):
    """A 4xx reply: the same request would be refused again. `repeated`: an earlier try of this call broke off."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
        self.repeated = False


class Connection:
    def __init__(
        self, url: str, *, api_key: str | None = None, admin_key: str | None = None, timeout: float = 60.0
    ) -> None:
        self.url = url.rstrip("/")
        self._api_key = api_key
        self._admin_key = admin_key or api_key
        self._timeout = timeout
        self._sessions: dict[bool, aiohttp.ClientSession] = {}  # keep-alive or not -> session

    async def get(self, path: str, **options: Any) -> Any:
        return self.decode(path, await self.control("GET", path, None, **options))

    async def post(self, path: str, body: Any, *, timeout: float | None = None) -> Any:
        return self.decode(path, await self.control("POST", path, body, timeout=timeout))

    async def generate(self, body: Any, timeout: float) -> bytes:
        """One try, on a keep-alive connection."""
        return await self._call("POST", "/generate", body, timeout, self._api_key, keep_alive=True)

    async def control(
        self,
        method: str,
        path: str,
        body: Any,
        *,
        timeout: float | None = None,
        admin: bool = False,
        repeatable: bool = True,
        before_repeat: Callable[[], Awaitable[None]] | None = None,
        tries: int = len(PAUSES) + 1,
        wait_for_server: bool = True,
    ) -> bytes:
        """The body of a 2xx reply. `before_repeat` is awaited before a call that may have run is sent again.
        `wait_for_server`: also try again when there is no connection at all."""
        key = self._admin_key if admin else self._api_key
        repeated = False
        for pause in (*PAUSES[: tries - 1], None):
            try:
                return await self._call_when_free(method, path, body, timeout or self._timeout, key)
            except RequestRefused as error:
                error.repeated = repeated
                raise
            except NotSent:
                if pause is None or not wait_for_server:
                    raise
            except ServerFailure as error:
                if not repeatable and error.status is None:
                    raise OutcomeUnknown(f"{error}; it must not run twice, so it is not repeated") from error
                if pause is None or not isinstance(error, BrokenConnection):
                    raise
                repeated = True
            await asyncio.sleep(pause)
            if repeated and before_repeat is not None:
                await before_repeat()
        raise AssertionError("unreachable")

    async def _call_when_free(self, method: str, path: str, body: Any, seconds: float, key: str | None) -> bytes:
        """A server that is busy is asked again for as long as the call may take."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return await self._call(method, path, body, seconds, key, keep_alive=False)
            except ServerBusy as error:
                if time.monotonic() + error.retry_after > deadline:
                    raise
                await asyncio.sleep(max(error.retry_after, PAUSES[1]))

    async def _call(
        self, method: str, path: str, body: Any, seconds: float, key: str | None, *, keep_alive: bool
    ) -> bytes:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        try:
            async with self._session(keep_alive).request(
                method, self.url + path, data=data, headers=headers, timeout=aiohttp.ClientTimeout(total=seconds)
            ) as reply:
                content, status, wait = await reply.read(), reply.status, reply.headers.get("Retry-After")
        except TimeoutError as error:
            raise ServerFailure(f"server {self.url}: {path} did not reply within {seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            kind = NotSent if isinstance(error, aiohttp.ClientConnectorError) else BrokenConnection
            cause = str(error) or type(error).__name__
            raise kind(f"server {self.url}: {path} failed: {type(error).__name__}: {cause}") from error
        if status == 429 or (status == 503 and wait is not None):
            message = f"server {self.url}: {path} replied {status}: {_message(content)}"
            raise ServerBusy(message, status, _seconds(wait))
        if status >= 300:
            refused: type[ServerFailure | RequestRefused] = ServerFailure if status >= 500 else RequestRefused
            raise refused(f"server {self.url}: {path} replied {status}: {_message(content)}", status)
        return content

    def decode(self, path: str, content: bytes) -> Any:
        try:
            return orjson.loads(content) if content else None
        except orjson.JSONDecodeError as error:
            quoted = content[:QUOTED].decode("utf-8", "replace")
            raise ServerFailure(f"server {self.url}: the reply to {path} is not JSON: {quoted!r}") from error

    async def close(self) -> None:
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            await session.close()

    def _session(self, keep_alive: bool) -> aiohttp.ClientSession:
        session = self._sessions.get(keep_alive)
        if session is None or session.closed:
            # No limit here: the load balancer bounds concurrency, and a second bound would hide requests from it.
            options: dict[str, Any] = {"keepalive_timeout": KEEP_ALIVE} if keep_alive else {"force_close": True}
            connector = aiohttp.TCPConnector(limit=0, **options)
            session = aiohttp.ClientSession(connector=connector, read_bufsize=1 << 20, auto_decompress=True)
            self._sessions[keep_alive] = session
        return session


def server_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def nobody_listens(error: BaseException) -> bool:
    """Whether the server's port refused the connection: no process has it open."""
    cause = error.__cause__
    return isinstance(cause, aiohttp.ClientConnectorError) and isinstance(cause.os_error, ConnectionRefusedError)


def _seconds(header: str | None) -> float:
    """Of Retry-After. A date, which servers hardly send, counts as 0."""
    try:
        return min(max(0.0, float(header or 0)), LONGEST_RETRY_AFTER)
    except ValueError:
        return 0.0


def _message(content: bytes) -> str:
    """The readable part of an error reply."""
    try:
        found = orjson.loads(content)
        error = found.get("error", found)
        message = error.get("message", error) if isinstance(error, dict) else error
        return str(message)[: 2 * QUOTED]
    except (orjson.JSONDecodeError, AttributeError):
        return content[:QUOTED].decode("utf-8", "replace")


async def wait_all(calls: Mapping[str, Awaitable[Any]]) -> dict[str, BaseException | Any]:
    """Awaits every call; its result or its exception under the same name."""
    results = await asyncio.gather(*calls.values(), return_exceptions=True)
    return dict(zip(calls, results, strict=True))


async def wait_for_living(
    calls: Mapping[str, Awaitable[Any]],
    answers: Mapping[str, Callable[[], Awaitable[None]]],
    grace: float,
) -> dict[str, Any]:
    """As `wait_all`, but nobody waits for a dead server. Once a call has succeeded, a server that does not even answer
    (`answers`) within PROBE_SECONDS is `Unresponsive`; one that does has `grace` seconds more."""
    tasks = {name: asyncio.ensure_future(call) for name, call in calls.items()}
    waiting, missing, living = set(tasks.values()), dict[str, str](), False
    clock, pause, deadline = asyncio.get_running_loop().time, PROBE_PAUSE, float("inf")
    try:
        while waiting and clock() < deadline:
            done, waiting = await asyncio.wait(
                waiting, timeout=pause if living else None, return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                if any(task.exception() is None for task in done):
                    living, deadline, pause = True, clock() + grace, PROBE_PAUSE
                continue
            pause = min(1.0, 2 * pause)
            asked = [name for name, task in tasks.items() if task in waiting]
            replies = await wait_all({name: asyncio.wait_for(answers[name](), PROBE_SECONDS) for name in asked})
            for name in failures(replies):
                if tasks[name].cancel():  # it had not ended
                    waiting.discard(tasks[name])
                    missing[name] = "it does not answer"
    finally:  # also when this is cancelled
        for task in waiting:
            task.cancel()
    missing |= {name: f"no reply {grace:g} s after the other servers'" for name in tasks if tasks[name] in waiting}
    results = await wait_all(tasks)
    return results | {name: Unresponsive(f"server {name}: {why}") for name, why in missing.items()}


async def all_of(*calls: Awaitable[Any]) -> list[Any]:
    """The results of calls that run at the same time. All have ended when the first error is raised."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def failures(results: Mapping[str, object]) -> dict[str, BaseException]:
    """The exceptions among the results of `wait_all`."""
    return {name: result for name, result in results.items() if isinstance(result, BaseException)}
