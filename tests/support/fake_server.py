"""A server that speaks SGLang's protocol and fails on demand. Runs inside a test, or as a process:

python fake_server.py PORT [seconds per answer]
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

from aiohttp import web

Fault = Callable[["FakeServer", dict[str, Any]], Any]


class FakeServer:
    """`fault(server, request)` may answer a /generate request itself; None lets it succeed. Fields may be set."""

    def __init__(self, seconds: float = 0.0, fault: Fault | None = None) -> None:
        self.seconds, self.fault = seconds, fault
        self.label = "default"
        self.paused = False
        self.calls: list[str] = []
        self.served: list[str] = []
        self.broken_calls: dict[str, Any] = {}  # path -> (status, body)
        self.memory_saver, self.busy = True, 0  # busy: how often /flush_cache is still refused
        self.memory = {"kv_cache", "weights"}
        self.bias, self.checksum = 0.0, "00"
        self._running: dict[str, asyncio.Event] = {}
        self.updates = self.most_updates = 0
        self.url = ""

    async def start(self, port: int = 0) -> FakeServer:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        body = await request.json() if request.can_read_body else {}
        self.calls.append(path)
        if path in self.broken_calls:
            status, reply = self.broken_calls[path]
            return web.json_response(reply, status=status)
        handler = {
            "/generate": self._generate, "/abort_request": self._abort, "/pause_generation": self._pause,
            "/continue_generation": self._continue, "/update_weight_version": self._label,
            "/update_weights_from_disk": self._update, "/flush_cache": self._flush,
            "/release_memory_occupation": self._release, "/resume_memory_occupation": self._take,
        }.get(path)  # fmt: skip
        if handler:
            return await handler(request, body)
        fixed: dict[str, Any] = {
            "/server_info": {"version": "0.5.23", "tp_size": 1, "context_length": 4096,
                             "enable_memory_saver": self.memory_saver},
            "/openapi.json": {"paths": {"/generate": {}, "/weights_checker": {}}},
            "/weights_checker": {"success": True, "ranks": [{"checksums": {"a.weight": self.checksum}}]},
            "/model_info": {"weight_version": self.label},
            "/health": {},
        }  # fmt: skip
        return web.json_response(fixed[path]) if path in fixed else web.json_response({}, status=404)

    async def _flush(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        self.busy -= 1
        return web.json_response({}, status=400 if self.busy >= 0 else 200)

    async def _release(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        assert self.busy < 0 and not self._running, "the real one ends when it is not idle"
        self.memory -= set(body["tags"])
        return web.Response()

    async def _take(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        assert not self.memory & set(body["tags"]), "the real one ends when it has the memory already"
        self.memory |= set(body["tags"])
        self.calls[-1] += " " + " ".join(body["tags"])
        return web.Response()

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.fault is not None:
            answer = self.fault(self, body)
            if asyncio.iscoroutine(answer):
                answer = await answer
            if isinstance(answer, web.StreamResponse):
                return answer
            if answer == "truncate":
                return await self._truncated(request)
        if body.get("logprob_start_len") == 0:
            rows = [[None, 0, None]] + [[-1.0 - self.bias, t, None] for t in body["input_ids"][1:]]
            return web.json_response({"meta_info": {"input_token_logprobs": rows}})
        rid, wanted = body["rid"], min(body["sampling_params"]["max_new_tokens"], 8)
        cut = self._running[rid] = asyncio.Event()
        try:
            await asyncio.wait_for(cut.wait(), self.seconds)
            made, reason = wanted // 2, "abort"
            await asyncio.sleep(0.03)  # an aborted request takes a moment to come back
        except TimeoutError:
            made, reason = wanted, "stop"
        finally:
            self._running.pop(rid, None)
        if reason == "stop":
            self.served.append(rid)
        return web.json_response(answer_of(made, reason, self.label, body["sampling_params"].get("sampling_seed", 0)))

    async def _truncated(self, request: web.Request) -> web.StreamResponse:
        """Promises a long body and closes the connection after half a sentence."""
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
        assert "weights" in self.memory
        self.updates += 1
        self.most_updates = max(self.most_updates, self.updates)
        await asyncio.sleep(0.02)
        self.updates -= 1
        return web.json_response({"success": True})

    async def _label(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        self.label = body["new_version"]
        return web.json_response({"success": True})


def answer_of(count: int, reason: str, label: str, seed: int = 0) -> dict[str, Any]:
    tokens = [(seed + i) % 250 for i in range(count)]
    return {
        "text": "x" * count, "output_ids": tokens,
        "meta_info": {
            "finish_reason": {"type": reason}, "weight_version": label,
            "output_token_logprobs": [[-0.5 - 0.01 * i, token, None] for i, token in enumerate(tokens)],
        },
    }  # fmt: skip


def changed(edit: Callable[[dict[str, Any]], Any]) -> Fault:
    """A fault that answers 200 with a damaged body."""

    def fault(server: FakeServer, body: dict[str, Any]) -> web.Response:
        answer = answer_of(8, "stop", server.label)
        text = edit(answer)
        return web.Response(text=text if isinstance(text, str) else json.dumps(answer), content_type="application/json")

    return fault


if __name__ == "__main__":

    async def main() -> None:
        await FakeServer(seconds=float(sys.argv[2]) if len(sys.argv) > 2 else 0.0).start(int(sys.argv[1]))
        print("ready", flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())
