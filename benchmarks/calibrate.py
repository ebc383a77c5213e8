"""The planner's times beside measurements with layers of Qwen2.5-32B on one GPU: some layers train, all layers decode.

    python benchmarks/calibrate.py train [--layers 2 6] [--tokens 16384]
    python benchmarks/calibrate.py decode --tokenizer DIR [--points 16x256 256x256 …] [-- SERVER ARGUMENTS]

`train` measures a DAPO update of the first and of the second number of layers. Their difference is the time of a layer,
the rest is the head; 64 layers with one head are printed beside the prediction at `--mfu`. `decode` starts SGLang with
random weights (64 GB in bf16) and decodes `--response` tokens for each of N requests at once (`--points`: N x tokens of
the prompt); the time of a step is printed beside the prediction. Ratios above 1: slower than predicted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ablation import split_arguments

from megatron_dapo.config import ModelShape, parse_config
from megatron_dapo.planner.hardware import Cluster, find_gpu
from megatron_dapo.planner.parameters import count_parameters
from megatron_dapo.planner.server_model import decode_model
from megatron_dapo.planner.timing import attention_flops


def shape_of(kind: str, layers: int | None = None) -> ModelShape:
    from random_model import CONFIGS

    config = CONFIGS[kind] | ({} if layers is None else {"num_hidden_layers": layers})
    return ModelShape.from_hf(config)


def update_seconds(layers: int, tokens: int) -> float:
    """In a process of its own: memory of the other model is gone."""
    command = [sys.executable, str(Path(__file__).with_name("step.py")), "--json", "--model", "32b"]
    command += ["--layers", str(layers), "--tokens", str(tokens), "--repeats", "5"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return float(json.loads(done.stdout.splitlines()[-1])["DAPO update"][0])


def train(args: argparse.Namespace) -> None:
    few, many = args.layers
    times = {count: update_seconds(count, args.tokens) for count in (few, many)}
    layer = (times[many] - times[few]) / (many - few)
    head = times[few] - few * layer
    gpu, shape = find_gpu(args.gpu), shape_of("32b")
    rate = gpu.tflops * 1e12 * args.mfu
    one = count_parameters(shape).layer_matrices_active / shape.layers
    flops = 2 * one + attention_flops(shape, args.tokens / 8) / shape.layers
    rows = {
        "one layer": (layer, args.tokens * 3 * flops / rate),
        "head with loss": (head, args.tokens * 4 * 2 * shape.hidden * shape.vocab / rate),
    }
    rows["64 layers and head"] = tuple(64 * a + b for a, b in zip(*rows.values(), strict=True))
    print(f"32B, {args.tokens} tokens in 8 sequences, forward and backward; predicted at MFU {args.mfu}")
    for name, (measured, predicted) in rows.items():
        print(f"{name:<20} {1e3 * measured:9.1f} ms, predicted {1e3 * predicted:9.1f} ms: {measured / predicted:.2f}")


async def decode(args: argparse.Namespace, folder: Path) -> None:
    from random_model import write_random_model

    from megatron_dapo.engines import open_engine
    from megatron_dapo.engines.protocol import SamplingParams
    from megatron_dapo.types import as_tokens

    model = write_random_model(args.kind, folder / args.kind, args.tokenizer)
    points = [tuple(int(number) for number in point.split("x")) for point in args.points]
    most = max(running for running, _ in points)
    arguments = [*args.server_arguments, "--load-format", "dummy", "--max-running-requests", str(most)]
    servers = {"arguments": arguments, "max_running": most, "device": args.device, "python": args.python}
    config = parse_config(
        {
            "policy": {"model": str(model)},
            "rollout": {"engine": "sglang", "servers": servers},
        }
    )
    shape, cluster = ModelShape.from_dir(str(model)), Cluster(find_gpu(args.gpu), 1)
    predict = decode_model(shape, cluster, 1)
    params = SamplingParams(args.response, temperature=1.0, ignore_eos=True)
    engine = await open_engine(config.rollout, str(model), str(folder))
    try:
        for number, (running, prompt) in enumerate((points[0], *points)):  # the first one twice: it warms up
            starts = [1000 * (number + 1) + i for i in range(running)]  # no prompt twice: it would be cached
            prompts = [as_tokens(range(start, start + prompt)) for start in starts]
            names = [f"{time.monotonic()}-{i}" for i in range(running)]
            began = time.perf_counter()
            await asyncio.gather(*(engine.generate(n, p, params) for n, p in zip(names, prompts, strict=True)))
            seconds = time.perf_counter() - began
            prefill = predict.per_prompt_token * prompt * running
            steps = args.response * predict.step(running, running * (prompt + args.response / 2))
            print(
                f"{running:4d} running, prompts of {prompt}: {running * args.response / seconds:8,.0f} tokens/s, "
                f"{1e3 * seconds / args.response:6.1f} ms a step with prefill, "
                f"predicted {1e3 * (steps + prefill) / args.response:6.1f} ms: {seconds / (steps + prefill):.2f}",
                flush=True,
            )
    finally:
        await engine.close()


def main() -> None:
    own, theirs = split_arguments("--mem-fraction-static", "0.85")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h200")
    commands = parser.add_subparsers(dest="command", required=True)
    training, decoding = commands.add_parser("train"), commands.add_parser("decode")
    training.add_argument("--layers", type=int, nargs=2, default=(2, 6))
    training.add_argument("--tokens", type=int, default=16384)
    training.add_argument("--mfu", type=float, default=0.5)
    decoding.add_argument("--tokenizer", type=Path, required=True)
    decoding.add_argument("--kind", choices=("32b", "dense", "moe", "tiny"), default="32b")
    decoding.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    decoding.add_argument("--python", default="", help="the Python that has sglang; empty: this one")
    decoding.add_argument(
        "--points", nargs="+", default=["16x256", "64x256", "128x256", "256x256", "16x4096", "40x4096"]
    )
    decoding.add_argument("--response", type=int, default=256)
    args = parser.parse_args(own)
    args.server_arguments = theirs
    if args.command == "train":
        train(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(decode(args, Path(folder)))


if __name__ == "__main__":
    main()
