"""Three transports for buckets of weights to SGLang servers: disk, tensor, distributed.

`send` gives every bucket to every server, reads the buckets to their end whatever happens, and returns the errors of
the servers that did not receive all of them. Which version a server then serves is decided in update.py.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
import torch.multiprocessing  # registers how tensors are pickled by reference to shared memory
from torch.multiprocessing.reductions import reduce_tensor

from megatron_dapo.config.rollout import WeightTransportConfig
from megatron_dapo.engines.bucket_reader import BucketReader
from megatron_dapo.engines.protocol import Bucket, EngineError
from megatron_dapo.engines.sglang.client import SGLangClient
from megatron_dapo.engines.sglang.http import failures, wait_all
from megatron_dapo.engines.sglang.response_parser import updating_label
from megatron_dapo.engines.sglang.weights.manifest import WeightManifest
from megatron_dapo.engines.sglang.weights.process_group import WeightProcessGroup, members_of
from megatron_dapo.engines.sglang.weights.snapshot import Snapshot, bucket_bytes, dtype_name

Errors = dict[str, BaseException]  # by the server's name

DEVICE_ARGUMENT = 6  # of torch's rebuild_cuda_tensor


@dataclass(slots=True)
class Transfer:
    """What has been sent, and which servers failed. `bucket_error`: what is wrong with the buckets themselves."""

    failed: Errors = field(default_factory=dict)
    tensors: int = 0
    bytes: int = 0
    bucket_error: str = ""

    def count(self, bucket: Bucket, manifest: WeightManifest) -> None:
        self.bucket_error = self.bucket_error or manifest.check(bucket)
        self.tensors += len(bucket)
        self.bytes += bucket_bytes(bucket)

    def finish(self, manifest: WeightManifest, servers: Sequence[SGLangClient]) -> bool:
        """Whether the buckets were the whole model; if not, no server has it."""
        self.bucket_error = self.bucket_error or manifest.missing()
        if self.bucket_error:
            self.failed |= {server.name: EngineError(self.bucket_error) for server in servers}
        return not self.bucket_error

    def remaining(self, servers: Sequence[SGLangClient]) -> list[SGLangClient]:
        return [server for server in servers if server.name not in self.failed]


class Transport(Protocol):
    def prepare(self, bucket: Bucket) -> Any:
        """What `send` needs besides the bucket; called in the thread that produces buckets."""
        ...

    def release(self, prepared: Any) -> None:
        """Called in the same thread, once the bucket has been sent."""
        ...

    async def send(self, version: int, servers: Sequence[SGLangClient], reader: BucketReader) -> Transfer: ...

    async def close(self) -> None: ...


def make_transport(config: WeightTransportConfig, snapshot: Snapshot) -> Transport:
    manifest = WeightManifest(snapshot.model)
    if config.transport == "disk":
        return DiskTransport(config, snapshot, manifest)
    kept = snapshot if config.keep_snapshot else None
    channel = TensorChannel(config) if config.transport == "tensor" else DistributedChannel(config)
    return DirectTransport(kept, channel, manifest)


class DiskTransport:
    """Buckets become a checkpoint that servers load; works with every server that can read the directory."""

    def __init__(self, config: WeightTransportConfig, snapshot: Snapshot, manifest: WeightManifest) -> None:
        self._config, self._snapshot, self._manifest = config, snapshot, manifest

    def prepare(self, bucket: Bucket) -> None:
        pass

    def release(self, prepared: None) -> None:
        pass

    async def send(self, version: int, servers: Sequence[SGLangClient], reader: BucketReader) -> Transfer:
        transfer = Transfer()
        self._manifest.begin()
        self._snapshot.begin(version)
        async for bucket, _ in reader:
            transfer.count(bucket, self._manifest)
            if not transfer.bucket_error:
                await asyncio.to_thread(self._snapshot.add, bucket)
        if not transfer.finish(self._manifest, servers):
            self._snapshot.discard()
            return transfer
        path = str(self._snapshot.commit())
        timeout, flush = self._config.timeout, self._config.flushes_cache
        calls = {server.name: server.load_from_disk(path, timeout, flush=flush) for server in servers}
        transfer.failed |= failures(await wait_all(calls))
        return transfer

    async def close(self) -> None:
        pass


class Channel(Protocol):
    """How one bucket gets from here to the servers."""

    async def open(self, version: int, servers: Sequence[SGLangClient]) -> Errors: ...

    def prepare(self, bucket: Bucket) -> Any: ...

    async def send(self, bucket: Bucket, prepared: Any, servers: Sequence[SGLangClient]) -> Errors: ...

    def release(self, prepared: Any) -> None: ...

    async def close(self) -> None: ...


class DirectTransport:
    """Sends each bucket while the next is produced; also writes a snapshot where one is kept."""

    def __init__(self, snapshot: Snapshot | None, channel: Channel, manifest: WeightManifest) -> None:
        self._snapshot, self._channel, self._manifest = snapshot, channel, manifest

    def prepare(self, bucket: Bucket) -> Any:
        return self._channel.prepare(bucket)

    def release(self, prepared: Any) -> None:
        self._channel.release(prepared)

    async def send(self, version: int, servers: Sequence[SGLangClient], reader: BucketReader) -> Transfer:
        transfer = Transfer()
        self._manifest.begin()
        if self._snapshot:
            self._snapshot.begin(version)
        transfer.failed |= await self._channel.open(version, servers)
        async for bucket, prepared in reader:
            transfer.count(bucket, self._manifest)
            remaining = transfer.remaining(servers)
            if transfer.bucket_error or not (remaining or self._snapshot):
                continue
            writing = asyncio.ensure_future(asyncio.to_thread(self._snapshot.add, bucket)) if self._snapshot else None
            try:
                if remaining:
                    transfer.failed |= await self._channel.send(bucket, prepared, remaining)
            finally:
                if writing is not None:
                    await writing
        complete = transfer.finish(self._manifest, servers)
        if self._snapshot:
            self._snapshot.commit() if complete else self._snapshot.discard()
        return transfer

    async def close(self) -> None:
        await self._channel.close()


class TensorChannel:
    """Same host: the request carries a reference to shared memory (or CUDA IPC memory), not the tensors."""

    def __init__(self, config: WeightTransportConfig) -> None:
        self._timeout = config.timeout

    async def open(self, version: int, servers: Sequence[SGLangClient]) -> Errors:
        return {}

    def prepare(self, bucket: Bucket) -> _SharedBucket:
        return _share(bucket)

    async def send(self, bucket: Bucket, prepared: _SharedBucket, servers: Sequence[SGLangClient]) -> Errors:
        calls = {server.name: server.load_tensors(prepared.payload, self._timeout) for server in servers}
        return failures(await wait_all(calls))

    def release(self, prepared: _SharedBucket) -> None:
        prepared.memory.clear()

    async def close(self) -> None:
        pass


@dataclass(slots=True)
class _SharedBucket:
    """A pickle, and the memory it refers to, which must outlive the requests."""

    payload: str
    memory: list[torch.Tensor]


def _share(bucket: Bucket) -> _SharedBucket:
    """Copies the bucket into one block of memory per dtype, and pickles a reference to it."""
    flats: list[torch.Tensor] = []
    views: dict[str, torch.Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for _, tensor in bucket):
        same = [(name, tensor) for name, tensor in bucket if tensor.dtype == dtype]
        flat = torch.cat([tensor.detach().reshape(-1) for _, tensor in same])
        parts = flat.split([tensor.numel() for _, tensor in same])
        views |= {name: part.view(tensor.shape) for (name, tensor), part in zip(same, parts, strict=True)}
        flats.append(flat)
    # Shared by file name: a file descriptor would have to be sent over a socket, and there is none to the server.
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        buffer = io.BytesIO()
        _Pickler(buffer).dump([(name, views[name]) for name, _ in bucket])
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    return _SharedBucket(base64.b64encode(buffer.getvalue()).decode(), flats)


class _Pickler(ForkingPickler):
    """Names a GPU by its UUID, which SGLang reads: the server's process may number the GPUs differently."""

    def reducer_override(self, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reduce_tensor(value)
        uuid = str(torch.cuda.get_device_properties(value.device).uuid)
        return rebuild, (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :])


