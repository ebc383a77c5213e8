"""Layout invariance: the update in every parallel layout is the update of one process, and that one is right.

The layouts are compared with one process (`selfcheck`), and the one process with a naive oracle: transformers'
model, sample by sample, the objective written out as in the paper. Planted errors show that both comparisons see.
"""

import os
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch
from reference_models import hf_model, hf_weights

from megatron_dapo.algorithm import Needs
from megatron_dapo.algorithm.objectives.dapo import DAPO
from megatron_dapo.policy import step
from megatron_dapo.policy.fork_ranks import run_ranks
from megatron_dapo.policy.loss_func import OnePassLoss
from megatron_dapo.policy.policy import Policy
from megatron_dapo.policy.runtime import RankError, initialize
from megatron_dapo.selfcheck import trace
from megatron_dapo.selfcheck.layout_spec import LayoutSpec, selfcheck_config
from megatron_dapo.selfcheck.layouts import DEFAULT_LAYOUTS, run_layouts
from megatron_dapo.selfcheck.synthetic import awkward_batch, random_hf_weights, synthetic_shape
from megatron_dapo.selfcheck.trace import compare, gather_full, trace_updates

UPDATES = 3


def traced(name, model, updates=UPDATES, **algorithm):
    layout = LayoutSpec.parse(name)
    return run_ranks(layout.world_size, _trace, layout, updates, model, algorithm)[0]


def _trace(place, layout, updates, model, algorithm):
    return trace_updates(place, layout, updates, model, **algorithm)


@cache
def reference(model, updates=UPDATES):
    return traced("single", model, updates)


@pytest.mark.parametrize("name", [*DEFAULT_LAYOUTS, "dp3", "tp2dp2do", "cp2dp2"])
def test_layout_gives_the_update_of_one_process(name):
    model = LayoutSpec.parse(name).model
    difference = compare(traced(name, model), reference(model))
    assert difference.loss <= 1e-5
    assert difference.grad_norm <= 1e-5
    assert difference.gradients <= 1e-5, difference.gradients_at
    assert difference.weights <= 1e-4, difference.weights_at


def test_untied_embeddings_across_pipeline_stages():
    difference = compare(traced("pp2", "dense"), reference("dense"))
    assert difference.within(1e-5), difference


@pytest.mark.parametrize("objective", ["gspo", "cispo"])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_sequence_level_objectives_under_context_parallelism(objective, aggregation):
    """GSPO's ratio belongs to a sequence that two ranks share; sequence means count it once, not per rank."""
    options = {"objective": objective, "aggregation": aggregation, "clip_low": 0.05, "clip_high": 0.05}
    options |= {"importance_sampling": {"level": "sequence", "cap": 1.5}}
    single, split = (traced(name, "dense", 1, **options) for name in ("single", "cp2"))
    assert compare(split, single).within(1e-5), compare(split, single)


def test_the_fixture_is_awkward():
    """Both clip bounds and the mask are in play, otherwise the comparison above would prove little."""
    metrics = run_ranks(1, _metrics)[0]
    assert metrics["clip_fraction_high"] > 0.02
    assert metrics["clip_fraction_low"] > 0.02
    batch = awkward_batch(synthetic_shape("dense"), 0)
    assert metrics["tokens"] == batch.loss_mask.sum() < len(batch.loss_mask)
    assert len(set(batch.lengths.tolist())) > 5


def _metrics(place):
    return _policy(place, "single", "dense").gradients(awkward_batch(synthetic_shape("dense"), 0))


def _policy(place, layout, model, folder=None):
    config = selfcheck_config(LayoutSpec.parse(layout))
    policy = Policy(config, synthetic_shape(model), initialize(config.policy, rendezvous=place))
    policy.load_hf(folder or random_hf_weights(synthetic_shape(model)))
    return policy


# ---- the oracle ----


def naive_gradients(model, batch, config):
    """The objective written out: min of the two surrogates, dual clip, k3, entropy, importance weight; one division."""
    a = config.algorithm
    total, count = torch.zeros(()), 0
    tokens = np.split(batch.tokens, np.cumsum(batch.lengths)[:-1])
    rows = [np.split(x, np.cumsum(batch.response_lengths)[:-1]) for x in (
        batch.old_logprobs, batch.engine_logprobs, batch.ref_logprobs, batch.loss_mask)]  # fmt: skip
    for i, (ids, old, engine, ref, mask) in enumerate(zip(tokens, *rows, strict=True)):
        ids, prompt = torch.from_numpy(ids).long(), int(batch.prompt_lengths[i])
        old, engine, ref = (torch.from_numpy(x) for x in (old, engine, ref))
        table = torch.log_softmax(model(ids[None]).logits[0, prompt - 1 : -1] / config.rollout.temperature, -1)
        logp = table[torch.arange(len(ids) - prompt), ids[prompt:]]
        advantage, ratio = float(batch.advantages[i]), torch.exp(logp - old)
        clipped = ratio.clamp(1 - a.clip_low, 1 + a.clip_high)
        surrogate = torch.minimum(ratio * advantage, clipped * advantage)
        if advantage < 0:
            surrogate = torch.maximum(surrogate, torch.tensor(a.dual_clip * advantage))
        weight = torch.exp(old - engine).clamp(max=a.importance_sampling.cap)
        kl = torch.exp(ref - logp) - (ref - logp) - 1
        entropy = -(table.exp() * table).sum(-1)
        loss = -weight * surrogate + a.kl.coefficient * kl - a.entropy_coefficient * entropy
        total = total + loss[torch.from_numpy(mask)].sum()
        count += int(mask.sum())
    (total / count).backward()
    return float(total.detach() / count), {name: p.grad for name, p in model.named_parameters()}


