"""`doctor` looks for flash-linear-attention where the model has gated DeltaNet layers."""

import json

import pytest
import transformers

from megatron_dapo.config import parse_config
from megatron_dapo.doctor import gpu
from megatron_dapo.doctor.check import CommandResult
from megatron_dapo.doctor.command import probes


def says(*result):
    return lambda command, seconds=0, environment=None: CommandResult(*result)


@pytest.mark.parametrize(
    ("cuda", "version", "status", "words"),
    [
        (False, "", "ok", "no GPU"),
        (True, "0.4.1", "ok", "flash-linear-attention 0.4.1"),
        (True, "", "warn", "run in torch, which is slower"),
    ],
)
def test_kernels_of_gated_delta_net(cuda, version, status, words):
    check = gpu.delta_rule(says(0, json.dumps({"cuda": cuda, "version": version})))
    assert check.status == status and words in check.found and bool(check.remedy) == (status != "ok")


def test_a_broken_flash_linear_attention_fails():
    check = gpu.delta_rule(says(1, "", "ImportError: no triton"))
    assert check.status == "fail" and "does not import: ImportError: no triton" in check.found and check.remedy


def test_the_probe_runs_on_this_machine():
    assert gpu.delta_rule().status in ("ok", "warn")


@pytest.mark.parametrize(("kind", "expected"), [("Qwen3Next", True), ("Qwen3", False)])
def test_only_a_model_with_such_layers_is_checked(kind, expected, tmp_path):
    config = getattr(transformers, f"{kind}Config")(architectures=[f"{kind}ForCausalLM"])
    config.save_pretrained(tmp_path)
    found = probes(parse_config({"policy": {"model": str(tmp_path)}}), named=True)
    assert ("delta rule" in {probe.name for probe in found}) == expected
