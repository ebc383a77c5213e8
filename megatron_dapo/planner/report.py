"""Prints a plan as tables of at most 100 columns, or returns it as JSON values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_dapo.config.load import as_settings
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.planner.assumptions import LIKELY, MARGIN
from megatron_dapo.planner.engine import EnginePlan
from megatron_dapo.planner.hardware import GIB, Cluster
from megatron_dapo.planner.modes import Mode
from megatron_dapo.planner.plan import TRAINING, Plan
from megatron_dapo.planner.search import KEYS, Candidate

NOTES = {
    "weights": "in the precision of the computation",
    "gradients": "fp32, Megatron's DDP buffers",
    "optimizer": "fp32 copy and two Adam moments, this rank's shard",
    "activations": "saved by layers, for all micro-batches in flight",
    "layer": "backward pass of one layer",
    "head": "logits of one chunk, gradient of the output layer",
    "optimizer step": "temporaries of torch's AdamW",
    "weight sync": "buckets that a sender keeps between updates",
    "other model": "weights, gradients and optimizer of the model beside it",
    "reserve": "CUDA, NCCL, fragmentation",
}


def layout_name(policy: PolicyConfig, world: int) -> str:
    """E.g. TP8 PP2 DP8: tensor and pipeline size, and every other size above 1."""
    data = world // policy.model_ranks if world % policy.model_ranks == 0 else 0
    sizes = {
        "TP": policy.tensor_parallel, "PP": policy.pipeline_parallel, "VPP": policy.virtual_pipeline,
        "CP": policy.context_parallel, "EP": policy.expert_parallel, "DP": data,
    }  # fmt: skip
    return " ".join(f"{name}{n}" for name, n in sizes.items() if n > 1 or name in ("TP", "PP")) or "one GPU"


def print_plan(plan: Plan, console: Console, top: int = 8) -> None:
    _print_model(plan, console)
    _print_verdict(plan, console)
    if plan.chosen:
        _print_memory(plan, plan.chosen.trainer, console)
        _print_engines(plan, console)
    if plan.phases:
        _print_time(plan, console)
        _print_advice(plan, console)
    _print_ranking(plan, console, top)
    console.print("\nAssumptions", style="bold")
    for line in plan.assumptions:
        console.print(f"· {line}")


def _print_model(plan: Plan, console: Console) -> None:
    p, shape = plan.parameters, plan.shape
    active = f", {p.active / 1e9:.2f} B active per token" if shape.is_moe else ""
    console.print(
        f"{shape.architecture}, {shape.layers} layers × {shape.hidden}, vocabulary {shape.vocab}: "
        f"{p.total:,} parameters ({p.total / 1e9:.2f} B{active})"
    )


def _print_verdict(plan: Plan, console: Console) -> None:
    gpus = f"{plan.cluster.gpus} × {plan.cluster.gpu.name}"
    layout = layout_name(plan.layout, plan.cluster.trainer_gpus)
    if plan.fits and plan.chosen:
        used, limit = plan.chosen.trainer.fullest.total / GIB, plan.limit / GIB
        engine = plan.chosen.engine
        with_engines = f" with engines of TP{engine.tensor_parallel}" if engine else ""
        line = f"FITS on {gpus} as {layout}{with_engines}: the fullest rank uses {used:.1f} of {limit:.1f} GiB"
        console.print(line, style="bold green")
        if used > (1 - MARGIN) * limit:
            console.print(
                f"Tight: less than {MARGIN:.0%} of the memory is free, which is as much as a predicted peak may be off",
                style="yellow",
            )
        return
    console.print(f"DOES NOT FIT on {gpus} as {layout}", style="bold red")
    for problem in plan.problems:
        console.print(f"· {problem}")
    if plan.changes is None:
        console.print("No layout fits: use more or larger GPUs, shorter sequences, or a smaller model")
    else:
        flags = " ".join(f"--set {item}" for item in as_settings(plan.changes))
        console.print(f"Smallest change that fits: {flags}")


def make_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table


def print_table(table: Table, console: Console) -> None:
    """Prints an empty line and the table, without the trailing spaces that rich adds to titles."""
    with console.capture() as capture:
        console.print(table)
    console.print()
    console.file.write("\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n")


def _print_memory(plan: Plan, trainer: Candidate, console: Console) -> None:
    memory, policy = trainer.fullest, trainer.memory
    stage = f" (pipeline stage {memory.stage})" if trainer.policy.pipeline_parallel > 1 else ""
    table = make_table(f"Trainer memory of the fullest rank{stage}", "part", ">GiB", "what")
    for part, size in memory.parts.items():
        table.add_row(part, f"{size / GIB:.2f}", NOTES[part])
    table.add_section()
    table.add_row("total", f"{memory.total / GIB:.2f}", f"of {plan.limit / GIB:.1f} GiB")
    if trainer.critic is not None:
        for name, while_it_trains in (("policy", policy), ("critic", trainer.critic)):
            table.add_row(name, f"{while_it_trains.total / GIB:.2f}", f"all of it, while the {name} trains")
    print_table(table, console)


def _print_engines(plan: Plan, console: Console) -> None:
    chosen = plan.chosen.engine if plan.chosen else None
    if chosen is None:
        return
    where = "on separate GPUs"
    if plan.cluster.colocated and not chosen.external:
        where = "on the trainer's GPUs"
    title = f"Engines {where}: GiB per GPU (KV cache: {chosen.longest:,} tokens at least)"
    table = make_table(
        title, "size", ">servers", ">weights", ">KV cache", ">KV tokens a server", ">running", ">at full speed"
    )
    for choice in plan.engines:
        engine = choice.engine
        if engine is None:
            continue
        mark = " ←" if engine.tensor_parallel == chosen.tensor_parallel else ""
        seconds = f"{choice.at_full_speed:,.0f} s" if engine.fits else "does not fit"
        table.add_row(
            f"TP{engine.tensor_parallel}{mark}", str(engine.servers), f"{engine.weights / GIB:.2f}",
            f"{engine.kv_room / GIB:.2f}", f"{engine.kv_tokens:,}", str(engine.running) if engine.fits else "", seconds,
        )  # fmt: skip
    print_table(table, console)


def _print_time(plan: Plan, console: Console) -> None:
    table = make_table("Time of one step", "phase", ">seconds", ">share", "from")
    total = plan.step_seconds
    for phase in plan.phases:
        table.add_row(phase.name, f"{phase.seconds:,.1f}", f"{phase.seconds / total:.0%}", phase.detail)
    table.add_section()
    low, high = plan.likely
    table.add_row(
        "step", f"{total:,.1f}", "", f"trains on {plan.work.samples} samples; likely {low:,.0f} to {high:,.0f} s"
    )
    print_table(table, console)
    low, high = (plan.days * factor for factor in LIKELY)
    console.print(
        f"The run: {plan.steps:,} steps (trainer.steps), {plan.gpu_hours:,.0f} GPU-hours, {plan.days:.1f} days (likely "
        f"{low:.1f} to {high:.1f})"
    )


def _print_advice(plan: Plan, console: Console) -> None:
    if not plan.advice:
        return
    table = make_table("What to change for time (--set)", ">step", ">saves", "change", "why")
    for advice in plan.advice:
        saved = 1 - advice.seconds / plan.step_seconds
        settings = "\n".join(as_settings(advice.changes))
        table.add_row(f"{advice.seconds:,.1f} s", f"{saved:.0%}", settings, advice.why)
    print_table(table, console)


def _print_ranking(plan: Plan, console: Console, top: int) -> None:
    if not plan.ranking:
        return
    world = plan.cluster.trainer_gpus
    table = make_table(
        f"The fastest of {len(plan.ranking)} trainer layouts that fit {world} GPUs beside the engine",
        "layout", ">micro-batch", "recompute", ">head chunk", ">GiB", ">train + log-probs",
    )  # fmt: skip
    for candidate in plan.ranking[:top]:
        policy = candidate.policy
        table.add_row(
            layout_name(policy, world), f"{policy.micro_batch_tokens:,}", policy.recompute,
            f"{policy.head_chunk_tokens or 'auto'}", f"{candidate.fullest.total / GIB:.1f}",
            f"{candidate.seconds:,.1f} s",
        )  # fmt: skip
    print_table(table, console)


def print_modes(modes: list[Mode], cluster: Cluster, console: Console) -> None:
    if not modes:
        return console.print(f"No division of {cluster.gpus} × {cluster.gpu.name} between trainer and engines fits")
    table = make_table(
        "Ways to divide the GPUs, fastest first; servers with the best TP and max_running at full speed", "engines",
        ">staleness", "trainer", ">TP", ">running", ">generation", ">training", ">step",
    )  # fmt: skip
    for mode in modes:
        name = f"{mode.engine_gpus} GPUs serve" if mode.engine_gpus else "colocated"
        training = sum(mode.phases.get(name, 0.0) for name in TRAINING)
        table.add_row(
            name, str(mode.staleness), layout_name(mode.trainer.policy, cluster.gpus - mode.engine_gpus),
            str(mode.server_tensor_parallel), str(mode.max_running), f"{mode.phases['generation']:,.0f} s",
            f"{training:,.0f} s", f"{mode.seconds:,.0f} s",
        )  # fmt: skip
    print_table(table, console)
    used = {"separate" if mode.engine_gpus else "colocated": mode.transport for mode in modes}
    console.print("Weights: " + ", ".join(f"{transport} to {name} engines" for name, transport in used.items()))


def plan_json(plan: Plan, top: int = 8) -> dict[str, Any]:
    """The plan as JSON values, in bytes and seconds."""
    p = plan.parameters
    return {
        "fits": plan.fits,
        "problems": plan.problems,
        "smallest_change": plan.changes,
        "parameters": {"total": p.total, "active": p.active, "embedding": p.embedding, "output": p.output},
        "gpu": plan.cluster.gpu.name,
        "gpus": plan.cluster.gpus,
        "layout": layout_name(plan.layout, plan.cluster.trainer_gpus),
        "limit_bytes": plan.limit,
        "trainer_bytes": None if plan.chosen is None else _memory_json(plan.chosen.trainer),
        "engine": None if plan.chosen is None else _engine_json(plan.chosen.engine),
        "phases": {phase.name: phase.seconds for phase in plan.phases},
        "step_seconds": plan.step_seconds,
        "likely_seconds": plan.likely,
        "days": plan.days,
        "gpu_hours": plan.gpu_hours,
        "advice": [asdict(advice) for advice in plan.advice],
        "layouts": [_candidate_json(c, plan.cluster.trainer_gpus) for c in plan.ranking[:top]],
        "assumptions": plan.assumptions,
    }


def _memory_json(candidate: Candidate) -> dict[str, Any]:
    memory = candidate.fullest
    critic = {} if candidate.critic is None else {"critic": candidate.critic.total}
    return {"stage": memory.stage, **memory.parts, "total": memory.total, **critic}


def _engine_json(engine: EnginePlan | None) -> dict[str, Any] | None:
    if engine is None:
        return None
    return {
        "servers": engine.servers, "tensor_parallel": engine.tensor_parallel, "weights_bytes": engine.weights,
        "kv_bytes": engine.kv_room, "kv_tokens": engine.kv_tokens, "running": engine.running, "fits": engine.fits,
    }  # fmt: skip


def _candidate_json(candidate: Candidate, world: int) -> dict[str, Any]:
    layout = {key: getattr(candidate.policy, key) for key in KEYS[:8]}
    more = {"data_parallel": world // candidate.policy.model_ranks, "bytes": candidate.fullest.total}
    return layout | more | {"seconds": candidate.seconds}
