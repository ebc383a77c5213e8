"""Opens the engine that the configuration names, ready to serve; `engine.close()` ends everything it started."""

from __future__ import annotations

from pathlib import Path

from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.protocol import Engine


async def open_engine(config: RolloutConfig, model: str, log_dir: str | Path) -> Engine:
    """`model`: the HF directory. `log_dir`: for the logs of servers that are started."""
    if config.engine == "embedded":
        from megatron_dapo.engines.embedded.engine import EmbeddedEngine

        return EmbeddedEngine.from_directory(model, config.embedded, pause_mode=config.weights.pause_mode)
    from megatron_dapo.engines.sglang.fleet import Fleet

    engine = await Fleet(config, config.servers.model or model, log_dir).start()
    if config.servers.router_url:
        from megatron_dapo.engines.sglang.router import wait_for_router

        try:
            await wait_for_router(config.servers)
        except BaseException:
            await engine.close()
            raise
    return engine
