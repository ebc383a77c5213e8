"""The tensors that an update must contain: exactly those of the model that the servers were started with.

SGLang ignores a name it does not know and exits on a wrong shape, so buckets are checked here before they are sent.
"""

from __future__ import annotations

import json
from pathlib import Path

from megatron_dapo.config.model import ARCHITECTURES
from megatron_dapo.engines.flat_bucket import specs_of
from megatron_dapo.engines.protocol import Bucket
from megatron_dapo.files import read_safetensors_directory, unpacked


class WeightManifest:
    """Names and shapes from the safetensors headers of an HF directory. Without a directory everything is accepted.
    Tensors that are never synced (a vision tower, multi-token prediction) are not part of an update, and experts have
    one name each."""

    def __init__(self, model: str | Path) -> None:
        file = Path(model) / "config.json"
        config = json.loads(file.read_text()) if file.is_file() else {}
        architecture = ARCHITECTURES.get(next(iter(config.get("architectures") or []), ""))
        carried = architecture.carried if architecture else ()
        self._shapes: dict[str, tuple[int, ...]] = {}
        if str(model) and any(Path(model).glob("*.safetensors")):
            stored = unpacked(read_safetensors_directory(model))
            self._shapes = {name: tensor.shape for name, tensor in stored.items() if not name.startswith(carried)}
        self._tied = bool(config.get("tie_word_embeddings") or config.get("text_config", {}).get("tie_word_embeddings"))
        self._seen: set[str] = set()

    def begin(self) -> None:
        self._seen = set()

    def check(self, bucket: Bucket) -> str:
        """What is wrong with the bucket, or an empty string."""
        for spec in specs_of(bucket):
            name = spec.name
            if name in self._seen:
                return f"tensor {name!r} was sent twice"
            self._seen.add(name)
            expected = self._shapes.get(name)
            if self._shapes and expected is None and not (self._tied and name == "lm_head.weight"):
                return f"the model has no tensor {name!r}"
            if expected is not None and expected != spec.shape:
                return f"tensor {name!r} has shape {spec.shape}, expected {expected}"
        return ""

    def missing(self) -> str:
        optional = {"lm_head.weight"} if self._tied else set()
        absent = sorted(set(self._shapes) - self._seen - optional)
        return f"{len(absent)} tensors are missing, the first is {absent[0]!r}" if absent else ""
