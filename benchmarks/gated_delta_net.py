"""A small random Qwen3-Next or Qwen3.5 on one GPU: the kernels of its gated DeltaNet layers, and a run with SGLang.

    python benchmarks/gated_delta_net.py rule                 # flash-linear-attention beside torch: results and time
    python benchmarks/gated_delta_net.py make DIR [--family qwen3_5]  # the model, its tokenizer and prompts
    python benchmarks/gated_delta_net.py train DIR --run RUN  # 3 steps; trainer and SGLang are colocated on one GPU

`rule` compares outputs and all gradients of packed sequences with the torch rule in fp32; exit code 1 if flash-linear-
attention is further from it than bf16 explains (wrong gradients were reported on Hopper for some Triton versions).
`train` starts `megatron-dapo train`: packed training, weight sync, and the start-up gate, which compares SGLang's
log-probs with the trainer's and ends the run if they differ. It prints the gate's figures and one line per step; exit
code 0 means that the gate passed and all steps were made. Its limit is 0.15 nats: random weights magnify rounding. In
transformers, bf16 and fp32 of this model differ by 0.057, so two bf16 implementations by about 0.08; a decay that is
wrong in one layer shows as 0.49. `--set key=value` changes any setting, for example `--set
'rollout.servers.arguments=["--mem-fraction-static","0.5","--disable-radix-cache"]`. Where SGLang cannot load the model,
its log under RUN/ has the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

LENGTHS = [1024, 37, 2048, 64, 3, 1500, 3516]  # 8192 tokens
KEY_HEADS, VALUE_HEADS, WIDTH = 16, 32, 128  # of Qwen3-Next-80B-A3B


def config_json(vocab: int, eos: int, family: str = "qwen3_next") -> dict[str, Any]:
    """Head sizes of Qwen3-Next-80B-A3B, with few heads, layers and experts. Qwen3.5 is dense."""
    config = {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_act": "silu", "hidden_size": 512,
        "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 256, "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_scaling": None,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "attention_bias": False, "attention_dropout": 0.0,
        "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_num_key_heads": 4,
        "linear_num_value_heads": 8, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 16,
        "num_experts_per_tok": 4, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "output_router_logits": False,
        "router_aux_loss_coef": 0.001, "tie_word_embeddings": False, "use_cache": True, "initializer_range": 0.02,
        "use_sliding_window": False, "vocab_size": vocab, "eos_token_id": eos, "bos_token_id": None,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    if family == "qwen3_next":
        return config
    left_out = ("expert", "router", "moe", "rope", "rotary")
    rotary = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}
    return {key: value for key, value in config.items() if not any(word in key for word in left_out)} | {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "rope_parameters": rotary,
    }  # fmt: skip


def make(folder: Path, family: str) -> None:
    from safetensors.torch import save_file

    from megatron_dapo.config import ModelShape
    from megatron_dapo.data import (
        arithmetic_problems,
        arithmetic_tokenizer,
        save_arithmetic_tokenizer,
        write_arithmetic,
    )
    from megatron_dapo.selfcheck.synthetic import random_hf_weights

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = arithmetic_tokenizer()
    config = config_json(-(-len(tokenizer) // 64) * 64, tokenizer.eos_token_id, family)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    weights = random_hf_weights(ModelShape.from_hf(config), scale=0.04)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_arithmetic_tokenizer(folder)
    write_arithmetic(folder / "prompts.jsonl", arithmetic_problems(2, 256, seed=1))
    print(f"{folder}: {sum(t.numel() for t in tensors.values()) / 1e6:.0f} M parameters")


def rule() -> int:
    from unittest import mock

    from megatron_dapo.policy.model import delta_rule

    if not delta_rule.has_fla():
        print("flash-linear-attention is not installed: training uses the torch rule")
    chunks = delta_rule.Chunks.of(LENGTHS, torch.device("cuda"))
    inputs = _inputs()
    with mock.patch.object(delta_rule, "has_fla", lambda: False):
        expected, seconds = _run(inputs, chunks)
    print(f"torch rule, fp32: {1e3 * seconds:.1f} ms for {sum(LENGTHS)} tokens, forward and backward")
    if not delta_rule.has_fla():
        return 0
    rounded = [x.detach().bfloat16().requires_grad_() for x in inputs]
    rounded[3] = inputs[3]  # the decay stays in fp32
    found, seconds = _run(rounded, chunks)
    print(f"flash-linear-attention, bf16: {1e3 * seconds:.1f} ms")
    worst = 0.0
    for name, a, b in zip(("output", "dq", "dk", "dv", "dg", "dbeta"), found, expected, strict=True):
        difference = float((a.float() - b).norm() / b.norm())
        worst = max(worst, difference)
        print(f"  {name:7} relative difference {difference:.1e}")
    print("agrees" if worst < 0.03 else "DIFFERS: more than bf16 explains")
    return 0 if worst < 0.03 else 1


def _inputs() -> list[torch.Tensor]:
    generator, t = torch.Generator("cuda").manual_seed(0), sum(LENGTHS)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device="cuda").bfloat16().float()

    q, k, v = (normal(t, heads, WIDTH) for heads in (KEY_HEADS, KEY_HEADS, VALUE_HEADS))
    decay = -torch.nn.functional.softplus(normal(t, VALUE_HEADS))
    strength = normal(t, VALUE_HEADS).sigmoid().bfloat16().float()
    return [x.requires_grad_() for x in (q, k, v, decay, strength)]


def _run(inputs: list[torch.Tensor], chunks: Any) -> tuple[list[torch.Tensor], float]:
    """Output and gradients, and the time of the third call."""
    from megatron_dapo.policy.model.delta_rule import gated_delta_rule

    seconds, results = 0.0, []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        q, k, v, decay, strength = inputs
        out = gated_delta_rule(q, k, v, decay, strength, chunks)
        weights = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
        results = [out.detach(), *torch.autograd.grad((out.float() * weights).sum(), inputs)]
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    return results, seconds


def train(folder: Path, run: Path, changes: list[str], dry_run: bool) -> int:
    from megatron_dapo.cli import main as command

    settings = [
        f"policy.model={folder}", "policy.micro_batch_tokens=4096", "policy.optimizer.lr=1e-5",
        "policy.optimizer.warmup_steps=0", "rollout.engine=sglang", "rollout.samples_per_prompt=8",
        "rollout.max_prompt_tokens=32", "rollout.max_response_tokens=256", "rollout.servers.count=1",
        "rollout.servers.share_gpus=true", 'rollout.servers.arguments=["--mem-fraction-static","0.5"]',
        "rollout.weights.transport=tensor", "rollout.sampler.order=prompt", "rollout.dynamic_sampling=false",
        f"data.path={folder}/prompts.jsonl", "data.template=plain", "reward.grader=math", "evaluate.every=0",
        f"trainer.run_dir={run}", "trainer.ranks=1", "trainer.steps=3", "trainer.prompts_per_step=16",
        "trainer.mini_batch_prompts=8", "trainer.checkpoint.every=0", "trainer.gate.max_mean_gap=0.15", *changes,
    ]  # fmt: skip
    (folder / "run.yaml").write_text("{}\n")
    words = [word for item in settings for word in ("--set", item)]
    code = command(["train", str(folder / "run.yaml"), *words, *(["--dry-run"] if dry_run else [])])
    for line in (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []:
        record = json.loads(line)
        named = ("gate", "gap", "kl", "loss", "grad_norm", "tokens_per")
        shown = {key: value for key, value in record["metrics"].items() if any(word in key for word in named)}
        print(json.dumps({"step": record.get("step"), **shown}))
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("rule")
    maker, trainer = commands.add_parser("make"), commands.add_parser("train")
    for sub in (maker, trainer):
        sub.add_argument("folder", type=Path)
    maker.add_argument("--family", choices=["qwen3_next", "qwen3_5"], default="qwen3_next")
    trainer.add_argument("--run", type=Path, required=True)
    trainer.add_argument("--set", action="append", default=[])
    trainer.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    if args.command == "rule":
        return rule()
    if args.command == "make":
        make(args.folder, args.family)
        return 0
    return train(args.folder, args.run, args.set, args.dry_run)


if __name__ == "__main__":
    sys.exit(main())
