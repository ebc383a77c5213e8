"""sglang-router in front of the servers: it takes the generate requests, once it knows every server."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from megatron_dapo.config.rollout import ServerConfig
from megatron_dapo.engines.protocol import EngineError
from megatron_dapo.engines.sglang.client import read_key
from megatron_dapo.engines.sglang.http import Connection, ServerFailure


async def wait_for_router(config: ServerConfig) -> None:
    """Until the router counts all servers as healthy. It looks for them at times of its own, so it may be the last to
    know; a request that comes too early is refused and counts as failed."""
    assert config.router_url is not None
    router = Connection(config.router_url, api_key=read_key(config.api_key_env), timeout=config.control_timeout)
    deadline, wanted = time.monotonic() + config.start_timeout, len(config.urls)
    try:
        while True:
            try:
                known = _healthy(await router.get("/readiness"), wanted)
                if known >= wanted:
                    return
                last = f"it knows {known} of {wanted} servers"
            except ServerFailure as error:
                last = str(error)
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the router {router.url} was not ready after {config.start_timeout:g} s "
                    f"(rollout.servers.start_timeout); the last: {last}"
                )
            await asyncio.sleep(0.5)
    finally:
        await router.close()


def _healthy(reply: Any, wanted: int) -> int:
    """A router that does not count counts as complete."""
    return int(reply.get("healthy_workers", wanted)) if isinstance(reply, dict) else wanted
