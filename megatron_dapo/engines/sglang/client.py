"""One SGLang server as seen from here: its capabilities, generation, and the control calls.

Every control call says at its definition whether it may run twice on the server. Those that may are repeated when the
connection breaks; the others raise `OutcomeUnknown`, and only a restart makes the server's state known again.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import logging
import pickle
import re
import socket
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_dapo.config.rollout import PauseMode, ServerConfig
from megatron_dapo.engines.protocol import Completion, SamplingParams
from megatron_dapo.engines.sglang.client_process import ClientProcess
from megatron_dapo.engines.sglang.http import (
    BrokenConnection,
    Connection,
    OutcomeUnknown,
    RequestRefused,
    ServerFailure,
    wait_for_living,
)
from megatron_dapo.engines.sglang.keys import Keys
from megatron_dapo.engines.sglang.response_parser import (
    GenerateCall,
    input_logprobs,
    lease_of,
    leased,
    version_number,
    without_lease,
)
from megatron_dapo.engines.sglang.server_state import ServerState
from megatron_dapo.errors import EngineError
from megatron_dapo.types import LogProbs, Tokens

log = logging.getLogger(__name__)

OLDEST_VERSION = (0, 5, 17)
MEMORY_TAGS = ("kv_cache", "weights")  # SGLang's names for the GPU memory that it can release
# In in_server/. The second of the checksums forgets where tensors were put.
EXPERT_LOADER = "megatron_dapo_experts.install"
CHECKSUM_LOADERS = ("megatron_dapo_checksums.install", "megatron_dapo_checksums.record_again")
EXACT_ARGUMENTS = ("--enable-deterministic-inference", "--attention-backend", "triton", "--disable-prefill-cuda-graph")
IN_SERVER = Path(__file__).parent / "in_server"
ADAPTER_PREFIX = "megatron-dapo-"  # of the names of LoRA adapters
SERVED_ADAPTERS = 2  # on a GPU at a time: the newest, and the one before for requests that still run
FLATTENED = "flattened_bucket"  # SGLang's name for one block of bytes and the tensors in it
HEALTH_SECONDS = 30.0  # SGLang's own health check gives up after 20
LEASE_SECONDS = 600.0  # after which a server of a run that was killed is free for others
END_LEASE_SECONDS = 2.0
ABORT_INTERVAL = 0.05  # seconds until requests that arrived after an abort are aborted
_incarnations = itertools.count()  # of all clients: a server that leaves may be another process when it is back


@dataclass(slots=True, frozen=True)
class Capabilities:
    """What a server can do, found by asking it rather than from its version number."""

    bracketed_updates: bool  # tensor and distributed updates need begin_ and end_weight_update around them
    checksums: bool
    releases_memory: bool  # can free its GPU memory, or uses none


class SGLangClient:
    """`process` sends its generate requests; None: this process does. `in_flight` is the load balancer's."""

    def __init__(
        self, url: str, config: ServerConfig, *, keys: Keys | None = None, generate_url: str | None = None
    ) -> None:
        keys = keys or Keys.of_external_servers(config)
        connect = partial(Connection, api_key=keys.api, admin_key=keys.admin, timeout=config.control_timeout)
        self.connection = connect(url)
        self._generate = connect(generate_url) if generate_url else self.connection
        self.name = self.connection.url
        self.config = config
        self.state = ServerState()
        self._api_key = keys.api
        self.process: ClientProcess | None = None
        self.in_flight = 0
        self.tensor_parallel = 1
        self.incarnation = next(_incarnations)  # another number for every process that serves here, if it is noticed
        self.on_this_host = False  # known with its capabilities
        self.adapters: dict[str, int] = {}  # LoRA's by name, oldest first, and their weight versions
        self._labels: set[str] = set()  # what its version label can be if it is still the same process
        self._capabilities: Capabilities | None = None
        self._released: set[str] = set()  # memory tags that it has released
        self._paused = False  # and without requests
        self.admitting = asyncio.Lock()  # held while it alone is given weights
        self.owner: str | None = None  # the run that leases it; None: it needs no lease
        self._leased_until = 0.0
        self._labelling = asyncio.Lock()  # an older label must not arrive after a newer one

    # ---- what it is ----

    async def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            self._capabilities = await self._read_capabilities()
        return self._capabilities

    async def _read_capabilities(self) -> Capabilities:
        info = await self.connection.get("/server_info")
        version = str(info.get("version", ""))
        if _numbers(version) < OLDEST_VERSION:
            raise EngineError(f"server {self.name} runs SGLang {version}; expected 0.5.17 or newer")
        self.tensor_parallel = int(info.get("tp_size") or 1)
        if self.config.demands.returns_experts and not info.get("enable_return_routed_experts"):
            raise EngineError(
                f"server {self.name} does not report the experts of a token (policy.routing_replay: engine): start it "
                "with --enable-return-routed-experts"
            )
        if self.config.demands.loads_packed_experts and EXPERT_LOADER not in (info.get("custom_weight_loader") or ()):
            raise EngineError(
                f"server {self.name} does not load packed experts (rollout.weights.pack_experts): start it with "
                f"--custom-weight-loader {EXPERT_LOADER}, with our in_server folder in its PYTHONPATH"
            )
        self._check_serves_adapters(info)
        if self.config.demands.exact:
            await self._check_exact()
        self.on_this_host = await asyncio.to_thread(_is_local, self.name)
        try:
            paths = set((await self.connection.get("/openapi.json"))["paths"])
        except (EngineError, KeyError, TypeError):
            # The list of endpoints may be switched off; then ask for the one that differs between versions.
            paths = {"/begin_weight_update"} if await self._has("/begin_weight_update") else set()
        return Capabilities(
            bracketed_updates="/begin_weight_update" in paths,
            checksums=set(CHECKSUM_LOADERS) <= set(info.get("custom_weight_loader") or ()),
            releases_memory=bool(info.get("enable_memory_saver")) or info.get("device") == "cpu",
        )

    def _check_serves_adapters(self, info: dict[str, Any]) -> None:
        rank = self.config.demands.lora.rank
        if not rank:
            return
        slots = int(info.get("max_loras_per_batch") or 0)
        if not info.get("enable_lora") or (info.get("max_lora_rank") or 0) < rank or slots < SERVED_ADAPTERS:
            raise EngineError(
                f"server {self.name} cannot serve this run's adapters (rollout.weights.transport: adapter): start it "
                f"with {' '.join(adapter_arguments(self.config))}"
            )

    async def _check_exact(self) -> None:
        """SGLang only logs that a plugin has failed, so the plugin itself must say that its kernels are in use."""
        kernels = (IN_SERVER / "megatron_dapo_kernels.py").read_bytes()
        expected = {"kernels": f"{zlib.crc32(kernels):x}", "attention": "True", "products": "True"}
        found: Any
        try:
            found = await self.checksums("exact")
        except RequestRefused as error:
            found = error
        if found != [expected]:
            raise EngineError(
                f"server {self.name} does not compute with the trainer's kernels (policy.true_on_policy; {found}): its "
                f"log says why the plugin megatron_dapo_exact failed. Start external servers with "
                f"{' '.join(EXACT_ARGUMENTS)} and with our folders in_server and in_server/exact_plugin in PYTHONPATH"
            )

    async def _has(self, path: str) -> bool:
        try:
            await self.connection.get(path)
        except (RequestRefused, ServerFailure) as error:
            return error.status != 404
        return True

    async def notice_restart(self, *, wait_for_server: bool = True) -> None:
        """Compares its version label with the one it was given last: a restarted SGLang has the label `default`."""
        label = await self.version_label(wait_for_server=wait_for_server)
        if self._labels and label not in self._labels:
            self.restarted()
        self._labels = {label}

    def restarted(self) -> None:
        """A new process serves at this URL: it is in no process group and holds all of its memory."""
        self.incarnation = next(_incarnations)
        self._capabilities = None
        self._released = set()
        self._labels = set()
        self._paused = False
        self.adapters = {}

    # ---- generation ----

    async def generate(
        self, request_id: str, prompt: Tokens, params: SamplingParams, adapter: str | None = None
    ) -> Completion:
        """One try; the engine repeats it, here or elsewhere."""
        call = GenerateCall(
            self._generate.url, self._api_key, self.name, request_id, prompt, _sampling(params),
            self.config.sample_seconds(params.max_new_tokens), params.routed_experts_from, adapter,
        )  # fmt: skip
        return await (self.process.generate(call) if self.process else call.send(self._generate))

    async def reports_token_versions(self) -> bool:
        """Whether its replies name the weight version of every token, not only the last one."""
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        reply = await self.connection.post("/generate", body)
        return "weight_versions" in reply.get("meta_info", {})

    async def logprobs_of(self, tokens: Sequence[int]) -> LogProbs:
        """The log-prob of every token but the first, given those before it, with the newest adapter: [tokens - 1]."""
        return input_logprobs(await self.score(tokens), tokens[1:], f"server {self.name}")

    async def score(self, tokens: Sequence[int]) -> Any:
        """The reply to a request that computes all of these tokens, with their log-probs."""
        body = {
            "input_ids": list(tokens), "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True, "logprob_start_len": 0, **({"lora_path": self.adapter} if self.adapter else {}),
        }  # fmt: skip
        return await self.connection.post("/generate", body)

    async def abort(self, request_id: str | None = None) -> None:
        """Repeatable: aborting a request that is gone does nothing."""
        await self._control("/abort_request", {"rid": request_id} if request_id else {"abort_all": True})

    async def pause(self, mode: PauseMode = "abort") -> None:
        """abort: all requests return what they have, under the label of the weights that generated it; waits for them.
        retract, in_place: they stay in the server and continue after `resume`, without or with their KV cache.

        Repeatable: a paused server pauses again.
        """
        if self._paused and not self.in_flight:
            return
        if mode == "abort":
            await self._abort_all()
        await self._control("/pause_generation", {"mode": mode})
        self._paused = mode == "abort"

    async def _abort_all(self) -> None:
        """Until all requests have returned. The caller sends no new ones.

        This must precede the pause: a request that is still on its way would wait in a paused server, which does not
        abort it. And a server that is told to pause while requests run looks once a second whether they have ended.
        """
        deadline = time.monotonic() + self.config.control_timeout
        while self.in_flight:
            if time.monotonic() > deadline:
                raise ServerFailure(
                    f"server {self.name}: {self.in_flight} aborted requests did not return within "
                    f"{self.config.control_timeout:g} s (rollout.servers.control_timeout)"
                )
            await self.abort()
            again = time.monotonic() + ABORT_INTERVAL
            while self.in_flight and time.monotonic() < again:
                await asyncio.sleep(0.005)

    async def resume(self, *, empty_cache: bool = True) -> None:
        """`empty_cache`: torch's cache of GPU memory, before the next request. Repeatable: a server that is not paused
        ignores it."""
        self._paused = False
        await self._control("/continue_generation", {"torch_empty_cache": empty_cache})

    async def flush_cache(self, timeout: float | None = None) -> None:
        """Repeatable. It passes through the scheduler, so its reply comes after everything sent before has run."""
        await self._control("/flush_cache", {}, timeout)

    # ---- GPU memory ----

    async def release_memory(self) -> None:
        """Weights and KV cache are gone until `resume_memory`. Waits until the server is idle: SGLang exits if it is
        not. Not repeatable: releasing memory twice ends the process (torch_memory_saver)."""
        if not (await self.capabilities()).releases_memory:
            raise EngineError(
                f"server {self.name} cannot release its GPU memory (rollout.servers.share_gpus): start it with "
                "--enable-memory-saver"
            )
        held = [tag for tag in MEMORY_TAGS if tag not in self._released]  # less than all after a failed update
        if not held:
            return
        await self.pause()
        await self._until_idle()
        self._released = set(MEMORY_TAGS)  # also if the reply is lost: the request was sent, and most likely ran
        await self._control("/release_memory_occupation", {"tags": held}, repeatable=False)

    async def resume_memory(self, tag: str) -> bool:
        """Takes the memory of `tag` back and returns True, if it was released; its contents are undefined.

        Not repeatable: resuming what is not released raises KeyError in SGLang's scheduler, which ends the process. If
        the connection breaks, the call most likely ran, so the update goes on; if it did not run, the server fails at
        the next call that uses the memory.
        """
        if tag not in self._released:
            return False
        self._released.remove(tag)
        try:
            await self._control("/resume_memory_occupation", {"tags": [tag]}, repeatable=False)
        except OutcomeUnknown as error:
            if not isinstance(error.__cause__, BrokenConnection):
                raise
            log.warning("%s; going on as if it had run", error)
        return True

    async def _until_idle(self) -> None:
        """An aborted request returns a moment before the scheduler has removed it."""
        deadline = time.monotonic() + self.config.control_timeout
        while True:
            try:
                return await self.flush_cache()
            except RequestRefused:  # something still runs
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.02)

    # ---- health and version ----

    async def answers(self) -> None:
        """Raises ServerFailure when its HTTP server does not reply. Generates nothing."""
        await self.connection.get("/model_info", wait_for_server=False)

    async def generates(self) -> None:
        """Raises ServerFailure unless a token comes out of it. A busy server proves it with the tokens of its requests,
        so this never waits in its queue. Fails while the server is paused."""
        await self.connection.control("GET", "/health_generate", None, timeout=HEALTH_SECONDS)

    async def version_label(self, *, wait_for_server: bool = True) -> str:
        return without_lease(await self._full_label(wait_for_server))

    async def _full_label(self, wait_for_server: bool = True) -> str:
        reply = await self.connection.get("/model_info", wait_for_server=wait_for_server)
        return str(reply.get("weight_version"))

    async def version(self) -> int:
        return version_number(await self.version_label(), f"server {self.name}")

    async def set_version_label(self, label: str) -> None:
        """Repeatable: the same label again."""
        async with self._labelling:
            self._labels.add(label)
            body = {"new_version": self._with_lease(label), "abort_all_requests": False}
            await self._control("/update_weight_version", body)
            self._labels = {label}

    async def checksums(self, action: str = "sent") -> list[dict[str, str]]:
        """Of each tensor that it was sent, by rank: what in_server/megatron_dapo_checksums.py found. With the action
        `checksum`, SGLang's own ones, of its parameters. Repeatable: it only reads."""
        reply = await self._control("/weights_checker", {"action": action})
        return [rank["checksums"] for rank in reply.get("ranks") or []]

    # ---- the lease of an external server: in its version label, so that every run that can reach it sees it ----

    async def claim(self) -> None:
        """Raises EngineError while another run leases it. A run that was killed leaves a lease that ends by itself."""
        if self.owner is None:
            return
        for held in (False, True):  # the second time to see whether another run has claimed it at the same moment
            label = await self._full_label()
            owner, until = lease_of(label)
            left = until - time.time()
            if owner not in ("", self.owner) and left > 0:
                raise EngineError(
                    f"server {self.name} belongs to run {owner} for another {left:.0f} s, longer if that run still "
                    "lives: give each run its own servers (rollout.servers.urls)"
                )
            if not held:
                await self.set_version_label(without_lease(label))

    async def renew_lease(self) -> None:
        """Every weight update does; this is for long steps. Call while no update runs."""
        if self.owner is None or self._leased_until - time.time() > LEASE_SECONDS / 2 or self._labelling.locked():
            return
        if len(self._labels) == 1:
            await self.set_version_label(*self._labels)

    async def end_lease(self) -> None:
        """Best effort: it ends by itself."""
        if self.owner is not None and self._leased_until:
            self.owner = None
            async with asyncio.timeout(END_LEASE_SECONDS):
                await self.set_version_label(await self.version_label(wait_for_server=False))

    def _with_lease(self, label: str) -> str:
        if self.owner is None:
            return label
        self._leased_until = time.time() + LEASE_SECONDS
        return leased(label, self.owner, self._leased_until)

    # ---- weights ----

    async def begin_update(self, timeout: float) -> None:
        """Opens a session for tensor and distributed updates. Repeatable together with closing the session first."""
        close = partial(self.close_update_session, timeout)
        await close()
        await self._control("/begin_weight_update", {}, timeout, before_repeat=close)

    async def close_update_session(self, timeout: float) -> None:
        """Closes a session that an earlier update left open; SGLang would refuse the next update. Repeatable."""
        with contextlib.suppress(RequestRefused):
            await self._control("/end_weight_update", {}, timeout)

    async def end_update(self, timeout: float) -> None:
        """Repeatable: if the first try closed the session, the second is refused, which then means success."""
        try:
            await self._control("/end_weight_update", {}, timeout)
        except RequestRefused as error:
            if not error.repeated:
                raise

    async def load_from_disk(self, path: str, timeout: float, *, flush: bool = True) -> None:
        """Repeatable, but not while the first try still runs: two disk updates at once end SGLang. `flush_cache` waits
        for it, also where it is refused because requests are kept (`flush` False)."""

        async def wait() -> None:
            with contextlib.suppress(*(() if flush else (RequestRefused,))):
                await self.flush_cache(timeout)

        body = {"model_path": path, "flush_cache": flush}
        await self._control("/update_weights_from_disk", body, timeout, before_repeat=wait)

    async def load_tensors(self, payload: str, timeout: float) -> None:
        """Repeatable while the shared memory behind `payload` exists: the same values are copied again."""
        body = {
            "serialized_named_tensors": [payload] * self.tensor_parallel, "flush_cache": False,
            "load_format": FLATTENED,
        }  # fmt: skip
        await self._control("/update_weights_from_tensor", body, timeout)

    async def call_loader(self, loader: str, timeout: float, *, flush: bool = False) -> None:
        """Runs a function of ours in the server, which was started with --custom-weight-loader. Repeatable. `flush`:
        empties the KV cache like `flush_cache`, but torch keeps its memory; the server must be idle, 0.5.18 ends if it
        is not."""
        nothing = base64.b64encode(pickle.dumps([])).decode()
        body = {
            "serialized_named_tensors": [nothing] * self.tensor_parallel, "flush_cache": flush,
            "torch_empty_cache": False, "load_format": loader,
        }  # fmt: skip
        await self._control("/update_weights_from_tensor", body, timeout)

    async def join_group(self, body: dict[str, Any], timeout: float) -> None:
        """Not repeatable: all members of a process group meet once. A new group under a new name can be made."""
        await self._control("/init_weights_update_group", body, timeout, repeatable=False)

    async def leave_group(self, name: str) -> None:
        await self._control("/destroy_weights_update_group", {"group_name": name}, 10.0)

    async def receive_broadcast(self, body: dict[str, Any], label: str, timeout: float) -> None:
        """Not repeatable: a broadcast is a collective. The call sets the version label to `label` when it has run, so
        after a lost reply the label tells whether it has."""
        self._labels.add(label)
        try:
            await self._control(
                "/update_weights_from_distributed",
                body | {"weight_version": self._with_lease(label)},
                timeout,
                repeatable=False,
            )
        except ServerFailure as error:
            if error.status is not None or await self.version_label() != label:
                raise
        self._labels = {label}

    # ---- LoRA adapters: any number is loaded, and each request names its own ----

    @property
    def adapter(self) -> str | None:
        """The newest; None: only the base."""
        return next(reversed(self.adapters), None)

    def adapter_of(self, version: int) -> str | None:
        return next((name for name in reversed(self.adapters) if self.adapters[name] == version), None)

    async def load_adapter(self, name: str, version: int, body: dict[str, Any], timeout: float) -> None:
        """Not repeatable: SGLang loads a name once, and a reader counts for memory that is shared by name. Another
        name can be loaded."""
        await self._control("/load_lora_adapter_from_tensors", {"lora_name": name, **body}, timeout, repeatable=False)
        self.adapters[name] = version

    async def unload_adapter(self, name: str) -> None:
        """Call when no request uses it: SGLang waits for them, and loads nothing meanwhile. Repeatable: if the first
        try unloaded it, the second is refused."""
        try:
            await self._control("/unload_lora_adapter", {"lora_name": name})
        except RequestRefused as error:
            if not error.repeated:
                raise

    async def unload_left_adapters(self) -> None:
        """Those of a trainer that has ended, or of a call without a reply. Their requests are aborted."""
        loaded = [str(model["id"]) for model in (await self.connection.get("/v1/models"))["data"]]
        left = [name for name in loaded if name.startswith(ADAPTER_PREFIX) and name not in self.adapters]
        if left:
            await self.abort()
        for name in left:
            await self.unload_adapter(name)

    async def close(self) -> None:
        await self.connection.close()
        if self._generate is not self.connection:
            await self._generate.close()

    async def _control(
        self, path: str, body: dict[str, Any], timeout: float | None = None, **options: Any
    ) -> dict[str, Any]:
        """A control call; `success: false` is a failure whatever the status says."""
        content = await self.connection.control("POST", path, body, timeout=timeout, admin=True, **options)
        if content[:1] != b"{":
            return {}
        reply = self.connection.decode(path, content)
        if reply.get("success") is False:
            raise ServerFailure(f"server {self.name}: {path} failed: {reply.get('message')}")
        return dict(reply)


