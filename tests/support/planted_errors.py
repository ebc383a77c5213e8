"""Errors in the maths of a layout that the self-check must find; each function plants one with `patch.setattr`.

    torchrun --nproc-per-node 2 tests/support/planted_errors.py [--dtype bf16] [--layers te] [--only NAME …]

runs the case of each error without and with it, and says whether the self-check found it. The exit code is 0 if it
found all of them, and nothing else. The references come from another process, without the error.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_dapo.policy import routing_replay, step
from megatron_dapo.policy.head import value
from megatron_dapo.policy.loss_func import OnePassLoss
from megatron_dapo.policy.megatron import options
from megatron_dapo.policy.megatron.runtime import shutdown
from megatron_dapo.policy.model import gpt, router
from megatron_dapo.processes.fork_ranks import Rendezvous
from megatron_dapo.selfcheck import layouts
from megatron_dapo.selfcheck.cases import Variants


class Averaged(OnePassLoss):
    """A mean per micro-batch."""

    def __call__(self, *args):
        return super().__call__(*args) / self.batch.counts.sum().clamp(min=1)

    def loss_func(self, output):
        loss, count, metrics = super().loss_func(output)
        return loss, torch.ones_like(count), metrics


def mean_of_each_micro_batch(patch):
    """The error that layouts exist to find: the factor tokens of the micro-batch / tokens of the batch is missing."""
    patch.setattr(step, "OnePassLoss", Averaged)


def right_tokens_of_each_micro_batch(patch):
    """The positive-example loss is divided by the micro-batch's own count of right tokens, as NeMo-RL does it."""
    real = step.LossInputs.of

    def planted(self, *args):
        tokens = real(self, *args)
        right = tokens.mask & (tokens.positive > 0)
        tokens.positive = right * (tokens.positive.max() * self._positive.count_nonzero() / right.sum().clamp_min(1))
        return tokens

    patch.setattr(step.LossInputs, "of", planted)


def tokens_counted_over_data_ranks_only(patch):
    """The wrong group: context-parallel ranks divide by their own tokens."""
    module = import_module("megatron.core.pipeline_parallel.schedules")
    real = module.parallel_state

    class WithoutContext:
        def __getattr__(self, name):
            return getattr(real, name)

        def get_data_parallel_group(self, *args, **kwargs):
            return real.get_data_parallel_group(*args, **(kwargs | {"with_context_parallel": False}))

    patch.setattr(module, "parallel_state", WithoutContext())


def norms_of_own_tokens(patch):
    """The missing sum over tensor-parallel ranks of gradients of norms under sequence parallelism."""
    module = import_module("megatron.core.distributed.finalize_model_grads")
    patch.setattr(module, "_allreduce_non_tensor_model_parallel_grads", lambda *args, **kwargs: None)


def experts_reduced_over_data_ranks_only(patch):
    """Megatron-Core 0.16 to 0.18: with TP > 1 and EP 1 each rank's experts learn from its own tokens alone."""

    def planted(chunk, config):
        for name, parameter in chunk.named_parameters():
            if ".experts." in name:
                parameter.allreduce = True

    patch.setattr(gpt, "separate_expert_gradients", planted)


def megatrons_auxiliary_loss(patch):
    """Computed per micro-batch, scaled by its tokens, and divided by the policy loss's denominator."""
    real = options._moe_options

    def planted(shape, policy, te):
        return real(shape, policy, te) | {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5}

    patch.setattr(options, "_moe_options", planted)
    patch.setattr(step.UpdateStep, "_set_load_balancing", lambda self, micro_batches, denominator: None)


def balance_of_each_micro_batch(patch):
    """f of the micro-batch instead of the mini-batch."""

    def planted(self, micro_batches, denominator):
        self.score(micro_batches, head=False)
        for micro in micro_batches:
            load = routing_replay.ExpertLoad.gather([micro], self.shape, self.runtime)
            micro.packed.routing.slopes = load.slopes(0.5, denominator) / len(micro_batches)

    patch.setattr(step.UpdateStep, "_set_load_balancing", planted)


