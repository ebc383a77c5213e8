"""Weight updates from trainer to engine on one GPU: GB/s in the loop with the proof, tokens/s before and after.

    python benchmarks/sync.py MODEL            # everything below; about 12 minutes on an H200
    python benchmarks/sync.py MODEL --only real --transports tensor tensor+snapshot disk
    python benchmarks/sync.py MODEL --only real --transports tensor distributed    # CUDA IPC and NCCL
    python benchmarks/sync.py MODEL --only real --transports tensor --fp8
    python benchmarks/sync.py MODEL --only moe --transports tensor --pack-experts
    python benchmarks/sync.py MODEL --only real --transports tensor adapter --generating

MODEL is the HF directory of a small dense model (Qwen2.5-1.5B; random weights will do). Three models are measured:

    real    MODEL itself
    dense   15 GB, the shape of Qwen2.5-7B, random weights
    moe     16 layers of Qwen3-30B-A3B, 6 291 tensors, 21 GB, random weights

The last two need no files: the engine starts with random weights of its own (--load-format dummy) and gets the
trainer's with the first update. They need MODEL's tokenizer, 45 GB of GPU memory and 45 GB of host memory.

One SGLang server shares the GPU with the trainer, as with `rollout.servers.share_gpus`: before every update it has
released its memory. With `distributed` it keeps its memory beside the trainer's: NCCL must allow two ranks on one GPU
(NCCL 2.30 or newer, NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_NCHANNELS=2). Each line says:

    seconds      from pausing the server to its verified version, without what the trainer does in between
    pause, transfer, labels, proof    its parts, one after the other
    checksums, probe    of proof: checksums of the server's memory; log-probs of a fixed text, in the first update
    flush, end   of labels: emptying the KV cache; ending SGLang's update session (0.5.23)
    join         of transfer: making the NCCL group, in the first update
    gather, hash, load    of transfer with `adapter`: until the tensors are in host memory; SHA-256 of the sender; the
                 request. Of `load`, the server's log (printed here) says how long it compared and loaded
    memory       of pause and labels: taking back the memory of weights and KV cache
    GB/s         of the update without `memory`, proof included: the number to compare with 18.6 (SGLang alone: 52)
    predicted    the same seconds by `megatron-dapo plan`'s model

--fp8 (model `real` only): the server starts with MODEL in fp8 (`convert hf-to-fp8`), and the sender quantises. The
first update sends the weights that the server started with, so its log-probs of a text must not change: the largest gap
is printed. Weights that arrived in another format or order would change them.

--pack-experts: `rollout.weights.pack_experts`. The first update is as slow as without it: the server compares what the
packed copies would write with what SGLang's own loader writes, and says in its log (printed here) whether they agree.

--transports adapter: LoRA's adapter of --rank beside the server's base (docs/lora.md); the other transports then send
merged weights. --generating: the server keeps its memory beside the trainer's and generates during the updates. Each
line then has the tokens/s of requests that ran before, during and after the update.

The limit printed beside it is one copy of the same bytes within the device. Arguments after `--` go to
sglang.launch_server (default: --mem-fraction-static 0.7). `--device cpu` runs everything on the CPU with a tiny MODEL.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from ablation import split_arguments
from random_model import write_random_model

from megatron_dapo.config import Config, ModelShape, parse_config
from megatron_dapo.engines import open_engine
from megatron_dapo.engines.protocol import Engine, SamplingParams, WeightReport
from megatron_dapo.planner.hardware import Cluster, find_gpu
from megatron_dapo.planner.sync import sync_time
from megatron_dapo.policy.megatron.runtime import Runtime, initialize, shutdown
from megatron_dapo.policy.model.gpt import build_model
from megatron_dapo.policy.model.lora import Adapters
from megatron_dapo.policy.policy import Offloader
from megatron_dapo.sync.gather import WeightBuckets
from megatron_dapo.trainer.colocation import memory
from megatron_dapo.types import Tokens, as_tokens
from megatron_dapo.weights.adapters import adapter_mappings
from megatron_dapo.weights.fp8_checkpoint import hf_to_fp8
from megatron_dapo.weights.model_weights import WHOLE, load_hf_weights
from megatron_dapo.weights.tensor_spec import flat_size

RANDOM_MODELS = ("dense", "moe")


class Trainer:
    """A model without optimizer, whose weights move to the host while the engine works."""

    def __init__(self, config: Config, runtime: Runtime, model: Path, *, load: bool) -> None:
        shape = ModelShape.from_dir(str(model))
        self.chunks = build_model(shape, config.policy, runtime)
        if config.policy.precision == "bf16":
            self.chunks = [chunk.bfloat16() for chunk in self.chunks]
        if load:
            load_hf_weights(self.chunks, shape, str(model))
        weights, lora = config.rollout.weights, config.policy.lora
        merge = None
        if lora.rank:
            (chunk,) = self.chunks
            chunk.adapters = Adapters(chunk, shape, lora, WHOLE, runtime.groups, seed=0)
            self.adapters = WeightBuckets(self.chunks, shape, WHOLE, adapters=adapter_mappings(shape, lora.rank))
            for _, parameter in chunk.adapters.live():
                torch.nn.init.normal_(parameter, std=0.01)
            merge = chunk.adapters.merged
        self.weights = WeightBuckets(
            self.chunks, shape, WHOLE, bucket_bytes=weights.bucket_bytes, quantization=weights.quantization, merge=merge
        )
        self.shape, self._offloader = shape, Offloader(runtime.device)

    def offload(self) -> None:
        self._offloader.offload(p for chunk in self.chunks for p in chunk.parameters())

    def onload(self) -> None:
        self._offloader.onload()

    @torch.no_grad()
    def step(self) -> None:
        """Other weights, as after an update."""
        for chunk in self.chunks:
            torch._foreach_mul_([p for p in chunk.parameters() if p.requires_grad], 1.001)


def settings(args: argparse.Namespace, model: Path, transport: str, dummy: bool) -> Config:
    servers = {
        "share_gpus": transport != "distributed" and not args.generating, "device": args.device, "python": args.python,
        "max_running": args.requests,
        "arguments": args.server_arguments + (["--load-format", "dummy"] if dummy else []),
    }  # fmt: skip
    if args.device == "cpu":
        servers["dtype"] = "float32"  # SGLang would take fp16, which is slow on a CPU
    kept = transport.endswith("+snapshot")
    weights = {
        "backend": "nccl" if args.device == "cuda" else "gloo", "transport": transport.split("+")[0],
        "keep_snapshot": kept, "bucket_bytes": args.bucket_mib << 20, "pack_experts": args.pack_experts,
    }  # fmt: skip
    if args.served:
        servers["model"], weights["quantization"] = str(args.served), "fp8"
    return parse_config(
        {
            "policy": {
                "model": str(model),
                "precision": "bf16" if args.device == "cuda" else "fp32",
                "lora": {"rank": args.rank if "adapter" in args.transports else 0},
            },
            "rollout": {"engine": "sglang", "servers": servers, "weights": weights},
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


async def generate(engine: Engine, name: str, prompt: Tokens, tokens: int) -> None:
    """A whole response, which an update may interrupt."""
    end = len(prompt) + tokens
    while len(prompt) < end:
        params = SamplingParams(end - len(prompt), temperature=1.0, ignore_eos=True)
        part = await engine.generate(f"{name}-{len(prompt)}", prompt, params)
        prompt = as_tokens([*prompt, *part.tokens])
        await asyncio.sleep(0.0 if len(part.tokens) else 0.05)


async def tokens_per_second(engine: Engine, label: str, args: argparse.Namespace) -> float:
    began = time.perf_counter()
    prompts = [as_tokens(range(10 + i, 42 + i)) for i in range(args.requests)]
    await asyncio.gather(*(generate(engine, f"{label}-{i}", p, args.tokens) for i, p in enumerate(prompts)))
    return args.requests * args.tokens / (time.perf_counter() - began)


async def hand_over(
    engine: Engine, trainer: Trainer, weights: WeightBuckets, version: int, shared: bool
) -> WeightReport:
    await engine.load_weights(version, weights.buckets())
    if shared:
        trainer.offload()
    return await engine.serve_weights(version)


async def measure(args: argparse.Namespace, trainer: Trainer, config: Config, name: str, limit: float) -> None:
    device, shared = next(trainer.chunks[0].parameters()).device, config.rollout.servers.share_gpus
    if shared:
        trainer.offload()
    print(f"{name}: the engine starts; {memory(device)}", flush=True)
    with tempfile.TemporaryDirectory() as logs:
        engine = await open_engine(config.rollout, config.policy.model, logs)
        await tokens_per_second(engine, "warm-up", args)
        before = await tokens_per_second(engine, "before", args)
        text, at_start = as_tokens(range(100, 400)), {}
        if args.served:
            at_start = await engine.logprobs_of(text)  # type: ignore[attr-defined]
        weights = trainer.adapters if config.rollout.sends_adapters else trainer.weights
        reports, after = [], 0.0
        for version in range(1, args.repeats + 1):
            if shared:
                await engine.release_memory()
                trainer.onload()
            if version > 1 or not args.served:
                trainer.step()
            running = (
                asyncio.create_task(tokens_per_second(engine, f"during-{version}", args)) if args.generating else None
            )
            await asyncio.sleep(0.5)
            reports.append(await hand_over(engine, trainer, weights, version, shared))
            during = f"{await running:,.0f} tokens/s during it, " if running else ""
            if version == 1 and args.served:
                now = await engine.logprobs_of(text)  # type: ignore[attr-defined]
                gap = max(float(abs(now[name] - at_start[name]).max()) for name in now)
                print(f"  the same weights, sent in fp8: log-probs of {len(text)} tokens differ by at most {gap:.6f}")
            after = await tokens_per_second(engine, f"after-{version}", args)
            parts = ", ".join(f"{part} {seconds:.3f} s" for part, seconds in reports[-1].parts.items())
            print(f"  {reports[-1].seconds:.3f} s ({parts}); {during}then {after:,.0f} tokens/s", flush=True)
        if shared:
            await engine.release_memory()
            trainer.onload()
        await engine.close()
        for log in Path(logs).rglob("*.log"):
            lines = log.read_text().splitlines()
            print("".join(f"  {line}\n" for line in lines if "experts::" in line or "adapter sync" in line), end="")
    moving = statistics.median(r.seconds - r.parts["memory"] for r in reports[1:] or reports)
    size = reports[-1].bytes
    proof = statistics.median(r.parts["proof"] for r in reports[1:] or reports)
    gpu = find_gpu("h200")
    predicted = sync_time(trainer.shape, config.policy, config.rollout.weights, Cluster(gpu, 1), 1)
    print(
        f"{name:<22} {reports[-1].tensors} tensors, {size / 1e9:.4g} GB: {moving:.3f} s = "
        f"{size / moving / 1e9:.3g} GB/s with proof ({proof / moving:.1%} of the time; "
        f"predicted {predicted.total:.3f} s; a copy {limit * 1e3:.1f} ms); "
        f"engine {before:,.0f} tokens/s before, {after:,.0f} after; {reports[-1].proof}",
        flush=True,
    )


def run_model(args: argparse.Namespace, kind: str, model: Path, runtime: Runtime) -> None:
    dummy = kind != "real"
    first = settings(args, model, args.transports[0], dummy)
    trainer = Trainer(first, runtime, model, load=not dummy)
    limit = copy_seconds(min(sum(flat_size(plan.specs) for plan in trainer.weights.plans), 8 << 30), runtime.device)
    for transport in args.transports if kind == "real" else args.transports[:1]:
        config = settings(args, model, transport, dummy)
        asyncio.run(measure(args, trainer, config, f"{kind} {transport}", limit))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--only", nargs="+", choices=["real", *RANDOM_MODELS], default=["real", *RANDOM_MODELS])
    parser.add_argument("--transports", nargs="+", default=["tensor", "tensor+snapshot"])
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--bucket-mib", type=int, default=512, help="rollout.weights.bucket_bytes; try 1024 and 2048")
    parser.add_argument("--fp8", action="store_true", help="quantise on the sender; with --only real")
    parser.add_argument("--pack-experts", action="store_true", help="send the experts of a layer as few tensors")
    parser.add_argument("--requests", type=int, default=64, help="that run at once while tokens/s are measured")
    parser.add_argument("--tokens", type=int, default=256, help="of each of them")
    parser.add_argument("--rank", type=int, default=32, help="of the transport `adapter`")
    parser.add_argument("--generating", action="store_true", help="requests run during the updates")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--python", default="", help="the Python that has sglang; empty: this one")
    own, theirs = split_arguments("--mem-fraction-static", "0.7")
    args = parser.parse_args(own)
    args.server_arguments = theirs if args.device == "cuda" or "--" in sys.argv else []
    if args.fp8 and args.only != ["real"]:
        parser.error("--fp8 needs --only real")
    if "adapter" in args.transports and not (args.generating and args.only == ["real"]):
        parser.error("--transports adapter needs --generating and --only real")
    warnings.filterwarnings("ignore")
    args.served = None
    runtime = initialize(settings(args, args.model, "tensor", False).policy)
    with tempfile.TemporaryDirectory() as folder:
        if args.fp8:
            args.served = Path(folder, "fp8")
            print(hf_to_fp8(args.model, args.served), flush=True)
        for kind in args.only:
            model = args.model if kind == "real" else write_random_model(kind, Path(folder, kind), args.model)
            run_model(args, kind, model, runtime)
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
    shutdown()


if __name__ == "__main__":
    main()
