"""Shared by the tests of failing servers: settings with short timeouts, a prompt, weights, a complete batch."""

import asyncio

import torch
from connect_engine import connect_engine
from event_loop import close_at_the_end
from simulation import Prompts

from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.rollout.sampler import Sampler
from megatron_dapo.types import FinishReason, Grade, as_tokens

PROMPT = as_tokens([3, 1, 4])
WEIGHTS = [("a.weight", torch.ones(2, 3)), ("b.weight", torch.zeros(4))]


def run(coroutine, seconds=40):
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


def settings(**servers):
    return RolloutConfig(
        samples_per_prompt=4, max_response_tokens=8, dynamic_sampling=False,
        servers={"sample_timeout": 1.0, "control_timeout": 2.0, "attempts": 5, **servers},
        weights={"timeout": 5.0}, sampler={"oversampling": 1, "order": "prompt", "unfinished": "finish"},
    )  # fmt: skip


async def connect(servers, config, **options):
    """An engine of these fake servers. It is closed when the test ends."""
    urls = [server.url for server in servers]
    return close_at_the_end(await connect_engine(urls, config, **options))


class Texts:
    """In place of a tokenizer, for conversations of which the tokens are tested."""

    def decode(self, tokens, skip_special_tokens):
        return ""


async def grade(prompt, sample):
    return Grade(sample.index % 2 == 0, 1.0)


async def fill_batch(engine, config, groups=6):
    sampler = Sampler(engine, grade, Prompts(), config, groups_per_step=groups)
    batch = await sampler.collect(0)
    assert len(batch.groups) == groups
    names = [(sample.prompt_id, sample.index) for sample in batch.samples]
    assert len(set(names)) == len(names) == groups * 4
    assert batch.metrics["rollout/samples_failed"] == 0
    for sample in batch.samples:
        assert sample.finish_reason is FinishReason.STOP and sample.length == 8
    return batch
