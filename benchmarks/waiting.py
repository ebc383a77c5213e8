"""How fast an engine decodes on the GPU of trainer ranks that wait for the driver, relative to the engine alone.

    python benchmarks/waiting.py examples/gsm8k_1gpu/gsm8k.yaml --set policy.model=MODEL [--ranks 2] [--lengths 250 0.6]

Starts the configured servers and, beside them, ranks of the trainer that wait as they do in a run
(`trainer/collectives.py`), and measures in turns: the engine alone, beside waiting ranks, and (`--in-nccl`, for
comparison) beside ranks that wait inside an NCCL broadcast, whose kernel spins on the GPU. Also prints the CPU time of
a waiting rank. Several ranks on one GPU need NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1; do not start MPS for this.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from engine import Load, log_normal

from megatron_dapo.config import Config, load_config
from megatron_dapo.engines import open_engine


def wait_as_rank(rendezvous, config: Config, folder: Path, in_nccl: bool) -> float:
    """One rank: waits until `folder`/done exists. Returns the share of a core that it used meanwhile."""
    import torch
    import torch.distributed as dist

    from megatron_dapo.policy.megatron.runtime import initialize, shutdown
    from megatron_dapo.trainer.collectives import Collectives
    from megatron_dapo.trainer.signals import StopSignal

    runtime = initialize(config.policy, rendezvous=rendezvous)
    collectives = Collectives(runtime, StopSignal())
    warm_up = torch.ones(1, device=runtime.device)
    dist.all_reduce(warm_up)  # NCCL sets up its communicator
    warm_up.item()
    collectives.barrier()
    future: Future[None] | None = None
    if runtime.rank == 0:
        future = Future()
        (folder / "ready").touch()
    began, used = time.monotonic(), time.process_time()
    if in_nccl:
        _wait_in_nccl(runtime, folder, dist)
    else:
        _wait_on_cpu(collectives, future, folder)
    share = (time.process_time() - used) / (time.monotonic() - began)
    shutdown()
    return share


def _wait_on_cpu(collectives, future: Future[None] | None, folder: Path) -> None:
    import threading

    if future is not None:

        def finish() -> None:
            while not (folder / "done").exists():
                time.sleep(0.2)
            future.set_result(None)

        threading.Thread(target=finish, daemon=True).start()
    collectives.wait(future, "waiting for the measurement")


def _wait_in_nccl(runtime, folder: Path, dist) -> None:
    import torch

    if runtime.rank == 0:
        while not (folder / "done").exists():
            time.sleep(0.2)
    flag = torch.zeros(1, device=runtime.device)
    dist.broadcast(flag, src=0)
    flag.item()


def run_as_ranks(config: Config, ranks: int, folder: Path, in_nccl: bool) -> None:
    from megatron_dapo.processes.fork_ranks import run_ranks

    shares = run_ranks(ranks, wait_as_rank, config, folder, in_nccl, timeout=600.0)
    print(*(f"{share:.4f}" for share in shares[1:]), flush=True)


@contextlib.contextmanager
def waiting_ranks(arguments: list[str], shares: list[float]) -> Iterator[None]:
    """Ranks wait while the block runs; afterwards `shares` has the CPU use of each rank but the first."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", __file__, *arguments, "--folder", folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            while not (Path(folder) / "ready").exists():
                if process.poll() is not None:
                    raise SystemExit(f"the ranks ended with code {process.returncode} before they waited")
                time.sleep(0.2)
            time.sleep(1.0)  # the others have arrived in their wait
            yield
            (Path(folder) / "done").touch()
            output, _ = process.communicate(timeout=120)
            if process.returncode:
                raise SystemExit(f"the ranks ended with code {process.returncode}")
            shares += [float(word) for word in output.split()]
        finally:
            process.kill()


async def measure(config: Config, args: argparse.Namespace, ranks: list[str]) -> None:
    lengths = log_normal(*args.lengths) if args.lengths else None
    kinds = {"alone": None, "beside waiting ranks": ranks}
    if args.in_nccl:
        kinds["beside ranks inside an NCCL broadcast"] = [*ranks, "--wait-in-nccl"]
    speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
    shares: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as logs:
        engine = await open_engine(config.rollout, config.policy.model, logs)
        try:
            for _ in range(args.rounds):
                for kind, command in kinds.items():
                    waiting = waiting_ranks(command, shares[kind]) if command else contextlib.nullcontext()
                    with waiting:
                        done, took = await Load(engine, config, lengths).measure(args.seconds)
                    speeds[kind].append(done.tokens / took)
                    print(f"{kind}: {speeds[kind][-1]:,.0f} tokens/s", flush=True)
        finally:
            await engine.close()
    alone = statistics.median(speeds["alone"])
    for kind, found in speeds.items():
        cpu = f", {max(shares[kind]):.1%} of a core for a waiting rank" if shares[kind] else ""
        speed = statistics.median(found)
        print(f"{kind}: median {speed:,.0f} tokens/s, {speed / alone:.1%} of the engine alone{cpu}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", dest="settings")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="times that each case is measured, in turns")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of one measurement after its warm-up")
    parser.add_argument("--lengths", type=float, nargs=2, metavar=("MEAN", "SIGMA"))
    parser.add_argument("--in-nccl", action="store_true", help="also measure beside ranks inside an NCCL broadcast")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # in the process of the ranks
    parser.add_argument("--wait-in-nccl", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    config = load_config(args.config, args.settings)
    if args.folder:
        run_as_ranks(config, args.ranks, args.folder, args.wait_in_nccl)
        return 0
    settings = [word for setting in args.settings for word in ("--set", setting)]
    asyncio.run(measure(config, args, [args.config, *settings, "--ranks", str(args.ranks)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
