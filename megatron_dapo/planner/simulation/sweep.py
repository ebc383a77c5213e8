"""Simulations of one configuration, or of all combinations of several values of its settings.

A key is a dotted key of the configuration, or `engine_gpus`: the GPUs that only run engines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from megatron_dapo.config import Config, ModelShape, load_config
from megatron_dapo.errors import UserError
from megatron_dapo.planner.engine import fleet_of, plan_engine
from megatron_dapo.planner.generation import part_of
from megatron_dapo.planner.hardware import Cluster
from megatron_dapo.planner.plan import shared_gpu
from megatron_dapo.planner.search import Task, judge, why_illegal
from megatron_dapo.planner.simulation.engine import SimulationError, from_run
from megatron_dapo.planner.simulation.run import Setting, Simulation, simulate
from megatron_dapo.planner.step import step_phases
from megatron_dapo.planner.workload import Workload

SPLIT = "engine_gpus"


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the flags of the command say."""

    config: str | None
    settings: list[str]
    shape: ModelShape
    cluster: Cluster
    mfu: float
    mean_prompt: int | None = None
    mean_response: int | None = None
    kept: float | None = None
    sigma: float | None = None
    run: str | None = None  # a run directory, for lengths and yield
    steps: int = 6
    seed: int = 0
    whole: bool = False  # simulate every server, even of a large fleet


@dataclass(frozen=True, slots=True)
class Variant:
    """One combination of a sweep. `problem`: why it cannot be simulated."""

    values: dict[str, str]
    simulation: Simulation | None
    parts: int = 1
    problem: str = ""


def parse_sweep(texts: list[str]) -> dict[str, list[str]]:
    """`key=a,b,c` of every --sweep."""
    found: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not values:
            raise SimulationError(f"--sweep {text}: expected KEY=VALUE,VALUE, for example rollout.max_staleness=0,1")
        found[key] = values.split(",")
    return found


def run_sweep(inputs: Inputs, keys: dict[str, list[str]]) -> list[Variant]:
    return [_variant(inputs, dict(zip(keys, values, strict=True))) for values in product(*keys.values())]


def _variant(inputs: Inputs, values: dict[str, str]) -> Variant:
    settings = [f"{key}={value}" for key, value in values.items() if key != SPLIT]
    cluster = inputs.cluster
    try:
        config = load_config(inputs.config, [*inputs.settings, *settings])
        if SPLIT in values:
            cluster = replace(cluster, engine_gpus=int(values[SPLIT]))
        setting, parts = make_setting(inputs, config, cluster)
    except UserError as error:
        if not values:
            raise
        return Variant(values, None, problem=str(error))
    return Variant(values, simulate(setting, inputs.steps, inputs.seed), parts)


def make_setting(inputs: Inputs, config: Config, cluster: Cluster) -> tuple[Setting, int]:
    """What to simulate, and in how many equal parts the fleet was divided."""
    if config.rollout.engine != "sglang":
        raise SimulationError(f"rollout.engine is {config.rollout.engine}: only SGLang servers are simulated")
    work = Workload.of(config, inputs.mean_prompt, inputs.mean_response, inputs.kept, inputs.sigma)
    if inputs.run:
        work = from_run(inputs.run, work)
    task = Task(inputs.shape, work, cluster, inputs.mfu, "te", *shared_gpu(config, cluster))
    if reason := why_illegal(task, config.policy):
        raise SimulationError(reason)
    engine = plan_engine(task.shape, config.rollout, cluster, work, task.kept)
    if not engine.fits or not engine.servers:
        raise SimulationError(f"an engine of {engine.tensor_parallel} GPUs does not fit; see megatron-dapo plan")
    fleet = fleet_of(task.shape, engine, config.rollout, cluster)
    phases = step_phases(task, config.rollout, config.policy, judge(task, config.policy).memory, engine, None)
    seconds: dict[str, float] = {phase.name: phase.seconds for phase in phases}
    sync = seconds.pop("weight sync")
    staleness: int = 0 if cluster.colocated else config.rollout.max_staleness
    parts = 1 if inputs.whole else part_of(work, fleet)
    work = replace(work, prompts=work.prompts // parts)
    fleet = replace(fleet, servers=fleet.servers // parts)
    return Setting(config.rollout, work, fleet, sum(seconds.values()), sync, staleness), parts
