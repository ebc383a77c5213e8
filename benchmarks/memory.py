"""What a trainer rank allocates, compared with what `megatron-dapo plan` predicts, part by part.

    python benchmarks/memory.py                            # one CUDA device, Qwen2.5-1.5B, random weights
    python benchmarks/memory.py --tokens 16384 --recompute full --head-chunk 1024
    python benchmarks/memory.py --dry-run                  # a tiny shape on the CPU: only the static parts are measured
    python benchmarks/memory.py --largest --recompute full --set policy.optimizer.cpu_offload=0.5

`--largest` takes as many layers of Qwen2.5-7B as the prediction allows on this GPU and in this host's memory. It trains
that model, and prints how many parameters it has.

Static parts are the sizes of Megatron's buffers and optimizer state. Peaks are torch.cuda.max_memory_allocated around
the build, one forward and backward pass, and one step. The first update creates the optimizer state, so the second one
is measured. A ratio above 1 means that more was allocated than predicted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psutil
import torch
from shapes import QWEN_1_5B, QWEN_7B

from megatron_dapo.config import Config, ModelShape, parse_config
from megatron_dapo.config.load import apply_overrides
from megatron_dapo.planner.memory import Layers, TrainerMemory, trainer_memory
from megatron_dapo.planner.parameters import count_parameters
from megatron_dapo.policy.batch import TrainBatch
from megatron_dapo.policy.megatron.options import has_transformer_engine
from megatron_dapo.policy.megatron.runtime import initialize, shutdown
from megatron_dapo.policy.policy import Policy
from megatron_dapo.processes.fork_ranks import Rendezvous

MIB = 1 << 20
LIBRARIES = 1 << 30  # of the GPU's memory: kernels of libraries, loaded at their first use
TINY = replace(QWEN_1_5B, layers=2, hidden=64, ffn_hidden=160, heads=4, head_dim=16, vocab=1000)


@dataclass(frozen=True)
class Line:
    part: str
    predicted: float
    measured: float | None

    def text(self) -> str:
        measured = "" if self.measured is None else f"{self.measured / MIB:12,.0f}"
        ratio = "" if not self.measured or not self.predicted else f"{self.measured / self.predicted:9.3f}"
        return f"{self.part:<30}{self.predicted / MIB:12,.0f}{measured:>12}{ratio:>9}"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="of the packed micro-batch (default 8192)")
    parser.add_argument("--sequences", type=int, default=4, help="number of sequences in it (default 4)")
    parser.add_argument("--recompute", choices=["none", "selective", "full"], default="none")
    parser.add_argument("--head-chunk", type=int, default=2048, metavar="TOKENS")
    parser.add_argument("--model", metavar="DIR", help="another model's directory with config.json (default: 1.5B)")
    parser.add_argument("--largest", action="store_true", help="the largest model that should fit, of layers of 7B")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--dry-run", action="store_true", help="a tiny shape, also without CUDA")
    return parser.parse_args(argv)


def make_config(args: argparse.Namespace) -> Config:
    raw: dict[str, Any] = {
        "policy": {
            "micro_batch_tokens": args.tokens, "recompute": args.recompute, "head_chunk_tokens": args.head_chunk,
        },
        "rollout": {"max_prompt_tokens": 16, "max_response_tokens": args.tokens - 16},
        "trainer": {"prompts_per_step": 1, "mini_batch_prompts": 1},
    }  # fmt: skip
    return parse_config(apply_overrides(raw, args.set))


def largest_shape(config: Config, layers: Layers) -> ModelShape:
    """As many layers of Qwen2.5-7B as fit the GPU and, for what the optimizer offloads, 85 % of the free host memory.

    Megatron keeps four fp32 values on the host for each offloaded parameter: weight, gradient and Adam's moments.
    """
    free = (torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 139 << 30) - LIBRARIES
    host = 0.85 * psutil.virtual_memory().available
    fits = QWEN_7B
    for count in range(1, 200):
        shape = replace(QWEN_7B, layers=count)
        offloaded = 16 * config.policy.optimizer.cpu_offload * count_parameters(shape).total
        memory = trainer_memory(shape, config.policy, world=1, micro_batches=1, layers=layers)
        if memory.total > free or offloaded > host:
            break
        fits = shape
    parameters = count_parameters(fits).total
    on_host = 16 * config.policy.optimizer.cpu_offload * parameters
    print(f"largest: {fits.layers} layers, {parameters / 1e9:.2f} G parameters; GPU {free / 2**30:.1f} GiB, offloaded "
          f"{on_host / 2**30:.1f} of {host / 2**30:.1f} GiB", flush=True)  # fmt: skip
    return fits


def make_batch(shape: ModelShape, tokens: int, sequences: int) -> TrainBatch:
    """`sequences` of unequal lengths that fill the micro-batch exactly; prompts of 16 tokens."""
    weights = np.arange(1, sequences + 1)
    lengths = np.maximum(17, tokens * weights // weights.sum())
    lengths[-1] += tokens - lengths.sum()
    responses = (lengths - 16).astype(np.int64)
    total, rng = int(responses.sum()), np.random.default_rng(0)
    return TrainBatch(
        tokens=rng.integers(0, shape.vocab, tokens).astype(np.int32),
        prompt_lengths=np.full(sequences, 16, dtype=np.int64),
        response_lengths=responses,
        advantages=rng.normal(size=sequences).astype(np.float32),
        loss_mask=np.ones(total, dtype=np.bool_),
        engine_logprobs=np.full(total, -np.log(shape.vocab), dtype=np.float32),
    )


class Meter:
    """Peak and current allocation on the device; None on the CPU."""

    def __init__(self) -> None:
        self.on = torch.cuda.is_available()

    def reset(self) -> None:
        if self.on:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> float | None:
        if self.on:
            torch.cuda.synchronize()
        return float(torch.cuda.max_memory_allocated()) if self.on else None

    def now(self) -> float | None:
        return float(torch.cuda.memory_allocated()) if self.on else None


def static_bytes(policy: Policy) -> dict[str, float]:
    """Sizes of weights, gradient buffers and optimizer state (fp32 copies and moments)."""
    buffers = [b for chunk in policy.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    state = 0
    for optimizer in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        inner = optimizer.optimizer
        state += sum(p.nbytes for group in inner.param_groups for p in group["params"])
        for values in inner.state.values():
            state += sum(v.nbytes for v in values.values() if torch.is_tensor(v) and v.dim())
    return {
        "weights": sum(p.nbytes for chunk in policy.model for p in chunk.parameters()),
        "gradients": sum(b.grad_data.nbytes for b in buffers),
        "optimizer": state,
    }


def measure(config: Config, shape: ModelShape, sequences: int) -> tuple[list[Line], float]:
    layers: Layers = "te" if has_transformer_engine() else "local"
    predicted = trainer_memory(shape, config.policy, world=1, micro_batches=1, layers=layers)
    meter = Meter()
    runtime = initialize(config.policy, rendezvous=Rendezvous(url=""))
    before = meter.now() or 0.0
    policy = Policy(config, shape, runtime)
    built = meter.now()
    batch = make_batch(shape, config.policy.micro_batch_tokens, sequences)
    policy.update(batch)
    settled = meter.now()
    meter.reset()
    started = time.monotonic()
    policy.gradients(batch)
    passes = meter.peak()
    seconds = time.monotonic() - started
    meter.reset()
    policy.step.step_optimizer()
    step = meter.peak()
    lines = _lines(predicted, static_bytes(policy), before, built, settled, passes, step)
    shutdown()
    return lines, seconds


def _lines(
    predicted: TrainerMemory,
    static: dict[str, float],
    before: float,
    built: float | None,
    settled: float | None,
    passes: float | None,
    step: float | None,
) -> list[Line]:
    """Peaks are differences from what was allocated before, so each line is one part."""

    def less(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else a - b

    copies = predicted.optimizer / 3  # the fp32 copy exists from the start, the moments from the first step
    return [
        Line("weights", predicted.weights, static["weights"]),
        Line("gradients", predicted.gradients, static["gradients"]),
        Line("optimizer", predicted.optimizer, static["optimizer"]),
        Line("after build", predicted.weights + predicted.gradients + copies, less(built, before)),
        Line("after the first update", predicted.static, less(settled, before)),
        Line("peak of a pass, above static", predicted.passes, less(passes, settled)),
        Line("peak of a step, above static", predicted.step, less(step, settled)),
        Line("largest allocation", predicted.allocated, less(max(passes or 0, step or 0) or None, before)),
    ]


def main(argv: list[str] | None = None) -> int:
    warnings.filterwarnings("ignore")
    args = parse(argv)
    if not torch.cuda.is_available() and not args.dry_run:
        print("no CUDA device: run this on one, or give --dry-run", file=sys.stderr)
        return 2
    if args.dry_run:
        args.tokens, args.head_chunk = min(args.tokens, 512), min(args.head_chunk, 128)
    config = make_config(args)
    if args.largest:
        shape = largest_shape(config, "te" if has_transformer_engine() else "local")
    else:
        shape = ModelShape.from_dir(args.model) if args.model else TINY if args.dry_run else QWEN_1_5B
    lines, seconds = measure(config, shape, args.sequences)
    if args.json:
        print(json.dumps({line.part: {"predicted": line.predicted, "measured": line.measured} for line in lines}))
        return 0
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU (peaks are not measured)"
    layers = "Transformer Engine" if has_transformer_engine() else "torch"
    print(f"{device}; {layers} layers; {args.tokens} tokens in {args.sequences} sequences; recompute {args.recompute}; "
          f"forward and backward {seconds:.2f} s")  # fmt: skip
    print(f"{'MiB':<30}{'predicted':>12}{'measured':>12}{'ratio':>9}")
    for line in lines:
        print(line.text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
