"""Megatron and a real SGLang server agree on the log-probs of the server's samples of one and of several turns, before
training and after each of several updates, with every transport, for tensor- and pipeline-parallel trainers. Each test
begins and ends with the server's first weights."""

import asyncio

import numpy as np
import pytest
from engine_thread import EngineThread
from faults import Texts
from installed_sglang import API_KEY_VARIABLE, SGLANG_VERSIONS
from long_lists import ALL_CASES, some
from subject import restore_first_weights, run

from megatron_dapo.config import ModelShape, parse_config
from megatron_dapo.engines.protocol import SamplingParams
from megatron_dapo.policy.batch import TrainBatch
from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.policy import Policy
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.rollout.accounting import GroupEvents
from megatron_dapo.rollout.agents.conversation import Conversation
from megatron_dapo.rollout.generation import Generation
from megatron_dapo.rollout.pending_group import PendingGroup, new_samples
from megatron_dapo.types import Group, Prompt, Sample, as_tokens

UPDATES = 5 if ALL_CASES else 2
TOLERANCE = 1e-4


def config_for(transport, layout, folder):
    return parse_config(
        {
            "policy": {
                **layout, "precision": "fp32", "micro_batch_tokens": 512, "timeout_seconds": 60,
                "optimizer": {"lr": 2e-3, "warmup_steps": 0},
            },
            "rollout": {
                "max_prompt_tokens": 32, "max_response_tokens": 24, "temperature": 0.8,
                "servers": {"device": "cpu", "api_key_env": API_KEY_VARIABLE},
                "weights": {
                    "transport": transport, "directory": str(folder), "backend": "gloo", "bucket_bytes": 40_000,
                },
            },
        }
    )  # fmt: skip


class Driver(EngineThread):
    def samples(self, version):
        params = SamplingParams(max_new_tokens=20, temperature=0.8, ignore_eos=True)
        prompts = [as_tokens([65 + i, 66, 67 + i]) for i in range(4)]

        async def all_of_them():
            return await asyncio.gather(
                *(self.engine.generate(f"{version}-{i}", prompt, params) for i, prompt in enumerate(prompts))
            )

        made = self.do(all_of_them())
        assert all(span.version == version for completion in made for span in completion.weight_spans)
        samples = [
            Sample(str(i), 0, prompt, c.tokens, c.logprobs, c.finish_reason)
            for i, (prompt, c) in enumerate(zip(prompts, made, strict=True))
        ]
        return [*samples, *self.do(self.conversations(version))]

    async def conversations(self, version):
        """Two samples of three turns each, with tokens appended between the turns."""
        generation = Generation(self.engine, self.rollout, GroupEvents())

        async def extend(sample, request):
            group = PendingGroup(0, 0, Group(Prompt("", "", sample.prompt_tokens), [sample]))
            return await generation.generate(sample, request, group, set())

        async def converse(number):
            prompt = Prompt(f"c{number}", "", as_tokens([70 + number, 71]))
            conversation = Conversation(
                prompt, new_samples(prompt, [number]), extend, Texts(),
                max_response_tokens=self.rollout.max_response_tokens, name=f"{version}-c{number}",
            )  # fmt: skip
            for tokens in ([80, 81 + number, 82], [90], []):
                await conversation.generate(max_tokens=5)
                conversation.append(tokens)
            conversation.finish()
            return conversation.samples

        made = [sample for number in range(2) for sample in await converse(number)]
        assert all(len(sample.turns) == 5 and sample.length == sample.trained_tokens + 4 for sample in made)
        assert {span.version for sample in made for span in sample.weight_spans} == {version}
        return made


def gaps_of_a_trainer(place, url, directory, config, version):
    """The largest |trainer − server| before training and after every update; then the server gets its weights back."""
    runtime = initialize(config.policy, rendezvous=place)
    policy = Policy(config, ModelShape.from_dir(directory), runtime)
    policy.load_hf(directory)
    stream = policy.weight_buckets(config.rollout.weights.bucket_bytes)
    driver = Driver([url], config, directory, version) if place.rank == 0 else None
    gaps, moved = [], []
    for update in range(UPDATES + 1):
        batch = share(
            TrainBatch.from_samples(driver.samples(version), [1, -1, 2, -2, 1, -1], [True] * 6) if driver else None
        )
        logprobs, _ = policy.log_probs(batch)
        gap = np.abs(logprobs - batch.engine_logprobs)
        assert gap[~batch.loss_mask].min() > 0.1  # appended tokens: the server has no log-probs of them
        gaps.append(float(gap[batch.loss_mask].max()))
        before = logprobs
        if update < UPDATES:
            policy.update(batch)
            moved.append(float(np.abs(policy.log_probs(batch)[0] - before).max()))
        else:
            policy.load_hf(directory)
        version += 1
        if driver:
            report = driver.do(driver.engine.update_weights(version, stream.buckets()))
            assert not report.failed
        else:
            for _ in stream.buckets():
                pass
    if driver:
        driver.do(driver.engine.close())
    return gaps, moved, version


def share(batch):
    """Rank 0's batch on both ranks."""
    import torch.distributed as dist

    box = [batch]
    dist.broadcast_object_list(box, src=0)
    return box[0]


SERVERS = [(version, transport) for version in SGLANG_VERSIONS for transport in ("disk", "tensor", "distributed")]


@pytest.mark.parametrize("layout", some(("tensor_parallel", "pipeline_parallel"), "tensor_parallel"))
@pytest.mark.parametrize(("sglang_server", "transport"), SERVERS, indirect=["sglang_server"])
def test_trainer_and_server_agree_after_every_update(sglang_server, transport, layout, tmp_path):
    run(restore_first_weights(sglang_server))
    config = config_for(transport, {layout: 2}, tmp_path)
    arguments = (sglang_server.process.url, sglang_server.directory, config, sglang_server.version)
    gaps, moved, version = run_ranks(2, gaps_of_a_trainer, *arguments, timeout=240)[0]
    sglang_server.version = version
    assert len(gaps) == UPDATES + 1
    assert max(gaps) <= TOLERANCE, gaps
    assert min(moved) > 100 * TOLERANCE, moved  # each update changed the log-probs far more than the tolerance
