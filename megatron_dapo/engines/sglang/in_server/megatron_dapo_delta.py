"""Runs inside an SGLang server: applies weight updates that contain only the elements that changed.

The server is started with `--custom-weight-loader megatron_dapo_delta.install`. One call with that load format makes
the model's `load_weights` understand tensors called `delta::…` (weights/delta.py writes them): positions of changed
elements, and the XOR of their old and new bits. A dense tensor of these bits goes through SGLang's own loader, and
every copy into a parameter becomes an XOR. So a delta reaches the right part of any parameter that the loader can fill,
fused or split over GPUs, and elements that did not change are XORed with zero.

Where one GPU holds the whole tensor, the sum of its words must be what the sender had before and has now. A difference
is an error: SGLang reports it, and the sender sends everything.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PREFIX = "delta::"
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def install(model: Any, named_tensors: Any) -> None:
    """SGLang's hook for a custom loader."""
    if hasattr(model, "load_weights_without_delta"):
        return
    full = model.load_weights_without_delta = model.load_weights
    whole = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1

    def load_weights(weights: Any, *args: Any, **kwargs: Any) -> Any:
        weights = list(weights)
        if not any(name.startswith(PREFIX) for name, _ in weights):
            return full(weights, *args, **kwargs)
        parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        for name, (spec, positions, bits) in _deltas(weights).items():
            _apply(full, parameters, name, spec, positions, bits, check=whole)
        return None

    model.load_weights = load_weights


def _deltas(weights: Any) -> dict[str, tuple[list[str], Any, Any]]:
    """By tensor: its description, positions and bits."""
    found: dict[str, dict[str, Any]] = {}
    for label, tensor in weights:
        _, kind, name, *spec = label.split("::")
        found.setdefault(name, {})[kind] = (spec, tensor)
    return {name: (parts["bits"][0], parts["positions"][1], parts["bits"][1]) for name, parts in found.items()}


def _apply(full: Any, parameters: Any, name: str, spec: Any, positions: Any, bits: Any, *, check: bool) -> None:
    dtype, shape, before, after = spec
    size = [int(n) for n in shape.split("x")] if shape else []
    dense = torch.zeros(torch.Size(size).numel(), dtype=bits.dtype, device=bits.device)
    dense[positions.long()] = bits
    with _XorCopies(parameters, check) as copies:
        full([(name, dense.view(getattr(torch, dtype)).view(size))])
    if not copies.count:
        raise RuntimeError(f"{name}: the model has no parameter for it")
    if check and (copies.before, copies.after) != (int(before), int(after)):
        raise RuntimeError(
            f"{name}: its sum was {copies.before} and is {copies.after}, but the sender had {before} and has {after}"
        )


class _XorCopies(TorchDispatchMode):
    """Copies into parameters are XORs meanwhile."""

    def __init__(self, parameters: Any, check: bool) -> None:
        super().__init__()
        self._parameters, self._check = parameters, check
        self.before = self.after = self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not torch.ops.aten.copy_.default or args[0].untyped_storage().data_ptr() not in self._parameters:
            return function(*args, **kwargs)
        target, source = args[0], args[1]
        if target.dtype != source.dtype:
            raise RuntimeError(f"the engine's parameter is {target.dtype}, the delta {source.dtype}")
        words = WORDS[target.element_size()]
        view, bits = target.view(words), source.to(target.device).view(words)
        if self._check:
            self.before += int(view.sum(dtype=torch.int64))
        torch.bitwise_xor(view, bits.expand_as(view), out=view)
        if self._check:
            self.after += int(view.sum(dtype=torch.int64))
        self.count += 1
        return target
