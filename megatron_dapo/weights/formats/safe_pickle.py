"""Reads the pickles in checkpoints without running code from them.

Only names on a short list resolve, and they resolve to inert stand-ins defined here, never to functions of torch,
Megatron or another package. `torch.load(weights_only=True)` does not replace this: it cannot read `.metadata`.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from types import FunctionType
from typing import Any

from megatron_dapo.files import ITEM_SIZES, Dtype


class UnsafePickle(ValueError):
    """The pickle refers to something that a checkpoint does not need."""


class PickledObject:
    """Stands in for a metadata class: stores constructor arguments and state, and runs nothing."""

    kind = ""
    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, field: str) -> Any:
        if not isinstance(self.state, dict) or field not in self.state:
            raise UnsafePickle(f"{self.kind} without {field}")
        return self.state[field]

    def get(self, field: str) -> Any:
        return self.state.get(field) if isinstance(self.state, dict) else None


_META = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_STAND_INS: dict[tuple[str, str], Any] = {
    (module, name): type(name, (PickledObject,), {"kind": name})
    for module, names in {
        _META: "Metadata MetadataIndex StorageMeta TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata "
        "TensorProperties _MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem": "_StorageInfo",
        _PLANNER: "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
        "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
        "pathlib": "PosixPath PurePosixPath WindowsPath",
        "pathlib._local": "PosixPath PurePosixPath WindowsPath",
    }.items()
    for name in names.split()
}
_DTYPES = {("torch", name): Dtype(name) for name in ITEM_SIZES}
STORAGES = {
    "float64": "DoubleStorage", "float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage",
    "int64": "LongStorage", "int32": "IntStorage", "int16": "ShortStorage", "int8": "CharStorage",
    "uint8": "ByteStorage", "bool": "BoolStorage",
}  # fmt: skip


def _size(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _enum_member(owner: Any, name: Any) -> PickledObject:
    """Python 3.11.0 to 3.11.3 pickle the member of an enum as a call of getattr; Debian 12 has 3.11.2."""
    if isinstance(owner, type) and issubclass(owner, PickledObject):
        return owner(name)
    raise UnsafePickle("it asks for builtins.getattr")


def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> PickledObject:
    return PickledObject(storage, int(offset), _size(size), _size(stride))


_PLAIN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): OrderedDict,
    **{(module, "getattr"): _enum_member for module in ("builtins", "__builtin__")},
}


_TENSORS: dict[tuple[str, str], Any] = {
    **{("torch", name): Dtype(dtype) for dtype, name in STORAGES.items()},
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *rest: tensor,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda tensor, *rest: tensor,
    ("torch._tensor", "_rebuild_from_type_v2"): lambda function, kind, args, state: function(*args),
}


class _Unpickler(pickle.Unpickler):
    """`tensors`: they are allowed and become PickledObjects of (storage, offset, shape, strides)."""

    def __init__(self, data: bytes, *, tensors: bool, opaque: bool = False) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = _PLAIN | _DTYPES | (_TENSORS if tensors else _STAND_INS)
        self._tensors = tensors
        self._opaque = opaque

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            if self._opaque and module.split(".")[0] in _HARMLESS:
                return type(name, (Opaque,), {"kind": name})
            raise UnsafePickle(f"it asks for {module}.{name}")
        found = self._allowed[module, name]
        # BUILD sets attributes of a function, but not of the method that calls it; classes and dtypes refuse it.
        return found.__call__ if isinstance(found, FunctionType) else found

    def persistent_load(self, reference: Any) -> Any:
        if not self._tensors:
            raise UnsafePickle("it refers to data outside itself")
        return tuple(reference)


def _load(data: bytes, *, tensors: bool, opaque: bool = False) -> Any:
    try:
        return _Unpickler(data, tensors=tensors, opaque=opaque).load()
    except UnsafePickle:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise UnsafePickle(f"damaged ({type(error).__name__}: {error})") from None


def load_metadata(data: bytes) -> PickledObject:
    """The contents of a `.metadata` file as inert objects."""
    found = _load(data, tensors=False)
    if not isinstance(found, PickledObject) or found.kind not in ("Metadata", "MCoreMetadata"):
        raise UnsafePickle("it holds something other than checkpoint metadata")
    return found


class Opaque(PickledObject):
    """Stands in for any other class; accepts whatever a pickle does to an object."""

    def add(self, *values: Any) -> None:
        pass

    __setitem__ = append = extend = add


# Packages whose objects may occur beside the weights in a file of Megatron; all of them become `Opaque`.
_HARMLESS = ("argparse", "numpy", "torch", "megatron", "transformer_engine", "pathlib", "types", "enum", "signal",
             "collections", "_codecs", "datetime", "copyreg")  # fmt: skip


def load_torch_pickle(data: bytes, *, opaque: bool = False) -> Any:
    """What `torch.save` pickled: containers, plain values, and tensors as PickledObjects (see `tensor_of`).

    `opaque`: objects of Megatron, numpy and the like are allowed beside the tensors, as inert stand-ins.
    """
    return _load(data, tensors=True, opaque=opaque)


def tensor_of(found: Any) -> tuple[Dtype, tuple[int, ...], str, int, tuple[int, ...]] | None:
    """(dtype, shape, storage key, offset in elements, strides) if `found` is a tensor; no strides: it is contiguous."""
    if not isinstance(found, PickledObject) or len(found.args) != 4 or isinstance(found, Opaque):
        return None
    storage, offset, shape, stride = found.args
    if len(storage) < 5 or storage[0] != "storage" or not isinstance(storage[1], Dtype):
        raise UnsafePickle("an unknown kind of storage")
    if len(stride) != len(shape) or min((offset, *shape, *stride)) < 0:
        raise UnsafePickle(f"a tensor of shape {shape} with strides {stride} at {offset}")
    contiguous = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    differs = any(have != want for have, want, n in zip(stride, contiguous, shape, strict=True) if n > 1)
    return storage[1], shape, str(storage[2]), offset, stride if differs else ()


def load_tensor_pickle(data: bytes) -> tuple[Dtype, tuple[int, ...], str, int]:
    """(dtype, shape, storage key, offset in elements) of the one contiguous tensor that a `data.pkl` describes."""
    found = tensor_of(load_torch_pickle(data))
    if found is None or found[4]:
        raise UnsafePickle("it holds something other than one contiguous tensor")
    return found[:4]
