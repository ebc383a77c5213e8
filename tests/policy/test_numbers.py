"""Numbers around an update, without a model: sums over the right ranks, counts of rollouts, learning rate, reference,
and which experts are replayed."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_dapo.algorithm import PolicyLoss, Scores, TokenBatch, token_weights
from megatron_dapo.config import parse_config
from megatron_dapo.config.algorithm import AlgorithmConfig
from megatron_dapo.config.policy import OptimizerConfig
from megatron_dapo.policy.batch import TrainBatch
from megatron_dapo.policy.loss_func import MetricReducer, make_loss_func
from megatron_dapo.policy.megatron.runtime import Runtime
from megatron_dapo.policy.model.router import MicroBatchRouting, _Replay
from megatron_dapo.policy.policy import Policy
from megatron_dapo.policy.step import LossInputs, UpdateStep, learning_rate
from megatron_dapo.processes.fork_ranks import run_ranks

# ---- four ranks: two sequences on two data ranks, each split over two context ranks ----

LOSS = PolicyLoss(AlgorithmConfig(objective="gspo", clip_low=0.5, clip_high=0.5, aggregation="seq-mean-token-mean"))
LENGTHS = (6, 4)
OLD = torch.tensor([-1.0, -2.0, -0.5, -1.5, -1.0, -3.0, -0.2, -2.0, -1.0, -1.0])
NEW = OLD + torch.tensor([0.1, -0.2, 0.3, 0.0, 0.2, -0.1, -0.3, 0.1, 0.05, 0.4])
MASK = torch.tensor([True] * 5 + [False] + [True] * 4)


def token_batch(tokens):
    ids = torch.repeat_interleave(torch.arange(2), torch.tensor(LENGTHS))
    weights, counts = token_weights("seq-mean-token-mean", MASK, ids, 2)
    advantages = torch.tensor([1.0, -2.0])[ids]
    values = (OLD, advantages, MASK, weights, counts, ids)
    return Scores(NEW[tokens], -NEW[tokens]), TokenBatch(*(value[tokens] for value in values), sequences=2)


def join(rendezvous):
    """Ranks 0 and 1 share the first sequence, ranks 2 and 3 the second; one pipeline stage."""
    dist.init_process_group("gloo", init_method=rendezvous.url, rank=rendezvous.rank, world_size=4)
    rank = rendezvous.rank
    cp = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    dp = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    pp = [dist.new_group([r]) for r in range(4)][rank]
    groups = SimpleNamespace(cp=cp, dp=dp, pp=pp, dp_cp=dist.group.WORLD)
    return Runtime(torch.device("cpu"), groups, rank, 4)


def loss_and_scores(rendezvous):
    runtime, rank = join(rendezvous), rendezvous.rank
    first, end = (0, 6) if rank < 2 else (6, 10)
    tokens = torch.arange(first, end)[rank % 2 :: 2]
    scores, batch = token_batch(tokens)
    batch.sequence_ids, batch.sequences = torch.zeros_like(batch.sequence_ids), 1  # each micro-batch counts its own
    output = torch.stack(scores)
    loss_sum, count, stored = make_loss_func(batch, LOSS, cp_group=runtime.groups.cp)(output)
    reducer = MetricReducer(LOSS, runtime, reference=False, engine=False)
    metrics = reducer.reduce([stored])
    step = SimpleNamespace(
        validate=lambda *a, **k: None,
        pack=lambda *a, **k: [SimpleNamespace(slots=tokens.numpy())],
        score=lambda micro_batches: [output],
        gather=lambda *a: UpdateStep.gather(SimpleNamespace(runtime=runtime), *a),
    )
    logprobs, entropy = Policy._scores(
        SimpleNamespace(step=step, runtime=runtime), SimpleNamespace(loss_mask=np.ones(10)), None, 2
    )
    return loss_sum.item(), int(count), metrics, logprobs, entropy


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(4, loss_and_scores)


def test_sums_of_a_sequence_are_those_of_its_context_ranks(ranks):
    alone = LOSS(*token_batch(torch.arange(10)))
    assert sum(loss for loss, *_ in ranks) == pytest.approx(alone.loss_sum.item(), rel=1e-6)
    assert [count for _, count, *_ in ranks] == [1, 0, 1, 0]


def test_metrics_are_means_over_tokens_and_maxima_over_ranks(ranks):
    alone = LOSS(*token_batch(torch.arange(10)))
    for _, _, metrics, *_ in ranks:
        assert metrics["tokens"] == 9 and metrics["denominator"] == 2
        assert metrics["loss"] == pytest.approx(alone.loss_sum.item() / 2, rel=1e-6)
        assert metrics["ratio_mean"] == pytest.approx(alone.sums["ratio_mean"].item() / 9, rel=1e-6)
        assert metrics["approx_kl"] == pytest.approx(alone.sums["approx_kl"].item() / 9, rel=1e-6)
        assert metrics["ratio_max"] == pytest.approx(alone.maxima["ratio_max"].item(), rel=1e-6)


def test_every_rank_has_the_scores_of_all_tokens(ranks):
    for *_, logprobs, entropy in ranks:
        assert logprobs.tolist() == NEW.tolist() and entropy.tolist() == (-NEW).tolist()


# ---- what is counted ----


def two_rollouts(**more):
    """Three samples of 2, 3 and 1 tokens; the first two are one rollout. The third token is masked."""
    return TrainBatch(
        tokens=np.zeros(9, np.int32), prompt_lengths=np.ones(3, np.int64), response_lengths=np.array([2, 3, 1]),
        advantages=np.ones(3, np.float32), loss_mask=np.array([1, 1, 0, 1, 1, 1], bool),
        engine_logprobs=np.zeros(6, np.float32), **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("aggregation", "of_samples", "of_rollouts", "counts"),
    [
        ("token-mean", [1, 1, 0, 1, 1, 1], [1, 1, 0, 1, 1, 1], (5, 5)),
        ("seq-mean-token-sum", [1, 1, 0, 1, 1, 1], [1, 1, 0, 1, 1, 1], (3, 2)),
        ("seq-mean-token-mean", [1 / 2, 1 / 2, 0, 1 / 2, 1 / 2, 1], [1 / 4, 1 / 4, 0, 1 / 4, 1 / 4, 1], (3, 2)),
        ("seq-mean-token-sum-norm", [0.1, 0.1, 0, 0.1, 0.1, 0.1], [0.1, 0.1, 0, 0.1, 0.1, 0.1], (3, 2)),
    ],
)
def test_a_rollout_of_two_samples_counts_once(aggregation, of_samples, of_rollouts, counts):
    config = parse_config({"algorithm": {"aggregation": aggregation, "aggregation_length": 10}})
    batches = [two_rollouts(), two_rollouts(rollouts=np.array([7, 7, 9]))]
    for batch, weights, count in zip(batches, (of_samples, of_rollouts), counts, strict=True):
        tokens = LossInputs(batch, config, "old", LOSS).everything()
        assert tokens.weights.tolist() == pytest.approx(weights)
        assert tokens.counts.sum() == count
        assert tokens.sequence_ids.tolist() == [0, 0, 1, 1, 1, 2]  # sequences of the model stay samples
    assert batches[1].select([2, 0]).rollouts.tolist() == [9, 7]


@pytest.mark.parametrize(
    ("rejected", "weights", "counts"),
    [(0, [0, 0, 0, 1 / 2, 1 / 2, 1], [0, 0, 0, 1, 0, 1]), (1, [1 / 2, 1 / 2, 0, 0, 0, 1], [1, 0, 0, 0, 0, 1])],
)
def test_a_rollout_of_which_a_sample_is_excluded_still_counts_once(rejected, weights, counts):
    """What is left of it is a mean over the samples that are left, whichever they are."""
    settings = {"aggregation": "seq-mean-token-mean", "off_policy": {"geometric_mask": [0.5, 2.0]}}
    config = parse_config({"algorithm": settings})
    old = np.repeat(np.where(np.arange(3) == rejected, 1.0, 0.0), [2, 3, 1]).astype(np.float32)
    batch, loss = two_rollouts(rollouts=np.array([7, 7, 9]), old_logprobs=old), PolicyLoss(config.algorithm)
    inputs = LossInputs(batch, config, "old", loss)
    tokens = inputs.everything()
    assert tokens.weights.tolist() == weights and tokens.counts.tolist() == counts
    assert inputs.denominator == loss(Scores(tokens.old_logprobs), tokens).denominator == 2


def test_micro_batches_add_their_sums_and_compare_their_maxima():
    reducer = MetricReducer.__new__(MetricReducer)
    reducer.sums, reducer.maxima = ["a"], ["b_max"]
    micro_batches = [{"sums": {"a": torch.tensor(x)}, "maxima": {"b_max": torch.tensor(x)}} for x in (1.0, 3.0, 2.0)]
    assert [reducer._total(micro_batches, kind).tolist() for kind in ("sums", "maxima")] == [[6.0], [3.0]]


def test_recomputed_log_probs_come_before_the_engines():
    batch = two_rollouts()
    assert batch.behaviour_logprobs is batch.engine_logprobs
    batch.old_logprobs = np.ones(6, np.float32)
    assert batch.behaviour_logprobs is batch.old_logprobs


def test_token_advantages_are_added_to_those_of_the_sample():
    batch = two_rollouts(token_advantages=np.arange(6, dtype=np.float32))
    tokens = LossInputs(batch, parse_config({}), "old", LOSS).everything()
    assert tokens.advantages.tolist() == [1, 2, 3, 4, 5, 6]


# ---- one update after the other ----


def test_the_first_update_has_the_first_learning_rate():
    """Warm-up over two steps of two updates: 1/4, 2/4, 3/4, 1 of the rate. Norms and biases do not decay."""
    seen = []
    groups = [{"wd_mult": 1.0}, {"wd_mult": 0.0}]
    optimizer = SimpleNamespace(param_groups=groups, step=lambda: (seen.append([dict(g) for g in groups]), 0.5, 0))
    config = parse_config(
        {
            "policy": {"optimizer": {"lr": 1.0, "warmup_steps": 2, "weight_decay": 0.1}},
            "trainer": {"prompts_per_step": 4, "mini_batch_prompts": 2, "steps": 9},
        }
    )
    step = SimpleNamespace(
        config=config, optimizer=optimizer, updates=0, _overlaps_gather=False, updates_per_step=2, total_steps=9
    )
    reported = [UpdateStep.step_optimizer(step)["lr"] for _ in range(5)]
    assert reported == [group["lr"] for group, _ in seen] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert [group["weight_decay"] for group in seen[0]] == [0.1, 0.0]
    assert step.updates == 5


def test_decay_starts_after_the_warm_up():
    """One step of two updates of warm-up, then four updates down to 0.2."""
    config = OptimizerConfig(lr=1.0, min_lr=0.2, warmup_steps=1, schedule="linear", decay_steps=3)
    assert [learning_rate(config, u, 2, 99) for u in range(8)] == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_the_reference_policy_chooses_its_own_experts_and_is_put_back():
    """The batch has the engine's experts; the reference's routers choose, with the reference's weights."""
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(layer.weight, 1.0)
    policy = Policy.__new__(Policy)
    policy.model, policy._reference, seen = [layer], None, []
    policy.runtime = SimpleNamespace(device=torch.device("cpu"), is_last_stage=False, last_stage_rank=0, groups=None)
    policy.step, policy.config = SimpleNamespace(complete_weights=lambda: None), parse_config({})

    def log_probs(batch, mini_batches, *, replay=True, record=False):
        seen.append((layer.weight.item(), replay, record))
        return np.zeros(3), np.zeros(3)

    policy.log_probs = log_probs
    policy.keep_reference()
    with torch.no_grad():
        layer.weight.fill_(5.0)
    policy.reference_log_probs(two_rollouts())
    assert seen == [(1.0, False, False)]
    assert layer.weight.item() == 5.0


