"""Bytes that a rank receives of a step's batch: the whole batch as before, and the samples that it trains on.

    python benchmarks/batch_sharing.py [--samples 512] [--mean 4500]

Forked CPU ranks, each a data-parallel rank of its own; ranks of one tensor, pipeline or context parallel group receive
the same. The bytes are counted where they arrive (`Collectives.received_bytes`) and scaled to the published batch of
8 192 samples.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import numpy as np

from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.policy.batch import TrainBatch
from megatron_dapo.policy.megatron.runtime import initialize, shutdown
from megatron_dapo.policy.schedule import shares_of_ranks
from megatron_dapo.processes.fork_ranks import Rendezvous, run_ranks
from megatron_dapo.trainer.batch_sharing import share_batch
from megatron_dapo.trainer.collectives import Collectives
from megatron_dapo.trainer.signals import StopSignal
from megatron_dapo.types import FinishReason, Sample, as_logprobs, as_tokens

PUBLISHED = 8192  # samples
PROMPT, MINI_BATCHES = 200, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--mean", type=int, default=4500, help="mean response length in tokens; log-normal")
    args = parser.parse_args()
    print("| data-parallel ranks | whole batch | scattered | × | 10 × the published batch |\n|---|---|---|---|---|")
    for ranks in (2, 4, 8):
        whole, share = (
            max(run_ranks(ranks, receive, args.samples, args.mean, everything)[1:]) * PUBLISHED / args.samples
            for everything in (True, False)
        )
        print(f"| {ranks} | {whole / 1e6:.0f} MB | {share / 1e6:.0f} MB | {share / whole:.2f} | "
              f"{whole / 1e8:.2f} → {share / 1e8:.2f} GB |", flush=True)  # fmt: skip


def receive(rendezvous: Rendezvous, samples: int, mean: int, everything: bool) -> int:
    runtime = initialize(PolicyConfig(), rendezvous=rendezvous)
    batch = make_batch(samples, mean) if rendezvous.rank == 0 else None
    edges = np.linspace(0, samples, MINI_BATCHES + 1).astype(int).tolist()
    mini = [list(range(a, b)) for a, b in pairwise(edges)] if batch is not None else None

    def shares(lengths, mini_batches):
        if everything:
            return [list(range(len(lengths)))] * rendezvous.world_size
        return shares_of_ranks(lengths.tolist(), rendezvous.world_size, mini_batches)

    with StopSignal() as stop:
        collectives = Collectives(runtime, stop)
        found, _ = share_batch(collectives, batch, mini, shares)
    shutdown()
    # The whole batch had a byte of mask per token; now it is a bit.
    return collectives.received_bytes + (len(found.loss_mask) * 7 // 8 if everything else 0)


def make_batch(samples: int, mean: int) -> TrainBatch:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(mean) - 0.32, 0.8, samples), 1, 20480).astype(int)
    made = [
        Sample("p", i, as_tokens(np.ones(PROMPT)), as_tokens(np.ones(n)), as_logprobs(np.zeros(n)), FinishReason.STOP)
        for i, n in enumerate(lengths)
    ]
    return TrainBatch.from_samples(made, np.zeros(samples), np.ones(samples, dtype=bool))


if __name__ == "__main__":
    main()
