"""`megatron-dapo selfcheck layouts`: the same DAPO updates in one process and in each parallel layout, compared.

The mini-batches are made to be awkward: unequal lengths, a fully masked sample, ratios beyond both clip bounds, a KL
term, an entropy bonus, importance weights, and a micro-batch budget that differs between layouts. Gradients and
weights are gathered into full HF-named tensors, so layouts are compared tensor by tensor.

On one machine every layout runs in forked ranks. Under torchrun or srun each layout runs in the job's own ranks (data
parallelism takes what the layout leaves over), and rank 0 computes the single-process reference in a child process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megatron_dapo.config import Config, ModelShape, parse_config
from megatron_dapo.errors import UserError
from megatron_dapo.policy.batch import TrainBatch
from megatron_dapo.policy.ranks import run_ranks
from megatron_dapo.policy.runtime import Rendezvous, Runtime, initialize, shutdown
from megatron_dapo.policy.update import Policy
from megatron_dapo.weights.live import Place, live_rows
from megatron_dapo.weights.mapping import table
from megatron_dapo.weights.shards import hf_tensors, unshard

DEFAULT_LAYOUTS = (
    "tp2", "tp2sp", "pp2", "pp2vpp2", "cp2", "dp2", "dp2do", "tp2pp2", "tp2cp2sp", "ep2", "ep2tp2sp",
)  # fmt: skip
WEIGHTS_TOLERANCE_FACTOR = 10  # Adam divides by the gradient's size: rounding in a tiny gradient is amplified


@dataclass(frozen=True, slots=True)
class LayoutSpec:
    """`tp2cp2sp` and the like. `do` is the distributed optimizer, `sp` sequence parallelism."""

    name: str
    sizes: dict[str, int] = field(default_factory=dict)
    sequence_parallel: bool = False
    distributed_optimizer: bool = False

    @classmethod
    def parse(cls, name: str) -> LayoutSpec:
        if not re.fullmatch(r"((tp|vpp|pp|cp|dp|ep)\d+|sp|do|single)+", name):
            raise UserError(f"layout {name!r}: expected parts such as tp2, pp2, vpp2, cp2, dp2, ep2, sp, do")
        sizes = {kind: int(size) for kind, size in re.findall(r"(vpp|tp|pp|cp|dp|ep)(\d+)", name)}
        flags = re.sub(r"(vpp|tp|pp|cp|dp|ep)\d+", " ", name).split()
        joined = "".join(flags)
        return cls(name, sizes, "sp" in joined, "do" in joined)

    def size(self, kind: str) -> int:
        return self.sizes.get(kind, 1)

    @property
    def is_moe(self) -> bool:
        return self.size("ep") > 1

    @property
    def world_size(self) -> int:
        """Ranks it needs on its own: experts spread over tensor, context and data ranks."""
        model = self.size("tp") * self.size("pp") * self.size("cp")
        experts = -(-self.size("ep") // (self.size("tp") * self.size("cp")))
        return model * max(self.size("dp"), experts)


@dataclass(slots=True)
class Trace:
    """What a run of several updates produced; gradients and weights as full HF-named tensors."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Difference:
    """Largest relative difference of each kind, and the tensor that has it."""

    loss: float
    grad_norm: float
    gradients: float
    gradients_at: str
    weights: float
    weights_at: str

    def within(self, tolerance: float) -> bool:
        bounds = (self.loss, self.grad_norm, self.gradients, self.weights / WEIGHTS_TOLERANCE_FACTOR)
        return all(x <= tolerance for x in bounds)  # NaN is not within


def check_shape(moe: bool) -> ModelShape:
    """A small model that exercises everything: QKV bias or q/k norms, grouped heads, an odd vocabulary, experts."""
    base: dict[str, Any] = {
        "layers": 4, "hidden": 32, "ffn_hidden": 48, "heads": 4, "kv_heads": 2, "vocab": 101, "max_positions": 512,
        "rope_theta": 1e4, "norm_eps": 1e-6, "tied_embeddings": False, "dtype": "float32",
    }  # fmt: skip
    if not moe:
        return ModelShape(architecture="qwen2", head_dim=8, qkv_bias=True, qk_norm=False, **base)
    return ModelShape(
        architecture="qwen3_moe", head_dim=16, qkv_bias=False, qk_norm=True, experts=4, experts_per_token=2,
        expert_ffn_hidden=24, **base,
    )  # fmt: skip


