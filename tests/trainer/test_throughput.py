"""MFU and memory: hand-computed FLOPs, GPU names as CUDA reports them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from workplace import MODELS

from megatron_dapo.config import ModelShape
from megatron_dapo.trainer import throughput, watchdog

SHAPE = ModelShape.from_hf(MODELS["models/Qwen2.5-1.5B"])


def test_flops_grow_with_tokens_and_with_the_square_of_lengths():
    layer = 2 * 1536 * 1536 + 2 * 1536 * 256 + 3 * 1536 * 8960  # queries and output, keys and values, MLP
    layer += 1536 + 2 * 256  # the planner counts the biases, too
    weights = 28 * layer + 151936 * 1536
    attention = 3 * 2 * 28 * 12 * 128  # forward and backward; QK and PV, over half of the length on average
    assert throughput.update_flops(SHAPE, np.array([10, 30])) == 6 * weights * 40 + attention * (100 + 900)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [("NVIDIA H200", 989), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA A100-SXM4-40GB", 312), ("NVIDIA L40S", 362),
     ("NVIDIA B200", 2250), ("NVIDIA GeForce RTX 4090", 165), ("NVIDIA H20", 148),
     ("NVIDIA L40", None), ("Tesla T4", None)],
)  # fmt: skip
def test_the_peak_of_a_gpu_is_found_by_its_name(name, tflops):
    found = throughput.peak_flops(name)
    assert found == (tflops * 1e12 if tflops else None)


def test_metrics_of_a_step(monkeypatch):
    lengths = np.array([100, 300])
    found = throughput.throughput_metrics(SHAPE, lengths, 2.0, ranks=4)
    assert found["train/batch_tokens"] == 400 and found["train/tokens_per_second_per_gpu"] == 50
    assert "train/mfu" not in found and found["memory/host_gib"] > 0.01, "no GPU, no MFU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    for name in ("max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: 3 * 2**30)
    found = throughput.throughput_metrics(SHAPE, lengths, 2.0, ranks=4)
    assert found["train/mfu"] == pytest.approx(throughput.update_flops(SHAPE, lengths) / (2.0 * 4 * 989e12))
    assert found["memory/gpu_peak_gib"] == 3.0
    assert "train/mfu" not in throughput.throughput_metrics(SHAPE, lengths, 0.0, ranks=4), "every update was skipped"


class NVML:
    """The functions of the library that are called, with their return codes."""

    def __init__(self, failing=""):
        self.failing = failing

    def __getattr__(self, name):
        def function(*arguments):
            if name == self.failing:
                return 3
            if name == "nvmlDeviceGetHandleByUUID":
                assert arguments[0] == b"GPU-1234"
            if name == "nvmlDeviceGetMemoryInfo":
                arguments[1][0], arguments[1][2] = 80, 60
            if name == "nvmlDeviceGetUtilizationRates":
                arguments[1][0] = 37
            return 0

        return function


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ("", {"memory_used_bytes": 60.0, "memory_total_bytes": 80.0, "utilization_ratio": 0.37}),
        ("nvmlDeviceGetUtilizationRates", {"memory_used_bytes": 60.0, "memory_total_bytes": 80.0}),
        ("nvmlInit_v2", {}),
        ("no library", {}),
    ],
)
def test_the_status_of_a_gpu_comes_from_nvml(failing, expected, monkeypatch):
    def load(name):
        if failing == "no library":
            raise OSError(name)
        return NVML(failing)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    monkeypatch.setattr(watchdog.ctypes, "CDLL", load)
    assert watchdog.gpu_status() == expected
