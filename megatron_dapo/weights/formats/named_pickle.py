"""Writes pickles that name classes of torch without importing torch, which would take seconds. A process that has
imported them pickles real objects instead (`Maker`), five times as fast; both unpickle to the same."""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from typing import Any


class Name:
    """A class or function, by module and name."""

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name

    def resolve(self) -> Any:
        return getattr(importlib.import_module(self.module), self.name)


class Call:
    """Unpickles as function(*args)."""

    def __init__(self, function: Name, args: tuple[Any, ...]) -> None:
        self.function = function
        self.args = args


class Instance:
    """Unpickles as an object of the class with this state."""

    def __init__(self, kind: Name, state: Any = None) -> None:
        self.kind = kind
        self.state = state


class Outside:
    """Refers to data that is not in the pickle (`persistent_id`)."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference


_Base: Any = pickle._Pickler  # in Python: the one in C imports a module before it names it


class _Pickler(_Base):
    def persistent_id(self, value: Any) -> Any:
        return value.reference if isinstance(value, Outside) else None

    def save_name(self, value: Name) -> None:
        self.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
        self.memoize(value)

    def save_call(self, value: Call) -> None:
        self.save(value.function)
        self.save(value.args)
        self.write(pickle.REDUCE)
        self.memoize(value)

    def save_instance(self, value: Instance) -> None:
        self.save(value.kind)
        self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        self.memoize(value)
        if value.state is not None:
            self.save(value.state)
            self.write(pickle.BUILD)

    dispatch = _Base.dispatch | {Name: save_name, Call: save_call, Instance: save_instance}


def dump(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(value)
    return buffer.getvalue()


class Maker:
    """Makes objects of named classes: real ones where `module` is imported already."""

    def __init__(self, module: str) -> None:
        self._real = module in sys.modules

    def name(self, name: Name) -> Any:
        return name.resolve() if self._real else name

    def call(self, function: Name, *args: Any) -> Any:
        return function.resolve()(*args) if self._real else Call(function, args)

    def instance(self, kind: Name, state: Any = None) -> Any:
        if not self._real:
            return Instance(kind, state)
        cls = kind.resolve()
        made = cls.__new__(cls)
        if isinstance(state, dict):
            made.__dict__.update(state)
        elif state is not None:
            made.__setstate__(state)
        return made

    def dump(self, value: Any) -> bytes:
        return pickle.dumps(value) if self._real else dump(value)
