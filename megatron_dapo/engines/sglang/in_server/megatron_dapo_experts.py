"""Runs inside an SGLang server: loads runs of experts with two or three copies instead of three for each expert.

The server is started with `--custom-weight-loader megatron_dapo_experts.install`. One call with that load format makes
the model's `load_weights` understand tensors called `experts::…` (sync/shared_bucket.py describes them): n experts
of a layer, [n, 3 * rows, columns], each with its gate, up and down matrices one after the other.

SGLang has many layouts of its fused parameters: gate or up first, transposed, padded, split over GPUs. None of them is
assumed here. The first time a run arrives, its experts go through SGLang's own loader under their own names. If the
fused parameters then have bitwise what one copy would have written, later updates copy; if not, or if the experts are
spread over GPUs, they use SGLang's own loader again, and the log says why.
"""

import logging
import re
from typing import Any

import torch

PREFIX = "experts::"
FUSED = ("w13", "w2")  # SGLang's names: gate and up; down
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
log = logging.getLogger(__name__)


def install(model: Any, named_tensors: Any) -> None:
    """SGLang's hook for a custom loader."""
    if hasattr(model, "load_weights_without_runs"):
        return
    own = model.load_weights_without_runs = model.load_weights
    layers = {_layer(name): module for name, module in model.named_modules() if hasattr(module, "w13_weight")}
    # By run: why a copy does not do what SGLang's loader does, or empty.
    reasons: dict[tuple[Any, ...], str] = {}
    model.megatron_dapo_runs = reasons

    def load_weights(weights: Any, *args: Any, **kwargs: Any) -> Any:
        runs = []

        def others() -> Any:  # a checkpoint is read lazily
            for name, tensor in weights:
                if name.startswith(PREFIX):
                    runs.append((name, tensor))
                else:
                    yield name, tensor

        # A list stays one: the checksums take anything else for a checkpoint.
        rest = list(others()) if isinstance(weights, list) else others()
        result = own(rest, *args, **kwargs)
        for name, run in runs:
            _load(own, layers, reasons, name, run)
        return result

    model.load_weights = load_weights


def _layer(name: str) -> str:
    """From `layers.N.` on: what is before it differs between SGLang and checkpoints."""
    found = re.search(r"layers\.\d+\..+$", name)
    return found[0] if found else name


def _load(own: Any, layers: Any, reasons: Any, name: str, run: Any) -> None:
    _, layer, first, kind = name.split("::")
    module, key = layers.get(_layer(layer)), (name, tuple(run.shape))
    if reasons.get(key) == "":
        pairs, reason = _pairs(module, int(first), kind, run)
        if not reason:
            for target, source in pairs:
                target.copy_(source)
            return
    own(list(_one_by_one(layer, int(first), kind, run)))
    if key not in reasons:
        pairs, reason = _pairs(module, int(first), kind, run)
        if not reason and not _same(pairs):
            reason = "SGLang's loader arranges them in another way"
        reasons[key] = reason
        if list(reasons.values()).count(reason) == 1:  # once for each reason, not for each layer
            log.warning("%s is loaded %s", name, f"expert by expert: {reason}" if reason else "at once")


def _one_by_one(layer: str, first: int, kind: str, run: Any) -> Any:
    gate, up, down = _matrices(run)
    for i in range(len(run)):
        for matrix, tensor in (("gate", gate), ("up", up), ("down", down)):
            yield f"{layer}.{first + i}.{matrix}_proj.{kind}", tensor[i]


def _matrices(run: Any) -> tuple[Any, Any, Any]:
    """Views of gate and up, [n, rows, columns], and of down, [n, columns, rows]."""
    gate, up, down = run.chunk(3, dim=1)
    return gate, up, down.view(len(run), run.shape[2], run.shape[1] // 3)


def _pairs(module: Any, first: int, kind: str, run: Any) -> tuple[list[tuple[Any, Any]], str]:
    """Parts of the fused parameters and what belongs there, or why that cannot be said."""
    if module is None:
        return [], "this GPU does not have the layer"
    if getattr(module, "moe_ep_size", 1) != 1:
        return [], "the engine has expert parallelism"
    w13, w2 = (getattr(module, f"{fused}_{kind}", None) for fused in FUSED)
    if w13 is None or w2 is None:
        return [], f"the layer has no w13_{kind} and w2_{kind}"
    gate, up, down = _matrices(run)
    size, rank = getattr(module, "moe_tp_size", 1), getattr(module, "moe_tp_rank", 0)
    rows, last = gate.shape[1] // size, first + len(run)
    found, expected = (w13.shape[1:], w2.shape[1:]), ((2 * rows, gate.shape[2]), (gate.shape[2], rows))
    if found != expected or last > len(w13):
        return [], f"an expert has the shapes {expected}, in the layer {tuple(map(tuple, found))} × {len(w13)}"
    part = slice(rank * rows, (rank + 1) * rows)
    w13, w2 = w13.data[first:last], w2.data[first:last]
    pairs = [(w13[:, :rows], gate[:, part]), (w13[:, rows:], up[:, part])]
    if size == 1:
        pairs = [(w13, run[:, : 2 * rows])]
    return [*pairs, (w2, down[:, :, part])], ""


def _same(pairs: Any) -> bool:
    """Bitwise; one expert at a time, because a comparison needs memory."""
    equal = [
        (mine.view(WORDS[mine.element_size()]) == theirs.to(mine).view(WORDS[mine.element_size()])).all()
        for target, source in pairs
        for mine, theirs in zip(target, source, strict=True)
    ]
    return bool(torch.stack(equal).all())
