"""Published runs of other systems, and what the planner predicts for them.

    python benchmarks/published.py

`published_runs.json` has their set-ups, measured seconds and sources. A prediction uses the same functions and the same
constants (`assumptions.py`) as a plan; the engines are vLLM where the run used vLLM. Differences that the
planner does not model (other trainers' kernels, reward computation, data loading) remain in the ratio. No constant was
fitted to the runs that are marked as unfitted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_dapo.arguments import table_console
from megatron_dapo.config import ModelShape
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.config.rollout import RolloutConfig, SamplerConfig, ServerConfig, WeightTransportConfig
from megatron_dapo.planner import assumptions
from megatron_dapo.planner.assumptions import DEFAULT_MFU
from megatron_dapo.planner.engine import EnginePlan, plan_engine, weight_bytes
from megatron_dapo.planner.generation import Fleet, Generation, generate
from megatron_dapo.planner.hardware import Cluster, find_gpu
from megatron_dapo.planner.memory import library_bytes
from megatron_dapo.planner.parameters import count_parameters
from megatron_dapo.planner.plan import Phase, step_phases, step_seconds
from megatron_dapo.planner.report import make_table, print_table
from megatron_dapo.planner.search import Task, judge
from megatron_dapo.planner.server_model import decode_model
from megatron_dapo.planner.timing import pass_time
from megatron_dapo.planner.workload import Workload

# Other systems, from gathered parameters to engines: 14 and 20 GB/s (verl, H20), 23 GB/s (miles, H100).
PEER_BROADCAST_BYTES_PER_SECOND = 20e9
PEER_PAUSE_SECONDS = 0.3  # besides the transfer; assumed
# Besides its phases, in a step of another system whose engines and trainer take turns: wake-ups, rewards, moving the
# batch. Fitted to NeMo-RL's five such steps on H100.
PEER_TURN_SECONDS = 25.0
PEER_IPC_BYTES_PER_SECOND = 18.6e9  # tensor by tensor; measured here before buckets were flat: 3.1 GB in 0.166 s
WITHIN = 0.75, 1.33  # a prediction divided by the published seconds


@dataclass(frozen=True, slots=True)
class Comparison:
    name: str
    set_up: str
    published: float
    predicted: float
    parts: dict[str, float]
    source: str
    recipe: str
    unfitted: bool

    @property
    def ratio(self) -> float:
        return self.predicted / self.published

    @property
    def within(self) -> bool:
        return WITHIN[0] <= self.ratio <= WITHIN[1]


def compare_all() -> list[Comparison]:
    shapes = published_shapes()
    return [compare(run, shapes[run["model"]]) for run in _read()["runs"]]


def published_shapes() -> dict[str, ModelShape]:
    return {name: _shape(sizes) for name, sizes in _read()["models"].items()}


def _read() -> Any:
    return json.loads(Path(__file__).with_name("published_runs.json").read_text(encoding="utf-8"))


def _shape(sizes: dict[str, Any]) -> ModelShape:
    kind = "qwen3_moe" if "experts" in sizes else "qwen3"
    return ModelShape(
        architecture=kind, max_positions=40960, rope_theta=1e6, norm_eps=1e-6, tied_embeddings=False, qkv_bias=False,
        qk_norm=True, **sizes,
    )  # fmt: skip


def compare(run: dict[str, Any], shape: ModelShape) -> Comparison:
    predict = {"step": _step, "training": _training, "sync": _sync}[run["kind"]]
    parts, seconds = predict(run, shape)
    gpus = f"{run['gpus']} × {run['gpu']}"
    if run.get("engine_gpus"):
        gpus = f"{run['gpus'] - run['engine_gpus']} + {run['engine_gpus']} × {run['gpu']}"
    set_up = f"{run['model']}, {gpus}, {run['kind']}"
    if run.get("staleness"):
        set_up += f" {run['staleness']} off"
    if (recipe := run.get("policy", {}).get("fp8", {}).get("recipe")) is not None:
        set_up += f", {recipe} fp8"
    return Comparison(
        run["name"], set_up, run["seconds"], seconds, parts, run["source"], run["recipe"], run.get("unfitted", False)
    )


def _step(run: dict[str, Any], shape: ModelShape) -> tuple[dict[str, float], float]:
    cluster = Cluster(find_gpu(run["gpu"]), run["gpus"], run.get("gpus_per_node", 8), run["engine_gpus"])
    policy = PolicyConfig(**run["policy"])
    longest, fp8 = run["longest"] - run["mean_prompt"], policy.fp8.recipe != "none"
    work = Workload(
        run["prompts"], run["samples_per_prompt"], run["updates"], run["mean_prompt"], run["mean_response"],
        run["mean_prompt"], longest, log_prob_passes=2,
    )  # fmt: skip
    rollout = RolloutConfig(
        servers=ServerConfig(
            tensor_parallel=run["server_tensor_parallel"],
            max_running=1024,  # vLLM's default on H100
            model="fp8" if fp8 else "",
            arguments=["--mem-fraction-static", str(run["memory_fraction"])],
        ),
        sampler=SamplerConfig(oversampling=1.0, unfinished="finish"),
        weights=WeightTransportConfig(
            transport="tensor" if cluster.colocated else "distributed", keep_snapshot=False,
            quantization="fp8" if fp8 else "none",
        ),
    )  # fmt: skip
    kept = library_bytes(cluster.trainer_gpus) if cluster.colocated else 0.0
    task = Task(shape, work, cluster, DEFAULT_MFU, kept=kept)
    engine = plan_engine(shape, rollout, cluster, work, kept)
    generation = _generation(rollout, cluster, shape, work, engine, run["staleness"])
    phases = step_phases(task, rollout, judge(task, policy), engine, generation)
    phases = [replace(p, seconds=_peer_sync(shape, cluster)) if p.name == "weight sync" else p for p in phases]
    if cluster.colocated:
        phases.append(Phase("turns", PEER_TURN_SECONDS, ""))
    return {phase.name: phase.seconds for phase in phases}, step_seconds(phases, cluster, run["staleness"])


def _generation(
    rollout: RolloutConfig, cluster: Cluster, shape: ModelShape, work: Workload, engine: EnginePlan, staleness: int
) -> Generation:
    decode = decode_model(shape, cluster, engine.tensor_parallel, "vllm", weight_bytes=weight_bytes(rollout))
    fleet = Fleet(engine.servers, decode, engine.kv_tokens, rollout.servers.max_running)
    generation = generate(work, rollout.sampler, fleet)
    if staleness > 1:  # several batches are in flight: the engines are never without work
        seconds = generation.tokens / fleet.full_speed(work)
        generation = Generation(seconds, generation.tokens, generation.wasted, seconds)
    return generation


def _training(run: dict[str, Any], shape: ModelShape) -> tuple[dict[str, float], float]:
    length, samples = run["length"], run["samples"]
    work = Workload(samples, 1, 1, 1, length - 1, 1, length - 1)
    cluster = Cluster(find_gpu(run["gpu"]), run["gpus"], run.get("gpus_per_node", 8))
    policy = PolicyConfig(**run["policy"])
    time = pass_time(shape, policy, cluster, work, run["gpus"], DEFAULT_MFU, train=True)
    names = ("arithmetic", "bubble", "tensor", "context", "expert", "data")
    # Megatron's overlap_moe_expert_parallel_comm, which this project's trainer does not have: the exchange of one
    # micro-batch runs beside the products of another.
    hidden = min(time.expert, time.arithmetic) if run.get("exchange_hidden") else 0.0
    return {name: getattr(time, name) for name in names}, time.total - hidden


def _sync(run: dict[str, Any], shape: ModelShape) -> tuple[dict[str, float], float]:
    seconds = _peer_sync(shape, Cluster(find_gpu(run["gpu"]), run["gpus"], 8, run["engine_gpus"]))
    return {"weight sync": seconds}, seconds


def _peer_sync(shape: ModelShape, cluster: Cluster) -> float:
    """Other systems gather to one rank, and send tensor by tensor."""
    network = cluster.wire(cluster.gpus) * assumptions.WIRE_SHARE
    broadcast = min(network, PEER_BROADCAST_BYTES_PER_SECOND)
    rate = PEER_IPC_BYTES_PER_SECOND if cluster.colocated else broadcast
    return count_parameters(shape).total * 2 / rate + PEER_PAUSE_SECONDS


def summary(found: list[Comparison]) -> str:
    low, high = WITHIN
    unfitted = [item for item in found if item.unfitted]
    good, new = sum(item.within for item in found), sum(item.within for item in unfitted)
    return (
        f"{good} of {len(found)} predictions are within {low} to {high} of the published time; {new} of the "
        f"{len(unfitted)} unfitted ones are."
    )


def main() -> None:
    found, console = compare_all(), table_console()
    table = make_table(
        "Published runs: seconds measured there, and predicted here", "name", "set-up", ">published", ">predicted",
        ">ratio", "predicted parts",
    )  # fmt: skip
    for item in found:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in item.parts.items() if seconds >= 0.05)
        mark = "" if item.within else " ✗"
        table.add_row(
            f"{item.name} (unfitted)" if item.unfitted else item.name, item.set_up, f"{item.published:.1f}",
            f"{item.predicted:.1f}", f"{item.ratio:.2f}{mark}", parts,
        )  # fmt: skip
    print_table(table, console)
    console.print(f"{summary(found)}\n", highlight=False)
    for item in found:
        console.print(f"· {item.name}: {item.source} ({item.recipe})", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
