"""The end of a rank: after an error it does not wait for the collectives of the others."""

import torch
import torch.distributed as dist

from megatron_dapo.policy.megatron.runtime import shutdown
from megatron_dapo.processes.fork_ranks import run_ranks


def ended(rendezvous, failed):
    dist.init_process_group("gloo", init_method=rendezvous.url, rank=rendezvous.rank, world_size=2)
    waits = []
    dist.destroy_process_group = lambda: waits.append("destroyed")  # what NCCL would wait in
    if rendezvous.rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)  # rank 1 never joins
        shutdown(failed=failed)
    return waits, dist.is_initialized()


def test_a_failed_rank_aborts_its_groups():
    assert run_ranks(2, ended, True)[0] == ([], False)
    assert run_ranks(2, ended, False)[0] == (["destroyed"], True)
