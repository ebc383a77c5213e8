"""The cost of RL over plain training: tokens/s and MFU of a DAPO update and of cross-entropy with the same model.

    python benchmarks/step.py [--tokens 16384] [--model 1.5b|7b|32b|moe] [--set policy.recompute=full]
    python benchmarks/step.py --options [--model moe]     # each Megatron option on or off, side by side
    python benchmarks/step.py --options --only fp8 flash  # those whose name has one of these words, and the defaults
    python benchmarks/step.py --profile --set policy.fp8.recipe=tensorwise  # what the GPU does in one DAPO update

One GPU, a Qwen2.5-1.5B shape (or some layers of Qwen2.5-7B, 32B or Qwen3-30B-A3B) with random weights, bf16, packed
sequences; forward, backward and gradient finalisation; the optimizer's step by itself. MFU counts 6 FLOPs per active
parameter and token plus causal attention, against 790 TFLOP/s (bf16, also for fp8).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from random_model import CONFIGS
from shapes import QWEN_1_5B, QWEN_7B, QWEN_30B_A3B_LAYERS

from megatron_dapo.config import ModelShape, parse_config
from megatron_dapo.config.load import apply_overrides
from megatron_dapo.planner.parameters import count_parameters
from megatron_dapo.policy.batch import TrainBatch
from megatron_dapo.policy.megatron.options import has_transformer_engine
from megatron_dapo.policy.megatron.runtime import initialize, shutdown
from megatron_dapo.policy.policy import Policy

PEAK = 790e12
SHAPES = {
    "1.5b": QWEN_1_5B, "moe": QWEN_30B_A3B_LAYERS, "7b": replace(QWEN_7B, layers=8),
    "32b": replace(ModelShape.from_hf(CONFIGS["32b"]), layers=4),
}  # fmt: skip
# The defaults, then each option by itself.
OPTIONS = {
    "defaults": [],
    "gradient accumulation fusion off": ["policy.gradient_accumulation_fusion=false"],
    "torch AdamW unfused": ["policy.optimizer.fused=false"],
    "bf16 gradient reduction": ["policy.gradient_reduction=bf16"],
    "precision-aware optimizer": ["policy.optimizer.precision_aware=true", "policy.optimizer.exp_avg_dtype=bf16",
                                  "policy.optimizer.exp_avg_sq_dtype=bf16"],
    "optimizer offload": ["policy.optimizer.cpu_offload=1.0"],
    "recompute core_attn": ["policy.recompute=selective"],
    "recompute full": ["policy.recompute=full"],
    "fp8 tensorwise": ["policy.fp8.recipe=tensorwise"],
    "fp8 blockwise": ["policy.fp8.recipe=blockwise"],
    "fp8 delayed": ["policy.fp8.recipe=delayed"],
    "flash attention": ["policy.attention_backend=flash"],
    "deterministic": ["policy.deterministic=true"],
    "LoRA of rank 32": ["policy.lora.rank=32"],
}  # fmt: skip
DENSE_OPTIONS = {"recompute mlp": ["policy.recompute=selective", "policy.recompute_modules=[mlp]"]}
MOE_OPTIONS = {
    "permute fusion off": ["policy.moe.permute_fusion=false"],
    "grouped GEMM off": ["policy.moe.grouped_gemm=false"],
    "router fusion": ["policy.moe.router_fusion=true"],
    "recompute moe": ["policy.recompute=selective", "policy.recompute_modules=[moe]"],
    "recompute layernorm, moe_act": ["policy.recompute=selective", "policy.recompute_modules=[layernorm, moe_act]"],
}
# Kernels by their names, for --profile; the first that matches.
KERNELS = {
    "attention": r"fmha|flash|attn|attention|sdpa",
    "fp8 conversion": r"(?<!no)cast|amax|quantiz|fp8_transpose|compute_scale|swizzle|block_scal",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas",
    "copies and memory": r"memcpy|memset|copy_kernel|fill",
    "other": "",
}


def make_batch(shape: ModelShape, tokens: int, sequences: int, seed: int) -> TrainBatch:
    rng = np.random.default_rng(seed)
    length, prompt = tokens // sequences, 64
    responses = sequences * (length - prompt)
    return TrainBatch(
        tokens=rng.integers(0, shape.vocab, tokens).astype(np.int32),
        prompt_lengths=np.full(sequences, prompt),
        response_lengths=np.full(sequences, length - prompt),
        advantages=rng.normal(size=sequences).astype(np.float32),
        loss_mask=np.ones(responses, np.bool_),
        engine_logprobs=(-np.log(shape.vocab) + 0.1 * rng.normal(size=responses)).astype(np.float32),
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


def flops(shape: ModelShape, tokens: int, sequences: int) -> float:
    weights = count_parameters(shape).layer_matrices_active + shape.vocab * shape.hidden
    attention = shape.layers * 2 * 2 * shape.heads * shape.head_dim * (tokens // sequences) / 2
    return tokens * (6 * weights + 3 * attention)


def shape_of(args: argparse.Namespace) -> ModelShape:
    return replace(SHAPES[args.model], layers=args.layers) if args.layers else SHAPES[args.model]


def make_policy(args: argparse.Namespace) -> tuple[Policy, list[TrainBatch]]:
    shape, tokens = shape_of(args), args.tokens
    raw: dict[str, Any] = {
        "policy": {"micro_batch_tokens": tokens},
        "rollout": {"max_prompt_tokens": 64, "max_response_tokens": tokens // args.sequences - 64},
    }
    config = parse_config(apply_overrides(raw, args.set))
    policy = Policy(config, shape, initialize(config.policy))
    return policy, [make_batch(shape, tokens, args.sequences, seed) for seed in range(4)]


def measure_one(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds and peak memory of each pass, with the options of this process."""
    policy, batches = make_policy(args)
    passes: dict[str, Callable[[int], Any]] = {
        "plain cross-entropy": lambda i: cross_entropy(policy, batches[i % 4]),
        "DAPO update": lambda i: policy.gradients(batches[i % 4]),
        "log-probs only": lambda i: policy.log_probs(batches[i % 4]),
        "optimizer step": lambda i: policy.step.step_optimizer(),
    }
    found: dict[str, Any] = {}
    for name, run in passes.items():
        torch.cuda.reset_peak_memory_stats()
        found[name] = (measure(run, args.repeats), torch.cuda.max_memory_allocated() / 2**30)
    layers = "Transformer Engine" if has_transformer_engine() else "plain torch layers"
    found["machine"] = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {layers}"
    return found