def balance_split_over_tensor_and_context_ranks(patch):
    """Before 0.19: half strength under TP 2 with sequence parallelism, and under CP 2."""
    real = router._AddLoss.apply
    ranks = SimpleNamespace(count=1)
    build = step.UpdateStep.__init__

    def init(self, config, *args):
        ranks.count = config.policy.tensor_parallel * config.policy.context_parallel
        build(self, config, *args)

    patch.setattr(step.UpdateStep, "__init__", init)
    patch.setattr(router, "_AddLoss", SimpleNamespace(apply=lambda probs, loss: real(probs, loss / ranks.count)))


def padding_is_balanced(patch):
    """Padding differs between layouts."""
    real = router.MicroBatchRouting
    patch.setattr(step, "MicroBatchRouting", lambda mask: real(torch.ones_like(mask)))


def experts_of_other_tokens(patch):
    """Where tensor and context parallelism split the tokens, replayed experts are those of the next token."""
    real = routing_replay.RoutingReplay.attach

    def planted(self, batch, micro):
        routed = micro.routed
        if self.runtime.groups.tp_cp.size() > 1:
            micro.routed = np.where(routed >= 0, (routed + 1) % len(batch.tokens), -1)
        real(self, batch, micro)
        micro.routed = routed

    patch.setattr(routing_replay.RoutingReplay, "attach", planted)


def value_gradients_added_over_tensor_ranks(patch):
    """Every tensor-parallel rank computes all values, so a sum over these ranks counts each of them twice."""
    real = value.gather_from_sequence_parallel_region
    patch.setattr(
        value,
        "gather_from_sequence_parallel_region",
        lambda hidden, **options: real(hidden, **(options | {"tensor_parallel_output_grad": True})),
    )


# The layout and the model in which each error shows.
PLANTED = {
    mean_of_each_micro_batch: ("dp2", "dense"),
    right_tokens_of_each_micro_batch: ("dp2", "dense"),
    tokens_counted_over_data_ranks_only: ("cp2", "dense"),
    norms_of_own_tokens: ("tp2sp", "dense"),
    experts_reduced_over_data_ranks_only: ("tp2sp", "moe"),
    megatrons_auxiliary_loss: ("dp2", "moe"),
    balance_of_each_micro_batch: ("dp2", "moe"),
    balance_split_over_tensor_and_context_ranks: ("tp2sp", "moe"),
    padding_is_balanced: ("cp2", "moe"),
    experts_of_other_tokens: ("tp2sp+replay", "moe"),
    value_gradients_added_over_tensor_ranks: ("tp2sp+critic", "dense"),
}


def search(chosen, variants, settings):
    """In a job's ranks: each case without an error, then with it. Whether all errors were found, and no others."""
    rendezvous = Rendezvous.from_environment()
    world = rendezvous.world_size
    cases = {plant: layouts.cases_of(PLANTED[plant][0], world, variants(PLANTED[plant][1])) for plant in chosen}
    different = {case.key: case for some in cases.values() for case in some}
    job = layouts._CheckInJob(rendezvous, settings, list(different.values()), lambda outcomes: 1)
    outcomes = job.run(print if rendezvous.rank == 0 else lambda text: None)
    results = []
    for plant, some in cases.items():
        for case in some:
            with pytest.MonkeyPatch.context() as patch:
                plant(patch)
                planted = outcomes | {case.key: job._run_one(case)}
            if rendezvous.rank == 0:
                pairs = [layouts._result(case, known, settings.tolerance) for known in (outcomes, planted)]
                results.append(pairs[0].ok and is_found(pairs[1]))
                print(f"{plant.__name__}, {case.name}, {case.model}, {case.precision} {case.layers}: "
                      f"without it {said(pairs[0])}; with it {said(pairs[1])}", flush=True)  # fmt: skip
    shutdown()
    if rendezvous.rank == 0:
        print(f"{sum(results)} of {len(results)} planted errors found", flush=True)
    return all(results)


def is_found(result):
    return result.status == "FAIL" or "replicas have diverged" in result.error


def said(result):
    if result.difference is None:
        return f"{result.status} {result.error}"
    return f"{result.status}, {result.difference.share:.2f} of the limit ({result.difference.worst})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[plant.__name__ for plant in PLANTED])
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--layers", default="torch")
    args = parser.parse_args()
    ours = search(
        [plant for plant in PLANTED if not args.only or plant.__name__ in args.only],
        lambda model: Variants.parse(model, args.dtype, "", args.layers),
        layouts.Settings(updates=1),
    )
    sys.exit(0 if ours else 1)
