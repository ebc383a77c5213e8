"""DAPO in your own Megatron-Core script: a stock GPTModel, Megatron's schedule and optimizer, our loss function.

    python examples/own_megatron_script.py                                   # one process, CPU or GPU
    torchrun --nproc-per-node 2 examples/own_megatron_script.py --tensor-parallel 2

Only the loss of megatron-dapo is used: `group_advantages`, `token_weights`, `PolicyLoss` and `make_loss_func`. The task
is a toy (generate even tokens), so that the reward visibly rises in half a minute. Two things make the result exact in
every layout: `calculate_per_token_loss=True`, and token weights that are computed before the batch is split.
"""

import argparse
import os
import warnings

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from megatron_dapo.algorithm import PolicyLoss, TokenBatch, group_advantages, token_weights
from megatron_dapo.config.algorithm import AlgorithmConfig
from megatron_dapo.policy.loss_func import check_transformer_config, from_cross_entropy, make_loss_func
from megatron_dapo.policy.megatron import cpu, patches

VOCAB, PROMPT, RESPONSE, GROUPS, GROUP_SIZE = 64, 4, 12, 8, 8


def build(tensor_parallel):
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, ffn_hidden_size=128, normalization="RMSNorm",
        activation_func=F.silu, gated_linear_unit=True, add_bias_linear=False, hidden_dropout=0.0,
        attention_dropout=0.0, tensor_model_parallel_size=tensor_parallel, use_cpu_initialization=True,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, bias_activation_fusion=False,
        bias_dropout_fusion=False, calculate_per_token_loss=True,  # the exact normaliser needs this
    )  # fmt: skip
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    check_transformer_config(config, ddp_config)  # refuses settings that would change the normaliser
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    gpt = GPTModel(config, spec, vocab_size=VOCAB, max_sequence_length=64, position_embedding_type="rope")
    model = DistributedDataParallel(config, ddp_config, gpt.to(torch.cuda.current_device()))
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=3e-3, weight_decay=0.0), [model])
    config.finalize_model_grads_func = finalize_model_grads
    return model, optimizer


def positions_of(tokens):
    return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)


@torch.no_grad()
def sample(model, prompts, generator):
    """The simplest engine: it recomputes everything for every token."""
    tokens = prompts.repeat_interleave(GROUP_SIZE, 0)
    for _ in range(RESPONSE):
        logits = model(tokens, positions_of(tokens), None, runtime_gather_output=True)[:, -1].float()
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)], 1)
    return tokens


def dapo_tokens(tokens, rewards, old_logprobs, config):
    """What is known of each token, flattened from [samples, length − 1]: position t predicts token t + 1."""
    samples, width = tokens.shape[0], tokens.shape[1] - 1
    groups = torch.arange(samples, device=tokens.device) // GROUP_SIZE
    advantages = group_advantages(rewards, groups)
    mask = positions_of(tokens[:, 1:]) >= PROMPT - 1
    ids = torch.arange(samples, device=tokens.device).repeat_interleave(width)
    weights, counts = token_weights(config.aggregation, mask.flatten(), ids, samples)
    return TokenBatch(old_logprobs, advantages.repeat_interleave(width), mask.flatten(), weights, counts, ids, samples)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--steps", type=int, default=25)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="megatron|torch")
    patches.install()  # lets Megatron-Core run without CUDA; does nothing where CUDA is
    backend = "gloo" if cpu.needed() else "nccl"
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}.items():
        os.environ.setdefault(name, value)
    torch.distributed.init_process_group(backend)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=args.tensor_parallel)
    model_parallel_cuda_manual_seed(1)
    model, optimizer = build(args.tensor_parallel)
    config = AlgorithmConfig()
    loss = PolicyLoss(config)
    device = torch.cuda.current_device()
    generator = torch.Generator(device).manual_seed(parallel_state.get_data_parallel_rank())
    run = get_forward_backward_func()
    for step in range(args.steps):
        prompts = torch.randint(VOCAB, (GROUPS, PROMPT), generator=generator, device=device)
        tokens = sample(model, prompts, generator)
        rewards = (tokens[:, PROMPT:] % 2 == 0).float().mean(1)
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        with torch.no_grad():
            old = -model(inputs, positions_of(inputs), None, labels=labels).float().flatten()
        known = dapo_tokens(tokens, rewards, old, config)

        def forward_step(_, model, inputs=inputs, labels=labels, known=known):
            output = model(inputs, positions_of(inputs), None, labels=labels)  # cross-entropy of every token
            return output, make_loss_func(known, loss, read_output=from_cross_entropy)

        model.zero_grad_buffer()
        optimizer.zero_grad()
        stored = run(forward_step_func=forward_step, data_iterator=None, model=model, num_microbatches=1,
                     seq_length=inputs.shape[1], micro_batch_size=inputs.shape[0], forward_only=False)  # fmt: skip
        _, grad_norm, _ = optimizer.step()
        tokens_seen = stored[0]["sums"]["tokens"].item()
        if torch.distributed.get_rank() == 0:
            print(f"step {step:2d}  reward {rewards.mean():.3f}  tokens {tokens_seen:.0f}  grad norm {grad_norm:.3f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
