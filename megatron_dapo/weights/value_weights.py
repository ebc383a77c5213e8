"""What a value model starts from: a language or reward model, an exported critic, or a checkpoint's critic/ folder.

A language model gives its layers, and the value head is zero. A head of one label is taken over under any of its usual
names. `value_config` is the config.json of an exported critic: transformers loads it as ForTokenClassification.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dapo.config.families import FAMILIES
from megatron_dapo.config.families.tensors import VALUE_HEAD
from megatron_dapo.config.model import ModelShape, value_classes
from megatron_dapo.files import StoredTensor
from megatron_dapo.weights.formats.megatron_reader import MegatronAsHF
from megatron_dapo.weights.formats.readers import HFReader
from megatron_dapo.weights.locate import METADATA
from megatron_dapo.weights.mapping import HEAD, hf_shapes
from megatron_dapo.weights.side_files import hf_files

if TYPE_CHECKING:
    from torch import Tensor

OURS = tuple(template.hf[0][0] for template in VALUE_HEAD)
# The head's weight or bias under the names of reward models (transformers), TRL and others.
ENDINGS = {name: name.removeprefix("score") for name in OURS}
HEADS = ("score", "v_head.summary", "v_head", "value_head.summary", "value_head")


def value_shape(model: str | Path) -> ModelShape:
    return ModelShape.from_dir(hf_files(model)).as_value_model()


class ValueWeights(Mapping[str, "Tensor"]):
    """The weights of a value model under its own HF names."""

    def __init__(self, model: str | Path, shape: ModelShape) -> None:
        self._shapes = hf_shapes(shape)
        in_checkpoint = (Path(model) / METADATA).exists()
        self._source: Mapping[str, Tensor] = MegatronAsHF(model, shape) if in_checkpoint else HFReader(model)
        names = {ours: [f"{head}{ending}" for head in HEADS] for ours, ending in ENDINGS.items()}
        self._found = {ours: next((n for n in known if n in self._source), None) for ours, known in names.items()}
        heads = {HEAD, *(name for known in names.values() for name in known)}
        self._names = [name for name in self._source if name not in heads] + list(OURS)

    @property
    def stored(self) -> dict[str, StoredTensor | None]:
        """By our names; None: a head that is not there, or a tensor of a Megatron checkpoint, which checks its own."""
        known = self._source.stored if isinstance(self._source, HFReader) else {}
        return {name: known.get(self._found.get(name) or name) for name in self}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._found:
            return self._source[name]
        import torch

        found = self._found[name]
        return torch.zeros(self._shapes[name]) if found is None else self._source[found]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def value_config(text: bytes, shape: ModelShape) -> bytes:
    """config.json of the model that a critic started from, as that of the critic."""
    config = json.loads(text)
    config |= {
        "architectures": value_classes(FAMILIES[shape.architecture])[:1],
        "id2label": {"0": "VALUE"}, "label2id": {"VALUE": 0}, "tie_word_embeddings": False,
    }  # fmt: skip
    return json.dumps(config, indent=2).encode() + b"\n"
