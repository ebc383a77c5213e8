"""A server that speaks SGLang's protocol and fails on demand. Runs inside a test, or as a process:

python fake_server.py PORT [seconds per response]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import sys
from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp import web
from event_loop import close_at_the_end

from megatron_dapo.engines.sglang.client import CHECKSUM_LOADERS

Fault = Callable[["FakeServer", dict[str, Any]], Any]


class FakeServer:
    """`fault(server, request)` may reply to a /generate request itself; None lets it succeed.

    `drop[path] = ["before", "after", …]` breaks the connection of the next calls of that path: before the call runs,
    while it runs ("during"), or after it ran and before the reply; "die" ends the server. Where the real server ends
    because of a wrong call, this one does too and notes the `crashes`. A connection that is used again after
    `keep_alive` idle seconds breaks.
    """

    def __init__(self, seconds: float = 0.0, fault: Fault | None = None) -> None:
        self.seconds, self.fault = seconds, fault
        self.label = "default"
        self.paused = False
        self.calls: list[str] = []
        self.served: list[str] = []
        self.crashes: list[str] = []
        self.broken_calls: dict[str, Any] = {}  # path -> (status, body)
        self.drop: dict[str, list[str]] = {}
        self.dead = False
        self.keep_alive = 1000.0
        self._last_used: dict[Any, float] = {}  # connection -> time
        self.hanging: set[str] = set()  # paths that never reply
        self.memory_saver, self.busy = True, 0  # busy: how often /flush_cache is still refused
        self.memory = {"kv_cache", "weights"}
        self.bias = 0.0
        self.checksums: dict[str, str] | None = None  # of one rank; None: it was started without our loaders
        self.brackets = self.session = False
        self.lora: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras_per_batch": 2}
        self.adapters: dict[str, dict[str, str]] = {}  # by name: the checksums of its tensors
        self.adapter_requests: list[str | None] = []  # that run
        self._running: dict[str, asyncio.Event] = {}
        self.updates = self.most_updates = 0
        self.update_seconds = 0.02
        self.loaded: list[str] = []
        self.url = ""

    async def start(self, port: int = 0) -> FakeServer:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        self._socket = socket.create_server(("127.0.0.1", port))
        await web.SockSite(self._runner, self._socket).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return close_at_the_end(self)

    async def stop(self) -> None:
        try:
            if self._socket.fileno() >= 0:  # asyncio would neither serve nor close what it has accepted just now
                asyncio.get_running_loop().remove_reader(self._socket)
                for _ in range(3):
                    await asyncio.sleep(0)
        finally:  # also when this is cancelled: the port is free
            await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path, now = request.path, asyncio.get_running_loop().time()
        body = await request.json() if request.can_read_body else {}
        idle = now - self._last_used.get(request.transport, now)
        self._last_used[request.transport] = now
        self.calls.append(path)
        drop = self.drop[path].pop(0) if self.drop.get(path) else ""
        self.dead = self.dead or drop == "die"
        if self.dead or drop == "before" or idle > self.keep_alive:
            return self._break(request)
        if path in self.hanging:
            await asyncio.sleep(1000)
        if drop == "during":
            self._left = asyncio.ensure_future(self._reply(path, request, body))
            await asyncio.sleep(0.01)
            return self._break(request)
        reply = await self._reply(path, request, body)
        return self._break(request) if drop == "after" or self.dead else reply

    def _break(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def _reply(self, path: str, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if path in self.broken_calls:
            status, reply = self.broken_calls[path]
            return web.json_response(reply, status=status)
        handler = {
            "/generate": self._generate, "/abort_request": self._abort, "/pause_generation": self._pause,
            "/continue_generation": self._continue, "/update_weight_version": self._label,
            "/update_weights_from_disk": self._update, "/flush_cache": self._flush,
            "/release_memory_occupation": self._release, "/resume_memory_occupation": self._resume,
            "/begin_weight_update": self._begin, "/end_weight_update": self._end,
            "/update_weights_from_tensor": self._load_tensors,
            "/load_lora_adapter_from_tensors": self._load_adapter, "/unload_lora_adapter": self._unload_adapter,
            "/health_generate": self._health, "/health": self._health,
        }.get(path)  # fmt: skip
        if handler:
            return await handler(request, body)
        brackets = {"/begin_weight_update": {}} if self.brackets else {}
        fixed: dict[str, Any] = {
            "/server_info": {"version": "0.5.23", "tp_size": 1, "context_length": 4096,
                             "enable_memory_saver": self.memory_saver, **self.lora,
                             "custom_weight_loader": [] if self.checksums is None else [*CHECKSUM_LOADERS]},
            "/openapi.json": {"paths": {"/generate": {}, "/weights_checker": {}} | brackets},
            "/weights_checker": {"success": True, "ranks": [{"checksums": self.checksums}]},
            "/model_info": {"weight_version": self.label},
            "/v1/models": {"data": [{"id": name} for name in ("base", *self.adapters)]},
        }  # fmt: skip
        return web.json_response(fixed[path]) if path in fixed else web.json_response({}, status=404)

    async def _health(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.Response(status=503 if self.paused else 200)

    async def _flush(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        while self.updates:  # it passes through the scheduler, after what came before
            await asyncio.sleep(0.005)
        self.busy -= 1
        return web.json_response({}, status=400 if self.busy >= 0 else 200)

    def _crash(self, cause: str) -> web.Response:
        self.crashes.append(cause)
        self.dead = True
        return web.Response()

    async def _release(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        if self.busy >= 0 or self._running:
            return self._crash("memory released while it was not idle")
        if not set(body["tags"]) <= self.memory:
            return self._crash("memory released twice")
        self.memory -= set(body["tags"])
        return web.Response()

    async def _resume(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        if self.memory & set(body["tags"]):
            return self._crash("memory resumed that was not released")
        self.memory |= set(body["tags"])
        self.calls[-1] += " " + " ".join(body["tags"])
        return web.Response()

    async def _begin(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        if self.session:
            return web.json_response({"success": False, "message": "a session is open"}, status=400)
        self.session = True
        return web.json_response({"success": True})

    async def _end(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        if not self.session:
            return web.json_response({"success": False, "message": "no session is open"}, status=400)
        self.session = False
        return web.json_response({"success": True})

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.fault is not None:
            reply = self.fault(self, body)
            if asyncio.iscoroutine(reply):
                reply = await reply
            if isinstance(reply, web.StreamResponse):
                return reply
            if reply == "truncate":
                return await self._truncated(request)
            if isinstance(reply, bytes):
                return raw_reply(request, reply)
        adapter = body.get("lora_path")
        if adapter is not None and adapter not in self.adapters:
            message = f"Got LoRA adapter that has never been loaded: {adapter}"
            return web.json_response({"error": {"message": message}}, status=400)
        if body.get("logprob_start_len") == 0:
            entries = [[None, 0, None]] + [[-1.0 - self.bias, t, None] for t in body["input_ids"][1:]]
            return web.json_response({"meta_info": {"input_token_logprobs": entries}})
        while self.paused:
            await asyncio.sleep(0.01)
        rid, wanted = body.get("rid", ""), min(body["sampling_params"]["max_new_tokens"], 8)
        cut = self._running[rid] = asyncio.Event()
        self.adapter_requests.append(adapter)
        try:
            await asyncio.wait_for(cut.wait(), self.seconds)
            made, reason = wanted // 2, "abort"
            await asyncio.sleep(0.03)  # an aborted request takes a moment to come back
        except TimeoutError:
            made, reason = wanted, "stop"
        finally:
            self._running.pop(rid, None)
            self.adapter_requests.remove(adapter)
        if reason == "stop":
            self.served.append(rid)
        seed = body["sampling_params"].get("sampling_seed", 0)
        return web.json_response(response_of(made, reason, self.label, seed))

    async def _truncated(self, request: web.Request) -> web.StreamResponse:
        """Promises a long body and closes the connection in the middle of it."""
        response = web.StreamResponse(headers={"Content-Length": "100000", "Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(b'{"text": "half a sen')
        assert request.transport is not None
        request.transport.abort()
        return response

    async def _abort(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        for rid, cut in self._running.items():
            if body.get("abort_all") or rid == body.get("rid"):
                cut.set()
        return web.Response()

    async def _pause(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        self.paused = True
        return await self._abort(request, {"abort_all": True})

    async def _continue(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        self.paused = False
        return web.Response()

    async def _update(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        if "weights" not in self.memory:
            return self._crash("weights written to released memory")
        self.updates += 1
        self.most_updates = max(self.most_updates, self.updates)
        await asyncio.sleep(self.update_seconds)
        self.updates -= 1
        self.loaded.append(body["model_path"])
        return web.json_response({"success": True})

    async def _load_tensors(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        if "weights" not in self.memory:
            return self._crash("weights written to released memory")
        if self.brackets and not self.session:
            return web.json_response({"success": False, "message": "no session is open"}, status=400)
        self.loaded.append(body["load_format"])
        return web.json_response({"success": True})

    async def _load_adapter(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        if body["lora_name"] in self.adapters:
            return web.json_response({"success": False, "error_message": "it is already loaded"}, status=400)
        self.adapters[body["lora_name"]] = body.get("expected_checksums", {})
        return web.json_response({"success": True})

    async def _unload_adapter(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        if body["lora_name"] in self.adapter_requests:
            return self._crash("an adapter unloaded while requests use it")  # SGLang loads nothing meanwhile
        if self.adapters.pop(body["lora_name"], None) is None:
            return web.json_response({"success": False, "error_message": "it does not exist"}, status=400)
        return web.json_response({"success": True})

    async def _label(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        self.label = body["new_version"]
        return web.json_response({"success": True})


class Proxy(FakeServer):
    """Passes calls on to `target`, and breaks the connections that `drop` names. Responses that are not aborted take
    1/`speed` times as long."""

    def __init__(self, target: str, speed: float = 1.0) -> None:
        super().__init__()
        self.target = target
        self.speed = speed

    async def _reply(self, path: str, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        headers = {"Authorization": request.headers["Authorization"], "Content-Type": "application/json"}
        data = json.dumps(body).encode() if request.method == "POST" else None
        clock, rid = asyncio.get_running_loop().time, str(body.get("rid"))
        began, cut = clock(), asyncio.Event()
        if path == "/generate":
            self._running[rid] = cut
        elif path in ("/abort_request", "/pause_generation"):
            await self._abort(request, body if path == "/abort_request" else {"abort_all": True})
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, self.target + path, data=data, headers=headers) as reply,
        ):
            response = web.Response(status=reply.status, body=await reply.read(), content_type=reply.content_type)
        if path == "/generate" and self.speed < 1:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(cut.wait(), (clock() - began) * (1 / self.speed - 1))
        return response


def raw_reply(request: web.Request, content: bytes) -> web.Response:
    """Sends these bytes instead of a reply, and closes the connection."""
    assert request.transport is not None
    request.transport.write(content)
    request.transport.close()
    return web.Response()


def damaged_http(chance: random.Random, body: bytes) -> bytes:
    """A reply to an HTTP request that is wrong below its JSON."""
    size, half = len(body), len(body) // 2
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
    lengths = (b"%d" % (size + 50), b"%d" % half, b"-5", b"many", b"9" * 40, b"%d\r\nContent-Length: 3" % size)
    gzip = b"Content-Encoding: gzip\r\n" + b"Content-Length: %d\r\n\r\n" % size
    return chance.choice(
        (
            head + b"Content-Length: %d\r\n\r\n" % size + body[:half],
            head + b"Content-Length: %s\r\n\r\n" % chance.choice(lengths) + body,
            head + b"Transfer-Encoding: chunked\r\n\r\n" + chance.choice((b"%x\r\n" % half, b"zz\r\n")) + body[:half],
            head + gzip + body,
            head + b"X: " + b"x" * 100_000 + b"\r\n\r\n" + body,
            head + b"\xff\x00: \xfe\r\n\r\n" + body,
            head[: chance.randrange(len(head))],
            chance.choice((b"", b"HTTP/1.1 OK\r\n\r\n", b"HTTP/7 200 OK\r\n\r\n", b"SSH-2.0\r\n")),
            b"HTTP/1.1 %d x\r\nLocation: /generate\r\nContent-Length: 0\r\n\r\n" % chance.choice((100, 204, 302, 500)),
            chance.randbytes(50),
        )
    )  # fmt: skip


def response_of(count: int, reason: str, label: str, seed: int = 0) -> dict[str, Any]:
    tokens = [(seed + i) % 250 for i in range(count)]
    return {
        "text": "x" * count, "output_ids": tokens,
        "meta_info": {
            "finish_reason": {"type": reason}, "weight_version": label,
            "output_token_logprobs": [[-0.5 - 0.01 * i, token, None] for i, token in enumerate(tokens)],
        },
    }  # fmt: skip


def changed(edit: Callable[[dict[str, Any]], Any]) -> Fault:
    """A fault that replies 200 with a damaged body."""

    def fault(server: FakeServer, body: dict[str, Any]) -> web.Response:
        response = response_of(8, "stop", server.label)
        text = edit(response)
        text = text if isinstance(text, str) else json.dumps(response)
        return web.Response(text=text, content_type="application/json")

    return fault


if __name__ == "__main__":

    async def main() -> None:
        await FakeServer(seconds=float(sys.argv[2]) if len(sys.argv) > 2 else 0.0).start(int(sys.argv[1]))
        print("ready", flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())
