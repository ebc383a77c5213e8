"""Megatron-Core is imported without torch's compiler and wandb where there is no CUDA, and nothing else notices."""

import subprocess
import sys

import pytest
import torch

from megatron_dapo.policy.megatron import importing
from megatron_dapo.policy.megatron.importing import MegatronFinder, _leave_as_is, _without

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA everything is imported")


CHECK = """
import sys, torch
import megatron_dapo.policy.policy
from megatron.core.fusions.fused_bias_swiglu import swiglu
from megatron_dapo.policy.megatron.importing import MegatronFinder, _leave_as_is
assert type(swiglu).__name__ == "function" and not hasattr(swiglu, "_torchdynamo_orig_callable"), swiglu
assert torch.compile is not _leave_as_is, "torch.compile is not the original again"
assert not any(isinstance(finder, MegatronFinder) for finder in sys.meta_path)
"""


@without_cuda
def test_megatrons_small_functions_are_not_compiled():
    """In a new process: another test may have imported Megatron-Core by itself."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", CHECK], capture_output=True, text=True)
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