@pytest.mark.parametrize(("mode", "recorded"), [("old_log_probs", True), ("engine", False), ("off", False)])
def test_old_log_probs_record_their_experts_only_if_asked(mode, recorded):
    config = SimpleNamespace(policy=SimpleNamespace(routing_replay=mode))
    policy = SimpleNamespace(config=config, log_probs=lambda *a, record: [record])
    assert Policy.old_log_probs(policy, two_rollouts()) is recorded


def test_a_token_is_replayed_only_if_all_of_its_experts_are_known():
    scores = torch.tensor([[0.9, 0.8, 0.1, 0.0]] * 4)
    given = torch.tensor([[3, 4], [0, 4], [3, 0], [3, 4]], dtype=torch.int16)  # from 1; 0: not known
    micro = MicroBatchRouting(torch.tensor([True, True, True, False]), targets={1: given})

    def topk(values, k, **_):
        return values.topk(k)

    values, chosen = _Replay(micro, 1).get_replay_topk(scores, 2, None, None, topk)
    assert chosen.sort().values.tolist() == [[2, 3], [0, 1], [0, 1], [2, 3]]
    assert torch.equal(values, scores.gather(1, chosen))
    assert micro.replayed[1].tolist() == [3, 1, 1]  # tokens that are not padding: all, replayed, with other experts
