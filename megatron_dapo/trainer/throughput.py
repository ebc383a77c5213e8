"""How fast a step trained and how much memory it took: MFU, tokens per second and GPU, memory of rank 0; a profiler.

MFU is the model's FLOPs over the FLOPs that the GPUs could do in the time of the updates. A token costs 6 FLOPs for
each matrix weight that it uses, output layer included, and the causal attention; recomputation does not count. The
peak is that of dense bf16 in the vendor's data sheet, so MFU exists on GPUs of `planner/hardware.py` only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_dapo.config import Config, ModelShape
from megatron_dapo.planner.assumptions import GIB
from megatron_dapo.planner.hardware import GPUS
from megatron_dapo.planner.parameters import count_parameters
from megatron_dapo.planner.timing import attention_flops
from megatron_dapo.policy.batch import Ints


def update_flops(shape: ModelShape, lengths: Ints) -> float:
    """Forward and backward FLOPs of one pass over sequences of these lengths, prompts included. [samples]"""
    weights = count_parameters(shape).layer_matrices_active + shape.vocab * shape.hidden
    per_length = attention_flops(shape, 1.0)  # attention grows with the square of the length
    tokens, squares = float(lengths.sum()), float((lengths.astype(float) ** 2).sum())
    return 6 * weights * tokens + 3 * per_length * squares


def peak_flops(device_name: str) -> float | None:
    """Of a GPU, by the name that CUDA reports ("NVIDIA H200"); None if it is unknown."""
    words = f"-{'-'.join(device_name.lower().replace('-', ' ').split())}-"
    found = [gpu.tflops * 1e12 for name, gpu in GPUS.items() if f"-{name}-" in words]
    return found[0] if found else None


def throughput_metrics(shape: ModelShape, lengths: Ints, seconds: float, ranks: int) -> dict[str, float]:
    """`lengths`: of all samples of the step. `seconds`: of its updates. A rank is a GPU; on a CPU it is a process."""
    tokens = float(lengths.sum())
    found = {"train/batch_tokens": tokens}
    if seconds > 0:
        found["train/tokens_per_second_per_gpu"] = tokens / seconds / ranks
    peak = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    if peak and seconds > 0:
        found["train/mfu"] = update_flops(shape, lengths) / (seconds * ranks * peak)
    return found | memory_metrics()


def memory_metrics() -> dict[str, float]:
    """Of this process. The GPU's peak is since the last call."""
    found = {"memory/host_gib": psutil.Process().memory_info().rss / GIB}
    if torch.cuda.is_available():
        found["memory/gpu_peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        found["memory/gpu_reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
        torch.cuda.reset_peak_memory_stats()
    return found


class StepProfiler:
    """torch.profiler for the steps of `observe.profile_steps`: one trace per rank, for ui.perfetto.dev. `begin` and
    `end` are called around the training of each step, on every rank."""

    def __init__(self, config: Config, rank: int) -> None:
        observe = config.observe
        self._steps = observe.profile_steps if rank in observe.profile_ranks else []
        name = f"rank_{rank}_steps_{'_'.join(map(str, self._steps))}.json.gz"
        self.file = Path(config.trainer.run_dir) / "profiles" / name
        self._profile: Any = None

    def begin(self, step: int) -> None:
        if self._steps and self._profile is None and self._steps[0] <= step <= self._steps[1]:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profile = torch.profiler.profile(activities=kinds, record_shapes=True)
            self._profile.start()

    def end(self, step: int) -> str | None:
        """After the last update of a step. Writes the trace when the last step is done; returns what to log."""
        if self._profile is None or step < self._steps[1]:
            return None
        profile, self._profile = self._profile, None
        profile.stop()
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(self.file))
        except (OSError, RuntimeError) as error:  # a full disk does not end the run
            return f"the profile could not be written: {error}"
        return f"profile of steps {self._steps[0]} to {self._steps[1]}: {self.file}"
