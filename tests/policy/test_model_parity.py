"""Our Qwen models on Megatron-Core and transformers' give the same logits for the same weights.

In fp32 they differ by rounding, so exactness is shown in fp64: in both, every cast to fp32 is made a cast to fp64.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from joined_ranks import Job, RankJobs
from reference_models import SHAPES, YARN, fp64, hf_model, hf_weights, in_fp64

from megatron_dapo.config import ModelShape, parse_config
from megatron_dapo.policy.batch import PackingSpec, TrainBatch, pack
from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.policy import Policy
from megatron_dapo.processes.fork_ranks import run_ranks

LENGTHS = (13, 29, 7)


def fp32_config(**policy):
    return parse_config(
        {
            "policy": {"precision": "fp32", "micro_batch_tokens": 64, "timeout_seconds": 60, **policy},
            "rollout": {"max_prompt_tokens": 20, "max_response_tokens": 40},
        }
    )


def some_batch(shape: ModelShape) -> TrainBatch:
    rng = np.random.default_rng(3)
    lengths = np.array(LENGTHS)
    prompts = np.array([4, 9, 2])
    total = int((lengths - prompts).sum())
    return TrainBatch(
        tokens=rng.integers(0, shape.vocab, int(lengths.sum())).astype(np.int32),
        prompt_lengths=prompts,
        response_lengths=lengths - prompts,
        advantages=np.ones(3, np.float32),
        loss_mask=np.ones(total, np.bool_),
        engine_logprobs=np.zeros(total, np.float32),
    )


def sequences(batch: TrainBatch) -> list[torch.Tensor]:
    return [torch.from_numpy(part).long() for part in np.split(batch.tokens, np.cumsum(LENGTHS)[:-1])]


def our_logits(rendezvous, shape, folder, packed):
    policy = Policy(fp32_config(), shape, initialize(fp32_config().policy, rendezvous=rendezvous))
    policy.load_hf(folder)
    batch, model = some_batch(shape), policy.model[0]
    with torch.no_grad():
        if packed:
            micro = pack(batch, [0, 1, 2], PackingSpec(), torch.device("cpu"))
            logits = model(micro.input_ids, micro.position_ids, None, packed_seq_params=micro.packed)[0]
            return [part[:, : shape.vocab] for part in logits.split(list(LENGTHS))]
        padded = torch.nn.utils.rnn.pad_sequence(sequences(batch), batch_first=True)
        positions = torch.arange(padded.shape[1]).expand_as(padded)
        logits = model(padded, positions, None)
        return [logits[i, :length, : shape.vocab] for i, length in enumerate(LENGTHS)]


def our_fp64_logits(rendezvous, shape, folder):
    policy = Policy(fp32_config(), shape, initialize(fp32_config().policy, rendezvous=rendezvous))
    policy.load_hf(folder)
    model = policy.model[0].double()
    with torch.no_grad(), fp64():
        micro = pack(some_batch(shape), [0, 1, 2], PackingSpec(), torch.device("cpu"))
        logits = model(micro.input_ids, micro.position_ids, None, packed_seq_params=micro.packed)[0]
    return [part[:, : shape.vocab] for part in logits.split(list(LENGTHS))]


def fp64_logits(model, shape):
    in_fp64(model, shape)
    with torch.no_grad(), fp64():
        return [model(tokens[None]).logits[0] for tokens in sequences(some_batch(shape))]


def scores(rendezvous, shape, folder, policy_options, temperature):
    config = fp32_config(**policy_options)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"temperature": temperature})})
    policy = Policy(config, shape, initialize(config.policy, rendezvous=rendezvous))
    policy.load_hf(folder)
    return policy.log_probs(some_batch(shape))


TEMPERATURE = 0.7
LAYOUTS = {
    "single": (1, {}),
    "tp2-sp": (2, {"tensor_parallel": 2, "head_chunk_tokens": 5}),
    "tp2": (2, {"tensor_parallel": 2, "sequence_parallel": False}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "cp2": (2, {"context_parallel": 2}),
}


@dataclass
class Pair:
    """A shape, transformers' logits of each sequence alone, and our results with the same weights."""

    shape: ModelShape
    expected: list[torch.Tensor]
    logits: dict[bool, Job]  # by whether the sequences are packed
    scores: dict[str, Job]  # by layout
    fp64: tuple[Job, list[torch.Tensor]]  # ours and transformers'


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    jobs, found = RankJobs(), {}
    for name, shape in SHAPES.items():
        model = hf_model(shape)
        with torch.no_grad():
            expected = [model(tokens[None]).logits[0] for tokens in sequences(some_batch(shape))]
        folder = hf_weights(model, tmp_path_factory.mktemp("hf"))
        logits = {packed: jobs.add(1, our_logits, shape, folder, packed) for packed in (False, True)}
        scored = {
            layout: jobs.add(world, scores, shape, folder, with_experts(shape, world, options), TEMPERATURE)
            for layout, (world, options) in LAYOUTS.items()
            if not refused(shape, options)
        }
        exact = jobs.add(1, our_fp64_logits, shape, folder), fp64_logits(model, shape)
        found[name] = Pair(shape, expected, logits, scored, exact)
    return found


