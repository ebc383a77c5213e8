"""Offloads tensors to host memory and loads them back, so that an engine can use the same GPU.

Device memory is freed by resizing storages to zero. Every tensor, view and bucket that Megatron made therefore stays
valid and has its contents again after `onload`. Host copies are pinned and reused, because pinning costs more than
copying.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class _Offloaded:
    storage: torch.UntypedStorage
    bytes: int
    host: Tensor | None  # None: the contents are not kept


class Offloader:
    """Moves the storages of one device to host memory and back. Offloading twice changes nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._offloaded: dict[int, _Offloaded] = {}
        self._hosts: dict[int, Tensor] = {}

    def offload(self, tensors: Iterable[Tensor], *, keep: bool = True) -> int:
        """Frees the storages of `tensors`; returns the number of bytes freed. With `keep=False` the contents are
        arbitrary after `onload`: for buffers that are overwritten before they are read."""
        freed = 0
        fresh = {storage_key(t): t.untyped_storage() for t in tensors if t.device == self._device}
        for key, storage in fresh.items():
            size = storage.nbytes()
            if key in self._offloaded or not size:
                continue
            host = self._copy_to_host(key, storage) if keep else None
            self._offloaded[key] = _Offloaded(storage, size, host)
            freed += size
        self._synchronize()
        for key in fresh:
            if key in self._offloaded:
                self._offloaded[key].storage.resize_(0)
        self.empty_cache()
        return freed

    def empty_cache(self) -> None:
        """Returns memory that torch has cached to the device, so that other processes can use it."""
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # tensors that an engine has received and closed
            torch.cuda.empty_cache()

    def onload(self) -> int:
        """Restores everything that is offloaded; returns the number of bytes."""
        restored = 0
        for entry in self._offloaded.values():
            entry.storage.resize_(entry.bytes)
            if entry.host is not None:
                _as_bytes(entry.storage, self._device).copy_(entry.host, non_blocking=True)
            restored += entry.bytes
        self._offloaded.clear()
        self._synchronize()
        return restored

    def _copy_to_host(self, key: int, storage: torch.UntypedStorage) -> Tensor:
        host = self._hosts.get(key)
        if host is None or host.numel() != storage.nbytes():
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._hosts[key] = host
        return host.copy_(_as_bytes(storage, self._device), non_blocking=True)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def storage_key(tensor: Tensor) -> int:
    """Equal for all tensors that share one storage."""
    return tensor.untyped_storage()._cdata


def _as_bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
