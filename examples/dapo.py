"""DAPO in one file and one process, on plain Megatron-Core. Read this first.

    python examples/dapo.py                # a tiny Qwen2 learns to add, on the CPU; pre-trains it the first time
    python examples/dapo.py --steps 100    # the pre-trained model is kept in runs/dapo_example

`dapo()` is the whole algorithm: it samples groups of responses, grades them, makes two updates and hands the new
weights to the engine. What follows it is in the order of a step. The four changes that DAPO makes to GRPO are the
blocks "DAPO 1" to "DAPO 4", numbered as in the paper (https://arxiv.org/abs/2503.14476).

With the same settings and seed, `megatron-dapo train` reports the same rewards, losses, entropies, gradient norms and
token counts (tests/examples/test_dapo_example.py). What `train` has and this file leaves out:
- parallel layouts, SGLang servers, grading processes, checkpoints, evaluation, guards against bad numbers;
- packed micro-batches, and an output layer that never holds all logits: here an update is one padded forward pass of a
  stock GPTModel, and the numbers of both agree to rounding;
- generation in flight and oversampling: here replacements are sampled in rounds, which gives the same batch as
  `rollout.sampler.oversampling: 1`. A prompt that one step draws twice gets the same responses twice.
Where it departs from the paper:
- a model of 0.3 M parameters and sums such as 37+5=, instead of Qwen2.5-32B and competition mathematics;
- two updates in a step instead of 16, and a constant learning rate without warm-up or weight decay;
- a dual clip at 10, which is in the paper's published script, bounds the loss of tokens with a negative advantage.
"""

from __future__ import annotations

import argparse
import asyncio
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_dapo import algorithm
from megatron_dapo.config import ModelShape
from megatron_dapo.config.algorithm import AlgorithmConfig
from megatron_dapo.data import PromptCursor, arithmetic_problems, arithmetic_prompts, arithmetic_tokenizer
from megatron_dapo.engines.embedded.engine import EmbeddedEngine
from megatron_dapo.engines.protocol import SamplingParams, derive_seed
from megatron_dapo.policy.megatron import cpu, patches
from megatron_dapo.sync.gather import WeightBuckets
from megatron_dapo.types import Grade, Group, Prompt, Sample
from megatron_dapo.weights.model_weights import RankPosition, load_hf_weights

IsRight = Callable[[Prompt, str], bool]  # grades the text of a response


@dataclass(frozen=True)
class Settings:
    model: Path  # HF directory of a dense Qwen model
    steps: int = 30
    prompts_per_step: int = 32
    samples_per_prompt: int = 8  # the size of a group
    mini_batch_prompts: int = 16  # groups in one update
    max_response_tokens: int = 8
    lr: float = 5e-4
    clip_low: float = 0.2
    clip_high: float = 0.28
    overlong_cache: int = 4  # tokens before max_response_tokens over which the penalty grows
    mask_truncated: bool = False
    seed: int = 0


def dapo(settings: Settings, prompts: Sequence[Prompt], is_right: IsRight) -> Iterator[dict[str, float]]:
    """Trains, and yields the metrics of each step under the names that they have in metrics.jsonl."""
    start_megatron(settings.seed)
    shape = ModelShape.from_dir(settings.model)
    model, optimizer = build(settings, shape)
    engine = EmbeddedEngine.from_directory(settings.model)
    weights = WeightBuckets([model], shape, RankPosition())  # the model's tensors under their HF names
    cursor = PromptCursor(prompts, settings.seed)  # shuffles the prompts anew in every epoch
    size = settings.mini_batch_prompts
    for step in range(settings.steps):
        groups = sample_informative_groups(engine, cursor, is_right, step, settings)  # DAPO 2
        batches = [make_batch(groups[i : i + size], model, settings) for i in range(0, len(groups), size)]  # DAPO 4
        updates = [update(model, optimizer, batch, settings) for batch in batches if batch.mask.any()]  # DAPO 1 and 3
        asyncio.run(engine.update_weights(step + 1, weights.buckets()))
        rewards = [rewards_of(group, settings) for group in groups]
        means = {name: float(np.mean([done[name] for done in updates])) for name in (updates[0] if updates else ())}
        tokens = sum(done["train/tokens"] for done in updates)
        yield {"reward/mean": float(np.mean(rewards)), **means, "train/tokens": tokens}
    asyncio.run(engine.close())


# ---- the model and its optimizer: Megatron-Core ----