async def call_living(
    servers: Sequence[SGLangClient], call: Callable[[SGLangClient], Awaitable[Any]], grace: float = float("inf")
) -> dict[str, Any]:
    """Calls all of them and waits for no dead one (`wait_for_living`); the results by the servers' names."""
    calls = {server.name: call(server) for server in servers}
    return await wait_for_living(calls, {server.name: server.answers for server in servers}, grace)


def _sampling(params: SamplingParams) -> dict[str, Any]:
    found: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens, "temperature": params.temperature, "top_p": params.top_p,
        "top_k": params.top_k, "ignore_eos": params.ignore_eos,
    }  # fmt: skip
    if params.stop:
        found["stop"] = list(params.stop)
    if params.stop_token_ids:
        found["stop_token_ids"] = list(params.stop_token_ids)
    if params.seed is not None:
        found["sampling_seed"] = params.seed
    return found


def adapter_arguments(config: ServerConfig) -> list[str]:
    """What a server needs for LoRA adapters that are loaded later. Strict: a tensor without a place is an error."""
    lora = config.demands.lora
    return [
        "--enable-lora", "--lora-strict-loading", "--max-lora-rank", str(lora.rank),
        "--max-loras-per-batch", str(SERVED_ADAPTERS), "--lora-target-modules", *(lora.targets or ["all"]),
    ]  # fmt: skip


def _is_local(url: str) -> bool:
    """Only an address of this host can be bound."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(urlsplit(url).hostname, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as trial:
            trial.bind(address)
    except OSError:
        return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """Without what follows the third: `rc5`, `.post1`, `+commit`."""
    found = re.match(r"\d+\.\d+\.\d+", version)
    return tuple(map(int, found[0].split("."))) if found else OLDEST_VERSION
