"""Measures all-reduce within each node and between pairs of nodes, and names the slow nodes.

A Slurm job runs it on every rank before weights are loaded:

    srun … python -m megatron_dapo.doctor.network LOG_DIR --slow 0.5

In each round every node is paired with another one. A node's bandwidth is that of its best pair, so a node is not
called slow because one of its partners is. With two nodes nobody can tell which of them is slow; then only
`--minimum` finds any. Uses NCCL with GPUs and gloo without. Rank 0 prints the table, writes LOG_DIR/network.json and
adds the names of slow nodes to LOG_DIR/slow_nodes. Exit code 1: a node did not finish the measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROUNDS = 3
SECONDS = 120.0  # of each collective; the first one also builds the connections
REPEATS = 5
CUDA_BYTES, CPU_BYTES = 256 << 20, 1 << 20


@dataclass(slots=True)
class NodeSpeed:
    """Bandwidth in GB/s; 0: not measured."""

    node: str
    inside: float = 0.0  # among the ranks of the node
    pairs: dict[str, float] = field(default_factory=dict)  # by partner

    @property
    def between(self) -> float:
        return max(self.pairs.values(), default=0.0)


def pairings(nodes: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs; no pair occurs twice. With an odd number of nodes one rests in each round."""
    seats: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    result = []
    for _ in range(min(ROUNDS + nodes % 2, len(seats) - 1)):
        half = len(seats) // 2
        matches = zip(seats[:half], reversed(seats[half:]), strict=True)
        result.append([(a, b) for a, b in matches if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return result


def slow_nodes(speeds: Sequence[NodeSpeed], share: float, minimum: float = 0.0) -> list[str]:
    """Nodes below `share` of the median node, or below `minimum` GB/s, within the node or between nodes."""
    found = set()
    for kind in ("inside", "between"):
        values = {speed.node: getattr(speed, kind) for speed in speeds if getattr(speed, kind)}
        if values:
            limit = max(share * statistics.median(values.values()), minimum if kind == "between" else 0.0)
            found |= {node for node, value in values.items() if value < limit}
    return [speed.node for speed in speeds if speed.node in found]


def table(speeds: Sequence[NodeSpeed], slow: Sequence[str]) -> str:
    lines = [f"{'node':<20} {'within':>12} {'between':>12}  all-reduce, GB/s"]
    for speed in speeds:
        inside = f"{speed.inside:12.2f}" if speed.inside else f"{'-':>12}"
        between = f"{speed.between:12.2f}" if speed.pairs else f"{'-':>12}"
        lines.append(f"{speed.node:<20} {inside} {between}{'  slow' if speed.node in slow else ''}")
    return "\n".join(lines)


def measure(ranks_of_nodes: Sequence[Sequence[int]], rank: int, device: torch.device) -> dict[str, Any]:
    """Collective. This rank's bandwidths: {"inside": …, "pairs": {index of the partner node: …}}."""
    import torch.distributed as dist

    mine = next(index for index, ranks in enumerate(ranks_of_nodes) if rank in ranks)
    found: dict[str, Any] = {"inside": 0.0, "pairs": {}}
    rounds: list[Sequence[tuple[int, ...]]] = [
        [(index,) for index, ranks in enumerate(ranks_of_nodes) if len(ranks) > 1]
    ]
    for members_of_round in [*rounds, *pairings(len(ranks_of_nodes))]:
        for members in members_of_round:
            if mine in members:
                ranks = sorted(rank for member in members for rank in ranks_of_nodes[member])
                # Only its members make a group: with 128 nodes there are 320 of them.
                group = dist.new_group(ranks, timeout=timedelta(seconds=SECONDS), use_local_synchronization=True)
                speed = all_reduce_speed(group, device)
                if len(members) == 1:
                    found["inside"] = speed
                else:
                    found["pairs"][members[1] if members[0] == mine else members[0]] = speed
        dist.barrier()  # one round at a time: pairs share no node within a round
    return found


def all_reduce_speed(group: Any, device: torch.device) -> float:
    """Bus bandwidth in GB/s of the fastest of several all-reduces."""
    import torch
    import torch.distributed as dist

    size = CUDA_BYTES if device.type == "cuda" else CPU_BYTES
    data = torch.ones(size // 4, device=device)
    best = float("inf")
    for repeat in range(REPEATS + 1):
        data.fill_(1.0)
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        dist.all_reduce(data, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        if repeat:  # the first one builds the connections
            best = min(best, time.perf_counter() - began)
    ranks = dist.get_world_size(group)
    if float(data[0]) != ranks:
        raise RuntimeError(f"an all-reduce of ones over {ranks} ranks gave {float(data[0])}")
    return 2 * (ranks - 1) / ranks * size / best / 1e9


def gather(mine: dict[str, Any], nodes: Sequence[str], world: int) -> list[NodeSpeed] | None:
    """Collective. On rank 0 the speeds of all nodes, each of its slowest rank; None elsewhere."""
    import torch.distributed as dist

    everyone: list[dict[str, Any] | None] = [None] * world
    dist.all_gather_object(everyone, mine)
    if dist.get_rank():
        return None
    names = list(dict.fromkeys(nodes))
    speeds = {name: NodeSpeed(name) for name in names}
    for node, found in zip(nodes, everyone, strict=True):
        assert found is not None
        speed = speeds[node]
        speed.inside = min(filter(None, (speed.inside, found["inside"])), default=0.0)
        for partner, value in found["pairs"].items():
            name = names[int(partner)]
            speed.pairs[name] = min(value, speed.pairs.get(name, value))
    return list(speeds.values())


def run(folder: Path, share: float, minimum: float) -> int:
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a lost partner is an error here, not an abort
    import torch
    import torch.distributed as dist

    from megatron_dapo.processes.fork_ranks import Rendezvous

    rendezvous = Rendezvous.from_environment()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rendezvous.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    node = os.environ.get("SLURMD_NODENAME") or platform.node()  # the name by which the batch script excludes it
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", init_method=rendezvous.url, rank=rendezvous.rank,
        world_size=rendezvous.world_size, timeout=timedelta(seconds=SECONDS),
    )  # fmt: skip
    try:
        nodes: list[Any] = [None] * rendezvous.world_size
        dist.all_gather_object(nodes, node)
        ranks = [[r for r, name in enumerate(nodes) if name == wanted] for wanted in dict.fromkeys(nodes)]
        speeds = gather(measure(ranks, rendezvous.rank, device), nodes, rendezvous.world_size)
    finally:
        dist.destroy_process_group()
    if speeds is not None:
        slow = slow_nodes(speeds, share, minimum)
        print(table(speeds, slow), flush=True)
        (folder / "network.json").write_text(json.dumps([asdict(speed) for speed in speeds], indent=1) + "\n")
        if slow:
            with (folder / "slow_nodes").open("a") as file:
                file.writelines(f"{name}\n" for name in slow)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="LOG_DIR")
    parser.add_argument("--slow", type=float, default=0.5, metavar="SHARE", help="of the median node (default 0.5)")
    parser.add_argument("--minimum", type=float, default=0.0, metavar="GB/S", help="between nodes (default: none)")
    args = parser.parse_args(argv)
    try:
        return run(args.folder, args.slow, args.minimum)
    except Exception as error:
        print(f"{platform.node()}: the network check failed: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
