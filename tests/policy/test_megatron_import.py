"""Megatron-Core is imported without torch's compiler and wandb where there is no CUDA, and nothing else notices. And a
plain run imports no more than it needs."""

import os
import subprocess
import sys

import pytest
import torch

from megatron_dapo.policy.megatron import importing
from megatron_dapo.policy.megatron.importing import MegatronFinder, _leave_as_is, _without

CHECK = """
import gc, sys
gc.disable()  # a tenth of the time of these imports
import torch
import megatron_dapo.trainer.loop, megatron_dapo.trainer.rollout_driver, megatron.core.optimizer.clip_grads
from megatron.core.fusions.fused_bias_swiglu import swiglu
from megatron_dapo.policy.megatron.importing import MegatronFinder, _leave_as_is
assert type(swiglu).__name__ == "function" and not hasattr(swiglu, "_torchdynamo_orig_callable"), swiglu
assert torch.compile is not _leave_as_is, "torch.compile is not the original again"
assert not any(isinstance(finder, MegatronFinder) for finder in sys.meta_path)
rare = [name for name in sys.modules if name.endswith((".teacher", ".openai_endpoint", ".sandbox"))]
assert not rare, f"a plain run imports {rare}"
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA everything is imported")
def test_megatrons_small_functions_are_not_compiled_and_libraries_that_need_a_gpu_not_used(tmp_path):
    """In a new process: another test may have imported Megatron-Core by itself."""
    for name in ("transformer_engine", "apex", "amp_C"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('its kernels need a GPU')")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path[1:]])}
    command = [sys.executable, "-W", "ignore", "-c", CHECK]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_decorator_with_and_without_options_leaves_the_function_as_it_is():
    def function():
        pass

    assert _leave_as_is(function) is function and _leave_as_is(dynamic=True)(function) is function


def test_a_module_is_missing_only_meanwhile_and_only_if_it_was_not_there():
    name = "colorsys"  # of the standard library, and nobody needs it
    sys.modules.pop(name, None)
    with _without(name), pytest.raises(ImportError):
        import colorsys
    import colorsys

    with _without(name):
        import colorsys as again
    assert again is colorsys


def test_it_is_installed_once_and_not_after_megatron(monkeypatch):
    import megatron.core  # noqa: F401

    before = list(sys.meta_path)
    importing.install()
    assert sys.meta_path == before
    monkeypatch.delitem(sys.modules, "megatron.core")
    monkeypatch.setattr(sys, "meta_path", list(before))
    importing.install()
    importing.install()
    assert [type(finder) for finder in sys.meta_path].count(MegatronFinder) == 1
