"""Three ways for buckets of weights to reach SGLang servers: disk, tensor, distributed.

`send` gives every server every bucket, reads the buckets to their end whatever happens, and returns the servers that
did not get all of them with the reason. It promises nothing about which version a server serves: sglang.py does.
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
from megatron_dapo.engines.sglang.client import SGLangServer
from megatron_dapo.engines.sglang.http import reasons, wait_all
from megatron_dapo.engines.sglang.weights.manifest import ExpectedTensors
from megatron_dapo.engines.sglang.weights.process_group import UpdateGroup
from megatron_dapo.engines.sglang.weights.snapshot import Snapshot, bucket_bytes, dtype_name

DEVICE_ARGUMENT = 6  # of torch's rebuild_cuda_tensor


@dataclass(slots=True)
class Sent:
    failed: dict[str, str] = field(default_factory=dict)
    tensors: int = 0
    bytes: int = 0
    wrong: str = ""  # what is the matter with the buckets themselves

    def count(self, bucket: Bucket, expected: ExpectedTensors) -> None:
        self.wrong = self.wrong or expected.check(bucket)
        self.tensors += len(bucket)
        self.bytes += bucket_bytes(bucket)

    def complete(self, expected: ExpectedTensors, servers: Sequence[SGLangServer]) -> bool:
        """Whether the buckets were the whole model; if not, no server has it."""
        self.wrong = self.wrong or expected.missing()
        if self.wrong:
            self.failed |= {server.name: self.wrong for server in servers}
        return not self.wrong

    def note(self, results: dict[str, object]) -> None:
        self.failed |= reasons(results)

    def reached(self, servers: Sequence[SGLangServer]) -> list[SGLangServer]:
        return [server for server in servers if server.name not in self.failed]


class Transport(Protocol):
    def prepare(self, bucket: Bucket) -> Any:
        """What `send` needs besides the bucket; called in the thread that makes buckets."""
        ...

    def release(self, prepared: Any) -> None:
        """Called in the same thread, once the bucket has been sent."""
        ...

    async def send(self, version: int, servers: Sequence[SGLangServer], reader: BucketReader) -> Sent: ...

    async def close(self) -> None: ...


def make_transport(config: WeightTransportConfig, snapshot: Snapshot) -> Transport:
    expected = ExpectedTensors(snapshot.model)
    if config.transport == "disk":
        return DiskTransport(config, snapshot, expected)
    kept = snapshot if config.keep_snapshot else None
    channel = TensorChannel(config) if config.transport == "tensor" else DistributedChannel(config)
    return StreamTransport(kept, channel, expected)


class DiskTransport:
    """Buckets become a checkpoint that servers load; works with every server that can read the directory."""

    def __init__(self, config: WeightTransportConfig, snapshot: Snapshot, expected: ExpectedTensors) -> None:
        self._config, self._snapshot, self._expected = config, snapshot, expected

    def prepare(self, bucket: Bucket) -> None:
        pass

    def release(self, prepared: None) -> None:
        pass

    async def send(self, version: int, servers: Sequence[SGLangServer], reader: BucketReader) -> Sent:
        sent = Sent()
        self._expected.begin()
        self._snapshot.begin(version)
        async for bucket, _ in reader:
            sent.count(bucket, self._expected)
            if not sent.wrong:
                await asyncio.to_thread(self._snapshot.add, bucket)
        if sent.complete(self._expected, servers):
            self._snapshot.commit()
        else:
            self._snapshot.discard()
            return sent
        calls = {server.name: load_from_disk(server, self._snapshot, self._config.timeout) for server in servers}
        sent.note(await wait_all(calls))
        return sent

    async def close(self) -> None:
        pass


async def load_from_disk(server: SGLangServer, snapshot: Snapshot, timeout: float) -> None:
    if snapshot.current is None:
        raise EngineError(f"server {server.name}: there is no snapshot of the weights to load")
    await server.update_call("/update_weights_from_disk", {"model_path": str(snapshot.current)}, timeout)


class Channel(Protocol):
    """How one bucket travels."""

    async def open(self, servers: Sequence[SGLangServer]) -> dict[str, object]: ...

    def prepare(self, bucket: Bucket) -> Any: ...

    async def send(self, bucket: Bucket, prepared: Any, servers: Sequence[SGLangServer]) -> dict[str, object]: ...

    def release(self, prepared: Any) -> None: ...

    async def close(self) -> None: ...


class StreamTransport:
    """Sends each bucket while the next is being made; keeps a snapshot on the way where there is one to keep."""

    def __init__(self, snapshot: Snapshot | None, channel: Channel, expected: ExpectedTensors) -> None:
        self._snapshot, self._channel, self._expected = snapshot, channel, expected

    def prepare(self, bucket: Bucket) -> Any:
        return self._channel.prepare(bucket)

    def release(self, prepared: Any) -> None:
        self._channel.release(prepared)

    async def send(self, version: int, servers: Sequence[SGLangServer], reader: BucketReader) -> Sent:
        sent = Sent()
        self._expected.begin()
        if self._snapshot:
            self._snapshot.begin(version)
        sent.note(await self._channel.open(servers))
        async for bucket, prepared in reader:
            sent.count(bucket, self._expected)
            reached = sent.reached(servers)
            if sent.wrong or not (reached or self._snapshot):
                continue
            writing = asyncio.ensure_future(asyncio.to_thread(self._snapshot.add, bucket)) if self._snapshot else None
            try:
                if reached:
                    sent.note(await self._channel.send(bucket, prepared, reached))
            finally:
                if writing is not None:
                    await writing
        complete = sent.complete(self._expected, servers)
        if self._snapshot:
            self._snapshot.commit() if complete else self._snapshot.discard()
        return sent

    async def close(self) -> None:
        await self._channel.close()


class TensorChannel:
    """Same host: the request carries a reference to shared memory (or CUDA IPC memory), not the tensors."""

    def __init__(self, config: WeightTransportConfig) -> None:
        self._timeout = config.timeout

    async def open(self, servers: Sequence[SGLangServer]) -> dict[str, object]:
        return {}

    def prepare(self, bucket: Bucket) -> _Shared:
        return _by_reference(bucket)

    async def send(self, bucket: Bucket, prepared: _Shared, servers: Sequence[SGLangServer]) -> dict[str, object]:
        return await wait_all({server.name: self._send_one(server, prepared.payload) for server in servers})

    def release(self, prepared: _Shared) -> None:
        prepared.memory.clear()

    async def _send_one(self, server: SGLangServer, payload: str) -> None:
        body = {"serialized_named_tensors": [payload] * server.tensor_parallel, "flush_cache": False}
        await server.update_call("/update_weights_from_tensor", body, self._timeout)

    async def close(self) -> None:
        pass


@dataclass(slots=True)
class _Shared:
    """A pickle, and the memory it refers to, which must outlive the requests."""

    payload: str
    memory: list[torch.Tensor]


def _by_reference(bucket: Bucket) -> _Shared:
    """The bucket copied into one piece of memory per dtype, and the pickle that refers to it."""
    flats: list[torch.Tensor] = []
    views: dict[str, torch.Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for _, tensor in bucket):
        same = [(name, tensor) for name, tensor in bucket if tensor.dtype == dtype]
        flat = torch.cat([tensor.detach().reshape(-1) for _, tensor in same])
        parts = flat.split([tensor.numel() for _, tensor in same])
        views |= {name: part.view(tensor.shape) for (name, tensor), part in zip(same, parts, strict=True)}
        flats.append(flat)
    # By file name: a file descriptor would have to be sent over a socket that the server does not have.
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        buffer = io.BytesIO()
        _Pickler(buffer).dump([(name, views[name]) for name, _ in bucket])
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    return _Shared(base64.b64encode(buffer.getvalue()).decode(), flats)


class _Pickler(ForkingPickler):
    """Names a GPU by its UUID, which SGLang reads: its number may be another one in the server's process."""

    def reducer_override(self, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reduce_tensor(value)
        uuid = str(torch.cuda.get_device_properties(value.device).uuid)
        return rebuild, (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :])


