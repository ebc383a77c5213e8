"""One weight update over all SGLang servers, in two phases: all bytes to all servers, then the version.

1. `load`: every server pauses (running requests return what they have, or stay in it: `rollout.weights.pause_mode`), is
   labelled as updating, and receives all buckets.
2. `serve`: a server that has everything gets the version as its label. It must report that label and pass the proof;
   only then does it serve. A server that failed in either phase is given the snapshot once.

So no server ever generates with mixed weights under a version number, even if this process dies in the middle.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dapo.config.rollout import WeightTransportConfig
from megatron_dapo.engines.protocol import WeightReport, WeightUpdateError
from megatron_dapo.engines.sglang.client import SGLangClient
from megatron_dapo.engines.sglang.http import Unresponsive, all_of, failures, wait_all, wait_for_living
from megatron_dapo.engines.sglang.response_parser import is_updating_label, updating_label
from megatron_dapo.engines.sglang.transports import Errors, Transfer, make_transport
from megatron_dapo.errors import EngineError
from megatron_dapo.sync.bucket import Bucket
from megatron_dapo.sync.bucket_stream import BucketStream
from megatron_dapo.sync.snapshot import Snapshot
from megatron_dapo.types import LogProbs

# The text of the probe: any tokens will do, since all servers get the same and every vocabulary has them.
PROBE = (11, 7, 3, 19, 2, 5, 23, 17)
# Servers of one run hold the same weights; what remains is the rounding of bf16 kernels under different batches.
PROBE_TOLERANCE = 0.5


@dataclass(slots=True, frozen=True)
class _Loaded:
    """The result of `load`, for `serve` and the report."""

    version: int
    servers: Sequence[SGLangClient]
    failed: Errors
    transfer: Transfer
    seconds: float
    prepare_seconds: float  # of these, until the servers were paused and had memory for the weights


class WeightUpdater:
    def __init__(self, config: WeightTransportConfig, snapshot: Snapshot) -> None:
        self._config = config
        self._snapshot = snapshot
        self._transport = make_transport(config, snapshot)
        self._brackets = config.transport != "disk"
        self.loaded: _Loaded | None = None  # between `load` and `serve`
        self._last: _Loaded | None = None
        self._first_errors: dict[str, str] = {}  # of the update, by server
        self._checksums: tuple[int, str, dict[str, str]] | None = None  # version, server, its checksums
        self._agreed: tuple[int, LogProbs] | None = None  # version, its log-probs of the probe text
        self._servers = 0
        self._installed: set[tuple[str, int]] = set()  # servers, with their incarnation, that have our loader
        self._serve_seconds = self._memory_seconds = self._proof_seconds = 0.0  # of the last update

    @property
    def keeps_snapshot(self) -> bool:
        """Whether a server that misses an update can be given the version from disk."""
        return self._config.transport == "disk" or self._config.keep_snapshot

    async def load(
        self, version: int, servers: Sequence[SGLangClient], buckets: Iterable[Bucket] | BucketStream
    ) -> None:
        """Every server receives all buckets; `serve` must follow."""
        started, self.loaded, self._memory_seconds = time.monotonic(), None, 0.0
        failed: Errors = {s.name: EngineError(s.state.why or "it is being restarted") for s in servers if s.state.down}
        self._servers = len(servers)
        for server in servers:
            if not server.state.down:
                server.state.withdrawn(f"the update to version {version} has not ended")
        async with BucketStream.of(buckets).open(self._transport.prepare, self._transport.release) as stream:
            up = [server for server in servers if server.name not in failed]
            calls = {server.name: self._prepare(server, version) for server in up}
            failed |= failures(await wait_for_living(calls, up[0].config.control_timeout / 4 if up else 0.0))
            ready = [server for server in servers if server.name not in failed]
            prepared = time.monotonic() - started
            try:
                transfer = await self._transport.send(version, ready, stream, [s.name for s in servers])
            except BaseException as error:
                self._snapshot.discard()
                for server in servers:
                    server.state.withdrawn(f"the update to version {version} broke off: {error}")
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
        again = [s for s in servers if s.name in failed and not s.state.down]
        again = [s for s in again if not isinstance(failed[s.name], Unresponsive)]
        results = await wait_all({server.name: self.from_snapshot(version, server) for server in again})
        for server in again:
            if isinstance(error := results[server.name], BaseException):
                failed[server.name] = error
            else:
                del failed[server.name]
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
        if self._config.proof == "checksum" and self._checksums is not None:
            proof += f", with the same checksums of {len(self._checksums[2])} tensors"
        elif self._agreed is not None:
            proof += f", which agree on the log-prob of a fixed text: {float(self._agreed[1].sum()):.4f}"
        # What the trainer does between `load` and `serve`, such as offloading its weights, is not part of the update.
        seconds, transfer = loaded.seconds + self._serve_seconds, loaded.transfer
        parts = {
            "pause": loaded.prepare_seconds, "transfer": loaded.seconds - loaded.prepare_seconds,
            "labels": self._serve_seconds - self._proof_seconds, "proof": self._proof_seconds,
            "memory": self._memory_seconds,
        }  # fmt: skip
        return WeightReport(version, served_by, failed, transfer.tensors, transfer.bytes, seconds, proof, parts)

    def _reason(self, server: SGLangClient) -> str:
        first, last = self._first_errors.get(server.name, ""), server.state.why
        return last if first in last else f"{first}; then: {last}"

    async def from_snapshot(self, version: int, server: SGLangClient) -> None:
        """Gives one server the version that the others have, from disk."""
        await asyncio.to_thread(self._snapshot.wait)  # it may still be written
        if self._snapshot.current is None or self._snapshot.current.name != f"version-{version}":
            raise EngineError(f"no snapshot of weight version {version} (rollout.weights.keep_snapshot)")
        await self._prepare(server, version, brackets=False)
        await server.load_from_disk(str(self._snapshot.current), self._config.timeout, flush=self._config.flushes_cache)
        failed = await self._commit(version, [server], brackets=False)
        if failed:
            raise failed[server.name]

    async def close(self) -> None:
        await self._transport.close()

    async def _prepare(self, server: SGLangClient, version: int, brackets: bool = True) -> None:
        await server.notice_restart()
        capabilities = await server.capabilities()
        await server.pause(self._config.pause_mode)
        await all_of(self._resume_memory(server, "weights"), server.set_version_label(updating_label(version)))
        if capabilities.bracketed_updates:
            if brackets and self._brackets:
                await server.begin_update(self._config.timeout)
            else:
                await server.close_update_session(self._config.timeout)
        member = (server.name, server.incarnation)
        if brackets and self._brackets and self._config.pack_experts and member not in self._installed:
            await server.install_expert_loader(self._config.timeout)
            self._installed.add(member)

    async def _resume_memory(self, server: SGLangClient, tag: str) -> bool:
        started = time.monotonic()
        was_released = await server.resume_memory(tag)
        self._memory_seconds += (time.monotonic() - started) / max(1, self._servers)  # servers do this in parallel
        return was_released

    async def _commit(self, version: int, servers: Sequence[SGLangClient], brackets: bool = True) -> Errors:
        """Labels and proves the version on each server; returns the errors of those that failed."""
        failed = failures(await wait_all({s.name: self._finish(s, version, brackets) for s in servers}))
        started = time.monotonic()
        labelled = [server for server in servers if server.name not in failed]
        by_checksum = self._config.proof == "checksum" and all(
            [(await server.capabilities()).checksums for server in labelled]
        )
        results = await wait_all({s.name: self._evidence(s, version, by_checksum) for s in labelled})
        failed |= self._compare_checksums(version, {n: r for n, r in results.items() if isinstance(r, dict)})
        failed |= self._compare_probes(version, {n: r for n, r in results.items() if isinstance(r, np.ndarray)})
        self._proof_seconds = time.monotonic() - started
        return failed | failures(results)

    async def _evidence(
        self, server: SGLangClient, version: int, by_checksum: bool
    ) -> dict[str, str] | LogProbs | None:
        """What is compared between servers, of one that reports the version."""
        label = server.version_label()
        if by_checksum:
            found, evidence = await all_of(label, server.checksums())
        elif self._config.proof == "version":
            found, evidence = await label, None
        else:
            found, evidence = await all_of(label, server.logprobs_of(PROBE))
        if found != str(version):
            raise EngineError(f"server {server.name}: it reports weight version {found!r}, expected {version}")
        return evidence

    def _compare_checksums(self, version: int, found: dict[str, dict[str, str]]) -> Errors:
        """All servers of a run have the same layout, so each tensor must have the same checksum everywhere."""
        failed: Errors = {}
        for name, checksums in found.items():
            if self._checksums is None or self._checksums[0] != version:
                self._checksums = (version, name, checksums)
            _, other, expected = self._checksums
            differing = [key for key in expected if checksums.get(key) != expected[key]]
            if differing or len(checksums) != len(expected):
                message = f"server {name}: {len(differing)} tensors differ from those of {other}: {differing[:3]}"
                failed[name] = EngineError(message)
        return failed

    def _compare_probes(self, version: int, probes: dict[str, LogProbs]) -> Errors:
        """Servers must agree on a fixed text with the median server of this version, also those that join later."""
        if self._agreed is None or self._agreed[0] != version:
            self._agreed = (version, np.median(np.stack(list(probes.values())), axis=0)) if probes else None
        if self._agreed is None:
            return {}
        gaps = {name: float(np.abs(values - self._agreed[1]).max()) for name, values in probes.items()}
        return {
            name: EngineError(f"server {name}: its log-probs of a fixed text differ from the others' by {gap:.3f}")
            for name, gap in gaps.items()
            if gap > PROBE_TOLERANCE
        }

    async def _finish(self, server: SGLangClient, version: int, brackets: bool) -> None:
        label = await server.version_label()
        if not is_updating_label(label, version):
            raise EngineError(f"server {server.name}: its label is {label!r} after the transfer; it has restarted")
        capabilities = await server.capabilities()
        if brackets and capabilities.bracketed_updates and self._brackets:
            await server.end_update(self._config.timeout)
        await all_of(self._resume_cache(server), server.set_version_label(str(version)))
        # Tensors of a checkpoint in bf16 are copied to their place: nothing worth freeing remains.
        await server.resume(empty_cache=self._config.quantization != "none")

    async def _resume_cache(self, server: SGLangClient) -> None:
        """The KV cache has its memory and is empty. A trainer on the same GPU has offloaded its weights by now."""
        was_released = await self._resume_memory(server, "kv_cache")
        if self._config.flushes_cache and not was_released:  # releasing it has emptied it
            await server.flush_cache()
