"""Packing and balance on a long-tailed length distribution: padding share and data-parallel imbalance.

    [SLIME=checkout] python benchmarks/packing.py [--samples 8192] [--ranks 16]

Response lengths are log-normal (median 1100, mean 1800, at most 20480 tokens), prompts have 100 to 400 tokens. The
peers are no packing (every micro-batch padded to its longest sample) and no balancing (samples assigned in order). If
SLIME names a checkout of slime, its own `build_dp_schedule` is called on the same lengths, with its three ways to
assign micro-batches to ranks, and its rule of padding. The work of a rank is counted with slime's FLOP formula for
Qwen2.5-32B there, because attention makes a long sample more expensive than its tokens say.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from types import SimpleNamespace

import numpy as np

from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.policy.schedule import schedule_micro_batches


def imbalance(loads: list[int]) -> float:
    """The largest load over the mean load, minus one."""
    return max(loads) / (sum(loads) / len(loads)) - 1


def rounded(tokens: int, multiple: int) -> int:
    return -(-tokens // multiple) * multiple


def beside_slime(lengths: np.ndarray, args: argparse.Namespace, policy: PolicyConfig) -> None:
    sys.path.insert(0, os.environ["SLIME"])
    from slime.utils.dp_schedule import build_dp_schedule
    from slime.utils.flops_utils import calculate_fwd_flops

    tp, cp = policy.tensor_parallel, policy.context_parallel
    shape = SimpleNamespace(
        hidden_size=5120, num_attention_heads=40, num_query_groups=8, kv_channels=128, vocab_size=152064,
        ffn_hidden_size=27648, num_layers=64, num_experts=None,
    )  # fmt: skip
    layout = {"dp_size": args.ranks, "cp_size": cp, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    each, whole = policy.sequence_alignment, policy.pack_alignment

    def ours(mini: list[int]) -> list[list[list[int]]]:
        return schedule_micro_batches([rounded(n, each) for n in mini], args.ranks, args.budget)

    def slime(**options: bool):
        settings = SimpleNamespace(
            **vars(shape), use_dynamic_batch_size=True, micro_batch_size=None, max_tokens_per_gpu=args.budget // cp,
            **{"balance_data": False, "balance_by_flops": False} | options,
        )  # fmt: skip

        def schedule(mini: list[int]) -> list[list[list[int]]]:
            own, micro, _, _ = build_dp_schedule(
                settings, layout, mini, global_batch_size=len(mini), rollout_indices=list(range(len(mini)))
            )
            return [[[own[rank][i] for i in batch] for batch in micro[rank]] for rank in range(args.ranks)]

        return schedule

    both = {"balance_data": True, "balance_by_flops": True}
    systems = [
        ("ours", ours, each, whole),
        ("slime", slime(), 2 * cp, tp * 128 * cp),
        ("slime --balance-data", slime(balance_data=True), 2 * cp, tp * 128 * cp),
        ("slime --balance-by-flops", slime(**both), 2 * cp, tp * 128 * cp),
    ]
    print("\n| | real tokens | imbalance, tokens | imbalance, FLOPs | micro-batches | CPU |")
    print("|---|---|---|---|---|---|")
    minis = [[int(n) for n in mini] for mini in np.array_split(lengths, args.updates)]
    for name, schedule, sample_multiple, multiple in systems:
        started = time.process_time()
        assigned = [schedule(mini) for mini in minis]
        cpu = time.process_time() - started
        packed = count = 0
        tokens, work = [], []
        for mini, ranks in zip(minis, assigned, strict=True):
            assert sorted(i for rank in ranks for micro in rank for i in micro) == list(range(len(mini)))
            sums = [[sum(rounded(mini[i], sample_multiple) for i in micro) for micro in rank] for rank in ranks]
            totals = [[rounded(total, multiple) for total in rank] for rank in sums]
            packed += sum(map(sum, totals))
            count += len(ranks[0])
            tokens.append(imbalance([sum(rank) for rank in totals]))
            work.append(imbalance([calculate_fwd_flops([mini[i] for m in rank for i in m], shape) for rank in ranks]))
        cells = [f"{lengths.sum() / packed:.2%}", f"{np.mean(tokens):.2%}", f"{np.mean(work):.2%}"]
        print(f"| {name} | {' | '.join(cells)} | {count / len(minis):.1f} | {cpu * 1e3:.0f} ms |")


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
    if os.environ.get("SLIME"):
        beside_slime(lengths, args, policy)


if __name__ == "__main__":
    main()
