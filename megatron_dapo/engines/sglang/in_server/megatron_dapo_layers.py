"""What goes through the layers of a model, for `megatron-dapo selfcheck engine`: a small sketch of every hidden state.

`megatron_dapo_checksums` lets an SGLang server answer with it: `POST /weights_checker {"action": "record_layers"}`,
then one request whose prompt is computed, then the action `recorded_layers`. The embedded engine's model is recorded in
the same way, and the trainer computes the same sketches from its own layers.

A layer's input is what its first norm is given: SGLang hands over hidden state and residual, whose sum is the stream.
Hooks do not run inside of a CUDA graph.
"""

import base64
import functools
import io
from typing import Any

import numpy as np
import torch

RECORD, RECORDED = ACTIONS = ("record_layers", "recorded_layers")
PROJECTIONS = 8
TOKENS, FINAL = "tokens", "final norm"


def sketch(hidden: torch.Tensor) -> np.ndarray:
    """[tokens, 1 + PROJECTIONS]: the norm of each row of [tokens, hidden], and fixed random projections of it."""
    rows = hidden.detach().reshape(-1, hidden.shape[-1]).double()
    projected = rows @ _directions(rows.shape[-1]).to(rows.device)
    return torch.cat([rows.norm(dim=-1, keepdim=True), projected], dim=-1).float().cpu().numpy()


@functools.cache
def _directions(hidden: int) -> torch.Tensor:
    """The same in every version of torch and numpy."""
    return torch.from_numpy(np.random.RandomState(0).standard_normal((hidden, PROJECTIONS)))


class Recorder:
    """Of a model of SGLang or transformers, from now on until `end`. `end` returns sketches [tokens, 1 + PROJECTIONS]
    of the stream before layer N, by `str(N)`, where N = layers is what leaves the last one; that of the final norm's
    output; and the `tokens` [tokens] that the model was given."""

    def __init__(self, model: Any) -> None:
        body = next(m for m in model.modules() if all(hasattr(m, name) for name in ("embed_tokens", "layers", "norm")))
        self._found: dict[str, list[np.ndarray]] = {}
        self._rows: list[int] = []  # of each forward pass, where the rest is padding
        norms = [getattr(layer, "input_layernorm", None) for layer in body.layers]  # None: on another GPU
        self._hooks = [
            norm.register_forward_pre_hook(functools.partial(self._stream, str(i)), with_kwargs=True)
            for i, norm in enumerate([*norms, body.norm])
            if norm is not None
        ]
        self._hooks.append(body.embed_tokens.register_forward_pre_hook(self._tokens))
        self._hooks.append(body.norm.register_forward_hook(self._final))
        if hasattr(body, "rotary_emb"):  # transformers: the embedded engine pads its batches
            self._hooks.append(body.rotary_emb.register_forward_pre_hook(self._positions))

    def _add(self, name: str, values: np.ndarray) -> None:
        self._found.setdefault(name, []).append(values)

    def _stream(self, name: str, module: Any, args: Any, kwargs: Any) -> None:
        residual = args[1] if len(args) > 1 else kwargs.get("residual")
        self._add(name, sketch(args[0] if residual is None else args[0].float() + residual.float()))

    def _tokens(self, module: Any, args: Any) -> None:
        self._add(TOKENS, args[0].reshape(-1).cpu().numpy().astype(np.int64))

    def _final(self, module: Any, args: Any, output: Any) -> None:
        self._add(FINAL, sketch(output[0] if isinstance(output, tuple) else output))

    def _positions(self, module: Any, args: Any) -> None:
        """One sequence, then padding at position 0."""
        steps = args[1].reshape(-1).diff().tolist()
        self._rows.append(next((i for i, step in enumerate(steps) if step != 1), len(steps)) + 1)

    def end(self) -> dict[str, np.ndarray]:
        for hook in self._hooks:
            hook.remove()
        return {
            name: np.concatenate([part[: self._rows[i]] if self._rows else part for i, part in enumerate(parts)])
            for name, parts in self._found.items()
        }


def answer(model: Any, action: str) -> dict[str, str]:
    """In the server. Repeatable: recording begins anew."""
    recorder = model.__dict__.pop("megatron_dapo_layers", None)
    file = io.BytesIO()
    np.savez(file, **({} if recorder is None else recorder.end()))
    if action == RECORD:
        model.__dict__["megatron_dapo_layers"] = Recorder(model)
    return {"npz": base64.b64encode(file.getvalue()).decode()}


def decode(found: dict[str, str]) -> dict[str, np.ndarray]:
    """What `answer` returned, as `Recorder.end` had it."""
    return dict(np.load(io.BytesIO(base64.b64decode(found["npz"]))))
