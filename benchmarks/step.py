"""The cost of RL over plain training: tokens/s and MFU of a DAPO update and of cross-entropy with the same model.

    python benchmarks/step.py [--tokens 16384] [--recompute none|full]

One GPU, a Qwen2.5-1.5B shape with random weights, bf16, packed sequences; forward, backward and gradient finalisation,
no optimizer step in either. MFU counts 6 FLOPs per parameter and token plus causal attention, against 790 TFLOP/s.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from shapes import QWEN_1_5B as SHAPE

from megatron_dapo.config import parse_config
from megatron_dapo.policy.batch import TrainBatch
from megatron_dapo.policy.model.gpt import has_transformer_engine
from megatron_dapo.policy.policy import Policy
from megatron_dapo.policy.runtime import initialize

PEAK = 790e12


def make_batch(tokens: int, sequences: int, seed: int) -> TrainBatch:
    rng = np.random.default_rng(seed)
    length, prompt = tokens // sequences, 64
    responses = sequences * (length - prompt)
    return TrainBatch(
        tokens=rng.integers(0, SHAPE.vocab, tokens).astype(np.int32),
        prompt_lengths=np.full(sequences, prompt),
        response_lengths=np.full(sequences, length - prompt),
        advantages=rng.normal(size=sequences).astype(np.float32),
        loss_mask=np.ones(responses, np.bool_),
        engine_logprobs=(-np.log(SHAPE.vocab) + 0.1 * rng.normal(size=responses)).astype(np.float32),
    )


def cross_entropy(policy: Policy, batch: TrainBatch) -> None:
    """The same packed tokens through the same schedule, with Megatron's own loss on every token."""
    micro = policy.step.pack(batch)

    def forward_step(iterator: Any, model: Any) -> Any:
        one = next(iterator)
        labels = torch.roll(one.input_ids, -1, 1)
        output = model(one.input_ids, one.position_ids, None, labels=labels, packed_seq_params=one.packed)
        count = torch.tensor(output.numel(), dtype=torch.int32, device=output.device)
        return output, lambda o: (o.float().sum(), count, {"loss": o.detach().sum()})

    policy.step.zero_grad()
    policy.step.forward_backward(
        forward_step_func=forward_step, data_iterator=iter(micro), model=policy.chunks[0], num_microbatches=len(micro),
        seq_length=batch.tokens.size, micro_batch_size=1, forward_only=False,
    )  # fmt: skip


def measure(run: Callable[[int], None], repeats: int) -> float:
    times = []
    for repeat in range(repeats + 3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run(repeat)
        torch.cuda.synchronize()
        if repeat >= 3:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def flops(tokens: int, sequences: int) -> float:
    width = SHAPE.heads * SHAPE.head_dim
    layer = SHAPE.hidden * (2 * width + 2 * SHAPE.kv_heads * SHAPE.head_dim) + 3 * SHAPE.hidden * SHAPE.ffn_hidden
    weights = SHAPE.layers * layer + SHAPE.vocab * SHAPE.hidden
    attention = SHAPE.layers * 2 * 2 * width * (tokens // sequences) / 2
    return tokens * (6 * weights + 3 * attention)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--recompute", choices=["none", "selective", "full"], default="none")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    config = parse_config(
        {
            "policy": {"micro_batch_tokens": args.tokens, "recompute": args.recompute},
            "rollout": {"max_prompt_tokens": 64, "max_response_tokens": args.tokens // args.sequences - 64},
        }
    )
    policy = Policy(config, SHAPE, initialize(config.policy))
    batches = [make_batch(args.tokens, args.sequences, seed) for seed in range(4)]
    layers = "Transformer Engine" if has_transformer_engine() else "plain torch layers"
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {layers}, {vars(args)}")
    work = flops(args.tokens, args.sequences)
    reference = 0.0
    for name, run in {
        "plain cross-entropy": lambda i: cross_entropy(policy, batches[i % 4]),
        "DAPO update": lambda i: policy.gradients(batches[i % 4]) and None,
        "log-probs only": lambda i: policy.log_probs(batches[i % 4]) and None,
    }.items():
        torch.cuda.reset_peak_memory_stats()
        seconds = measure(run, args.repeats)
        reference = reference or seconds
        share = work / 3 if name.startswith("log") else work
        print(
            f"{name:<20} {args.tokens / seconds / 1e3:7.1f} k tokens/s  {reference / seconds:5.2f} × cross-entropy  "
            f"MFU {share / seconds / PEAK:.2f}  peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
