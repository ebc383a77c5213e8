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

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megatron_dapo.config import Config, parse_config
from megatron_dapo.errors import UserError
from megatron_dapo.policy.fork_ranks import run_ranks
from megatron_dapo.policy.policy import Policy
from megatron_dapo.policy.runtime import Rendezvous, Runtime, initialize, shutdown
from megatron_dapo.selfcheck.synthetic import awkward_batch, random_hf_weights, synthetic_shape
from megatron_dapo.weights.mapping import OUTPUT, parameter_mappings
from megatron_dapo.weights.model_weights import live_mappings
from megatron_dapo.weights.sharding import hf_tensors, unshard

DEFAULT_LAYOUTS = (
    "tp2", "tp2sp", "pp2", "pp2vpp2", "cp2", "dp2", "dp2do", "tp2pp2", "tp2cp2sp", "ep2", "ep2tp2sp",
)  # fmt: skip
JOB = Rendezvous().url  # where the ranks of torchrun and srun meet
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
    def model(self) -> str:
        """Expert parallelism needs experts; tied embeddings are at their hardest across pipeline stages."""
        if self.size("ep") > 1:
            return "moe"
        return "tied" if self.size("pp") > 1 else "dense"

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


def trace_updates(place: Rendezvous | None, layout: LayoutSpec, updates: int, model: str, **algorithm: Any) -> Trace:
    """Runs the updates in this rank; rank 0 gets the whole trace, the others an empty one."""
    config, shape = check_config(layout, **algorithm), synthetic_shape(model)
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
        leave(place)


def leave(place: Rendezvous | None) -> None:
    """A forked rank is done. A job's ranks stay together: the next layout needs only other model-parallel groups."""
    if place is None or place.url != JOB:
        shutdown()


def gather_full(policy: Policy, runtime: Runtime, *, gradient: bool) -> dict[str, Tensor]:
    """Collective. Full HF-named tensors on rank 0; {} elsewhere. For small models: nothing is streamed."""
    if gradient and policy.config.policy.distributed_optimizer:
        _complete_gradient_buffers(policy)
    position = policy.position
    mine = {
        mapping.name: (position.tp_rank, (parameter.main_grad if gradient else parameter.data).detach().cpu().clone())  # type: ignore[attr-defined]
        for mapping, parameter in live_mappings(policy.model, policy.shape, position)
    }
    everyone: list[Any] | None = [None] * runtime.world_size if runtime.rank == 0 else None
    dist.gather_object(mine, everyone)
    if everyone is None:
        return {}
    full: dict[str, Tensor] = {}
    for name, mapping in parameter_mappings(policy.shape).items():
        shards = _one_of_each(name, everyone)
        if not shards and name == OUTPUT and policy.shape.tied_embeddings:
            continue  # one stage holds embedding and head: there is no second copy
        # Experts are whole on each of their ranks; other rows are split over tensor-parallel ranks.
        parts = [shards[min(shards)]] if mapping.expert is not None else [shards[rank] for rank in sorted(shards)]
        full |= hf_tensors(mapping, unshard(mapping, parts))
    return full


def _one_of_each(name: str, everyone: list[dict[str, tuple[int, Tensor]]]) -> dict[int, Tensor]:
    """Tensor-parallel rank to its shard; replicas (data, context, expert-tensor ranks) must hold the same bits."""
    shards: dict[int, Tensor] = {}
    for rank, held in enumerate(everyone):
        if name in held:
            tp_rank, tensor = held[name]
            if not torch.equal(_bits(shards.setdefault(tp_rank, tensor)), _bits(tensor)):
                raise UserError(f"rank {rank} holds other values of {name} than its replicas: they have diverged")
    return shards


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


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
    references: dict[str, Trace] = {}
    rows: list[tuple[LayoutSpec, Difference | None, float]] = []
    with console.status("single process") as status:
        for spec in specs:
            if spec.model not in references:
                status.update(f"single process, {spec.model} model")
                references[spec.model] = _reference(place, in_job, updates, spec.model)
            status.update(f"layout {spec.name}")
            started = time.monotonic()
            if in_job:
                trace = trace_updates(place, spec, updates, spec.model)
            else:
                trace = run_ranks(spec.world_size, trace_updates, spec, updates, spec.model)[0]
            difference = compare(trace, references[spec.model]) if place.rank == 0 else None
            rows.append((spec, difference, time.monotonic() - started))
    if in_job:
        shutdown()
    if place.rank != 0:
        return 0
    _print(console, rows, tolerance, updates)
    return 0 if all(d is not None and d.within(tolerance) for _, d, _ in rows) else 1


def _reference(place: Rendezvous, in_job: bool, updates: int, model: str) -> Trace:
    single = LayoutSpec.parse("single")
    if not in_job:
        return run_ranks(1, trace_updates, single, updates, model)[0]
    if place.rank != 0:
        return Trace()
    # The ranks of this job are already a world of their own: the reference needs a process outside it.
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.pt"
        command = [sys.executable, "-m", __name__, str(file), str(updates), model]
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
    for column in ("layout", "ranks", "model", "loss", "gradients", "grad norm", "weights", "seconds", ""):
        grid.add_column(column, justify="left" if column in ("layout", "model", "") else "right")
    for spec, difference, seconds in rows:
        assert difference is not None
        ok = difference.within(tolerance)
        verdict = "[green]ok[/]" if ok else f"[red]FAIL[/] gradient of {difference.gradients_at}"
        cells = [difference.loss, difference.gradients, difference.grad_norm, difference.weights]
        numbers = [f"{x:.1e}" for x in cells]
        grid.add_row(spec.name, str(spec.world_size), spec.model, *numbers, f"{seconds:.1f}", verdict)
    console.print(grid)
    limit = tolerance * WEIGHTS_TOLERANCE_FACTOR
    console.print(f"tolerance {tolerance:g} (weights {limit:g}, after Adam)")


if __name__ == "__main__":
    target, count, kind = sys.argv[1:]
    result = trace_updates(None, LayoutSpec.parse("single"), int(count), kind)
    torch.save({name: getattr(result, name) for name in Trace.__slots__}, target)