class DistributedChannel:
    """This process broadcasts to all ranks of all servers: NCCL between GPUs, gloo between CPUs."""

    def __init__(self, config: WeightTransportConfig) -> None:
        self._config = config
        self._group: UpdateGroup | None = None

    async def open(self, servers: Sequence[SGLangServer]) -> dict[str, object]:
        """Joins the servers into a group; a group of the same servers is used again."""
        if self._group is not None and self._group.members == [server.name for server in servers]:
            return {}
        await self.close()
        group = UpdateGroup(self._config, servers)
        try:
            await group.join()
        except EngineError as error:
            await group.leave()
            return {server.name: error for server in servers}
        self._group = group
        return {}

    def prepare(self, bucket: Bucket) -> None:
        pass

    def release(self, prepared: None) -> None:
        pass

    async def send(self, bucket: Bucket, prepared: None, servers: Sequence[SGLangServer]) -> dict[str, object]:
        assert self._group is not None
        body = {
            "names": [name for name, _ in bucket], "dtypes": [dtype_name(tensor.dtype) for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket], "group_name": self._group.name,
            "flush_cache": False,
        }  # fmt: skip
        try:
            await self._group.broadcast(bucket, body)
        except EngineError as error:
            # A collective fails for all: whoever got the bucket cannot be told from who did not.
            await self.close()
            return {server.name: error for server in servers}
        return {}

    async def close(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            await group.leave()