def refused(shape, options):
    """tests/config: experts with tensor parallelism need sequence parallelism."""
    return shape.is_moe and not options.get("sequence_parallel", True)


def with_experts(shape, world, options):
    if shape.is_moe and world > 1:
        return {**options, "expert_parallel": 2 if "pipeline_parallel" not in options else 1}
    return options


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_logits_match_transformers(name, packed, pairs):
    found = pairs[name].logits[packed].results()[0]
    for ours, theirs in zip(found, pairs[name].expected, strict=True):
        assert theirs.abs().max() > 0.5  # the logits are not all near zero
        assert (ours - theirs).abs().max() <= 1e-5


@pytest.mark.parametrize("name", SHAPES)
def test_fp64_logits_are_those_of_transformers(name, pairs):
    ours, theirs = pairs[name].fp64
    for a, b in zip(ours.results()[0], theirs, strict=True):
        assert a.dtype == b.dtype == torch.float64
        assert (a - b).abs().max() <= 1e-10


def test_fp64_logits_with_yarn_are_those_of_transformers(tmp_path):
    model = hf_model(YARN)
    folder = hf_weights(model, tmp_path)
    assert ModelShape.from_dir(folder).rope_scaling == YARN.rope_scaling
    (found,) = run_ranks(1, our_fp64_logits, YARN, folder)
    for ours, theirs, plain in zip(found, fp64_logits(model, YARN), fp64_logits(model, SHAPES["qwen2"]), strict=True):
        assert (ours - theirs).abs().max() <= 1e-10
        assert len(plain) < 10 or (theirs - plain).abs().max() > 1e-3  # YaRN changes the logits


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (layout, name)
        for layout, (_, options) in LAYOUTS.items()
        for name, shape in SHAPES.items()
        if not refused(shape, options)
    ],
)
def test_log_probs_and_entropies_match_transformers(name, layout, pairs):
    """The forward-only pass: every rank gets the log-prob and entropy of every response token, at temperature."""
    batch = some_batch(pairs[name].shape)
    expected, entropies = [], []
    for tokens, logits, prompt in zip(sequences(batch), pairs[name].expected, batch.prompt_lengths, strict=True):
        logp = torch.log_softmax(logits / TEMPERATURE, dim=-1)[prompt - 1 : -1]
        expected.append(logp.gather(1, tokens[prompt:, None]).squeeze(1))
        entropies.append(-(logp.exp() * logp).sum(-1))
    for found, entropy in pairs[name].scores[layout].results():
        np.testing.assert_allclose(found, torch.cat(expected).numpy(), atol=2e-5)
        np.testing.assert_allclose(entropy, torch.cat(entropies).numpy(), atol=2e-5)