@pytest.fixture(scope="module", params=["dense", "tied"])
def oracle(request, tmp_path_factory):
    shape = synthetic_shape(request.param)
    model = hf_model(shape)
    folder = hf_weights(model, tmp_path_factory.mktemp("oracle"))
    config = selfcheck_config(LayoutSpec.parse("single"))
    loss, gradients = naive_gradients(model, awkward_batch(shape, 0), config)
    return request.param, folder, loss, gradients


def _loss_and_gradients(place, layout, model, folder):
    policy = _policy(place, layout, model, folder)
    metrics = policy.gradients(awkward_batch(synthetic_shape(model), 0))
    return metrics["loss"], gather_full(policy, policy.runtime, gradient=True)


def difference_to_oracle(layout, oracle):
    model, folder, loss, gradients = oracle
    world = LayoutSpec.parse(layout).world_size
    found_loss, found = run_ranks(world, _loss_and_gradients, layout, model, folder)[0]
    worst, _ = trace._largest(found, gradients)
    return max(worst, abs(found_loss - loss) / abs(loss))


@pytest.mark.parametrize("layout", ["single", "tp2pp2"])
def test_gradients_are_those_of_the_written_out_objective(layout, oracle):
    assert difference_to_oracle(layout, oracle) <= 1e-5


# ---- planted errors: each must be seen ----


def with_extra_counts(monkeypatch, extra):
    """Adds to the denominator at an active token, which the loss cannot blank out."""

    def planted(aggregation, mask, sequence_ids, sequences, norm):
        weights, counts = real(aggregation, mask, sequence_ids, sequences, norm)
        counts[mask.nonzero()[0]] += extra(mask, sequence_ids, sequences)
        return weights, counts

    real = step.token_weights
    monkeypatch.setattr(step, "token_weights", planted)


def count_before_mask(monkeypatch):
    with_extra_counts(monkeypatch, lambda mask, ids, n: int((~mask).sum()))


def masked_sample_counts_one_token(monkeypatch):
    with_extra_counts(
        monkeypatch, lambda mask, ids, n: int(torch.zeros(n).index_add_(0, ids, mask.float()).eq(0).sum())
    )


def mean_per_micro_batch(monkeypatch):
    class Averaged(OnePassLoss):
        def __call__(self, *args):
            return super().__call__(*args) / self.batch.counts.sum().clamp(min=1)

        def loss_func(self, output):
            loss, count, metrics = super().loss_func(output)
            return loss, torch.ones_like(count), metrics

    monkeypatch.setattr(step, "OnePassLoss", Averaged)


def missing_context_factor(monkeypatch):
    """Megatron's per-micro-batch path: it divides by each rank's own count and forgets context parallelism."""
    real = Policy.gradients

    def planted(self, *args, **kwargs):
        self.megatron_config.calculate_per_token_loss = False
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Policy, "gradients", planted)


@pytest.mark.parametrize(
    ("plant", "layout"),
    [
        (count_before_mask, "single"),
        (masked_sample_counts_one_token, "single"),
        (mean_per_micro_batch, "dp2"),
    ],
)
def test_planted_errors_are_seen(plant, layout, oracle, monkeypatch):
    plant(monkeypatch)
    assert difference_to_oracle(layout, oracle) > 1e-3


def test_a_missing_context_factor_is_seen(oracle, monkeypatch):
    """The one-pass head refuses a loss that Megatron scales; a loss in two passes shows the wrong gradient."""
    missing_context_factor(monkeypatch)
    with pytest.raises(RankError, match="per-token path must be on"):
        difference_to_oracle("cp2", oracle)
    monkeypatch.setattr(DAPO, "needs", Needs(whole_sequences=True))
    assert difference_to_oracle("cp2", oracle) > 1e-3


def test_the_two_pass_head_gives_the_same_gradients(oracle, monkeypatch):
    monkeypatch.setattr(DAPO, "needs", Needs(whole_sequences=True))
    assert difference_to_oracle("tp2pp2", oracle) <= 1e-5


def test_the_command_fails_on_a_planted_error(monkeypatch, capsys):
    mean_per_micro_batch(monkeypatch)
    assert run_layouts(["dp2"], tolerance=1e-5, updates=1) == 1
    assert "FAIL" in capsys.readouterr().out


def test_the_command_passes_and_says_what_it_compared(capsys):
    assert run_layouts(["tp2"], tolerance=1e-5, updates=1) == 0
    printed = capsys.readouterr().out
    assert "tp2" in printed and "ok" in printed and "FAIL" not in printed


def test_a_diverged_replica_is_an_error():
    shard = torch.ones(3)
    held = [{"w": (0, shard)}, {"w": (0, shard + 1e-7)}]
    with pytest.raises(Exception, match="rank 1 holds other values of w"):
        trace._one_of_each("w", held)


@pytest.mark.parametrize("name", ["xp2", "tp", "2tp", ""])
def test_unknown_layout_names_are_refused(name):
    with pytest.raises(Exception, match="expected parts such as"):
        LayoutSpec.parse(name)


def test_the_command_joins_a_job():
    """Under torchrun the layouts run in the job's own ranks, one after the other."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    check = ["-m", "megatron_dapo.cli", "selfcheck", "layouts", "--layouts", "tp2sp,dp2do", "--updates", "1"]
    done = subprocess.run(
        [*torchrun, *check], capture_output=True, text=True, timeout=240, env=os.environ | {"COLUMNS": "120"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("ok") == 2 and "FAIL" not in done.stdout
