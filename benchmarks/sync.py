"""Weight updates from trainer to engine on one device: seconds and GB/s by transport, and the memory in use.

    python benchmarks/sync.py MODEL [--transports tensor disk] [--repeats 3] [-- ARGUMENTS OF sglang.launch_server]

MODEL is an HF directory (random weights will do). One SGLang server shares the device with the trainer, as with
`rollout.servers.share_gpus`: before every update it has released its memory and the trainer's state is offloaded. The
limit printed beside it is one copy of the same bytes within the device; `--device cpu` runs everything on the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
import warnings

import torch

from megatron_dapo.config import Config, ModelShape, parse_config
from megatron_dapo.engines.factory import open_engine
from megatron_dapo.engines.protocol import Engine, WeightReport
from megatron_dapo.policy.policy import Policy
from megatron_dapo.policy.runtime import initialize
from megatron_dapo.trainer.collectives import Collectives
from megatron_dapo.trainer.colocation import Colocation, memory
from megatron_dapo.trainer.signals import StopSignal
from megatron_dapo.weights.sync import WeightBuckets


def settings(args: argparse.Namespace) -> Config:
    servers = {"share_gpus": True, "device": args.device, "python": args.python, "arguments": args.server_arguments}
    return parse_config(
        {
            "policy": {"model": args.model, "precision": "bf16" if args.device == "cuda" else "fp32"},
            "rollout": {"engine": "sglang", "servers": servers, "weights": {"backend": "gloo"}},
        }
    )


def copy_seconds(size: int, device: torch.device) -> float:
    """The limit: the same bytes copied once within the device."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)


async def hand_over(
    engine: Engine, policy: Policy, weights: WeightBuckets, version: int
) -> tuple[WeightReport, dict[str, float]]:
    """One hand-over: from a trainer that has the device to an engine that serves, and back."""
    colocation = Colocation(True, policy, Collectives(policy.runtime, StopSignal()), lambda line: None)
    clock = {}
    began = time.perf_counter()
    colocation.offload_training_state()
    clock["offload"] = time.perf_counter() - began
    await engine.load_weights(version, weights.buckets())
    colocation.offload_weights()
    report = await engine.serve_weights(version)
    began = time.perf_counter()
    await engine.release_memory()
    clock["release"] = time.perf_counter() - began
    began = time.perf_counter()
    policy.onload()
    clock["onload"] = time.perf_counter() - began
    return report, clock


async def measure(
    args: argparse.Namespace, config: Config, policy: Policy, weights: WeightBuckets, limit: float
) -> None:
    device, version = policy.runtime.device, 0
    for name in args.transports:
        chosen = {"transport": name.split("+")[0], "keep_snapshot": name.endswith("+snapshot"), "backend": "gloo"}
        rollout = config.rollout.model_copy(update={"weights": config.rollout.weights.model_copy(update=chosen)})
        policy.offload_training_state()
        policy.offload_weights()
        print(f"{name}: engine starts; {memory(device)}", flush=True)
        with tempfile.TemporaryDirectory() as logs:
            engine = await open_engine(rollout, args.model, logs)
            print(f"  engine serves; {memory(device)}", flush=True)
            await engine.release_memory()
            print(f"  engine released; {memory(device)}", flush=True)
            policy.onload()
            print(f"  trainer back; {memory(device)}", flush=True)
            seconds: list[float] = []
            for _ in range(args.repeats):
                version += 1
                report, clock = await hand_over(engine, policy, weights, version)
                seconds.append(report.seconds)
                print(f"  {report.seconds:.3f} s; " + ", ".join(f"{k} {v:.2f} s" for k, v in clock.items()), flush=True)
            best = statistics.median(seconds)
            print(
                f"{name:<16} {report.tensors} tensors, {report.bytes / 1e9:.2f} GB: {best:.3f} s = "
                f"{report.bytes / best / 1e9:.1f} GB/s, {best / limit:.0f} × one copy on the device; {report.proof}",
                flush=True,
            )
            await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--transports", nargs="+", default=["tensor", "tensor+snapshot", "disk"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--python", default="", help="the Python that has sglang; empty: this one")
    ours, _, theirs = " ".join(sys.argv[1:]).partition(" -- ")
    args = parser.parse_args(ours.split())
    args.server_arguments = theirs.split()
    warnings.filterwarnings("ignore")
    config = settings(args)
    policy = Policy(config, ModelShape.from_dir(args.model), initialize(config.policy))
    policy.load_hf(args.model)
    weights = policy.weight_buckets()
    size = weights.total_bytes
    limit = copy_seconds(size, policy.runtime.device)
    print(f"one copy of {size / 1e9:.2f} GB on the device: {limit * 1e3:.1f} ms ({size / limit / 1e9:.0f} GB/s)")
    asyncio.run(measure(args, config, policy, weights, limit))


if __name__ == "__main__":
    main()