def profile_update(args: argparse.Namespace) -> None:
    """Milliseconds of the GPU by kind of kernel in one DAPO update, and how long the GPU has nothing to do."""
    policy, batches = make_policy(args)
    for batch in batches[:3]:
        policy.gradients(batch)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        started = time.perf_counter()
        policy.gradients(batches[3])
        launched = time.perf_counter() - started
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    on_gpu = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(event.time_range.start, event.time_range.end, event.name) for event in on_gpu]
    sums = dict.fromkeys(KERNELS, 0.0)
    largest: dict[str, float] = {}
    for start, end, name in spans:
        kind = next(kind for kind, pattern in KERNELS.items() if re.search(pattern, name.lower()))
        sums[kind] += (end - start) / 1e3
        largest[name] = largest.get(name, 0.0) + (end - start) / 1e3
    busy, until = 0.0, 0.0
    for start, end, _ in sorted(spans):
        busy += max(0.0, end - max(start, until)) / 1e3
        until = max(until, end)
    print(f"{vars(args)}")
    print(
        f"{1e3 * seconds:.1f} ms for {args.tokens} tokens: GPU busy {busy:.1f} ms; the host had launched all "
        f"{len(spans)} kernels after {1e3 * launched:.1f} ms"
    )
    print(", ".join(f"{kind} {value:.1f} ms" for kind, value in sums.items()))
    for name, value in sorted(largest.items(), key=lambda pair: -pair[1])[:15]:
        print(f"  {value:7.2f} ms  {name[:110]}", flush=True)


def print_one(args: argparse.Namespace, found: dict[str, Any]) -> None:
    work = flops(shape_of(args), args.tokens, args.sequences)
    reference = found["plain cross-entropy"][0]
    print(f"{found['machine']}, {vars(args)}")
    for name in ("plain cross-entropy", "DAPO update", "log-probs only"):
        seconds, peak = found[name]
        share = work / 3 if name.startswith("log") else work
        print(
            f"{name:<20} {args.tokens / seconds / 1e3:7.1f} k tokens/s  {reference / seconds:5.2f} × cross-entropy  "
            f"MFU {share / seconds / PEAK:.2f}  peak {peak:.1f} GiB"
        )
    seconds, peak = found["optimizer step"]
    print(f"{'optimizer step':<20} {1e3 * seconds:7.1f} ms  peak {peak:.1f} GiB", flush=True)


def compare_options(args: argparse.Namespace) -> None:
    """Each option in a process of its own, one line each."""
    work = flops(shape_of(args), args.tokens, args.sequences)
    print(f"{args.model}, {args.tokens} tokens per update; × is the DAPO update's speed beside the defaults'")
    print(f"{'option':<34} {'k tokens/s':>10} {'×':>6} {'MFU':>6} {'CE ×':>6} {'step ms':>8} {'peak GiB':>9}")
    defaults = 0.0
    for name, settings in (OPTIONS | (MOE_OPTIONS if SHAPES[args.model].is_moe else DENSE_OPTIONS)).items():
        if args.only and settings and not any(word in name for word in args.only):
            continue
        command = [sys.executable, __file__, "--json", "--model", args.model, "--tokens", str(args.tokens)]
        command += ["--layers", str(args.layers), "--sequences", str(args.sequences), "--repeats", str(args.repeats)]
        for setting in [*args.set, *settings]:
            command += ["--set", setting]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no output"]
            reason = next((line for line in reversed(lines) if "Error" in line), lines[-1])
            print(f"{name:<34} failed: {reason[:120]}", flush=True)
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        update, entropy, step = (found[part][0] for part in ("DAPO update", "plain cross-entropy", "optimizer step"))
        defaults = defaults or update
        peak = max(found[part][1] for part in ("DAPO update", "optimizer step"))
        print(
            f"{name:<34} {args.tokens / update / 1e3:10.1f} {defaults / update:6.2f} {work / update / PEAK:6.2f} "
            f"{entropy / update:6.2f} {1e3 * step:8.1f} {peak:9.1f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), default="1.5b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=0, help="another number of layers; 0: the model's")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the configuration"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--options", action="store_true", help="compare Megatron's options")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="options whose name has one of the words")
    parser.add_argument("--profile", action="store_true", help="the GPU's time by kind of kernel in one DAPO update")
    parser.add_argument("--json", action="store_true", help="print the measurement as JSON")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    if args.options:
        compare_options(args)
    elif args.profile:
        profile_update(args)
    elif args.json:
        print(json.dumps(measure_one(args)))
    else:
        print_one(args, measure_one(args))
    shutdown()


if __name__ == "__main__":
    main()
