"""Will it fit, how long will it take: parameters, memory per rank, time per phase, layouts. Imports no torch."""

from megatron_dapo.planner.activations import Layers
from megatron_dapo.planner.engine import EnginePlan, plan_engine
from megatron_dapo.planner.hardware import GPUS, Cluster, find_gpu
from megatron_dapo.planner.memory import TrainerMemory, trainer_memory
from megatron_dapo.planner.parameters import Parameters, count_parameters
from megatron_dapo.planner.plan import Plan, make_plan
from megatron_dapo.planner.workload import Workload

__all__ = [
    "GPUS", "Cluster", "EnginePlan", "Layers", "Parameters", "Plan", "TrainerMemory", "Workload", "count_parameters",
    "find_gpu", "make_plan", "plan_engine", "trainer_memory",
]  # fmt: skip
