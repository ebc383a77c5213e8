"""An engine under test beside the transformers model that says what is right; shared by the tests of real servers."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import torch
from connect_engine import connect_engine
from installed_sglang import API_KEY_VARIABLE, RealServer
from tiny_model import byte_tokenizer, changed_weights, reference_logprobs, tiny_model

from megatron_dapo.config.rollout import EmbeddedConfig, RolloutConfig
from megatron_dapo.engines.embedded.engine import EmbeddedEngine
from megatron_dapo.types import as_tokens

TOLERANCE = 1e-4
PROMPT = as_tokens([72, 101, 108, 108, 111, 44, 32, 119])


def settings(transport="disk", **more):
    return RolloutConfig(
        servers={
            "sample_timeout": 60, "control_timeout": 30, "max_running": 16, "api_key_env": API_KEY_VARIABLE,
        },
        weights={"transport": transport, "backend": "gloo", "timeout": 60}, **more,
    )  # fmt: skip


def run(coroutine, seconds=200):
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


class Subject:
    """`server` None: the embedded engine."""

    def __init__(self, server: RealServer | None) -> None:
        self.server = server
        self.model = server.model if server else tiny_model()

    @asynccontextmanager
    async def open(self, transport="disk", config=None, url=None):
        """`url`: instead of the server's own, for a proxy in front of it."""
        if self.server is None:
            mode = config.weights.pause_mode if config else "abort"
            small = EmbeddedConfig(batch_tokens=32)
            engine = EmbeddedEngine(copy_of(self.model), byte_tokenizer(), small, pause_mode=mode)
        else:
            engine = await connect_engine(
                [url or self.server.process.url], config or settings(transport),
                model=str(self.server.directory), version=self.server.version,
            )  # fmt: skip
        try:
            yield engine
        finally:
            if self.server is not None:
                self.server.version = engine.weight_version
            await engine.close()

    async def update(self, engine, seed):
        """Moves the engine and the reference model to new weights; two buckets, so that their order matters."""
        pairs = changed_weights(self.model, seed)
        report = await engine.update_weights(engine.weight_version + 1, iter([pairs[:9], pairs[9:]]))
        self.model.load_state_dict(dict(pairs))
        return report

    def assert_agrees(self, prompt, completion, temperature=1.0):
        expected = reference_logprobs(self.model, prompt, completion.tokens, temperature)
        assert np.abs(completion.logprobs - expected).max() < TOLERANCE


async def restore_first_weights(server: RealServer) -> None:
    """The weights of the server's directory, where a test before has sent others."""
    first = tiny_model().state_dict()
    if not all(torch.equal(tensor, first[name]) for name, tensor in server.model.state_dict().items()):
        await send_first_weights(server)


async def send_first_weights(server: RealServer) -> None:
    first = tiny_model().state_dict()
    async with Subject(server).open() as engine:
        assert not (await engine.update_weights(engine.weight_version + 1, iter([[*first.items()]]))).failed
    server.model.load_state_dict(first)


def copy_of(model):
    twin = tiny_model()
    twin.load_state_dict(model.state_dict())
    return twin