def start_megatron(seed: int) -> None:
    patches.install()  # on a machine without CUDA, Megatron's device "cuda" is the CPU from here on
    dist.init_process_group("gloo" if cpu.needed() else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(seed)


def build(settings: Settings, shape: ModelShape) -> tuple[DistributedDataParallel, Any]:
    """A Qwen model with the weights of the HF directory under Megatron's DDP, and Megatron's Adam. All in fp32."""
    config = TransformerConfig(
        num_layers=shape.layers, hidden_size=shape.hidden, ffn_hidden_size=shape.ffn_hidden,
        num_attention_heads=shape.heads, num_query_groups=shape.kv_heads, kv_channels=shape.head_dim,
        normalization="RMSNorm", layernorm_epsilon=shape.norm_eps, activation_func=F.silu, gated_linear_unit=True,
        add_bias_linear=False, add_qkv_bias=shape.qkv_bias, qk_layernorm=shape.qk_norm, hidden_dropout=0.0,
        attention_dropout=0.0, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        bias_activation_fusion=False, bias_dropout_fusion=False, use_cpu_initialization=True,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=shape.qk_norm)
    gpt = GPTModel(
        config, spec, vocab_size=shape.vocab, max_sequence_length=shape.max_positions, position_embedding_type="rope",
        rotary_base=shape.rope_theta, share_embeddings_and_output_weights=shape.tied_embeddings,
    )  # fmt: skip
    load_hf_weights([gpt], shape, settings.model)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), gpt.cuda())
    adam = OptimizerConfig(optimizer="adam", lr=settings.lr, weight_decay=0.0, clip_grad=1.0)
    return model, get_megatron_optimizer(adam, [model])


# ---- generate and grade ----


async def sample_groups(
    engine: EmbeddedEngine, prompts: Sequence[Prompt], is_right: IsRight, step: int, settings: Settings
) -> list[Group]:
    """All responses to each prompt, at once. Their scores are +1 (right) and −1 (wrong)."""

    async def sample(prompt: Prompt, index: int) -> Sample:
        seed = derive_seed(settings.seed, step, prompt.id, index)
        params = SamplingParams(settings.max_response_tokens, temperature=1.0, seed=seed)
        done = await engine.generate(f"{step}-{prompt.id}-{index}", prompt.tokens, params)
        right = is_right(prompt, engine.tokenizer.decode(done.tokens, skip_special_tokens=True))
        grade = Grade(right, score=1.0 if right else -1.0)
        return Sample(prompt.id, index, prompt.tokens, done.tokens, done.logprobs, done.finish_reason, grade=grade)

    size = settings.samples_per_prompt
    samples = await asyncio.gather(*(sample(prompt, i) for prompt in prompts for i in range(size)))
    return [Group(prompt, samples[i * size : (i + 1) * size]) for i, prompt in enumerate(prompts)]


# ---- DAPO 2: dynamic sampling ----
# The advantages of a group that is all right or all wrong are 0, so it adds nothing to the gradient. Such a group is
# replaced by that of another prompt, until the batch is full of groups to learn from.


def sample_informative_groups(
    engine: EmbeddedEngine, cursor: PromptCursor, is_right: IsRight, step: int, settings: Settings
) -> list[Group]:
    kept: list[Group] = []
    while missing := settings.prompts_per_step - len(kept):
        for group in asyncio.run(sample_groups(engine, cursor.take(missing), is_right, step, settings)):
            keep, _reason = algorithm.keep_group(group)
            if keep:
                kept.append(group)
    return kept


# ---- DAPO 4: overlong reward shaping ----
# A truncated response has no answer yet, but its reasoning may be right: to score it like a wrong one is noise.
# Soft punishment: a penalty that grows from 0 to −1 over the last `overlong_cache` tokens before the limit.
# Overlong filtering (`mask_truncated`): truncated responses stay out of the loss.


def rewards_of(group: Group, settings: Settings) -> list[float]:
    """[samples]. Added after dynamic sampling: a difference in length must not look like one in correctness."""
    lengths = [sample.length for sample in group.samples]
    penalties = algorithm.soft_overlong_penalty(lengths, settings.max_response_tokens, settings.overlong_cache)
    return [grade.score + float(penalty) for grade, penalty in zip(group.grades, penalties, strict=True)]


def in_loss(sample: Sample, settings: Settings) -> bool:
    return not (settings.mask_truncated and sample.truncated)


# ---- what an update trains on ----


class Batch(NamedTuple):
    tokens: Tensor  # [samples, length]: prompt and response, padded on the right
    mask: Tensor  # [samples, length − 1]: whether token t + 1, which position t predicts, is in the loss
    advantages: Tensor  # [samples]
    old_logprobs: Tensor  # [samples · (length − 1)]: of the policy before the step's first update


