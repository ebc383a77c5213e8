"""Requests to servers that grade: JSON over HTTP with a time limit, retries with backoff, and a bearer token.

The token comes from an environment variable and appears in no message. A request that fails for good raises
`RemoteFailure`, whose `reason` names the kind of failure in metrics. `RemoteGrader` turns it into an ungraded grade;
after too many of them in a row it raises `GraderError`, so that a dead server does not waste a whole run.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson

from megatron_dapo.config.data import RemoteConfig
from megatron_dapo.reward.grader import GraderError
from megatron_dapo.types import Grade, Prompt, Sample

LONGEST_PAUSE = 60.0
LARGEST_REPLY = 16 * 2**20  # bytes
QUOTED = 200  # characters of a reply in a message
# Another try may succeed. A 500 is often one response that the server's code cannot handle: see `http_reward`.
PASSING = {408, 425, 429, 500, 502, 503, 504}


class RemoteFailure(Exception):
    """`reason` is one of timeout, connection, status, unusable-reply."""

    def __init__(self, reason: str, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.reason, self.status = reason, status

    @property
    def passing(self) -> bool:
        return self.reason in ("timeout", "connection") or self.status in PASSING


class RemoteServer:
    """One service at one or several addresses. Opened and used in one event loop."""

    def __init__(self, config: RemoteConfig, key: str) -> None:
        """`key`: the configuration key of this section, for messages."""
        self._config, self._key = config, key
        self._secret = ""
        self._session: aiohttp.ClientSession | None = None
        self._places = asyncio.Semaphore(config.concurrency)
        self._next = 0
        self.retries = 0

    async def open(self) -> None:
        name = self._config.api_key_env
        if name:
            self._secret = os.environ.get(name, "")
            if not self._secret:
                raise GraderError(
                    f"{self._key}.api_key_env names {name}, which is not set in the environment: export it"
                )
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._config.timeout), connector=aiohttp.TCPConnector(limit=0)
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, path: str, body: Any, retries: int | None = None) -> Any:
        """The decoded JSON reply. Raises RemoteFailure when all tries have failed."""
        content = orjson.dumps(body)
        limit = self._config.retries if retries is None else retries
        for failures in range(limit + 1):
            url = self._config.urls[self._next % len(self._config.urls)].rstrip("/") + path
            self._next += 1
            try:
                async with self._places:
                    return await self._once(url, content)
            except RemoteFailure as failure:
                if failures == limit or not failure.passing:
                    raise
            self.retries += 1
            pause = min(LONGEST_PAUSE, self._config.backoff * 2**failures)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        raise AssertionError("not reached")

    async def _once(self, url: str, content: bytes) -> Any:
        assert self._session is not None, "open() comes first"
        headers = {"Content-Type": "application/json"}
        if self._secret:
            headers["Authorization"] = f"Bearer {self._secret}"
        try:
            # A redirect could lead to another host, which must not get the token.
            async with self._session.post(url, data=content, headers=headers, allow_redirects=False) as reply:
                text = await self._read(reply, url)
                if reply.status != 200:
                    raise RemoteFailure("status", f"{url} replied {reply.status}: {self._quote(text)}", reply.status)
        except TimeoutError:
            raise RemoteFailure("timeout", f"{url} did not reply within {self._config.timeout:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise RemoteFailure("connection", f"{url}: {type(error).__name__}: {self._hide(str(error))}") from None
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError:
            raise RemoteFailure("unusable-reply", f"{url} replied with no JSON: {self._quote(text)}") from None

    async def _read(self, reply: aiohttp.ClientResponse, url: str) -> bytes:
        parts, size = [], 0
        async for part in reply.content.iter_chunked(2**16):
            parts.append(part)
            size += len(part)
            if size > LARGEST_REPLY:
                reply.close()
                raise RemoteFailure("unusable-reply", f"{url} sent more than {LARGEST_REPLY} bytes")
        return b"".join(parts)

    def _quote(self, text: bytes) -> str:
        return repr(self._hide(text.decode(errors="replace"))[:QUOTED])

    def _hide(self, text: str) -> str:
        return text.replace(self._secret, "***") if self._secret else text


class RemoteGrader:
    """Base of the graders behind a server; has the interface of `RewardPool`. Derived classes implement `ask`."""

    decodes_tokens = False
    kind = "remote"

    def __init__(self, config: RemoteConfig, key: str) -> None:
        self._server, self._max_failures, self._key = RemoteServer(config, key), config.max_failures, key
        self._counts: Counter[str] = Counter()
        self._in_a_row = 0

    async def __aenter__(self) -> Self:
        await self._server.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.close()

    async def grade(self, prompt: Prompt, sample: Sample) -> Grade:
        """The grade of `sample.text`. Raises GraderError once the server has failed too often."""
        try:
            grade = await self.ask(prompt, sample.text)
        except RemoteFailure as failure:
            self._failed(prompt, failure)
            return Grade(None, 0.0, None, f"{self.kind}: {failure}")
        self._in_a_row = 0
        if grade.ungraded:
            self._counts["ungraded/by-grader"] += 1
        self._counts["graded" if not grade.ungraded else "ungraded"] += 1
        self._counts["correct"] += grade.correct is True
        return grade

    async def grade_tokens(self, prompt: Prompt, sample: Sample) -> Grade:
        raise RuntimeError("a server grades texts: decode the response first")

    async def ask(self, prompt: Prompt, response: str) -> Grade:
        """Raises RemoteFailure."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """Counts since it was created, under the names of `RewardPool.metrics`."""
        names = (
            "graded",
            "correct",
            "ungraded",
            "errors",
            *sorted(n for n in self._counts if n.startswith("ungraded/")),
        )
        counted = {f"reward/{name}": float(self._counts[name]) for name in names}
        return {**counted, "reward/retries": float(self._server.retries)}

    def _failed(self, prompt: Prompt, failure: RemoteFailure) -> None:
        self._counts["ungraded"] += 1
        self._counts["errors"] += 1
        self._counts[f"ungraded/{self.kind}-{failure.reason}"] += 1
        self._in_a_row += 1
        if self._in_a_row >= self._max_failures:
            raise GraderError(
                f"{self._key}: the last {self._in_a_row} responses could not be graded ({self._key}.max_failures is "
                f"{self._max_failures}), last one of prompt {prompt.id}: {failure}"
            )
