"""The SGLang engine: one server, several, or several behind sglang-router, as one engine.

- A request goes to the server that serves the current weight version and is expected to finish it first; samples of
  one prompt prefer the same server, whose cache then holds the prompt.
- Servers may come and go. One that comes gets the current weights alone, while the others generate. The requests of one
  that leaves, or of one that is much slower than others with room, are aborted there and continued elsewhere.
- A request that a server failed is sent again, to another server if there is one; so is one whose reply makes no
  sense. A server that is busy (429) gets it later. Any other refusal (4xx) is final.
- A server that fails a control call serves nothing until the supervision has recovered it: admitted it again with the
  current weights, or restarted it. A failed server is an error only when no server is left that could recover.
- A completion with an older weight version (the server restarted) is not used, and the server gets the current weights.
  A version that was never sent to it is a `ForeignWeightsError`: somebody else updates the server.
- LoRA's adapters (`rollout.weights.transport: adapter`) change without a pause. A request names the adapter of its
  version and ends with it; the adapter is unloaded when its last request has ended. When the version after the next
  one comes, requests that still run are aborted and continued with the newest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from megatron_dapo.config.rollout import RolloutConfig
from megatron_dapo.engines.protocol import Completion, ForeignWeightsError, SamplingParams, WeightReport
from megatron_dapo.engines.sglang.client import SGLangClient, call_living
from megatron_dapo.engines.sglang.http import (
    OutcomeUnknown,
    RequestRefused,
    ServerBusy,
    ServerFailure,
    Unresponsive,
    nobody_listens,
    wait_all,
)
from megatron_dapo.engines.sglang.in_server.megatron_dapo_base import ACTION as SHARE
from megatron_dapo.engines.sglang.load_balancer import LoadBalancer
from megatron_dapo.engines.sglang.response_parser import BASE_LABEL, BadReply, UnfinishedUpdate, UnknownLabel
from megatron_dapo.engines.sglang.weight_update import WeightUpdater
from megatron_dapo.errors import EngineError
from megatron_dapo.sync.bucket import Bucket
from megatron_dapo.sync.bucket_stream import BucketStream
from megatron_dapo.sync.snapshot import Snapshot
from megatron_dapo.types import FinishReason, LogProbs, Tokens, WeightSpan, as_logprobs, as_tokens

log = logging.getLogger(__name__)

NO_SERVER_PATIENCE = 30.0
ADMIT_POLL = 0.05  # seconds
SNAPSHOT_TRIES = 2  # a server that loads snapshots slower than updates come joins the next update instead
LEAVE_SECONDS = 5.0  # for requests of a server that leaves to return what they have


class Supervision:
    """Keeps servers working, as the fleet does. This one does nothing: a server that fails stays out until the next
    weight update."""

    def check(self, server: SGLangClient) -> None:
        """A request on it failed: find out now whether it still works. Until then it gets no new requests."""

    def recover(self, server: SGLangClient, cause: BaseException) -> None:
        """It has failed: admit it again, or restart it. Returns at once; its state is RECOVERING until done."""

    async def recovered(self, *, joins: bool = False) -> None:
        """Waits until a server has been recovered, or none can be; with `joins` also for one that joins the fleet."""

    async def end(self, servers: Sequence[SGLangClient]) -> list[SGLangClient]:
        """Ends the processes of these servers, which frees their GPU memory; they are restarted when the engine has
        the GPUs again. Returns the servers that are not ours to end."""
        return list(servers)

    async def stop(self) -> None:
        """No more checks and restarts."""

    async def close(self) -> None:
        """Ends what was started."""


@dataclass(slots=True, eq=False)
class _Running:
    """A request on a server. `moved`: it was aborted there to run elsewhere. `lost`: no reply will come."""

    server: SGLangClient
    name: str
    version: int
    reply: asyncio.Task[Completion]
    moved: bool = False
    lost: bool = False


class SGLangEngine:
    def __init__(
        self, servers: Sequence[SGLangClient], config: RolloutConfig, *, model: str = "", version: int = 0
    ) -> None:
        """`model` is the HF directory that servers were started with; disk updates copy its configuration files."""
        self.servers = list(servers)
        self.config = config
        self._version = version
        self._adapters = config.sends_adapters
        # Of whole weights; 0: those that a server starts with
        self._sent_versions = {0} if self._adapters else {0, version}
        self.snapshot = Snapshot(config.weights.directory, model)
        self._update = WeightUpdater(config, self.snapshot)
        self.vocabulary: int | None = None  # token ids are below it; None: not known
        self.patience = NO_SERVER_PATIENCE  # how long a request waits for any server to serve; the fleet raises it
        self.supervision: Supervision = Supervision()
        self._balancer = LoadBalancer(self.servers, config.servers.max_running)
        self._changing = asyncio.Lock()  # held while servers change weights or memory: two updates at once end SGLang
        self._updating = False  # between the start of `load_weights` and the end of the update
        self._running: dict[str, _Running] = {}  # by request
        self._up = len(self.servers)  # servers that were not down when they were counted
        self._epoch = 0  # counts the times that all requests were aborted
        self._aborted: set[str] = set()
        self._background: set[asyncio.Task[Any]] = set()

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def max_running(self) -> int:
        """Of the servers that work, and at least of one: while none does, requests wait for the next one."""
        return self.config.servers.max_running * max(1, self._up)

    @property
    def memory_released(self) -> bool:
        """Whether the trainer has the GPUs."""
        return self._balancer.memory_released

    @property
    def gpus_in_use(self) -> bool:
        """Whether a trainer on the same GPUs needs memory that a starting server would take."""
        return self.memory_released or (self.config.servers.share_gpus and self._updating)

    @property
    def generating(self) -> bool:
        """Whether servers accept requests now: not paused, not updating, GPUs not with the trainer."""
        return self._balancer.open and not self._changing.locked() and not self.gpus_in_use

    async def shared_base(self) -> dict[str, str]:
        """By SGLang's name of a parameter: a pickled reference to its memory (rollout.servers.share_base)."""
        (found,) = await self.servers[0].checksums(SHARE)
        return found

    # ---- servers that come and fail ----

    def _count_servers(self) -> None:
        self._up = sum(not server.state.down for server in self.servers)

    def add(self, server: SGLangClient) -> None:
        """It serves when it is admitted."""
        self.servers.append(server)
        self._balancer.add(server)

    async def remove(self, server: SGLangClient) -> None:
        """It leaves. Its requests return what they have and are continued elsewhere."""
        server.state.given_up("it has left the fleet")
        self.servers.remove(server)
        self._balancer.remove(server)
        self._move(server, len(self._running))
        deadline = asyncio.get_running_loop().time() + LEAVE_SECONDS
        while server.in_flight and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        self._lose(server)
        await server.close()

    async def admit(self, server: SGLangClient) -> None:
        """Lets a server serve, if it holds the current version or can be given it. Others go on meanwhile, and so do
        updates, which leave it out: if one comes, this starts again with its version."""
        async with server.admitting:
            await self._admit_alone(server)
        self._count_servers()
        self._balancer.refresh(server)

    async def _admit_alone(self, server: SGLangClient) -> None:
        tries, was_down = 0, server.state.down
        try:
            while True:
                # Between load and serve the trainer may still use the KV cache's memory.
                while self._changing.locked() or self._update.loaded is not None or self.gpus_in_use:
                    await asyncio.sleep(ADMIT_POLL)
                if server.state.serves(self._version):
                    break
                server.state.recovering("it is given the current weights")  # until then an update leaves it out
                version, tries = self._version, tries + 1
                if not await self._admit(server, version, last=tries > SNAPSHOT_TRIES) or server not in self.servers:
                    break
                if version == self._version and not self._updating:
                    server.state.served(version)
        finally:
            if not was_down:  # else its supervisor is not done yet
                server.state.recovery_ended()

    async def _admit(self, server: SGLangClient, version: int, last: bool) -> bool:
        """False: it must wait for the next update. `last`: updates come faster than it loads a snapshot."""
        await server.notice_restart()
        await server.claim()
        await server.capabilities()
        held = await self._held(server, version)
        if held == version:
            await server.resume()  # a pause whose reply was lost may have left it paused
        elif last or not self._update.has_snapshot:
            no_update = not last and not self.config.in_flight  # comes before the batch that needs this server
            server.state.recovering(f"it holds weight version {held}, current is {version}", lost=no_update)
            return False
        else:
            try:
                await self._update.from_snapshot(version, server)
            except EngineError:
                if version == self._version and not self._updating:
                    raise
                return True  # the snapshot was replaced while it was being loaded
        await self._check_pause_mode(server)
        return True

    async def _held(self, server: SGLangClient, version: int) -> int | None:
        """The version that it could serve now."""
        try:
            held: int | None = await server.version()
        except (UnfinishedUpdate, UnknownLabel):
            held = None
        if not self._adapters:
            return held
        if held != 0:
            raise EngineError(
                f"server {server.name} got other weights than those it was started with, but adapters are added to "
                "these (rollout.weights.transport: adapter): restart it"
            )
        await server.set_version_label(BASE_LABEL)
        await server.unload_left_adapters()
        return version if server.adapter_of(version) or self._is_base(version) else 0

    def _is_base(self, version: int) -> bool:
        """Whether servers need no adapter for it: a new one changes nothing."""
        return version == 0 and not self._update.has_snapshot

    async def _check_pause_mode(self, server: SGLangClient) -> None:
        mode = self.config.weights.pause_mode
        if mode != "abort" and not self._adapters and not await server.reports_token_versions():
            raise EngineError(
                f"server {server.name}: rollout.weights.pause_mode {mode} keeps requests while weights change, but the "
                "server's replies do not say which version generated which token (SGLang 0.5.23 does): use abort"
            )

    def _fail(self, server: SGLangClient, cause: BaseException) -> None:
        """It gets no requests until the supervision has recovered it."""
        if not server.state.down:
            server.state.withdrawn(str(cause))
            self.supervision.recover(server, cause)

    def _move(self, server: SGLangClient, count: int) -> None:
        """Aborts the newest requests of a server; they are continued on others."""
        mine = [one for one in reversed(self._running.values()) if one.server is server and not one.moved]
        for one in mine[:count]:
            self._abort_to_continue(one)

    def _abort_to_continue(self, one: _Running) -> None:
        one.moved = True
        self._in_background(partial(one.server.abort, one.name))

    def _lose(self, server: SGLangClient) -> None:
        """Nothing more comes from this server: its requests are sent again."""
        for one in self._running.values():
            if one.server is server:
                one.lost = True
                one.reply.cancel()

    def rebalance(self) -> None:
        """Moves requests from a server on which they run much slower than they would elsewhere. Called every second."""
        self._count_servers()
        if not self.config.servers.router_url and (found := self._balancer.overloaded()) is not None:
            self._move(*found)

    def speeds(self) -> dict[str, float]:
        """Of each server that has been measured, in shares of the median."""
        return {server.name: share for server, share in self._balancer.speeds().items()}

    # ---- generation ----

    async def generate(self, request_id: str, prompt: Tokens, params: SamplingParams) -> Completion:
        epoch, failure = self._epoch, ""
        key = zlib.crc32(np.ascontiguousarray(prompt[:256]).tobytes())
        failed_on: set[SGLangClient] = set()

        def aborted() -> bool:
            return self._epoch != epoch or request_id in self._aborted

        attempt = rejected = 0
        busy_since: float | None = None
        clock = asyncio.get_running_loop().time
        while attempt < self.config.servers.attempts:
            version, server = self._version, None
            if not aborted():
                server = await self._balancer.acquire(request_id, key, version, self.patience, failed_on)
            replaced = self._adapters and version != self._version
            if server is None or aborted() or replaced:
                if server is not None:
                    self._balancer.release(server)
                if replaced and not aborted():
                    continue  # an adapter came while it waited: it starts with that
                self._aborted.discard(request_id)
                return Completion(as_tokens([]), as_logprobs([]), FinishReason.ABORT)
            name = f"{request_id}-try{attempt}" if attempt else request_id
            reply = asyncio.ensure_future(self._try(server, name, prompt, params, version))
            running = self._running[request_id] = _Running(server, name, version, reply)
            began, crowd, tokens = clock(), server.in_flight, 0
            try:
                completion = await reply
                server.state.completed_request()
                tokens = len(completion.tokens)
                completion.server, completion.rejected = server.name, rejected
                completion.moved = running.moved and completion.finish_reason is FinishReason.ABORT and not aborted()
                return completion
            except ServerBusy as error:  # not a try: the server has not started it
                now = clock()
                busy_since = now if busy_since is None else busy_since
                if now - busy_since > self.patience:
                    raise EngineError(
                        f"request {request_id}: refused for {self.patience:g} s; the last: {error}"
                    ) from error
                server.state.failed_request(now, error.retry_after)
            except ServerFailure as error:
                failure, attempt, busy_since = str(error), attempt + 1, None
                rejected += isinstance(error, BadReply)
                failed_on.add(server)
                server.state.failed_request(clock())
                self.supervision.check(server)
                self._in_background(partial(server.abort, name))
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not running.lost or (task is not None and task.cancelling()):
                    self._in_background(partial(server.abort, name))
                    raise
                failed_on.add(server)
            finally:
                reply.cancel()
                self._running.pop(request_id, None)
                self._aborted.discard(request_id)
                self._balancer.release(server, tokens, clock() - began, (crowd + server.in_flight) / 2)
                self._unload_unused(server)
        tries = self.config.servers.attempts
        raise EngineError(f"request {request_id}: {tries} tries failed (rollout.servers.attempts); the last: {failure}")

    async def _try(
        self, server: SGLangClient, name: str, prompt: Tokens, params: SamplingParams, version: int
    ) -> Completion:
        """A completion that makes sense, or ServerFailure."""
        adapter = server.adapter_of(version) if self._adapters else None
        if self._adapters and adapter is None and not self._is_base(version):
            raise ServerFailure(f"server {server.name} has no adapter of weight version {version}")
        try:
            completion = await server.generate(name, prompt, params, adapter)
        except UnknownLabel as error:
            raise await self._foreign(server, str(error)) from error
        except RequestRefused as error:
            if adapter is None or adapter not in str(error):
                raise
            server.adapters.pop(adapter, None)
            raise self._outdated(server, version, f"it has lost the adapter of weight version {version}") from error
        if problem := completion.problem(params, self.vocabulary):
            raise BadReply(f"server {server.name}, request {name}: {problem}")
        await self._check_version(server, completion, 0 if self._adapters else version)
        if self._adapters and completion.weight_spans:
            completion.weight_spans = [WeightSpan(version, 0, len(completion.tokens))]
        return completion

    async def _check_version(self, server: SGLangClient, completion: Completion, version: int) -> None:
        """`version` is the one that was current when the request was sent. A request that was kept over weight updates
        has tokens of later versions, too."""
        kept = self.config.weights.pause_mode != "abort" and not self._adapters
        expected = range(version, self._version + 1) if kept else (version,)
        others = {span.version for span in completion.weight_spans} - set(expected)
        if others - self._sent_versions:
            found = min(others - self._sent_versions)
            raise await self._foreign(server, f"server {server.name}: it generated with weight version {found}")
        if others:
            raise self._outdated(server, version, f"it generated with weight version {min(others)}, not {version}")

    def _outdated(self, server: SGLangClient, version: int, cause: str) -> ServerFailure:
        if server.state.serves(version):
            server.state.withdrawn(cause)
            self._in_background(partial(self._readmit, server))
        return ServerFailure(f"server {server.name}: {cause}; was it restarted?")

    async def _foreign(self, server: SGLangClient, found: str) -> EngineError:
        """A reply names weights that this run has not sent. If the server's own label does not, only the reply is
        damaged."""
        asked = self.servers if self.config.servers.router_url else [server]
        if all([await self._holds_ours(other) for other in asked]):
            return BadReply(f"{found}, which it does not hold")
        server.state.withdrawn(
            f"{found}, which this run has never sent; current is {self._version}. Somebody else updates this server: "
            "give each run its own servers, or protect them with a key (rollout.servers.api_key_env)"
        )
        return ForeignWeightsError(server.state.why)

    async def _holds_ours(self, server: SGLangClient) -> bool:
        try:
            return await server.version() in self._sent_versions
        except (UnfinishedUpdate, UnknownLabel) as error:
            return isinstance(error, UnfinishedUpdate)

    async def _readmit(self, server: SGLangClient) -> None:
        try:
            await self.admit(server)
        except EngineError as error:
            self._fail(server, error)

    # ---- control ----

    def wake_requests(self, server: SGLangClient) -> None:
        """The server takes requests again."""
        self._balancer.refresh(server)

    async def abort(self, request_id: str | None = None) -> None:
        if request_id is not None:
            self._aborted.add(request_id)
            self._balancer.cancel(request_id)
            if (running := self._running.get(request_id)) is not None:
                # Only the router knows which server has the request: ask all.
                asked = self.servers if self.config.servers.router_url else [running.server]
                await wait_all({other.name: other.abort(running.name) for other in asked})
            return
        self._abort_waiting()
        busy = [server for server in self.servers if server.in_flight or self.config.servers.router_url]
        self._fail_silent(await call_living(busy, SGLangClient.abort, self.config.servers.control_timeout / 4))

    def _abort_waiting(self) -> None:
        self._epoch += 1
        self._balancer.cancel()

    def _fail_silent(self, results: Mapping[str, object]) -> None:
        """Those that do not answer have failed, and the requests on them are lost."""
        for server in self.servers:
            if isinstance(error := results.get(server.name), Unresponsive):
                self._fail(server, error)
                self._lose(server)

    async def load_weights(self, version: int, buckets: Iterable[Bucket] | BucketStream) -> None:
        self._balancer.memory_released = False
        if all(server.state.down for server in self.servers):  # else nobody waits: a later server gets a later version
            await self.supervision.recovered(joins=True)
            while all(s.state.down for s in self.servers) and any(s.admitting.locked() for s in self.servers):
                await asyncio.sleep(ADMIT_POLL)
        self._updating = True
        try:
            async with self._changing:
                if self._adapters:
                    self._abort_old()
                    return await self._update.load(version, list(self.servers), buckets)
                self._abort_waiting()
                self._version = version
                self._sent_versions.add(version)
                with self._balancer.closed():
                    await self._update.load(version, list(self.servers), buckets)
        except BaseException:
            self._updating = False
            raise

    async def serve_weights(self, version: int) -> WeightReport:
        with self._balancer.closed() if not self._adapters else contextlib.nullcontext():
            try:
                async with self._changing:
                    failed = await self._update.serve(version)
                    if self._adapters:
                        self._switch_to(version)
            finally:
                self._updating = False
            self._fail_silent(failed)
            for server in self.servers:
                if server.name in failed:
                    self._fail(server, failed[server.name])
            if all(server.name in failed for server in self.servers):
                await self.supervision.recovered()
            return self._update.report()

    async def update_weights(self, version: int, buckets: Iterable[Bucket]) -> WeightReport:
        await self.load_weights(version, buckets)
        return await self.serve_weights(version)

    # ---- LoRA adapters ----

    def _switch_to(self, version: int) -> None:
        """Requests that start from now on use its adapter, also those that wait for a server."""
        self._version = version
        self._balancer.cancel()
        self._balancer.refresh()
        for server in self.servers:
            self._unload_unused(server)

    def _abort_old(self) -> None:
        """Requests of an older version than the current one: with the next adapter, servers would have three in use."""
        for one in self._running.values():
            if one.version != self._version and not one.moved:
                self._abort_to_continue(one)

    def _unload_unused(self, server: SGLangClient) -> None:
        """All but the current adapter, the next one, and those of requests that run."""
        if len(server.adapters) < 2 or server not in self.servers:
            return
        versions = {one.version for one in self._running.values() if one.server is server} | {self._version}
        kept = {server.adapter, *map(server.adapter_of, versions)}
        for name in [name for name in server.adapters if name not in kept]:
            del server.adapters[name]
            self._in_background(partial(server.unload_adapter, name))

    async def release_memory(self) -> None:
        self._balancer.memory_released = True  # from now on no server is started
        down = [server for server in self.servers if server.state.down]
        not_ended = await self.supervision.end(down)
        async with self._changing:
            self._abort_waiting()
            up = [server for server in self.servers if server not in down or server in not_ended]
            for server in up:
                server.state.withdrawn("the trainer has its GPUs")
            results = await wait_all({server.name: server.release_memory() for server in up})
        for server in up:
            if isinstance(error := results[server.name], BaseException):
                await self._free_gpus_of(server, error)

    async def _free_gpus_of(self, server: SGLangClient, error: BaseException) -> None:
        """It has not released its memory, or it is not known whether it has. When it has ended, it has."""
        if not isinstance(error, ServerFailure | RequestRefused):
            raise error
        log.warning("server %s did not release its GPU memory: %s", server.name, error)
        self._fail(server, error)
        if not await self.supervision.end([server]):
            return
        # It is not ours to end. A lost reply most likely means that the call ran.
        if not (isinstance(error, OutcomeUnknown) or nobody_listens(error)):
            raise error

    async def logprobs_of(self, tokens: Sequence[int]) -> dict[str, LogProbs]:
        """The log-probs of a text on each serving server, for a trainer to compare with its own."""
        serving = [server for server in self.servers if server.state.serves(self._version)]
        return {server.name: await server.logprobs_of(tokens) for server in serving}

    async def close(self) -> None:
        await self.supervision.stop()
        for task in self._background:
            task.cancel()
        await self._update.close()
        await wait_all({server.name: server.close() for server in self.servers})
        self.snapshot.close()
        await self.supervision.close()

    def _in_background(self, work: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            with contextlib.suppress(EngineError):  # an abort that fails: the request is over anyway
                await work()

        task = asyncio.ensure_future(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
