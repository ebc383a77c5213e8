"""Saving and loading weights and optimizer state: ours, Megatron's own `fully_reshardable`, and plain writing.

    python benchmarks/checkpoint.py                       # one CUDA device, Qwen2.5-1.5B; without CUDA a 60M model
    python benchmarks/checkpoint.py --ranks 2             # data-parallel ranks, one device each (or on the CPU)

The limit is the same bytes written to files and synced, by all ranks at once. Both ways write the same keys.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from shapes import QWEN_1_5B

from megatron_dapo.config import parse_config
from megatron_dapo.policy import checkpoint
from megatron_dapo.policy.fork_ranks import run_ranks
from megatron_dapo.policy.gpu_count import gpu_count
from megatron_dapo.policy.policy import Policy
from megatron_dapo.policy.runtime import Rendezvous, initialize

SMALL = replace(QWEN_1_5B, layers=14, hidden=512, ffn_hidden=1536, heads=8, head_dim=64, vocab=32000)
Row = tuple[str, float, float]


def seconds(action: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - began


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_plainly(path: Path, size: int) -> None:
    block = memoryview(os.urandom(1 << 20) * 16)
    with path.open("wb", buffering=0) as file:
        for start in range(0, size, len(block)):
            file.write(block[: size - start])
        os.fsync(file.fileno())


def measure(rendezvous: Rendezvous, folder: Path, repeats: int) -> tuple[list[Row], int]:
    shape = QWEN_1_5B if gpu_count() else SMALL
    config = parse_config({"policy": {"precision": "bf16" if gpu_count() else "fp32"}})
    policy = Policy(config, shape, initialize(config.policy, rendezvous=rendezvous))
    rows: list[Row] = []
    target, size = folder / "checkpoint", 0
    for name in ("Megatron's fully_reshardable", "ours") * repeats:
        way = nullcontext() if name == "ours" else mock.patch.object(checkpoint, "whole_parameters", nullcontext)
        with way:
            saving = seconds(lambda: checkpoint.save_policy(policy, target))
            loading = seconds(lambda: checkpoint.load_policy(policy, target))
        rows.append((name, saving, loading))
        size = size_of(target)
        dist.barrier()
        if rendezvous.rank == 0:
            shutil.rmtree(target)
    plain = seconds(lambda: write_plainly(folder / f"plain-{rendezvous.rank}", size // rendezvous.world_size))
    return [("written plainly (the limit)", plain, 0.0), *rows], size


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="data-parallel ranks (default 1)")
    parser.add_argument("--folder", metavar="DIR", help="where to write (default: a temporary directory)")
    parser.add_argument("--repeats", type=int, default=2, help="of which the fastest counts (default 2)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows, size = run_ranks(args.ranks, measure, Path(folder), args.repeats, timeout=1200)[0]
    limit = rows[0][1]
    where = f"{gpu_count()} GPU" if gpu_count() else "CPU"
    print(f"{where}, {args.ranks} data-parallel ranks, {size / 1e9:.2f} GB")
    for name in dict.fromkeys(row[0] for row in rows):
        saving, loading = (min(row[i] for row in rows if row[0] == name) for i in (1, 2))
        load = f", load {loading:6.2f} s" if loading else ""
        print(f"{name:30s} save {saving:6.2f} s = {size / saving / 1e9:5.2f} GB/s, {saving / limit:5.2f} × limit{load}")


if __name__ == "__main__":
    main()
