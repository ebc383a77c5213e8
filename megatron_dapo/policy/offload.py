"""State that leaves the device for a while and comes back to the same tensors: for engines that share our GPUs.

Memory is given back by emptying storages, so every tensor, view and bucket that Megatron made stays what it is and is
whole again after `bring_back`. Host copies are pinned and kept, because pinning costs more than copying.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class _Place:
    storage: torch.UntypedStorage
    bytes: int
    host: Tensor | None  # None: the contents are not worth keeping


class Parking:
    """Tensors of one device, parked in host memory or not. Parking what is parked already changes nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parked: dict[int, _Place] = {}
        self._hosts: dict[int, Tensor] = {}

    def park(self, tensors: Iterable[Tensor], *, keep: bool = True) -> int:
        """Frees the storages under `tensors`; returns the bytes. Without `keep` they come back with arbitrary contents,
        which is right for what is overwritten before it is read."""
        freed = 0
        fresh = {key(t): t.untyped_storage() for t in tensors if t.device == self._device}
        for name, storage in fresh.items():
            size = storage.nbytes()
            if name in self._parked or not size:
                continue
            host = self._copy_out(name, storage) if keep else None
            self._parked[name] = _Place(storage, size, host)
            freed += size
        self._synchronize()
        for name in fresh:
            if name in self._parked:
                self._parked[name].storage.resize_(0)
        self.empty_cache()
        return freed

    def empty_cache(self) -> None:
        """What torch holds without using it becomes another process's."""
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # what was sent to an engine and has been read
            torch.cuda.empty_cache()

    def bring_back(self) -> int:
        """Everything parked is on the device again; returns the bytes."""
        restored = 0
        for place in self._parked.values():
            place.storage.resize_(place.bytes)
            if place.host is not None:
                _bytes_of(place.storage, self._device).copy_(place.host, non_blocking=True)
            restored += place.bytes
        self._parked.clear()
        self._synchronize()
        return restored

    def _copy_out(self, name: int, storage: torch.UntypedStorage) -> Tensor:
        host = self._hosts.get(name)
        if host is None or host.numel() != storage.nbytes():
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._hosts[name] = host
        return host.copy_(_bytes_of(storage, self._device), non_blocking=True)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def key(tensor: Tensor) -> int:
    """The same for all tensors on one storage."""
    return tensor.untyped_storage()._cdata


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
