"""How fast a GPU decodes beside processes that wait on it, relative to decoding alone.

    python benchmarks/waiting.py [--turns 2] [--seconds 3]

Replays a CUDA graph of 200 small matrix products, as an engine does for each token, alone and beside two other
processes on the same GPU: with a CUDA context only, with an NCCL communicator, waiting in a gloo broadcast (as our
ranks do, `trainer/collectives.py`), and waiting in an NCCL broadcast, whose kernel spins. Prints milliseconds per
replay and the share of the speed alone. Needs NCCL 2.30 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1
NCCL_MAX_NCHANNELS=2; do not start the Multi-Process Service, which hides the effect.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

KINDS = ("context", "communicator", "gloo broadcast", "NCCL broadcast")


def wait_beside(kind: str, rank: int, folder: Path) -> None:
    """One of the two other processes; ends when `folder`/done exists."""
    torch.ones(1024, device="cuda").sum().item()
    group = None
    if kind != "context":
        device = torch.device("cuda:0")
        dist.init_process_group("nccl", init_method=f"file://{folder}/group", rank=rank, world_size=2, device_id=device)
        dist.all_reduce(torch.ones(1, device=device))
        torch.cuda.synchronize()
        group = dist.new_group(backend="gloo") if kind == "gloo broadcast" else None
    (folder / f"ready{rank}").touch()
    if rank == 0 or not kind.endswith("broadcast"):
        while not (folder / "done").exists():
            time.sleep(0.1)
    if kind.endswith("broadcast"):
        flag = torch.zeros(1, device="cpu" if group else "cuda")
        dist.broadcast(flag, 0, group=group)
        flag.item()
    os._exit(0)  # without NCCL's shutdown, which the other process may not join any more


@contextlib.contextmanager
def others(kind: str) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, __file__, "--kind", kind, "--folder", name, "--rank"]
        processes = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
        try:
            while not all((folder / f"ready{rank}").exists() for rank in range(2)):
                if any(process.poll() for process in processes):
                    raise SystemExit(f"a process that was to wait ({kind}) ended")
                time.sleep(0.1)
            time.sleep(1.0)  # it has begun to wait
            yield
            (folder / "done").touch()
            for process in processes:
                process.wait(60)
        finally:
            for process in processes:
                process.kill()


def decode_graph() -> torch.cuda.CUDAGraph:
    weights = [torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(200)]
    start = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16)

    def step() -> torch.Tensor:
        x = start
        for weight in weights:
            x = x @ weight
        return x

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph, seconds: float) -> float:
    torch.cuda.synchronize()
    replays, began = 0, time.monotonic()
    while time.monotonic() - began < seconds:
        graph.replay()
        torch.cuda.synchronize()
        replays += 1
    return (time.monotonic() - began) / replays * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement")
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kind:
        wait_beside(args.kind, args.rank, args.folder)
    graph = decode_graph()
    found: dict[str, list[float]] = {kind: [] for kind in ("alone", *KINDS)}
    for _ in range(args.turns):
        for kind, times in found.items():
            with contextlib.nullcontext() if kind == "alone" else others(kind):
                times.append(milliseconds(graph, args.seconds))
    alone = statistics.median(found["alone"])
    for kind, times in found.items():
        took = statistics.median(times)
        print(f"{kind}: {took:.3f} ms, {alone / took:.0%} of the speed alone")


if __name__ == "__main__":
    main()
