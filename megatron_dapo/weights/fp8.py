"""Weights in fp8 for the engines, in the format of the published Qwen FP8 checkpoints, which SGLang serves.

The matrices of attention and MLP (also of experts) are e4m3, with one fp32 scale for each block of 128 × 128 in a
tensor `…weight_scale_inv`: value = e4m3 × scale. The largest value of a block becomes 448, the largest e4m3 number.
Embedding, output layer, norms, routers, gates, biases and gated DeltaNet layers stay as they are. The sender of weight
sync and `convert hf-to-fp8` use the same functions, so both give the same bits (tests/weights/test_fp8.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_dapo.weights.names import SCALE
from megatron_dapo.weights.tensor_spec import TensorSpec, in_flat_order

BLOCK = 128
LARGEST = 448.0  # of e4m3
DTYPE = torch.float8_e4m3fn
_SMALLEST = 1e-12  # of a block's largest value, so that a block of zeros has a scale
_ROWS = 64 * BLOCK  # rows that are computed at a time, in fp32
_QUANTISED = re.compile(
    r"\.(self_attn\.[qkvo]_proj|mlp\.(experts\.\d+\.|shared_expert\.)?(gate|up|down)_proj)\.weight$"
)


def is_quantised(name: str) -> bool:
    return _QUANTISED.search(name) is not None


def quantised_specs(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The tensors that are sent instead of these, in the order of a flat bucket."""
    found: list[TensorSpec] = []
    for spec in specs:
        if is_quantised(spec.name):
            found.append(TensorSpec(spec.name, DTYPE, spec.shape))
            found.append(TensorSpec(spec.name + SCALE, torch.float32, scale_shape(spec.shape)))
        else:
            found.append(spec)
    return in_flat_order(found)


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """One scale for each block, of which those at the end may be smaller."""
    return tuple(-(-size // BLOCK) for size in shape)


@torch.no_grad()
def quantise(weight: Tensor, out: Tensor, scales: Tensor) -> None:
    """weight [rows, columns] to `out` (e4m3) and `scales` [rows / 128, columns / 128], both rounded up."""
    columns = weight.shape[1]
    for start in range(0, weight.shape[0], _ROWS):
        part = weight[start : start + _ROWS].float()
        rows = part.shape[0]
        padded = torch.nn.functional.pad(part, (0, -columns % BLOCK, 0, -rows % BLOCK))
        blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
        scale = blocks.abs().amax(dim=(1, 3)).clamp_(min=_SMALLEST) / LARGEST
        scales[start // BLOCK : start // BLOCK + scale.shape[0]] = scale
        values = (blocks / scale[:, None, :, None]).view(padded.shape)[:rows, :columns]
        out[start : start + rows] = values.clamp_(-LARGEST, LARGEST).to(DTYPE)


def quantise_pairs(source: Iterable[tuple[str, Tensor]], target: Iterable[tuple[str, Tensor]]) -> None:
    """Fills `target`, whose tensors are the `quantised_specs` of the source's."""
    found = dict(target)
    for name, tensor in source:
        if is_quantised(name):
            quantise(tensor, found[name], found[name + SCALE])
        else:
            found[name].copy_(tensor)


def dequantise(weight: Tensor, scales: Tensor, first_row: int = 0) -> Tensor:
    """In fp32. `weight` may be some rows of the matrix, from `first_row` on."""
    rows, columns = weight.shape
    needed = scales[first_row // BLOCK : -(-(first_row + rows) // BLOCK)].float()
    skip = first_row % BLOCK
    spread = needed.repeat_interleave(BLOCK, 0)[skip : skip + rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return weight.float() * spread


def quantization_config(names: Iterable[str]) -> dict[str, Any]:
    """What config.json says about such a checkpoint. `names`: all tensors of the model."""
    kept = sorted({name.removesuffix(".weight") for name in names if name.endswith("_proj.weight") or _is_linear(name)}
                  - {name.removesuffix(".weight") for name in names if is_quantised(name)})  # fmt: skip
    return {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": kept,
    }  # fmt: skip


def _is_linear(name: str) -> bool:
    """Linear layers that keep their type, besides those that end with _proj."""
    return name == "lm_head.weight" or bool(re.search(r"\.(gate|shared_expert_gate|in_proj_\w+)\.weight$", name))
