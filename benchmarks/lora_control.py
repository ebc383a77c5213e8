"""What limits LoRA on the quickstart's task: cross-entropy on right answers with different parts of the model trained.

    make quickstart
    python benchmarks/lora_control.py runs/quickstart/start      # 15 minutes of one core

Plain torch, without Megatron or sampling. Each line has the mean probability of the right answer to held-out problems
after 60, 120 and 240 updates.
"""

from __future__ import annotations

import argparse
import random
import runpy
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import Qwen2ForCausalLM

from megatron_dapo.data import arithmetic_problems, arithmetic_tokenizer

QUICKSTART = runpy.run_path(str(Path(__file__).resolve().parents[1] / "examples" / "quickstart" / "quickstart.py"))
LEVEL, BATCH, ALPHA = 2, 128, 32
LINES = [  # rank (0: the model itself), learning rate, trained besides the adapters, frozen
    (0, 5e-4, (), ()),
    (0, 5e-4, (), ("embed_tokens",)),
    (4, 2e-3, (), ()),
    (96, 2e-3, (), ()),
    (4, 5e-3, (), ()),
    (4, 1e-2, (), ()),
    (4, 2e-3, ("norm", "bias"), ()),
    (4, 2e-3, ("embed_tokens",), ()),
]


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.scale = ALPHA / rank
        self.a = nn.Parameter((torch.rand(rank, base.in_features) * 2 - 1) * base.in_features**-0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * (x @ self.a.t() @ self.b.t())


def adapt(model: nn.Module, rank: int, also: tuple[str, ...]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(word in name for word in also))
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.endswith("_proj"):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Adapted(module, rank))


def train(start: Path, rank: int, lr: float, also: tuple[str, ...], frozen: tuple[str, ...], updates: int) -> None:
    tokenizer, model = arithmetic_tokenizer(), Qwen2ForCausalLM.from_pretrained(start)
    torch.manual_seed(0)
    if rank:
        adapt(model, rank, also)
    for name, parameter in model.named_parameters():
        if any(word in name for word in frozen):
            parameter.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)
    held_out = arithmetic_problems(LEVEL, 100, seed=0, split="held-out")
    inputs, labels = QUICKSTART["pretraining_batch"](
        arithmetic_problems(LEVEL, 700, seed=0), tokenizer, random.Random(0), wrong_share=0.0
    )
    found, choice = [], torch.Generator().manual_seed(0)
    for update in range(1, updates + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, update / 10)
        chosen = torch.randint(len(inputs), (BATCH,), generator=choice)
        loss = model(input_ids=inputs[chosen], labels=labels[chosen]).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if update in (60, 120, 240):
            right = QUICKSTART["probability_of_right_answers"](model, held_out, tokenizer)
            found.append(f"{right:.1%} after {update}")
    what = f"rank {rank}" if rank else "full"
    what += "".join(f" + {name}" for name in also) + "".join(f" - {name}" for name in frozen)
    count = sum(parameter.numel() for parameter in trained)
    print(f"{what:<24} {count:>7,} trained, lr {lr:g}: {', '.join(found)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start", type=Path)
    parser.add_argument("--updates", type=int, default=240)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for rank, lr, also, frozen in LINES:
        train(args.start, rank, lr, also, frozen, args.updates)


if __name__ == "__main__":
    main()
