"""Waits for sglang-router, which distributes the generate requests over the servers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from megatron_dapo.config.rollout import ServerConfig
from megatron_dapo.engines.protocol import EngineError
from megatron_dapo.engines.sglang.http import Connection, ServerFailure
from megatron_dapo.engines.sglang.keys import Keys


async def wait_for_router(config: ServerConfig) -> None:
    """Until the router counts all servers as healthy. Until then it refuses requests."""
    assert config.router_url is not None
    router = Connection(config.router_url, api_key=Keys.of_external_servers(config).api, timeout=config.control_timeout)
    deadline, wanted = time.monotonic() + config.start_timeout, len(config.urls)
    try:
        while True:
            try:
                known = _healthy(await router.get("/readiness", tries=1), wanted)
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
    """A router that reports no number is taken to know all."""
    return int(reply.get("healthy_workers", wanted)) if isinstance(reply, dict) else wanted
