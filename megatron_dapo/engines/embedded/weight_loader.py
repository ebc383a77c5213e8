"""Copies buckets of HF-named tensors into a transformers model: every tensor exactly once, or an error.

Names are those of the checkpoint on disk. transformers keeps all experts of a MoE layer in one tensor for gate/up and
one for down; checkpoints, and so the buckets, have one tensor per expert. Of a model with a vision tower it holds the
text model, which checkpoints have under `model.language_model.`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_dapo.engines.protocol import Bucket


class WeightLoader:
    """`load` and `missing` return an error message, or an empty string."""

    def __init__(self, model: Any) -> None:
        self._targets = dict(_targets(model))
        self._tied = bool(model.config.tie_word_embeddings)
        self._seen: set[str] = set()
        self.bytes = 0

    @property
    def count(self) -> int:
        return len(self._seen)

    def load(self, bucket: Bucket) -> str:
        for full_name, tensor in bucket:
            name = full_name.replace("model.language_model.", "model.", 1)
            target = self._targets.get(name)
            if target is None:
                return f"the model has no tensor {name!r}"
            if name in self._seen:
                return f"tensor {name!r} was sent twice"
            if target.shape != tensor.shape:
                return f"tensor {name!r} has shape {tuple(tensor.shape)}, expected {tuple(target.shape)}"
            with torch.no_grad():
                target.copy_(tensor)
            self._seen.add(name)
            self.bytes += tensor.numel() * tensor.element_size()
        return ""

    def missing(self) -> str:
        absent = sorted(set(self._targets) - self._seen - ({"lm_head.weight"} if self._tied else set()))
        return f"{len(absent)} tensors are missing, the first is {absent[0]!r}" if absent else ""


def _targets(model: Any) -> list[tuple[str, Tensor]]:
    """Every tensor of the model under its name in a checkpoint."""
    found: list[tuple[str, Tensor]] = []
    for name, parameter in model.state_dict(keep_vars=True).items():
        data = parameter.data
        if name.endswith(".mlp.experts.gate_up_proj"):
            prefix = name.removesuffix(".gate_up_proj")
            for index, expert in enumerate(data):
                gate, up = expert.chunk(2)
                found += [(f"{prefix}.{index}.gate_proj.weight", gate), (f"{prefix}.{index}.up_proj.weight", up)]
        elif name.endswith(".mlp.experts.down_proj"):
            prefix = name.removesuffix(".down_proj")
            found += [(f"{prefix}.{index}.down_proj.weight", expert) for index, expert in enumerate(data)]
        else:
            found.append((name, data))
    return found
