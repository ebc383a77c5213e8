"""Engines generate responses. The rest of the project sees one protocol; two engines implement it.

- protocol.py        what an engine is: generate, abort, pause, weight updates; the errors and data types
- server_load.py     KV cache in use and waiting requests during a rollout
- teacher.py         log-probs of a teacher, for distillation
- embedded/          transformers on the CPU, inside this process, exact to the bit
- sglang/            SGLang servers over HTTP: started here or external

`open_engine` opens the one that the configuration names.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dapo.config.model import ModelShape

if TYPE_CHECKING:
    from megatron_dapo.config.rollout import RolloutConfig
    from megatron_dapo.engines.protocol import Engine


async def open_engine(config: RolloutConfig, model: str, log_dir: str | Path) -> Engine:
    """An engine that is ready to serve; `engine.close()` ends everything it started. `model`: the HF directory.
    `log_dir`: for the logs of servers that are started."""
    if config.engine == "embedded":
        from megatron_dapo.engines.embedded.engine import EmbeddedEngine

        return EmbeddedEngine.from_directory(model, config.embedded, pause_mode=config.weights.pause_mode)
    from megatron_dapo.engines.sglang.fleet import Fleet

    engine = await Fleet(config, config.servers.model or model, log_dir).start()
    if (Path(model) / "config.json").exists():
        engine.vocabulary = ModelShape.from_dir(model).vocab
    return engine
