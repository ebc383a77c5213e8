"""policy.true_on_policy: trainer and embedded engine compute the same log-probs, bit for bit.

`make test` compares a few hundred tokens; with ALL_CASES=1 it is more than 100 000.
"""

import asyncio

import numpy as np
import pytest
import torch
from forked import run, steps_of
from long_lists import ALL_CASES, some
from tiny_model import tiny_model
from tiny_run import raw_config

from megatron_dapo import batch_invariant
from megatron_dapo.config import ConfigError, check_config, parse_config
from megatron_dapo.data import save_arithmetic_tokenizer
from megatron_dapo.engines.embedded.engine import EmbeddedEngine
from megatron_dapo.engines.protocol import SamplingParams
from megatron_dapo.policy.batch import TrainBatch
from megatron_dapo.policy.megatron.options import check_hardware
from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.policy import Policy
from megatron_dapo.processes.fork_ranks import run_ranks

KINDS = ["qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen3_next"]
SAMPLES, LONGEST = (256, 100) if ALL_CASES else (4, 40)
VERSIONS = 2


def generate(engine, prompts, lengths, temperature):
    async def all_at_once():
        calls = [
            engine.generate(
                str(i), prompt, SamplingParams(int(length), temperature=temperature, seed=i, ignore_eos=True)
            )
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        return await asyncio.gather(*calls)

    return asyncio.run(all_at_once())


def batch_of(prompts, done, random):
    counts = np.array([len(completion.tokens) for completion in done])
    pairs = zip(prompts, done, strict=True)
    return TrainBatch(
        tokens=np.concatenate([part for prompt, completion in pairs for part in (prompt, completion.tokens)]),
        prompt_lengths=np.array([len(prompt) for prompt in prompts]),
        response_lengths=counts,
        advantages=random.standard_normal(len(prompts)).astype(np.float32),
        loss_mask=np.ones(counts.sum(), bool),
        engine_logprobs=np.concatenate([completion.logprobs for completion in done]),
    )


def largest_differences(rendezvous, raw, planted=""):
    """Of scoring and of an update, for several weight versions; and the number of compared tokens."""
    config = parse_config(raw)
    shape = check_config(config)
    policy = Policy(config, shape, initialize(config.policy, rendezvous=rendezvous))
    policy.load_hf(config.policy.model)
    engine = EmbeddedEngine.from_directory(config.policy.model, config.rollout.embedded)
    if planted == "another kernel of attention":
        batch_invariant.active = lambda: False
    elif planted == "bias added inside of the product":
        # Rounded once. Which of torch's own kernels do that depends on the CPU.
        batch_invariant.REPLACED[torch.ops.aten.addmm.default] = lambda _, bias, left, right: (
            left.double() @ right.double() + bias.double()
        ).float()
    random, found, tokens = np.random.default_rng(0), [], 0
    for version in range(1, VERSIONS + 1):
        prompts = [random.integers(0, shape.vocab, random.integers(1, 17)).astype(np.int32) for _ in range(SAMPLES)]
        done = generate(engine, prompts, random.integers(1, LONGEST, SAMPLES), config.rollout.temperature)
        batch = batch_of(prompts, done, random)
        found.append(float(np.abs(policy.log_probs(batch)[0] - batch.engine_logprobs).max()))
        found.append(policy.update(batch, first=True)["mismatch_max"])
        tokens += len(batch.loss_mask)
        asyncio.run(engine.update_weights(version, list(policy.weight_buckets().buckets())))
    return found, tokens


def raw(kind, tmp_path, **settings):
    model = tiny_model(kind)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):  # a new model's are 0, and rounding would hide where they are added
            torch.nn.init.normal_(weight)
    model.save_pretrained(tmp_path / "model")
    save_arithmetic_tokenizer(tmp_path / "model")
    return raw_config(tmp_path / "model", tmp_path / "run", policy__true_on_policy=True, **settings)


@pytest.mark.parametrize("kind", some(KINDS, "qwen2_moe", "qwen3_next"))
def test_every_token_has_the_same_log_prob(kind, tmp_path):
    settings = raw(kind, tmp_path, rollout__temperature=1.0 if kind == "qwen3" else 0.7)
    ((found, tokens),) = run_ranks(1, largest_differences, settings, timeout=3600)
    assert found == [0.0] * 2 * VERSIONS
    assert tokens > 0.4 * LONGEST * SAMPLES * VERSIONS  # with ALL_CASES, more than 100 k over all kinds


@pytest.mark.parametrize("planted", ["another kernel of attention", "bias added inside of the product"])
def test_a_planted_difference_is_seen(planted, tmp_path):
    ((found, _),) = run_ranks(1, largest_differences, raw("qwen2", tmp_path), planted)
    assert max(found) > 0


def test_a_run_whose_gate_demands_zero(tmp_path):
    settings = raw("qwen2", tmp_path, trainer__steps=2, trainer__gate={"max_mean_gap": 0, "max_gap": 0})
    assert run(settings) == 0
    found = steps_of(tmp_path / "run")
    assert [metrics["train/mismatch_max"] for metrics in found] == [0.0] * 2


SGLANG = {"rollout__engine": "sglang", "policy__precision": "bf16"}


@pytest.mark.parametrize(
    "change",
    [
        {"policy__tensor_parallel": 2},
        {"policy__precision": "bf16"},
        {"policy__lora": {"rank": 4}},  # the engine computes with merged weights
        {"rollout__engine": "sglang"},
        SGLANG | {"policy__context_parallel": 2},
        SGLANG | {"policy__lora": {"rank": 4}},
        SGLANG | {"rollout__servers": {"tensor_parallel": 2}},
        SGLANG | {"rollout__servers": {"dtype": "float16"}},
    ],
)
def test_what_it_cannot_do_is_refused(change, tmp_path):
    with pytest.raises(ConfigError, match="true_on_policy needs"):
        parse_config(raw("qwen2", tmp_path, **change))


def test_a_run_on_cuda(tmp_path):
    """One key: the servers' kernels, deterministic algorithms and the gate follow."""
    config = parse_config(raw("qwen2", tmp_path, **SGLANG))
    assert config.rollout.servers.demands.exact and config.policy.is_deterministic
    assert (config.gate.max_mean_gap, config.gate.max_gap) == (0, 0)
    check_config(config)
    with pytest.raises(ConfigError, match="fp32 on a machine without CUDA"):
        check_hardware(config.policy, te=False)
    for kind, reason in (("qwen3_next", "experts, linear attention, gated"), ("qwen2_yarn", "scaled rotary positions")):
        (tmp_path / kind).mkdir()
        with pytest.raises(ConfigError, match=f"no kernels for models with {reason}"):
            check_config(parse_config(raw(kind, tmp_path / kind, **SGLANG)))


PARTS = [(0, 1, 0, 37), (3, 40, 5, 1), (49, 1, 9, 20)]  # first row, rows, first column, columns


@pytest.mark.parametrize("size", [7, 32, 100, 896])
def test_an_element_of_a_product_depends_on_its_row_and_column_alone(size):
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(rows, size, generator=generator) for rows in (50, 37))
    with batch_invariant.BatchInvariant():
        whole = left @ right.T
        parts = [left[i : i + n] @ right[j : j + m].T for i, n, j, m in PARTS]
    assert torch.allclose(whole, left @ right.T, atol=1e-3)
    for (i, n, j, m), part in zip(PARTS, parts, strict=True):
        assert torch.equal(whole[i : i + n, j : j + m], part)
