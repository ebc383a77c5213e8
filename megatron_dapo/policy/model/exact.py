"""Forward passes with the kernels of an SGLang server (`policy.true_on_policy` on CUDA): same bits.

The kernels are in engines/sglang/in_server/megatron_dapo_kernels.py. Gradients are ordinary ones: of the torch function
that computes the same but for rounding, at the same inputs. All of it holds when a layer is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dapo.engines.sglang.in_server import megatron_dapo_kernels as kernels


class _WithGradientOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ordinary: Callable[..., Tensor], exact: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.ordinary = ordinary
        ctx.save_for_backward(*inputs)
        return exact(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            out = ctx.ordinary(*leaves)
        return None, None, *torch.autograd.grad(out, leaves, grads[0])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    def ordinary(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    return _WithGradientOf.apply(ordinary, lambda x, weight: kernels.rms_norm(x, weight, eps)[0], x, weight)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
    ordinary: Callable[..., Tensor],
) -> Tensor:
    """Of packed sequences, as `local_spec.attend_packed`; `ordinary(query, key, value)` computes the same."""

    def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return kernels.attend(query, key, value, starts, starts, longest, scale)[0]

    return _WithGradientOf.apply(ordinary, exact, query, key, value)


class _Products(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.mm.default:
            return kernels.mm(*args)
        return func(*args, **(kwargs or {}))


def _with_products(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Products():
        return forward(*args, **kwargs)


def use_exact_products(model: torch.nn.Module) -> None:
    """In the forward passes of Megatron's linear layers, whose backward passes write into gradient buffers."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module.forward = partial(_with_products, module.forward)