class DistributedChannel:
    """Broadcasts from this process to all ranks of all servers: NCCL between GPUs, gloo between CPUs."""

    def __init__(self, config: WeightTransportConfig) -> None:
        self._config = config
        self._group: WeightProcessGroup | None = None
        self._version = self._sent = 0

    async def open(self, version: int, servers: Sequence[SGLangClient]) -> Errors:
        """Joins the servers into a group. A group with the same members, none of them restarted, is used again."""
        self._version, self._sent = version, 0
        if not servers or (self._group is not None and self._group.members == members_of(servers)):
            return {}
        await self.close()
        failed: Errors = {}
        for _ in range(2):  # a join cannot be repeated, but a second group can be made
            group = WeightProcessGroup(self._config, servers)
            try:
                await group.join()
            except EngineError as error:
                await group.leave()
                failed = {server.name: error for server in servers}
                continue
            self._group = group
            return {}
        return failed

    def prepare(self, bucket: Bucket) -> None:
        pass

    def release(self, prepared: None) -> None:
        pass

    async def send(self, bucket: Bucket, prepared: None, servers: Sequence[SGLangClient]) -> Errors:
        assert self._group is not None
        body = {
            "names": [name for name, _ in bucket], "dtypes": [dtype_name(tensor.dtype) for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket], "group_name": self._group.name,
            "flush_cache": False,
        }  # fmt: skip
        self._sent += 1
        try:
            await self._group.broadcast(bucket, body, updating_label(self._version, self._sent))
        except EngineError as error:
            # A failed broadcast leaves it unknown which servers have the bucket.
            await self.close()
            return {server.name: error for server in servers}
        return {}

    async def close(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            await group.leave()