@torch.no_grad()
def make_batch(groups: Sequence[Group], model: DistributedDataParallel, settings: Settings) -> Batch:
    samples = [sample for group in groups for sample in group.samples]
    rows = [np.concatenate([sample.prompt_tokens, sample.response_tokens]) for sample in samples]
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros(len(rows), tokens.shape[1] - 1, dtype=torch.bool)
    for i, (row, sample) in enumerate(zip(rows, samples, strict=True)):
        tokens[i, : len(row)] = torch.from_numpy(row)
        mask[i, len(sample.prompt_tokens) - 1 : len(row) - 1] = in_loss(sample, settings)
    # As in GRPO: (reward − mean of the group) / std of the group. All tokens of a response have the same advantage.
    rewards = [reward for group in groups for reward in rewards_of(group, settings)]
    advantages = algorithm.group_advantages(rewards, [i // settings.samples_per_prompt for i in range(len(rows))])
    tokens = tokens.cuda()
    return Batch(tokens, mask.cuda(), advantages.cuda(), old_logprobs=score(model, tokens).logprobs)


def score(model: DistributedDataParallel, tokens: Tensor) -> algorithm.Scores:
    """Log-prob of every token but the first, and the entropy of the policy there: [samples · (length − 1)]."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    logprobs = model(tokens, positions, None)[:, :-1].float().log_softmax(-1)  # [samples, length − 1, vocabulary]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return algorithm.Scores(logprobs.gather(-1, tokens[:, 1:, None]).flatten(), entropy.flatten())


# ---- DAPO 1: clip-higher ----
# r = π/π_old is the ratio of a token's probabilities under the new and the old policy, Â its advantage. Its loss is
#     −min(r·Â, clip(r, 1 − low, 1 + high)·Â).
# With PPO's low = high = 0.2, a token of probability 0.01 can rise to no more than 0.012: the policy stops exploring
# and its entropy collapses. DAPO raises `high` to 0.28. It keeps `low`, or unlikely tokens would soon be impossible.


def clip_higher(settings: Settings) -> algorithm.PolicyLoss:
    return algorithm.PolicyLoss(AlgorithmConfig(clip_low=settings.clip_low, clip_high=settings.clip_high))


# ---- DAPO 3: token-level loss ----
# GRPO takes the mean over the tokens of each response and then over the responses: a token of a long response counts
# less. DAPO adds up the losses of all tokens of the mini-batch and divides once, by the number of tokens.


def token_level_loss(scores: algorithm.Scores, batch: Batch, settings: Settings) -> algorithm.LossOutputs:
    """The sum of the losses (`loss_sum`) and the number of tokens (`denominator`); Megatron divides the gradients."""
    samples, mask = len(batch.mask), batch.mask.flatten()
    sequence = torch.arange(samples, device=mask.device).repeat_interleave(batch.mask.shape[1])  # each token's sample
    weights, counts = algorithm.token_weights("token-mean", mask, sequence, samples)  # both 1 if in the loss, else 0
    advantages = batch.advantages[sequence]
    known = algorithm.TokenBatch(batch.old_logprobs, advantages, mask, weights, counts, sequence, samples)
    return clip_higher(settings)(scores, known)


# ---- one update ----


def update(model: DistributedDataParallel, optimizer: Any, batch: Batch, settings: Settings) -> dict[str, float]:
    model.zero_grad_buffer()
    optimizer.zero_grad()
    result = token_level_loss(score(model, batch.tokens), batch, settings)
    result.loss_sum.backward()
    finalize_model_grads([model], num_tokens=result.denominator)  # divides the gradients by the number of tokens
    _, grad_norm, _ = optimizer.step()  # clips their norm to 1 first
    tokens = int(result.denominator)
    loss, entropy = float(result.loss_sum) / tokens, float(result.sums["entropy"]) / tokens
    return {"train/loss": loss, "train/entropy": entropy, "train/grad_norm": float(grad_norm), "train/tokens": tokens}


# ---- the task: sums ----


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=Path("runs/dapo_example"), help="of the pre-trained model")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="megatron|torch|transformers")
    torch.set_num_threads(1)  # the model is too small for more
    if not (args.folder / "config.json").exists():
        from quickstart.quickstart import make_model  # examples/quickstart: knows the task but is often wrong

        make_model(args.folder, seed=0)
    prompts = arithmetic_prompts(arithmetic_problems(2, 700, seed=0), arithmetic_tokenizer())
    steps = dapo(Settings(args.folder, args.steps), prompts, lambda prompt, text: text == prompt.answer)
    for number, metrics in enumerate(steps, 1):
        values = "  ".join(f"{name} {value:<8.4g}" for name, value in metrics.items())
        print(f"step {number:<4} {values}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
