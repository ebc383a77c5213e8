"""How much of the mismatch between engine and trainer routing replay removes (policy.routing_replay: engine, R3).

    python benchmarks/routing_replay.py make DIR --tokenizer TOKENIZER_DIR         # a small random Qwen3-MoE in bf16
    python benchmarks/routing_replay.py run CONFIG --set policy.model=DIR [--samples 64] [--tokens 512]

`run` starts the servers as `megatron-dapo train` does, samples responses to random prompts with the experts of every
token, ends the servers, and scores the same tokens with the trainer in this process: first with the router's own
choice, then with the engine's. It prints KL(engine‖trainer) (k3), the mean and the largest gap of a log-prob, and the
share of the choices in which the routers disagree. Both lines are of the same tokens and the same weights. Exit code 1
if the engine's experts are missing for any token but the last of a sample.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from megatron_dapo.config import Config, ModelShape, load_config
from megatron_dapo.engines import open_engine
from megatron_dapo.engines.protocol import SamplingParams
from megatron_dapo.policy.batch import TrainBatch
from megatron_dapo.policy.megatron.runtime import initialize, shutdown
from megatron_dapo.policy.policy import Policy
from megatron_dapo.rollout.generation import append_completion
from megatron_dapo.types import FinishReason, Sample, as_logprobs, as_tokens

SIZES = {
    "small": {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4,
              "head_dim": 64, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 384,
              "intermediate_size": 3072},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
             "intermediate_size": 128},
}  # fmt: skip


def make(folder: Path, tokenizer: Path, size: str) -> None:
    """Random weights: scores of experts lie close together, so rounding changes many choices."""
    import transformers

    text = transformers.AutoTokenizer.from_pretrained(tokenizer)
    config = transformers.Qwen3MoeConfig(
        vocab_size=-(-len(text) // 64) * 64, tie_word_embeddings=False, norm_topk_prob=True, initializer_range=0.05,
        max_position_embeddings=4096, eos_token_id=text.eos_token_id, bos_token_id=None, **SIZES[size],
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    text.save_pretrained(folder)


async def sample(config: Config, count: int, tokens: int, vocab: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as logs:
        engine = await open_engine(config.rollout, config.policy.model, logs)
        try:
            return list(await asyncio.gather(*(one(engine, i, rng, config, tokens, vocab) for i in range(count))))
        finally:
            await engine.close()


async def one(engine, index, rng, config, tokens, vocab) -> Sample:  # type: ignore[no-untyped-def]
    prompt = as_tokens(rng.integers(0, vocab, int(rng.integers(8, 64))))
    params = SamplingParams(
        tokens, config.rollout.temperature, ignore_eos=True, seed=index, routed_experts_from=0
    )  # fmt: skip
    found = Sample(f"p{index}", 0, prompt, as_tokens([]), as_logprobs([]), FinishReason.ABORT)
    append_completion(found, await engine.generate(f"sample-{index}", prompt, params))
    return found


def gaps(policy: Policy, batch: TrainBatch, name: str) -> None:
    logprobs = policy.log_probs(batch)[0]
    assert batch.engine_logprobs is not None
    difference = (logprobs - batch.engine_logprobs).astype(np.float64)
    kl = np.mean(np.exp(difference) - 1 - difference)
    mean, largest = np.abs(difference).mean(), np.abs(difference).max()
    print(f"{name:22} mismatch KL {kl:.3e}   mean gap {mean:.3e}   largest {largest:.3f}", flush=True)


def run(config: Config, count: int, tokens: int) -> int:
    shape = ModelShape.from_dir(config.policy.model)
    samples = asyncio.run(sample(config, count, tokens, shape.vocab))
    batch = TrainBatch.from_samples(samples, np.zeros(count, np.float32), np.ones(count, bool))
    known = sum(int((s.routed_experts > 0).all(-1).sum()) for s in samples if s.routed_experts is not None)
    total = int(batch.lengths.sum())
    print(f"{shape.layers} layers, {shape.experts} experts, top-{shape.experts_per_token}; {total} tokens")
    policy = Policy(config, shape, initialize(config.policy))
    policy.load_hf(config.policy.model)
    gaps(policy, replace(batch, routed_experts=None), "router's own choice")
    gaps(policy, batch, "experts of the engine")
    micro_batches = policy.step.pack(batch)
    policy.step.score(micro_batches)
    found = policy.step.replay.metrics(micro_batches)
    share, differs = found["routing_replayed"], found["routing_changed"]
    print(f"replayed: {share:.4f} of the tokens; choices that the router would make otherwise: {differs:.4f}")
    shutdown()
    expected = known / total
    right = known == total - count and math.isclose(share, expected, abs_tol=1e-9)
    print(f"every token but the last of each sample has the engine's experts: {'yes' if right else 'NO'}")
    return 0 if right else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("make")
    maker.add_argument("folder", type=Path)
    maker.add_argument("--tokenizer", type=Path, required=True)
    maker.add_argument("--size", choices=SIZES, default="small")
    runner = commands.add_parser("run")
    runner.add_argument("config")
    runner.add_argument("--set", action="append", default=[])
    runner.add_argument("--samples", type=int, default=64)
    runner.add_argument("--tokens", type=int, default=512)
    args = parser.parse_args()
    if args.command == "make":
        make(args.folder, args.tokenizer, args.size)
        return 0
    config = load_config(args.config, ["policy.routing_replay=engine", *args.set])
    return run(config, args.samples, args.tokens)


if __name__ == "__main__":
    sys.exit(main())
