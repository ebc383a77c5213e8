"""The tensors that an update must bring: exactly those of the model that the servers were started with.

SGLang ignores a name it does not know and dies of a wrong shape, so this is checked here, before anything is sent.
"""

from __future__ import annotations

import json
from pathlib import Path

from megatron_dapo.engines.protocol import Bucket
from megatron_dapo.files import read_safetensors_header


class ExpectedTensors:
    """Names and shapes from the safetensors headers of an HF directory; without one, nothing is expected."""

    def __init__(self, model: str | Path) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in sorted(Path(model).glob("*.safetensors")) if str(model) else []:
            self._shapes |= {name: stored.shape for name, stored in read_safetensors_header(path).items()}
        config = Path(model) / "config.json"
        self._tied = config.is_file() and bool(json.loads(config.read_text()).get("tie_word_embeddings"))
        self._seen: set[str] = set()

    def begin(self) -> None:
        self._seen = set()

    def check(self, bucket: Bucket) -> str:
        """What is wrong with the bucket, or an empty string."""
        for name, tensor in bucket:
            if name in self._seen:
                return f"tensor {name!r} came twice"
            self._seen.add(name)
            wanted = self._shapes.get(name)
            if self._shapes and wanted is None and not (self._tied and name == "lm_head.weight"):
                return f"the model has no tensor {name!r}"
            if wanted is not None and wanted != tuple(tensor.shape):
                return f"tensor {name!r} has shape {tuple(tensor.shape)}, the model's has {wanted}"
        return ""

    def missing(self) -> str:
        optional = {"lm_head.weight"} if self._tied else set()
        absent = sorted(set(self._shapes) - self._seen - optional)
        return f"{len(absent)} tensors did not come, the first is {absent[0]!r}" if absent else ""
