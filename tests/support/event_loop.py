"""Tests that are coroutines. Each has an event loop of its own, and what it opened is closed when it ends or fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from contextvars import ContextVar
from typing import Any

SECONDS = 200  # then a test that waits for ever fails, with a traceback of what it waits for
_opened: ContextVar[AsyncExitStack | None] = ContextVar("opened", default=None)


async def run_test(test: Callable[..., Awaitable[None]], arguments: dict[str, Any]) -> None:
    async with AsyncExitStack() as stack:
        _opened.set(stack)
        async with asyncio.timeout(SECONDS):
            await test(**arguments)


async def until(reached: Callable[[], object]) -> None:
    while not reached():
        await asyncio.sleep(0.01)


def close_at_the_end(opened: Any) -> Any:
    """Calls `close` or `stop` of an engine or server when this test, if it is a coroutine, is over."""
    if (stack := _opened.get()) is not None:
        stack.push_async_callback(opened.close if hasattr(opened, "close") else opened.stop)
    return opened
