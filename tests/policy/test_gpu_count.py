"""Settings that keep CUDA uninitialized while Megatron is imported, with a stand-in for nvidia-smi."""

import importlib.util
import os

import pytest

from megatron_dapo.policy.megatron.importing import gpu_count, keep_cuda_uninitialized


@pytest.fixture
def two_gpus(tmp_path, monkeypatch):
    script = tmp_path / "nvidia-smi"
    script.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        "  -L) echo 'GPU 0: NVIDIA H200'; echo 'GPU 1: NVIDIA H200';;\n"
        "  --query-gpu=compute_cap) echo 9.0; echo 9.0;;\n"
        "esac\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "")
    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST")


def test_flashinfer_is_told_the_compute_capability(two_gpus, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "flashinfer" else None)
    keep_cuda_uninitialized()
    assert os.environ["FLASHINFER_CUDA_ARCH_LIST"] == "9.0"


def test_a_list_of_the_user_is_kept(two_gpus, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "12.0f")
    keep_cuda_uninitialized()
    assert os.environ["FLASHINFER_CUDA_ARCH_LIST"] == "12.0f"


def test_gpus_are_counted_without_torch(two_gpus, monkeypatch):
    assert gpu_count() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,-1")
    assert gpu_count() == 1
