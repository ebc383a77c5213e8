"""The engine that a configuration asks for, started or connected, and ready."""

from __future__ import annotations

from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.rollout.engine import Engine


async def open_engine(config: RolloutConfig, model: str) -> Engine:
    """Serves the HF directory `model` at weight version 0. Close it with `await engine.close()`."""
    if config.engine == "embedded":
        from megatron_dapo.rollout.embedded import EmbeddedEngine

        return EmbeddedEngine.from_directory(model, config.embedded)
    if config.servers.urls:
        from megatron_dapo.rollout.sglang import SGLangEngine

        return await SGLangEngine.connect(config.servers.urls, config, model=model)
    from megatron_dapo.rollout.fleet import Fleet

    return await Fleet.start(config, model)
