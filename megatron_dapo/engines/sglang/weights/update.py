"""One weight update over a fleet of SGLang servers, in two phases: all bytes everywhere, then the version.

1. Every server stops (running requests return what they have), is labelled as updating, and receives all buckets.
2. A server that has everything gets the version as its label, and must read it back and pass the proof; only then
   does it serve. One that failed is given the snapshot once; failing that too, it serves nothing until the next
   update reaches it.

So no server ever answers with mixed weights under a version number, not even if this process dies half-way.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from megatron_dapo.config.rollout import WeightTransportConfig
from megatron_dapo.engines.bucket_reader import BucketReader
from megatron_dapo.engines.protocol import Bucket, EngineError, WeightReport, WeightUpdateError
from megatron_dapo.engines.sglang.client import SGLangServer
from megatron_dapo.engines.sglang.http import reasons, wait_all
from megatron_dapo.engines.sglang.weights.snapshot import Snapshot
from megatron_dapo.engines.sglang.weights.transports import Sent, load_from_disk, make_transport
from megatron_dapo.types import LogProbs

# Text for the probe: any tokens will do, since all servers get the same and every vocabulary has them.
PROBE = (11, 7, 3, 19, 2, 5, 23, 17)
# Servers of one fleet hold the same weights; what is left is the rounding of bf16 kernels under different batches.
PROBE_TOLERANCE = 0.5


@dataclass(slots=True, frozen=True)
class _Loaded:
    """What `load` did, for `serve`."""

    version: int
    servers: Sequence[SGLangServer]
    failed: dict[str, str]
    sent: Sent
    began: float


class WeightUpdate:
    def __init__(self, config: WeightTransportConfig, snapshot: Snapshot) -> None:
        self._config, self._snapshot = config, snapshot
        self._transport = make_transport(config, snapshot)
        self.loaded: _Loaded | None = None  # between `load` and `serve`
        self._checksums: tuple[int, str, dict[str, str]] | None = None  # version, server, its checksums
        self._agreed: tuple[int, LogProbs] | None = None  # version, its log-probs of the probe text

    async def load(
        self, version: int, servers: Sequence[SGLangServer], buckets: Iterable[Bucket], executor: Executor | None = None
    ) -> None:
        """Every server receives all buckets; `serve` must follow."""
        began, self.loaded = time.monotonic(), None
        for server in servers:
            server.serves, server.trouble = None, f"the update to version {version} has not ended"
        async with BucketReader(buckets, self._transport.prepare, self._transport.release, executor) as reader:
            failed = reasons(await wait_all({s.name: self._prepare(s, version) for s in servers}))
            ready = [server for server in servers if server.name not in failed]
            try:
                sent = await self._transport.send(version, ready, reader)
            except BaseException as error:
                self._snapshot.discard()
                for server in servers:
                    server.trouble = f"the update to version {version} broke off: {error}"
                raise WeightUpdateError(f"weight version {version}: the buckets could not be sent: {error}") from error
        self.loaded = _Loaded(version, servers, failed | sent.failed, sent, began)

    async def serve(self, version: int) -> WeightReport:
        """Gives the version's label to every server that has all of it, and lets those serve that pass the proof."""
        loaded, self.loaded = self.loaded, None
        if loaded is None or loaded.version != version:
            raise WeightUpdateError(f"weight version {version} has not been loaded")
        servers, failed = loaded.servers, dict(loaded.failed)
        failed |= await self._commit(version, [s for s in servers if s.name not in failed])
        again = [server for server in servers if server.name in failed]
        recovered = await wait_all({server.name: self.from_snapshot(version, server) for server in again})
        failed = {name: f"{failed[name]}; then: {error}" for name, error in reasons(recovered).items()}
        return await self._open(version, servers, failed, loaded.sent, loaded.began)

    async def from_snapshot(self, version: int, server: SGLangServer) -> None:
        """Gives one server the version that the others have, from disk."""
        if self._snapshot.current is None or self._snapshot.current.name != f"version-{version}":
            raise EngineError(f"no snapshot of weight version {version} (rollout.weights.keep_snapshot)")
        await self._prepare(server, version, brackets=False)
        await load_from_disk(server, self._snapshot, self._config.timeout)
        failed = await self._commit(version, [server], brackets=False)
        if failed:
            raise EngineError(failed[server.name])
        await server.resume()

    async def close(self) -> None:
        await self._transport.close()

    def _bracketed(self) -> bool:
        return self._config.transport != "disk"

    async def _prepare(self, server: SGLangServer, version: int, brackets: bool = True) -> None:
        capabilities = await server.capabilities()
        await server.pause()
        await server.take_memory("weights")
        await server.set_version_label(f"updating-to-{version}")
        if capabilities.bracketed_updates:
            # A session that an earlier update left open would refuse this one.
            with contextlib.suppress(EngineError):
                await server.update_call("/end_weight_update", {}, self._config.timeout)
            if brackets and self._bracketed():
                await server.update_call("/begin_weight_update", {}, self._config.timeout)

    async def _commit(self, version: int, servers: Sequence[SGLangServer], brackets: bool = True) -> dict[str, str]:
        """The version's label and its proof on each server; returns who failed and why."""
        failed = reasons(await wait_all({s.name: self._finish(s, version, brackets) for s in servers}))
        probed = [server for server in servers if server.name not in failed]
        if self._config.proof == "version" or not probed:
            return failed
        able = [(await server.capabilities()).checksums for server in probed]
        if self._config.proof == "checksum" and all(able):
            results = await wait_all({server.name: server.checksums() for server in probed})
            self._compare_checksums(version, {n: r for n, r in results.items() if isinstance(r, dict)}, failed)
        else:
            results = await wait_all({server.name: server.logprobs_of(PROBE) for server in probed})
            self._compare(version, {n: r for n, r in results.items() if isinstance(r, np.ndarray)}, failed)
        failed |= reasons(results)
        return failed

    def _compare_checksums(self, version: int, found: dict[str, dict[str, str]], failed: dict[str, str]) -> None:
        """All servers of a fleet are laid out alike, so each tensor must have the same checksum everywhere."""
        for name, checksums in found.items():
            if self._checksums is None or self._checksums[0] != version:
                self._checksums = (version, name, checksums)
            _, other, expected = self._checksums
            differing = [key for key in expected if checksums.get(key) != expected[key]]
            if differing or len(checksums) != len(expected):
                failed[name] = f"server {name}: {len(differing)} tensors differ from {other}'s: {differing[:3]}"

    def _compare(self, version: int, probes: dict[str, LogProbs], failed: dict[str, str]) -> None:
        """Servers must agree on a fixed text: with the median server of this version, also those that come later."""
        if self._agreed is None or self._agreed[0] != version:
            self._agreed = (version, np.median(np.stack(list(probes.values())), axis=0)) if probes else None
        if self._agreed is None:
            return
        gaps = {name: float(np.abs(values - self._agreed[1]).max()) for name, values in probes.items()}
        for name, gap in gaps.items():
            if gap > PROBE_TOLERANCE:
                failed[name] = f"server {name}: its log-probs of a fixed text differ from the others' by {gap:.3f}"

    async def _finish(self, server: SGLangServer, version: int, brackets: bool) -> None:
        label = await server.version_label()
        if label != f"updating-to-{version}":
            raise EngineError(f"server {server.name}: its label is {label!r} after the transfer; it has restarted")
        capabilities = await server.capabilities()
        if brackets and capabilities.bracketed_updates and self._bracketed():
            await server.update_call("/end_weight_update", {}, self._config.timeout)
        await server.take_memory("kv_cache")  # by now a trainer on the same GPU has put its own weights away
        await server.flush_cache()
        await server.set_version_label(str(version))
        found = await server.version_label()
        if found != str(version):
            raise EngineError(f"server {server.name}: it acknowledges weight version {found!r}, expected {version}")
        await server.resume()

    async def _open(
        self, version: int, servers: Sequence[SGLangServer], failed: dict[str, str], sent: Sent, began: float
    ) -> WeightReport:
        for server in servers:
            server.trouble = failed.get(server.name, "")
            server.serves = None if server.trouble else version
        if len(failed) == len(servers):
            causes = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
            raise WeightUpdateError(f"no server took weight version {version}: {causes}")
        served_by = tuple(server.name for server in servers if not server.trouble)
        seconds = time.monotonic() - began
        proof = f"version {version} acknowledged by {len(served_by)} of {len(servers)}"
        if self._config.proof == "checksum" and self._checksums is not None:
            proof += f", with the same checksums of {len(self._checksums[2])} tensors"
        elif self._agreed is not None:
            proof += f", which agree on the log-prob of a fixed text: {float(self._agreed[1].sum()):.4f}"
        return WeightReport(version, served_by, failed, sent.tensors, sent.bytes, seconds, proof)