def random_hf_weights(shape: ModelShape, seed: int = 0, scale: float = 0.1) -> dict[str, Tensor]:
    """Random weights under HF names; norms near one, biases not zero, so that every mapping error shows."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for row in table(shape).values():
        for name, size in zip(row.hf, row.hf_shapes, strict=True):
            noise = torch.randn(size, generator=generator) * scale
            weights[name] = 1 + noise if "norm" in name else noise
    return weights


def awkward_batch(shape: ModelShape, seed: int, samples: int = 14) -> TrainBatch:
    """Unequal lengths, sample 3 fully masked, sample 5 partly; old log-probs far enough off to clip both ways."""
    rng = np.random.default_rng(seed)
    prompts, responses = rng.integers(2, 9, samples), rng.integers(3, 30, samples)
    total = int(responses.sum())
    mask = np.ones(total, dtype=np.bool_)
    starts = np.concatenate([[0], np.cumsum(responses)])
    mask[starts[3] : starts[4]] = False
    mask[starts[5] : starts[5] + 2] = False
    typical = -np.log(shape.vocab)
    return TrainBatch(
        tokens=rng.integers(0, shape.vocab, int((prompts + responses).sum())).astype(np.int32),
        prompt_lengths=prompts.astype(np.int64),
        response_lengths=responses.astype(np.int64),
        advantages=rng.normal(size=samples).astype(np.float32),
        loss_mask=mask,
        old_logprobs=(typical + 0.5 * rng.normal(size=total)).astype(np.float32),
        engine_logprobs=(typical + 0.5 * rng.normal(size=total)).astype(np.float32),
        ref_logprobs=(typical + 0.5 * rng.normal(size=total)).astype(np.float32),
    )


def check_config(layout: LayoutSpec, **algorithm: Any) -> Config:
    """fp32, and a micro-batch budget that depends on the layout, so that the splits differ."""
    budget = 512 if layout.name == "single" else 64 + 16 * (sum(map(ord, layout.name)) % 4)
    return parse_config(
        {
            "policy": {
                "tensor_parallel": layout.size("tp"),
                "pipeline_parallel": layout.size("pp"),
                "virtual_pipeline": layout.size("vpp"),
                "context_parallel": layout.size("cp"),
                "expert_parallel": layout.size("ep"),
                "sequence_parallel": layout.sequence_parallel,
                "distributed_optimizer": layout.distributed_optimizer,
                "precision": "fp32",
                "micro_batch_tokens": budget,
                "head_chunk_tokens": 24,
                "timeout_seconds": 120,
                "optimizer": {"lr": 1e-3, "warmup_steps": 0},
            },
            "rollout": {"max_prompt_tokens": 10, "max_response_tokens": 30, "temperature": 0.9},
            "algorithm": {
                "kl": {"coefficient": 0.05},
                "entropy_coefficient": 0.01,
                "importance_sampling": {"level": "token", "cap": 1.5},
                **algorithm,
            },
        }
    )


def trace_updates(place: Rendezvous | None, layout: LayoutSpec, updates: int, moe: bool, **algorithm: Any) -> Trace:
    """Runs the updates in this rank; rank 0 gets the whole trace, the others an empty one."""
    config, shape = check_config(layout, **algorithm), check_shape(moe)
    torch.set_num_threads(1)
    runtime = initialize(config.policy, seed=1, rendezvous=place)
    try:
        policy = Policy(config, shape, runtime)
        policy.load_hf(random_hf_weights(shape))
        trace = Trace()
        for update in range(updates):
            batch = awkward_batch(shape, seed=update)
            policy.gradients(batch)
            trace.gradients.append(gather_full(policy, runtime, gradient=True))
            metrics = policy.update(batch)
            trace.losses.append(metrics["loss"])
            trace.grad_norms.append(metrics["grad_norm"])
        trace.weights = gather_full(policy, runtime, gradient=False)
        return trace
    finally:
        shutdown()


def gather_full(policy: Policy, runtime: Runtime, *, gradient: bool) -> dict[str, Tensor]:
    """Collective. Full HF-named tensors on rank 0; {} elsewhere. For small models: nothing is streamed."""
    if gradient and policy.config.policy.distributed_optimizer:
        _complete_gradient_buffers(policy)
    groups = runtime.groups
    place = Place(groups.tp.rank(), groups.tp.size(), groups.ep.rank(), groups.ep.size(), 0, 1)
    mine = {
        row.name: (place.tp_rank, (parameter.main_grad if gradient else parameter.data).detach().cpu().clone())  # type: ignore[attr-defined]
        for row, parameter in live_rows(policy.model, policy.shape, place)
    }
    everyone: list[Any] | None = [None] * runtime.world_size if runtime.rank == 0 else None
    dist.gather_object(mine, everyone)
    if everyone is None:
        return {}
    rows, full = table(policy.shape), {}
    for name, row in rows.items():
        shards = dict(held[name] for held in reversed(everyone) if name in held)
        # Experts are whole on each of their ranks; other rows are split over tensor-parallel ranks.
        parts = [shards[min(shards)]] if row.expert is not None else [shards[rank] for rank in sorted(shards)]
        full |= hf_tensors(row, unshard(row, parts))
    return full


def _complete_gradient_buffers(policy: Policy) -> None:
    """Under the distributed optimizer each data-parallel rank holds only its reduced shard: collect the others'."""
    for chunk in policy.chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)


