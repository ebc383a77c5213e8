"""The head (output layer + DAPO loss, forward and backward) against its limit and its peers, on one GPU.

    python benchmarks/head.py                      # 8192 tokens, hidden 5120, vocabulary 152064, bf16
    python benchmarks/head.py --vocab 19008        # one rank of eight

The limit is the three matrix products alone (logits, d_hidden, d_weight), same shapes, same run. A peer that is not
installed is named as not measured. Times are medians of CUDA-event timings over fresh random inputs. Memory is the peak
beyond the inputs, the gradient of the hidden states and the fp32 main_grad that Megatron keeps anyway.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_dapo.algorithm import PolicyLoss, Scores, TokenBatch, token_weights
from megatron_dapo.config.algorithm import AlgorithmConfig
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.policy.head.fused import HeadRequest, one_pass, two_pass
from megatron_dapo.policy.loss_func import OnePassLoss, make_loss_func

LOSS = PolicyLoss(AlgorithmConfig())


class Case:
    """Fresh inputs. Weights and hidden states are scaled so that logits have realistic sizes."""

    def __init__(self, args: argparse.Namespace, seed: int) -> None:
        g = torch.Generator("cuda").manual_seed(seed)
        kind: dict[str, Any] = {"device": "cuda", "generator": g}
        self.hidden = torch.randn(args.tokens, args.hidden, **kind).bfloat16().requires_grad_()
        self.weight = (torch.randn(args.vocab, args.hidden, **kind) / args.hidden**0.5).bfloat16().requires_grad_()
        self.weight.main_grad = torch.zeros(args.vocab, args.hidden, device="cuda")
        self.targets = torch.randint(args.vocab, (args.tokens,), **kind)
        self.advantages = torch.randn(args.tokens, **kind)
        self.old = -torch.full((args.tokens,), args.vocab, device="cuda").log() + 0.1 * torch.randn(args.tokens, **kind)
        self.ids = torch.arange(args.tokens, device="cuda") // 1024
        mask = torch.rand(args.tokens, **kind) > 0.05
        weights, counts = token_weights("token-mean", mask, self.ids, int(self.ids.max()) + 1)
        self.known = TokenBatch(self.old, self.advantages, mask, weights, counts, self.ids, int(self.ids.max()) + 1)
        self.chunk = args.chunk or PolicyConfig().head_chunk(args.vocab)


def three_products(case: Case) -> None:
    logits = torch.mm(case.hidden.detach(), case.weight.detach().t())
    torch.mm(logits, case.weight.detach())
    torch.mm(logits.t(), case.hidden.detach())


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def ours_one_pass(case: Case) -> None:
    loss = OnePassLoss(case.known, LOSS)
    vocab = case.weight.shape[0]
    request = HeadRequest(case.ids, case.targets, vocab, 1.0, case.chunk, loss, "added-shared")
    loss.loss_func(one_pass(case.hidden, case.weight, request, world()))[0].backward()


def ours_two_pass(case: Case) -> None:
    request = HeadRequest(case.ids, case.targets, case.weight.shape[0], 1.0, case.chunk)
    output = torch.stack(two_pass(case.hidden, case.weight, request, world()))
    make_loss_func(case.known, LOSS)(output)[0].backward()


def fp32_logits(case: Case) -> None:
    logits = (case.hidden @ case.weight.t()).float()
    logp = -F.cross_entropy(logits, case.targets, reduction="none")
    make_loss_func(case.known, LOSS, read_output=Scores)(logp)[0].backward()


def cut_cross_entropy(case: Case) -> None:
    from cut_cross_entropy import linear_cross_entropy

    logp = -linear_cross_entropy(case.hidden, case.weight, case.targets, reduction="none").float()
    make_loss_func(case.known, LOSS, read_output=Scores)(logp)[0].backward()


def liger_grpo(case: Case) -> None:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(beta=0.0, epsilon_low=0.2, epsilon_high=0.28, loss_type="dapo", use_ref_model=False)
    sequences = 8
    shape = (sequences, case.hidden.shape[0] // sequences)
    hidden = case.hidden.view(*shape, -1)
    value = loss(
        hidden, case.weight, case.targets.view(shape), case.known.mask.view(shape).long(),
        case.advantages.view(shape)[:, 0].contiguous(), old_per_token_logps=case.old.view(shape),
    )  # fmt: skip
    (value[0] if isinstance(value, tuple) else value).backward()


def measure(run: Callable[[Case], None], args: argparse.Namespace) -> tuple[float, float]:
    """(milliseconds, GiB beyond inputs and gradients)."""
    times, peak = [], 0.0
    for repeat in range(args.repeats + 2):
        case = Case(args, repeat)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() + case.hidden.numel() * 2
        torch.cuda.reset_peak_memory_stats()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run(case)
        end.record()
        torch.cuda.synchronize()
        if repeat >= 2:
            times.append(start.elapsed_time(end))
            peak = max(peak, (torch.cuda.max_memory_allocated() - held) / 2**30)
        del case
    return statistics.median(times), max(0.0, peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"tokens": 8192, "hidden": 5120, "vocab": 152064, "chunk": 0, "repeats": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    contenders: dict[str, Callable[[Case], None]] = {
        "three products (the limit)": three_products,
        "ours, one pass": ours_one_pass,
        "ours, two passes": ours_two_pass,
        "cut-cross-entropy": cut_cross_entropy,
        "fp32 logits": fp32_logits,
        "liger GRPO (dapo)": liger_grpo,
    }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, {vars(args)}")
    limit = 0.0
    for name, run in contenders.items():
        try:
            milliseconds, gib = measure(run, args)
        except Exception as error:  # a peer that is not installed or does not support this shape
            print(f"{name:<28} not measured: {type(error).__name__}: {str(error)[:120]}")
            torch.cuda.empty_cache()
            continue
        limit = limit or milliseconds
        print(f"{name:<28} {milliseconds:8.2f} ms  {milliseconds / limit:6.3f} × limit  +{gib:.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
