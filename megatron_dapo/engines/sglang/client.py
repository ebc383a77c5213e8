"""One SGLang server: what it can do, generation, and the calls that weight updates are made of."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_dapo.config.rollout import ServerConfig
from megatron_dapo.engines.protocol import Capabilities, Completion, EngineError, SamplingParams
from megatron_dapo.engines.sglang.http import Connection, ServerFailure
from megatron_dapo.engines.sglang.response_parser import parse_completion, version_number
from megatron_dapo.types import LogProbs, Tokens

OLDEST_VERSION = (0, 5, 17)
MEMORY = ("kv_cache", "weights")  # SGLang's names for what it can release


class SGLangServer:
    """`serves` is the weight version this server may answer with, or None while it must not be asked."""

    def __init__(self, url: str, config: ServerConfig, *, generate_url: str | None = None) -> None:
        api, admin = read_key(config.api_key_env), read_key(config.admin_key_env)
        self.connection = Connection(url, api_key=api, admin_key=admin, timeout=config.control_timeout)
        self._front = Connection(generate_url, api_key=api, admin_key=admin) if generate_url else self.connection
        self.name, self.config = self.connection.url, config
        self.serves: int | None = None
        self.trouble = ""  # why it serves nothing
        self.in_flight = 0
        self.resting_until, self.failures = 0.0, 0
        self._capabilities: Capabilities | None = None
        self.tensor_parallel = 1
        self._released: set[str] = set()  # what of its GPU memory is the trainer's at the moment

    async def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            self._capabilities = await self._ask_capabilities()
        return self._capabilities

    async def _ask_capabilities(self) -> Capabilities:
        info = await self.connection.get("/server_info")
        version = str(info.get("version", ""))
        if _numbers(version) < OLDEST_VERSION:
            raise EngineError(f"server {self.name}: it is SGLang {version}; 0.5.17 or newer is needed")
        self.tensor_parallel = int(info.get("tp_size") or 1)
        try:
            paths = set((await self.connection.get("/openapi.json"))["paths"])
        except (EngineError, KeyError, TypeError):
            # The list of calls may be switched off; then ask for the one that differs.
            paths = {"/begin_weight_update"} if await self._has("/begin_weight_update") else set()
        return Capabilities(
            engine="sglang", version=version, seeded=bool(info.get("enable_deterministic_inference")),
            bracketed_updates="/begin_weight_update" in paths,
            checksums="/weights_checker" in paths and await self._can_checksum(),
            max_tokens=info.get("context_length") or info.get("max_total_num_tokens"),
            releases_memory=bool(info.get("enable_memory_saver")) or info.get("device") == "cpu",
        )  # fmt: skip

    async def _has(self, path: str) -> bool:
        try:
            await self.connection.get(path)
        except EngineError as error:
            return " answered 404" not in str(error)
        return True

    async def _can_checksum(self) -> bool:
        try:
            await self.checksums()
        except EngineError:
            return False
        return True

    async def generate(self, request_id: str, prompt: Tokens, params: SamplingParams) -> Completion:
        body = {
            "rid": request_id, "input_ids": prompt, "sampling_params": _sampling(params),
            "return_logprob": True, "logprob_start_len": -1,
        }  # fmt: skip
        content = await self._front.call("POST", "/generate", body, timeout=self.config.request_timeout)
        return parse_completion(content, f"server {self.name}, request {request_id}")

    async def logprobs_of(self, tokens: Sequence[int]) -> LogProbs:
        """The log-prob of every token but the first, given those before it: [tokens - 1]."""
        body = {
            "input_ids": list(tokens), "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True, "logprob_start_len": 0,
        }  # fmt: skip
        reply = await self.connection.post("/generate", body)
        try:
            rows = reply["meta_info"]["input_token_logprobs"][1:]
            found = np.array([row[0] for row in rows], dtype=np.float32)
        except (KeyError, TypeError, IndexError) as error:
            raise ServerFailure(f"server {self.name}: the log-prob probe's answer lacks {error}") from error
        if len(found) != len(tokens) - 1 or not np.isfinite(found).all():
            raise ServerFailure(f"server {self.name}: the log-prob probe gave {found} for {len(tokens)} tokens")
        return found

    async def abort(self, request_id: str | None = None) -> None:
        await self._order("/abort_request", {"rid": request_id} if request_id else {"abort_all": True})

    async def pause(self) -> None:
        """Aborts what runs and waits until it has come back, under the label of the weights that made it."""
        await self._order("/pause_generation", {"mode": "abort"})
        deadline = time.monotonic() + self.config.control_timeout
        while self.in_flight:
            if time.monotonic() > deadline:
                raise ServerFailure(
                    f"server {self.name}: {self.in_flight} aborted requests did not return within "
                    f"{self.config.control_timeout:g} s (rollout.servers.control_timeout)"
                )
            await asyncio.sleep(0.005)

    async def resume(self) -> None:
        await self._order("/continue_generation", {})

    async def flush_cache(self) -> None:
        await self._order("/flush_cache", {})

    async def release_memory(self) -> None:
        """Weights and KV cache are gone until `take_memory`. The order comes when the server is idle, since it would
        end one that is not."""
        if not (await self.capabilities()).releases_memory:
            raise EngineError(
                f"server {self.name} cannot release its GPU memory (rollout.servers.share_gpus): start it with "
                "--enable-memory-saver"
            )
        await self.pause()
        await self._until_idle()
        await self._order("/release_memory_occupation", {"tags": list(MEMORY)})
        self._released = set(MEMORY)

    async def take_memory(self, part: str) -> None:
        """Gets `part` of the memory back, if it was released; its contents are not what they were."""
        if part in self._released:
            await self._order("/resume_memory_occupation", {"tags": [part]})
            self._released.remove(part)

    async def _until_idle(self) -> None:
        """An aborted request has come back before the scheduler has forgotten it."""
        deadline = time.monotonic() + self.config.control_timeout
        while True:
            try:
                return await self.flush_cache()  # refused (4xx) while anything runs
            except EngineError as error:
                if isinstance(error, ServerFailure) or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.02)

    def forget_memory(self) -> None:
        """It was started again, and holds all of its memory."""
        self._released = set()

    async def health(self) -> None:
        """Answers without generating anything."""
        await self.connection.get("/model_info")

    async def version_label(self) -> str:
        return str((await self.connection.get("/model_info")).get("weight_version"))

    async def version(self) -> int:
        return version_number(await self.version_label(), f"server {self.name}")

    async def set_version_label(self, label: str) -> None:
        await self._order("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def checksums(self) -> dict[str, str]:
        """Its own checksum of each tensor it holds, over all ranks."""
        reply = await self._order("/weights_checker", {"action": "checksum"})
        ranks = reply.get("ranks") or []
        return {
            f"{index}.{name}": value for index, rank in enumerate(ranks) for name, value in rank["checksums"].items()
        }

    async def update_call(self, path: str, body: dict[str, Any], timeout: float) -> None:
        await self._order(path, body, timeout)

    async def close(self) -> None:
        await self.connection.close()
        if self._front is not self.connection:
            await self._front.close()

    async def _order(self, path: str, body: dict[str, Any], timeout: float | None = None) -> dict[str, Any]:
        """A control call; `success: false` is a failure whatever the status says."""
        content = await self.connection.call("POST", path, body, timeout=timeout, admin=True)
        if content[:1] != b"{":
            return {}
        reply = self.connection.decode(path, content)
        if reply.get("success") is False:
            raise ServerFailure(f"server {self.name}: {path} failed: {reply.get('message')}")
        return dict(reply)


def _sampling(params: SamplingParams) -> dict[str, Any]:
    found: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens, "temperature": params.temperature, "top_p": params.top_p,
        "top_k": params.top_k, "min_p": params.min_p, "ignore_eos": params.ignore_eos,
    }  # fmt: skip
    if params.stop:
        found["stop"] = list(params.stop)
    if params.stop_token_ids:
        found["stop_token_ids"] = list(params.stop_token_ids)
    if params.seed is not None:
        found["sampling_seed"] = params.seed
    return found


def read_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise EngineError(f"rollout.servers names the key in the environment variable {variable}, which is not set")
    return key


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")[:3]
    digits = ["".join(c for c in part if c.isdigit()) for part in parts]
    return tuple(int(d) for d in digits if d) or OLDEST_VERSION
