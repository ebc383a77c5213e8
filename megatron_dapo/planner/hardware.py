"""GPUs and the links between them, from the vendors' data sheets. All values are per GPU and direction."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from megatron_dapo.config.trainer import SlurmConfig
from megatron_dapo.errors import UserError
from megatron_dapo.planner.assumptions import GIB


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_gib: float  # the total that CUDA reports, not the nominal size
    tflops: float  # dense bf16
    bandwidth: float  # device memory, TB/s
    nvlink: float  # GB/s to GPUs of the same node (PCIe where there is no NVLink)
    network: float = 50.0  # GB/s to other nodes: one 400 Gbit/s port for each GPU
    per_host: int = 8  # GPUs of one operating system; NVLink may connect more

    @property
    def memory(self) -> float:
        """Bytes."""
        return self.memory_gib * GIB

    @property
    def traffic_cost(self) -> float:
        """Time of memory traffic beside that of products, relative to an H200, on which the planner's were measured."""
        return self.tflops / self.bandwidth / (989 / 4.8)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100", 79.1, 989, 3.35, 450),
        Gpu("h800", 79.1, 989, 3.35, 200),
        Gpu("h200", 139.8, 989, 4.8, 450),
        Gpu("h20", 95.6, 148, 4.0, 450),
        Gpu("b200", 178.3, 2250, 8.0, 900),
        Gpu("gb200", 184.0, 2500, 8.0, 900, per_host=4),
        Gpu("a100", 79.1, 312, 2.04, 300, 25),
        Gpu("a100-40g", 39.4, 312, 1.56, 300, 25),
        Gpu("a800", 79.1, 312, 2.04, 200, 25),
        Gpu("l40s", 44.4, 362, 0.86, 32, 12.5),
        Gpu("l4", 22.0, 121, 0.3, 32, 12.5),
        Gpu("rtx-4090", 23.5, 165, 1.01, 32, 12.5),
    )
}


def find_gpu(name: str, memory_gib: float | None = None) -> Gpu:
    """The GPU of this name; `memory_gib` replaces its memory size (a MIG slice, another board)."""
    key = name.lower().replace("_", "-").replace("nvidia-", "")
    if key not in GPUS:
        near = difflib.get_close_matches(key, GPUS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise UserError(f"--gpu: unknown GPU {name!r}{hint} Known: {', '.join(GPUS)}; name one that is like it")
    gpu = GPUS[key]
    return gpu if memory_gib is None else replace(gpu, memory_gib=memory_gib)


@dataclass(frozen=True, slots=True)
class Cluster:
    """`engine_gpus` of the `gpus` only serve; 0: the engines share the trainer's GPUs (colocated)."""

    gpu: Gpu
    gpus: int
    gpus_per_node: int = 8
    engine_gpus: int = 0

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise UserError(f"--gpus is {self.gpus}: at least one GPU is needed")
        if not 0 <= self.engine_gpus < self.gpus:
            raise UserError(
                f"{self.engine_gpus} of {self.gpus} GPUs would only run engines (--engine-gpus, or else "
                "slurm.engine_nodes × GPUs per node), which leaves none for the trainer; 0 means that engines and "
                "trainer share all GPUs"
            )

    @property
    def colocated(self) -> bool:
        return self.engine_gpus == 0

    @property
    def trainer_gpus(self) -> int:
        return self.gpus - self.engine_gpus

    def wire(self, span: int) -> float:
        """Bytes per second between the GPUs of a group that spans `span` consecutive ranks."""
        return (self.gpu.nvlink if span <= self.gpus_per_node else self.gpu.network) * 1e9

    def wire_of_group(self, ranks: int, stride: int) -> float:
        """The same of a group of every `stride`-th rank. A ring enters a node once, so its members there share their
        network ports."""
        if ranks * stride <= self.gpus_per_node:
            return self.gpu.nvlink * 1e9
        return min(self.gpu.nvlink, self.gpu.network * max(1, self.gpus_per_node // stride)) * 1e9


def cluster_of(
    slurm: SlurmConfig,
    gpu: str,
    gpus: int | None = None,
    gpus_per_node: int | None = None,
    engine_gpus: int | None = None,
    gpu_memory: float | None = None,
) -> Cluster:
    """The GPUs that the flags of `plan` and `simulate` name; where they name none, those of the Slurm job."""
    per_node = gpus_per_node or slurm.gpus_per_node or 8
    serving = slurm.engine_nodes * per_node if engine_gpus is None else engine_gpus
    return Cluster(find_gpu(gpu, gpu_memory), gpus or slurm.nodes * per_node, per_node, serving)