def compare(found: Trace, reference: Trace) -> Difference:
    gradients = [_largest(a, b) for a, b in zip(found.gradients, reference.gradients, strict=True)]
    gradient, gradient_at = max(gradients, key=lambda pair: _nan_first(pair[0]))
    weight, weight_at = _largest(found.weights, reference.weights)
    return Difference(
        loss=_largest_number(found.losses, reference.losses),
        grad_norm=_largest_number(found.grad_norms, reference.grad_norms),
        gradients=gradient,
        gradients_at=gradient_at,
        weights=weight,
        weights_at=weight_at,
    )


def _nan_first(x: float) -> float:
    return float("inf") if x != x else x


def _largest_number(found: Sequence[float], reference: Sequence[float]) -> float:
    return max((_nan_first(abs(a - b) / abs(b)) for a, b in zip(found, reference, strict=True)), default=0.0)


def _largest(found: dict[str, Tensor], reference: dict[str, Tensor]) -> tuple[float, str]:
    """‖a − b‖ / ‖b‖ of the worst tensor; a tensor that only one side has is infinitely different."""
    if found.keys() != reference.keys():
        return float("inf"), ", ".join(sorted(found.keys() ^ reference.keys()))
    differences = {
        name: _nan_first(float((found[name].double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)))
        for name, b in reference.items()
    }
    worst = max(differences, key=lambda name: differences[name])
    return differences[worst], worst


def run_layouts(names: Sequence[str] | None, tolerance: float, updates: int) -> int:
    """The command: prints one row per layout; returns 0 when all are within the tolerance."""
    specs = [LayoutSpec.parse(name) for name in names or DEFAULT_LAYOUTS]
    place = Rendezvous.from_environment()
    in_job = place.world_size > 1
    console = Console(quiet=place.rank != 0)
    references: dict[bool, Trace] = {}
    rows: list[tuple[LayoutSpec, Difference | None, float]] = []
    with console.status("single process") as status:
        for spec in specs:
            if spec.is_moe not in references:
                status.update(f"single process, {'MoE' if spec.is_moe else 'dense'} model")
                references[spec.is_moe] = _reference(place, in_job, updates, spec.is_moe)
            status.update(f"layout {spec.name}")
            started = time.monotonic()
            if in_job:
                trace = trace_updates(place, spec, updates, spec.is_moe)
            else:
                trace = run_ranks(spec.world_size, trace_updates, spec, updates, spec.is_moe)[0]
            difference = compare(trace, references[spec.is_moe]) if place.rank == 0 else None
            rows.append((spec, difference, time.monotonic() - started))
    if place.rank != 0:
        return 0
    _print(console, rows, tolerance, updates)
    return 0 if all(d is not None and d.within(tolerance) for _, d, _ in rows) else 1


def _reference(place: Rendezvous, in_job: bool, updates: int, moe: bool) -> Trace:
    single = LayoutSpec.parse("single")
    if not in_job:
        return run_ranks(1, trace_updates, single, updates, moe)[0]  # type: ignore[no-any-return]
    if place.rank != 0:
        return Trace()
    # The ranks of this job are already a world of their own: the reference needs a process outside it.
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.pt"
        command = [sys.executable, "-m", __name__, str(file), str(updates), str(int(moe))]
        subprocess.run(command, check=True, env=_environment_of_one_process(), timeout=600)
        return Trace(**torch.load(file, weights_only=True))


def _environment_of_one_process() -> dict[str, str]:
    """Ours, without what torchrun and srun use to describe the job."""
    job = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")
    return {k: v for k, v in os.environ.items() if k not in job and not k.startswith("TORCHELASTIC")}


def _print(
    console: Console, rows: Sequence[tuple[LayoutSpec, Difference | None, float]], tolerance: float, updates: int
) -> None:
    grid = Table(title=f"Largest relative difference to a single process, {updates} DAPO updates, fp32")
    for column in ("layout", "ranks", "loss", "gradients", "grad norm", "weights", "seconds", ""):
        grid.add_column(column, justify="left" if column in ("layout", "") else "right")
    for spec, difference, seconds in rows:
        assert difference is not None
        ok = difference.within(tolerance)
        verdict = "[green]ok[/]" if ok else f"[red]FAIL[/] gradient of {difference.gradients_at}"
        cells = [difference.loss, difference.gradients, difference.grad_norm, difference.weights]
        numbers = [f"{x:.1e}" for x in cells]
        grid.add_row(spec.name, str(spec.world_size), *numbers, f"{seconds:.1f}", verdict)
    console.print(grid)
    limit = tolerance * WEIGHTS_TOLERANCE_FACTOR
    console.print(f"tolerance {tolerance:g} (weights {limit:g}, after Adam)")


if __name__ == "__main__":
    target, count, moe_flag = sys.argv[1:]
    result = trace_updates(None, LayoutSpec.parse("single"), int(count), bool(int(moe_flag)))
    torch.save({name: getattr(result, name) for name in Trace.__slots__}, target)
