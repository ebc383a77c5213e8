"""One weight update over all SGLang servers, in two phases: all bytes to all servers, then the version.

1. `load`: every server pauses (running requests return what they have, or stay in it: `rollout.weights.pause_mode`), is
   labelled as updating, and receives all buckets.
2. `serve`: a server that has everything gets the version as its label. It must report that label and pass the proof;
   only then does it serve. A server that failed in either phase is given the snapshot once.

So no server ever generates with mixed weights under a version number, even if this process dies in the middle.

LoRA's adapters are loaded beside those that servers use: nothing pauses, and the label stays that of the base.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.protocol import WeightReport, WeightUpdateError
from megatron_dapo.engines.sglang.client import CHECKSUM_LOADERS, EXPERT_LOADER, Capabilities, SGLangClient, call_living
from megatron_dapo.engines.sglang.http import Unresponsive, all_of, failures, wait_all
from megatron_dapo.engines.sglang.response_parser import BASE_LABEL, is_updating_label, updating_label
from megatron_dapo.engines.sglang.transports import AdapterTransport, Errors, Transfer, make_transport
from megatron_dapo.engines.sglang.weight_proof import PROBE, Probes, compare
from megatron_dapo.errors import EngineError
from megatron_dapo.sync.bucket import Bucket
from megatron_dapo.sync.bucket_stream import BucketStream
from megatron_dapo.sync.snapshot import Snapshot
from megatron_dapo.types import LogProbs

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class _Loaded:
    """The result of `load`, for `serve` and the report."""

    version: int
    servers: Sequence[SGLangClient]
    failed: Errors
    transfer: Transfer
    seconds: float
    prepare_seconds: float  # of these, until the servers were paused and had memory for the weights


@dataclass(slots=True)
class _Record:
    """What is known of one process of a server. `installed`: our modules in it. `unproven`: the tensors that its
    checksums did not cover in the last update; None: it has not given any."""

    installed: set[str] = field(default_factory=set)
    differed: bool = False
    warned: bool = False
    probed: bool = False
    unproven: tuple[str, ...] | None = None


class WeightUpdater:
    def __init__(self, config: RolloutConfig, snapshot: Snapshot) -> None:
        self._config = config.weights
        self._snapshot = snapshot
        self._transport = make_transport(config.weights, snapshot, config.servers.demands.lora)
        self._adapters = self._transport if isinstance(self._transport, AdapterTransport) else None
        self._brackets = config.weights.transport != "disk"
        self.loaded: _Loaded | None = None  # between `load` and `serve`
        self._last: _Loaded | None = None
        self._first_errors: dict[str, str] = {}  # of the update, by server
        self._probes = Probes()
        self._servers = 0
        self._records: dict[int, _Record] = {}  # by incarnation
        self._serve_seconds = 0.0  # of the last update
        self._parts: defaultdict[str, float] = defaultdict(float)

    @property
    def has_snapshot(self) -> bool:
        return self._snapshot.exists if self._adapters is None else self._adapters.version is not None

    async def load(
        self, version: int, servers: Sequence[SGLangClient], buckets: Iterable[Bucket] | BucketStream
    ) -> None:
        """Every server receives all buckets; `serve` must follow."""
        started, self.loaded = time.monotonic(), None
        self._parts.clear()
        failed: Errors = {s.name: EngineError(s.state.why or "it is being restarted") for s in servers if s.state.down}
        self._servers = len(servers)
        for server in servers:
            if not server.state.down and self._adapters is None:
                server.state.withdrawn(f"the update to version {version} has not ended")
        async with BucketStream.of(buckets).open(self._transport.prepare, self._transport.release) as stream:
            up = [server for server in servers if server.name not in failed]
            grace = up[0].config.control_timeout / 4 if up else 0.0
            failed |= failures(await call_living(up, lambda server: self._prepare(server, version), grace))
            ready = [server for server in servers if server.name not in failed]
            prepared = time.monotonic() - started
            try:
                transfer = await self._transport.send(version, ready, stream, [s.name for s in servers])
            except BaseException as error:
                self._snapshot.discard()
                for server in servers if self._adapters is None else ():
                    server.state.withdrawn(f"the update to version {version} broke off: {error}")
                if isinstance(error, asyncio.CancelledError):
                    raise
                raise WeightUpdateError(f"weight version {version}: the buckets could not be sent: {error}") from error
        seconds = time.monotonic() - started
        self.loaded = self._last = _Loaded(version, servers, failed | transfer.failed, transfer, seconds, prepared)

    async def serve(self, version: int) -> Errors:
        """Lets every server serve that has the whole version and passes the proof; returns the others' errors."""
        started, loaded, self.loaded = time.monotonic(), self.loaded, None
        if loaded is None or loaded.version != version:
            raise WeightUpdateError(f"weight version {version} has not been loaded")
        servers, failed = loaded.servers, dict(loaded.failed)
        failed |= await self._commit(version, [s for s in servers if s.name not in failed])
        self._first_errors = {name: str(error) for name, error in failed.items()}
        kept = self._config.writes_files or self._adapters is not None  # the version on disk, or the adapter in memory
        again = [s for s in servers if s.name in failed and not s.state.down and kept]
        again = [s for s in again if not isinstance(failed[s.name], Unresponsive)]
        for server in again:
            log.warning("weight version %d, given from the snapshot: %s", version, failed[server.name])
        results = await wait_all({server.name: self.from_snapshot(version, server) for server in again})
        failed = {name: error for name, error in failed.items() if name not in results} | failures(results)
        for server in servers:
            if server.name not in failed:
                server.state.served(version)
        self._serve_seconds = time.monotonic() - started
        return failed

    def report(self) -> WeightReport:
        """The last update as it stands now. Raises WeightUpdateError when no server serves the version."""
        loaded = self._last
        assert loaded is not None
        servers, version = loaded.servers, loaded.version
        failed = {s.name: self._reason(s) for s in servers if not s.state.serves(version)}
        if len(failed) == len(servers):
            causes = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
            raise WeightUpdateError(f"no server took weight version {version}: {causes}")
        served_by = tuple(server.name for server in servers if server.name not in failed)
        proof = f"version {version} acknowledged by {len(served_by)} of {len(servers)}"
        gaps = [self._record(s).unproven for s in servers if s.name in served_by]
        if proven := [len(unproven) for unproven in gaps if unproven is not None]:
            tensors = loaded.transfer.tensors
            proof += f", {len(proven)} with the checksums of {tensors - max(proven)} of {tensors} tensors"
        if agreement := self._probes.describe(version):
            proof += f", which {agreement}"
        # What the trainer does between `load` and `serve`, such as offloading its weights, is not part of the update.
        seconds, transfer = loaded.seconds + self._serve_seconds, loaded.transfer
        proving = self._parts["checksums"] + self._parts["probe"]
        parts = {
            "pause": loaded.prepare_seconds, "transfer": loaded.seconds - loaded.prepare_seconds,
            "labels": self._serve_seconds - proving, "proof": proving,
        }  # fmt: skip
        parts |= {name: self._parts[name] for name in ("checksums", "probe", "flush", "end", "memory")}
        parts |= transfer.seconds
        return WeightReport(version, served_by, failed, transfer.tensors, transfer.bytes, seconds, proof, parts)

    def _reason(self, server: SGLangClient) -> str:
        first, last = self._first_errors.get(server.name, ""), server.state.why
        return last if first in last else f"{first}; then: {last}"

    async def from_snapshot(self, version: int, server: SGLangClient) -> None:
        """Gives one server the version that the others have: from disk, or an adapter."""
        if self._adapters is not None:
            failed = await self._adapters.load(version, [server]) or await self._commit(version, [server])
            if failed:
                raise failed[server.name]
            return
        await asyncio.to_thread(self._snapshot.wait)  # it may still be written
        if self._snapshot.current is None or self._snapshot.current.name != f"version-{version}":
            raise EngineError(f"no snapshot of weight version {version} (rollout.weights.keep_snapshot)")
        snapshot = self._snapshot.current
        await self._prepare(server, version, brackets=False)
        await server.load_from_disk(str(snapshot), self._config.timeout, flush=self._config.flushes_cache)
        if self._snapshot.current != snapshot:  # an update has changed the files; the label still says so
            raise EngineError(f"server {server.name}: weight version {version} was replaced while it was loaded")
        failed = await self._commit(version, [server], brackets=False)
        if failed:
            raise failed[server.name]

    async def close(self) -> None:
        await self._transport.close()

    async def _prepare(self, server: SGLangClient, version: int, brackets: bool = True) -> None:
        await server.notice_restart(wait_for_server=False)
        capabilities = await server.capabilities()
        if self._adapters is not None:
            return
        await server.pause(self._config.pause_mode)
        await all_of(self._resume_memory(server, "weights"), server.set_version_label(updating_label(version)))
        in_session = brackets and self._brackets
        loaders = self._missing_loaders(server, capabilities, in_session)
        if capabilities.bracketed_updates and (in_session or loaders):
            await server.begin_update(self._config.timeout)  # also closes one that an earlier update left open
        for loader in loaders:
            await server.call_loader(loader, self._config.timeout)
        self._record(server).installed |= {*loaders}
        self._record(server).differed = False
        if capabilities.bracketed_updates and not in_session:
            await server.close_update_session(self._config.timeout)

    def _missing_loaders(self, server: SGLangClient, capabilities: Capabilities, in_session: bool) -> list[str]:
        """Our modules that the server needs. Checksums come first: packed experts must pass through the loader that
        records where tensors go."""
        record, (install, record_again) = self._record(server), CHECKSUM_LOADERS
        checks = self._config.proof == "checksum" and capabilities.checksums
        loaders = [install] if checks else []
        loaders += [EXPERT_LOADER] if in_session and self._config.pack_experts else []
        missing = [loader for loader in loaders if loader not in record.installed]
        return [record_again, *missing] if checks and record.differed else missing

    async def _resume_memory(self, server: SGLangClient, tag: str) -> bool:
        with self._timed("memory"):
            return await server.resume_memory(tag)

    async def _commit(self, version: int, servers: Sequence[SGLangClient], brackets: bool = True) -> Errors:
        """Proves and labels the version on each server; returns the errors of those that failed."""
        failed = failures(await call_living(servers, lambda server: self._finish(server, version, brackets)))
        labelled = [server for server in servers if server.name not in failed]
        results = await call_living(labelled, lambda server: self._evidence(server, version))
        failed |= failures(results)
        probes = {name: found for name, found in results.items() if isinstance(found, np.ndarray)}
        wrong = self._probes.compare(version, probes)
        return failed | {name: EngineError(f"server {name}: {what}") for name, what in wrong.items()}

    async def _prove(self, server: SGLangClient, version: int) -> None:
        """Compares the server's memory with what was sent."""
        record, last = self._record(server), self._last
        record.unproven = None
        if self._config.proof != "checksum" or last is None or last.version != version:
            return
        sent = last.transfer.checksums
        if len(sent) != last.transfer.tensors:  # a sender has failed
            return
        if not (await server.capabilities()).checksums:
            if not record.warned:
                record.warned = True
                log.warning(
                    "server %s cannot prove its weights (rollout.weights.proof: checksum): start it with "
                    "--custom-weight-loader %s, with our in_server folder in its PYTHONPATH",
                    server.name, " ".join(CHECKSUM_LOADERS),
                )  # fmt: skip
            return
        with self._timed("checksums"):
            found = compare(sent, await server.checksums())
        if found.differing:
            record.differed = True
            raise EngineError(f"server {server.name}: {found}")
        record.unproven = found.unproven

    async def _evidence(self, server: SGLangClient, version: int) -> LogProbs | None:
        """The log-probs of the probe, where the checksums are not enough, of a server that reports the version."""
        record = self._record(server)
        with self._timed("probe"):
            if self._config.proof == "version" or (record.unproven == () and record.probed):
                found, probe = await server.version_label(), None
            elif not record.probed:
                found, alone = await all_of(server.version_label(), server.logprobs_of(PROBE))
                probe = self._probes.measured([alone, *await all_of(*(server.logprobs_of(PROBE) for _ in range(3)))])
            else:
                found, probe = await all_of(server.version_label(), server.logprobs_of(PROBE))
        expected = str(version) if self._adapters is None else BASE_LABEL
        if found != expected:
            raise EngineError(f"server {server.name}: it reports weight version {found!r}, expected {expected}")
        record.probed = True
        return probe

    def _record(self, server: SGLangClient) -> _Record:
        return self._records.setdefault(server.incarnation, _Record())

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        """Adds to a part of the report. Servers do the same at the same time, so each counts its share."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._parts[part] += (time.monotonic() - started) / max(1, self._servers)

    async def _finish(self, server: SGLangClient, version: int, brackets: bool) -> None:
        if self._adapters is not None:  # SGLang has compared the checksums
            self._record(server).unproven = () if self._config.proof == "checksum" else None
            return await server.set_version_label(BASE_LABEL)
        # Before the session ends: what SGLang then makes of quantised weights is not what was sent.
        found = await wait_all({"label": server.version_label(), "proof": self._prove(server, version)})
        label = found["label"]
        if isinstance(label, str) and not is_updating_label(label, version):
            raise EngineError(f"server {server.name}: its label is {label!r} after the transfer; it has restarted")
        for error in failures(found).values():
            raise error
        await all_of(self._end_update(server, brackets and self._brackets), server.set_version_label(str(version)))
        # Tensors of a checkpoint in bf16 are copied to their place: nothing worth freeing remains.
        await server.resume(empty_cache=server.config.share_gpus and self._config.quantization != "none")

    async def _end_update(self, server: SGLangClient, in_session: bool) -> None:
        """The KV cache has its memory and is empty. A trainer on the same GPU has offloaded its weights by now."""
        capabilities = await server.capabilities()
        was_released = await self._resume_memory(server, "kv_cache")
        if self._config.flushes_cache and not was_released:  # releasing it has emptied it
            with self._timed("flush"):
                await self._flush(server, in_session and capabilities.checksums)
        if in_session and capabilities.bracketed_updates:
            with self._timed("end"):
                await server.end_update(self._config.timeout)

    async def _flush(self, server: SGLangClient, in_session: bool) -> None:
        """Empties the KV cache. /flush_cache would also free torch's cached memory, into which a server receives
        weights over NCCL, in a block for each tensor: 0.7 s for 3.5 GB on an H200."""
        if in_session and self._config.pause_mode == "abort" and self._config.proof == "checksum":
            await server.call_loader(CHECKSUM_LOADERS[0], self._config.timeout, flush=True)
        else:
            await server.flush_cache()
