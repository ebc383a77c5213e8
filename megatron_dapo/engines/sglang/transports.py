"""Four transports for buckets of weights to SGLang servers: disk, tensor, distributed, adapter.

`send` gives every bucket to every server and returns the errors of the servers that did not receive all of them. Which
version a server then serves is decided in weight_update.py.

Buckets may be on other ranks (`RemoteBucket`): those ranks send them (sync/remote_sender.py) as this process says.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.config.families import find_family
from megatron_dapo.config.policy import LoraConfig
from megatron_dapo.config.rollout import WeightTransportConfig
from megatron_dapo.engines.sglang.client import ADAPTER_PREFIX, FLATTENED, SGLangClient, call_living
from megatron_dapo.engines.sglang.http import failures
from megatron_dapo.engines.sglang.in_server.megatron_dapo_checksums import sha256
from megatron_dapo.engines.sglang.process_group import WeightProcessGroups, members_of
from megatron_dapo.engines.sglang.response_parser import updating_label
from megatron_dapo.engines.sglang.weight_proof import SentChecksums, Sums, checksums_of
from megatron_dapo.errors import EngineError
from megatron_dapo.files import read_safetensors_directory, unpacked
from megatron_dapo.sync.bucket import Bucket, FlatBucket, Manifest, RemoteBucket, bucket_in, flatten, specs_of
from megatron_dapo.sync.bucket_stream import BucketStream
from megatron_dapo.sync.remote_sender import SenderLink
from megatron_dapo.sync.shared_bucket import SharedBucket, packed, share, shared_memory
from megatron_dapo.sync.snapshot import Snapshot
from megatron_dapo.weights.adapters import adapter_config
from megatron_dapo.weights.tensor_spec import flat_size


class WeightManifest(Manifest):
    """Of the model that the servers were started with. Names and shapes are from the safetensors headers of its
    directory; without one everything is accepted. Tensors that are never synced (a vision tower, multi-token
    prediction) are not part of an update, and experts have one name each."""

    def __init__(self, model: str | Path) -> None:
        file = Path(model) / "config.json"
        config = json.loads(file.read_text()) if file.is_file() else {}
        family = find_family(config)
        carried = family.carried if family else ()
        shapes: dict[str, tuple[int, ...]] = {}
        if str(model) and any(Path(model).glob("*.safetensors")):
            stored = unpacked(read_safetensors_directory(model))
            shapes = {name: tensor.shape for name, tensor in stored.items() if not name.startswith(carried)}
        tied = config.get("tie_word_embeddings") or config.get("text_config", {}).get("tie_word_embeddings")
        super().__init__(shapes, tied=bool(tied))


Errors = dict[str, BaseException]  # by the server's name
# Seconds after an update: torch holds the GIL while it reserves shared memory, which would delay its last requests.
MEMORY_DELAY = 1.0


@dataclass(slots=True, frozen=True)
class Prepared:
    """A bucket of this rank: `wire`, what the transport sends of it, and its checksums."""

    wire: Any
    checksums: SentChecksums | None


@dataclass(slots=True)
class Transfer:
    """What has been sent, and which servers failed. `bucket_error`: what is wrong with the buckets themselves.
    `checksums`: of every tensor, if the proof needs them. `seconds`: of steps that the report should name."""

    failed: Errors = field(default_factory=dict)
    tensors: int = 0
    bytes: int = 0
    bucket_error: str = ""
    checksums: Sums = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def finish(self, manifest: WeightManifest, servers: Sequence[SGLangClient]) -> bool:
        """Whether the buckets were the whole model; if not, no server has it."""
        self.bucket_error = self.bucket_error or manifest.missing()
        if self.bucket_error:
            self.failed |= {server.name: EngineError(self.bucket_error) for server in servers}
        return not self.bucket_error

    def remaining(self, servers: Sequence[SGLangClient]) -> list[SGLangClient]:
        return [server for server in servers if server.name not in self.failed]


class Transport:
    """`prepare` makes what is sent of a bucket, `release` frees it: both in the thread that produces the buckets."""

    def __init__(self, config: WeightTransportConfig, snapshot: Snapshot, manifest: WeightManifest) -> None:
        self._config = config
        self._snapshot = snapshot
        self._manifest = manifest
        self._proves = config.proof == "checksum"
        self._sent: list[SentChecksums] = []

    def prepare(self, bucket: Bucket) -> Prepared:
        flat = flatten(bucket)
        wire = self._make(flat)  # first: servers wait for what has been launched until now
        return Prepared(wire, checksums_of(flat) if self._proves else None)

    def _make(self, bucket: FlatBucket) -> Any:
        """What is sent: the bucket itself."""
        return bucket

    def release(self, prepared: Prepared) -> None:
        """Nothing, where the bucket itself is sent."""

    def _count(self, transfer: Transfer, bucket: Bucket, prepared: Prepared | None) -> None:
        transfer.bucket_error = transfer.bucket_error or self._manifest.check(bucket)
        specs = specs_of(bucket)
        transfer.tensors += len(specs)
        transfer.bytes += flat_size(specs)
        if prepared is not None and prepared.checksums is not None:
            self._sent.append(prepared.checksums)

    def _begin(self) -> Transfer:
        self._manifest.begin()
        self._sent = []
        return Transfer()

    async def _read_checksums(self, transfer: Transfer) -> None:
        sent, self._sent = self._sent, []
        for checksums in await asyncio.to_thread(lambda: [one.read() for one in sent]):
            transfer.checksums |= checksums

    async def send(
        self, version: int, servers: Sequence[SGLangClient], stream: BucketStream, order: Sequence[str]
    ) -> Transfer:
        """`order`: the names of all servers, node by node, also of those that get nothing."""
        raise NotImplementedError

    async def close(self) -> None:
        pass


def make_transport(config: WeightTransportConfig, snapshot: Snapshot, lora: LoraConfig) -> Transport:
    if config.transport == "adapter":
        return AdapterTransport(config, snapshot, lora)
    kinds = {"disk": DiskTransport, "tensor": TensorTransport, "distributed": DistributedTransport}
    return kinds[config.transport](config, snapshot, WeightManifest(snapshot.model))


class DiskTransport(Transport):
    """Buckets become a checkpoint that servers load; works with every server that can read the directory. Rank 0
    writes everything."""

    async def send(
        self, version: int, servers: Sequence[SGLangClient], stream: BucketStream, order: Sequence[str]
    ) -> Transfer:
        transfer = self._begin()
        self._snapshot.begin(version)
        async for bucket, prepared in stream:
            self._count(transfer, bucket, prepared)
            if not transfer.bucket_error:
                await asyncio.to_thread(self._snapshot.add, bucket)
        if not transfer.finish(self._manifest, servers):
            self._snapshot.discard()
            return transfer
        path = str(self._snapshot.commit())
        timeout, flush = self._config.timeout, self._config.flushes_cache
        results = await call_living(servers, lambda server: server.load_from_disk(path, timeout, flush=flush))
        transfer.failed |= failures(results)
        await self._read_checksums(transfer)
        return transfer


class DirectTransport(Transport):
    """Sends each bucket while the next is produced; also writes a snapshot where one is kept. A subclass says how one
    bucket gets from here, or from another rank, to the servers."""

    # Of the update that runs
    _version = 0
    _link: SenderLink | None = None
    _order: Sequence[str] = ()

    async def _open(self, servers: Sequence[SGLangClient]) -> Errors:
        raise NotImplementedError

    async def _send_bucket(self, number: int, bucket: Bucket, prepared: Any, servers: Sequence[SGLangClient]) -> Errors:
        """`prepared`: of `_make`; None for a `RemoteBucket`."""
        raise NotImplementedError

    async def send(
        self, version: int, servers: Sequence[SGLangClient], stream: BucketStream, order: Sequence[str]
    ) -> Transfer:
        self._version = version
        self._link = stream.link
        self._order = order
        try:
            return await self._send(servers, stream)
        except BaseException as error:
            self._tell_senders(str(error))
            raise

    async def _send(self, servers: Sequence[SGLangClient], stream: BucketStream) -> Transfer:
        transfer, keeps, number = self._begin(), self._config.keep_snapshot, 0
        if keeps:
            await asyncio.to_thread(partial(self._snapshot.begin, self._version, background=True))
        began = time.monotonic()
        transfer.failed |= await self._open(servers)
        transfer.seconds["join"] = time.monotonic() - began
        async for bucket, prepared in stream:
            self._count(transfer, bucket, prepared)
            remaining = transfer.remaining(servers)
            if not remaining or transfer.bucket_error:
                self._tell_senders(transfer.bucket_error or "no server is left that has all weights")
            if not transfer.bucket_error:
                writing = asyncio.ensure_future(asyncio.to_thread(self._snapshot.add, bucket)) if keeps else None
                try:
                    if remaining:
                        wire = None if prepared is None else prepared.wire
                        transfer.failed |= await self._send_bucket(number, bucket, wire, remaining)
                finally:
                    if writing is not None:
                        await writing
            number += 1
        complete = transfer.finish(self._manifest, servers)
        if keeps:
            self._snapshot.commit() if complete else self._snapshot.discard()
        await self._read_checksums(transfer)
        if complete and transfer.remaining(servers):
            await self._read_remote_checksums(transfer, servers)
        return transfer

    async def _read_remote_checksums(self, transfer: Transfer, servers: Sequence[SGLangClient]) -> None:
        link = self._link
        if link is None or not self._proves:
            return
        for rank in filter(None, link.ranks):  # those of rank 0 are known
            try:
                transfer.checksums |= await asyncio.to_thread(link.checksums, rank)
            except EngineError as error:
                transfer.failed |= {server.name: error for server in servers}

    def _tell_senders(self, cause: str) -> None:
        if self._link is not None:
            self._link.fail(cause)


class TensorTransport(DirectTransport):
    """Same host: the request carries a reference to shared memory (or CUDA IPC memory), not the tensors. With several
    nodes, a rank on each node holds the bucket, and the servers of the node get that rank's reference."""

    def _make(self, bucket: FlatBucket) -> SharedBucket:
        return share(bucket, pack_experts=self._config.pack_experts)

    def release(self, prepared: Prepared) -> None:
        prepared.wire.free()

    async def _open(self, servers: Sequence[SGLangClient]) -> Errors:
        if self._link is not None:
            packs = self._config.pack_experts
            self._link.post_plan({"action": "share", "pack_experts": packs, "checksums": self._proves})
        return {}

    async def _send_bucket(
        self, number: int, bucket: Bucket, prepared: SharedBucket | None, servers: Sequence[SGLangClient]
    ) -> Errors:
        link, timeout = self._link, self._config.timeout
        payloads = {} if prepared is None else {0: prepared.payload}
        rank_of = {server.name: 0 for server in servers}  # the rank on its node that holds this bucket
        if link is None:
            assert prepared is not None
            prepared.expect(len(servers))
        else:
            assert isinstance(bucket, FlatBucket | RemoteBucket)
            per_node = len(self._order) // len(bucket.receivers)
            rank_of = {name: bucket.receivers[index // per_node] for index, name in enumerate(self._order)}
            try:
                for rank in {rank_of[server.name] for server in servers} - {0}:
                    payloads[rank] = await asyncio.to_thread(link.payload, number, rank)
            except EngineError as error:
                return {server.name: error for server in servers}
        results = await call_living(servers, lambda s: s.load_tensors(payloads[rank_of[s.name]], timeout))
        if link is not None:
            link.done(number)
        return failures(results)


class DistributedTransport(DirectTransport):
    """Broadcasts from the senders to all ranks of all servers: NCCL between GPUs, gloo between CPUs."""

    _groups: WeightProcessGroups | None = None

    async def _open(self, servers: Sequence[SGLangClient]) -> Errors:
        """Joins the servers into a group for each sender. Groups with the same members, none of them restarted, are
        used again."""
        link, groups = self._link, self._groups
        senders = link.ranks if link else [0]
        if not servers:
            return {}
        if groups is not None and groups.members == members_of(servers) and groups.senders == senders:
            if link is not None:
                link.post_plan({"action": "same", "checksums": self._proves})
            return {}
        await self.close()
        failed: Errors = {}
        for _ in range(1 if link else 2):  # a join cannot be repeated, but a second group can be made
            groups = WeightProcessGroups(self._config, servers, senders)
            try:
                await groups.join(link)
            except EngineError as error:
                await groups.leave()
                failed = {server.name: error for server in servers}
                continue
            self._groups = groups
            return {}
        return failed

    async def _send_bucket(
        self, number: int, bucket: Bucket, prepared: FlatBucket | None, servers: Sequence[SGLangClient]
    ) -> Errors:
        assert self._groups is not None
        specs = specs_of(bucket if prepared is None else prepared)
        if self._config.pack_experts:
            specs = packed(specs)
        sender = bucket.owner if isinstance(bucket, RemoteBucket) else 0
        body = {
            "names": [spec.name for spec in specs], "shapes": [list(spec.shape) for spec in specs],
            "dtypes": [str(spec.dtype).removeprefix("torch.") for spec in specs],
            "group_name": self._groups.names[sender], "flush_cache": False, "load_format": FLATTENED,
        }  # fmt: skip
        label = updating_label(self._version, number + 1)
        try:
            await self._groups.broadcast(None if prepared is None else prepared.flat, body, label, self._link)
        except EngineError as error:
            # A failed broadcast leaves it unknown which servers have the bucket.
            self._tell_senders(str(error))
            await self.close()
            return {server.name: error for server in servers}
        return {}

    async def close(self) -> None:
        if self._groups is not None:
            groups, self._groups = self._groups, None
            await groups.leave()


class AdapterTransport(Transport):
    """LoRA's adapter under a new name for each version; the servers' base stays as it is. It is in shared memory for
    servers on this host, and in the request for others. With `proof: checksum` SGLang compares the SHA-256 of every
    tensor; where one differs it ends.

    Servers go on reading the memory: it is new for each version and never written again. That of the next version is
    made between updates."""

    def __init__(self, config: WeightTransportConfig, snapshot: Snapshot, lora: LoraConfig) -> None:
        super().__init__(config, snapshot, WeightManifest(""))
        self._lora = lora
        self.version: int | None = None  # of what is kept for servers that come later
        self._adapter = flatten([])
        self._checksums: dict[str, str] = {}
        self._memory: list[torch.Tensor] = []  # of the next version, or empty

    def prepare(self, bucket: Bucket) -> Prepared:
        flat = flatten(bucket)
        fits = bool(self._memory) and self._memory[0].shape == flat.flat.shape
        host = self._memory.pop() if fits else torch.empty_like(flat.flat, device="cpu")
        return Prepared(bucket_in(host.copy_(flat.flat), flat.specs), None)

    def _make_memory(self) -> None:
        with contextlib.suppress(RuntimeError):  # /dev/shm may be too small for one more
            self._memory = [shared_memory(self._adapter.flat.numel())]

    async def send(
        self, version: int, servers: Sequence[SGLangClient], stream: BucketStream, order: Sequence[str]
    ) -> Transfer:
        transfer, parts, began = self._begin(), [], time.monotonic()
        async for bucket, prepared in stream:
            self._count(transfer, bucket, prepared)
            parts.append(prepared.wire)
        if transfer.finish(self._manifest, servers):
            gathered = time.monotonic()
            adapter = parts[0] if len(parts) == 1 else flatten([pair for part in parts for pair in part])
            self._checksums = await asyncio.to_thread(sha256, dict(adapter)) if self._proves else {}
            self._adapter, self.version, hashed = adapter, version, time.monotonic()
            transfer.failed |= await self.load(version, servers)
            transfer.seconds |= {"gather": gathered - began, "hash": hashed - gathered}
            transfer.seconds["load"] = time.monotonic() - hashed
            if any(server.on_this_host for server in servers):  # others get the tensors in the request
                loop = asyncio.get_running_loop()
                loop.call_later(MEMORY_DELAY, loop.run_in_executor, None, self._make_memory)
        return transfer

    async def load(self, version: int, servers: Sequence[SGLangClient]) -> Errors:
        """Loads the last version that was sent."""
        if version != self.version:
            raise EngineError(f"weight version {version} has been replaced by version {self.version}")
        name = f"{ADAPTER_PREFIX}{version}-{uuid.uuid4().hex[:12]}"
        shared = {}
        for here in {server.on_this_host for server in servers}:
            shared[here] = await asyncio.to_thread(partial(share, self._adapter, by_value=not here))
            shared[here].expect(sum(server.tensor_parallel for server in servers if server.on_this_host is here))
        body = {"config_dict": self._description, "load_format": FLATTENED}
        body |= {"expected_checksums": self._checksums} if self._proves else {}

        def load(server: SGLangClient) -> Any:
            payloads = {"serialized_named_tensors": [shared[server.on_this_host].payload] * server.tensor_parallel}
            return server.load_adapter(name, version, body | payloads, self._config.timeout)

        return failures(await call_living(servers, load))

    @cached_property
    def _description(self) -> dict[str, Any]:
        names = [spec.name for spec in self._adapter.specs]
        return dict(json.loads(adapter_config(names, self._lora, str(self._snapshot.model))))
