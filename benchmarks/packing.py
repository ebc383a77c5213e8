"""Packing and balance on a long-tailed length distribution: padding share and data-parallel imbalance.

    python benchmarks/packing.py [--samples 8192] [--ranks 16]

Response lengths are log-normal (median 1100, mean 1800, at most 20480 tokens), prompts have 100 to 400 tokens. The
peers are no packing (every micro-batch padded to its longest sample) and no balancing (samples assigned in order).
"""

from __future__ import annotations

import argparse

import numpy as np

from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.policy.schedule import schedule_micro_batches


def imbalance(loads: list[int]) -> float:
    """The largest load over the mean load, minus one."""
    return max(loads) / (sum(loads) / len(loads)) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--budget", type=int, default=32768, help="tokens of a micro-batch")
    parser.add_argument("--updates", type=int, default=16, help="mini-batches of a step")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    responses = np.exp(rng.normal(7.0, 1.0, args.samples)).clip(8, 20480)
    lengths = (responses + rng.integers(100, 400, args.samples)).astype(int)
    policy = PolicyConfig(tensor_parallel=8, context_parallel=2, micro_batch_tokens=args.budget)
    each, whole = policy.sequence_alignment, policy.pack_alignment
    shape = f"mean {lengths.mean():.0f} tokens, longest {lengths.max()}"
    print(f"{args.samples} samples, {shape}; {args.ranks} data-parallel ranks, TP8 CP2")
    real = packed = 0
    worst, unbalanced, padded = [], [], 0
    for mini in np.array_split(lengths, args.updates):
        aligned = [-(-int(n) // each) * each for n in mini]
        assigned = schedule_micro_batches(aligned, args.ranks, args.budget)
        totals = [[-(-sum(aligned[i] for i in micro) // whole) * whole for micro in bins] for bins in assigned]
        real, packed = real + int(mini.sum()), packed + sum(map(sum, totals))
        worst.append(imbalance([sum(t) for t in totals]))
        unbalanced.append(imbalance([int(share.sum()) for share in np.array_split(mini, args.ranks)]))
        for share in np.array_split(mini, args.ranks):
            ordered, done = np.sort(share)[::-1], 0
            while done < len(ordered):
                count = max(1, args.budget // int(ordered[done]))
                padded += int(ordered[done]) * len(ordered[done : done + count])
                done += count
    print(f"real tokens        {real / packed:7.2%}   goal ≥ 98 %   padded to the longest, sorted: {real / padded:.2%}")
    print(f"DP imbalance       {np.mean(worst):7.2%}   goal ≤ 2 %    assigned in order: {np.mean(unbalanced):.2%}")
    print(f"worst mini-batch   {max(worst):7.2%}")


if __name__ == "__main__":
    main()
