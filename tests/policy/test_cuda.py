"""The same updates on CUDA and on the CPU. These tests run where there is an NVIDIA GPU."""

import os

import pytest

from megatron_dapo.policy.ranks import run_ranks
from megatron_dapo.policy.selfcheck import LayoutSpec, compare, trace_updates
from megatron_dapo.policy.visible import gpu_count

pytestmark = pytest.mark.skipif(gpu_count() == 0, reason="needs an NVIDIA GPU; this machine has none")
SINGLE = LayoutSpec.parse("single")


def without_gpu(place, model):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a forked rank that has not touched CUDA yet
    return trace_updates(place, SINGLE, 3, model)


@pytest.mark.parametrize("model", ["dense", "tied", "moe"])
def test_cuda_and_cpu_give_the_same_update(model):
    on_gpu = run_ranks(1, trace_updates, SINGLE, 3, model)[0]
    on_cpu = run_ranks(1, without_gpu, model)[0]
    difference = compare(on_gpu, on_cpu)
    assert difference.within(1e-4), difference
