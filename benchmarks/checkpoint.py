"""Saving and loading a checkpoint: how long the loop waits, when the checkpoint is published, and how fast.

    python benchmarks/checkpoint.py                       # one CUDA device, Qwen2.5-1.5B; without CUDA a 60M model
    python benchmarks/checkpoint.py --ranks 2             # data-parallel ranks, one device each (or on the CPU)

The loop waits for the copy to host memory; the first save also takes that memory. Beside it: saves that the loop waits
for, Megatron's own synchronous save (`fully_reshardable`), and the limit: the same bytes written to files and synced,
by all ranks at once. "check" reads every file and compares its CRC-32, "load" reads the checkpoint into the policy.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
from shapes import QWEN_1_5B

from megatron_dapo.checkpoints import policy_state
from megatron_dapo.checkpoints.checkpoints import Checkpoints, SaveReport
from megatron_dapo.checkpoints.optimizer_state import initialize_state
from megatron_dapo.config import parse_config
from megatron_dapo.config.trainer import CheckpointConfig
from megatron_dapo.policy.megatron.importing import gpu_count
from megatron_dapo.policy.megatron.runtime import initialize, shutdown
from megatron_dapo.policy.policy import Policy
from megatron_dapo.processes.fork_ranks import Rendezvous, run_ranks

SMALL = replace(QWEN_1_5B, layers=14, hidden=512, ffn_hidden=1536, heads=8, head_dim=64, vocab=32000)


@dataclass(frozen=True)
class Result:
    name: str
    waited: float  # seconds for which the loop stands still
    published: float  # seconds until the checkpoint is complete
    size: int

    def text(self, limit: float) -> str:
        rate = self.size / self.published / 1e9
        return (
            f"{self.name:34s} loop waits {self.waited:7.2f} s, complete after {self.published:7.2f} s = {rate:5.2f} "
            f"GB/s, {self.published / limit:5.2f} × limit"
        )


def progress(policy: Policy, line: str) -> None:
    if policy.runtime.rank == 0:
        print(line, file=sys.stderr, flush=True)


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


def remove(path: Path, rank: int) -> None:
    dist.barrier()
    if rank == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()


def save_with_megatron(policy: Policy, folder: Path) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()  # Megatron would start a server process for it
    initialize_state(policy.optimizer)
    state = policy_state._sharded_state(policy, is_loading=False)
    folder.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(state, str(folder), content_metadata=policy_state._metadata(policy))


def our_saves(policy: Policy, folder: Path, repeats: int) -> tuple[list[Result], Checkpoints]:
    """The first save in the background, later ones, and one that the loop waits for. Leaves the last checkpoint."""
    reports: list[SaveReport] = []
    options = CheckpointConfig(keep=1, keep_best=False)
    checkpoints = Checkpoints(folder, options, policy.runtime)
    for step in range(repeats + 2):
        dist.barrier()
        reports += checkpoints.save(policy, step, None, {}, None, wait=step == repeats + 1)
        reports += checkpoints.finish()
        save = reports[-1]
        progress(policy, f"loop waited {save.waited_seconds:.2f} s, published after {save.seconds:.2f} s")
    assert all(report.error is None for report in reports), reports
    names = ["background, first", *["background, later"] * repeats, "waited for"]
    return [
        Result(name, report.waited_seconds, report.seconds, report.bytes)
        for name, report in zip(names, reports, strict=True)
    ], checkpoints


def measure(rendezvous: Rendezvous, folder: Path, repeats: int) -> tuple[list[Result], float, float]:
    shape = QWEN_1_5B if gpu_count() else SMALL
    config = parse_config({"policy": {"precision": "bf16" if gpu_count() else "fp32"}})
    policy = Policy(config, shape, initialize(config.policy, rendezvous=rendezvous))
    results, checkpoints = our_saves(policy, folder, repeats)
    path: list[Path | None] = []
    check = seconds(lambda: path.append(checkpoints.newest()))
    assert path[0] is not None
    load = seconds(lambda: checkpoints.load(policy, path[0]))  # type: ignore[arg-type]
    progress(policy, f"check {check:.2f} s, load {load:.2f} s")
    remove(checkpoints.folder, rendezvous.rank)
    took = seconds(lambda: save_with_megatron(policy, folder / "megatron"))
    size = size_of(folder / "megatron")
    results.append(Result("Megatron's own save", took, took, size))
    remove(folder / "megatron", rendezvous.rank)
    plain = folder / f"plain-{rendezvous.rank}"
    took = seconds(lambda: write_plainly(plain, results[0].size // rendezvous.world_size))
    plain.unlink()
    shutdown()
    return [Result("plain writing (the limit)", took, took, results[0].size), *results], check, load


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="data-parallel ranks (default 1)")
    parser.add_argument("--folder", metavar="DIR", help="where to write (default: a temporary directory)")
    parser.add_argument("--repeats", type=int, default=2, help="of later saves; the fastest counts (default 2)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        results, check, load = run_ranks(args.ranks, measure, Path(folder), args.repeats, timeout=1800)[0]
    where = f"{gpu_count()} GPU" if gpu_count() else "CPU"
    size = results[0].size
    print(f"{where}, {args.ranks} data-parallel ranks, {size / 1e9:.2f} GB")
    for name in dict.fromkeys(result.name for result in results):
        fastest = min((result for result in results if result.name == name), key=lambda result: result.waited)
        print(fastest.text(results[0].published))
    print(f"check {check:.2f} s = {size / check / 1e9:.2f} GB/s, load {load:.2f} s = {size / load / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
