"""An OpenAI-compatible endpoint in front of a conversation, so that an agent library can be trained without changes.

    @rollout_function(resume="restart")
    async def generate(prompt, conversation, settings):
        async with openai_endpoint(conversation) as endpoint:
            client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
            …

Every rollout has its own address and key; requests under /v1 with the key as bearer token also find it. The endpoint
keeps the tokens: if the messages of a request extend those of the last one and its response, only the new messages are
appended. If they do not, because the library has changed the history, another sample of the same rollout starts. No
response is encoded again to continue it.

Sampling settings of a request other than `stop` and `max_tokens` are ignored: rollouts are sampled as the run says.
Tool calls are those of Qwen's format. A streamed reply is one chunk.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from megatron_dapo.errors import UserError
from megatron_dapo.rollout.agents.conversation import Conversation, Turn
from megatron_dapo.rollout.agents.functions import shared
from megatron_dapo.rollout.agents.tools.call_tools import find_tool_calls

LARGEST_REQUEST = 64 * 2**20  # bytes
MODEL = "policy"


class BadRequest(Exception):
    """The message is sent to the client."""


@dataclass(slots=True, eq=False)
class Rollout:
    """One conversation behind the endpoint."""

    conversation: Conversation
    api_key: str
    base_url: str
    known: list[dict[str, Any]] = field(default_factory=list)  # messages of the last request and its response
    tools: list[Any] = field(default_factory=list)
    requests: int = 0
    failure: BaseException | None = None
    ended: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to one request."""
        async with self.lock:  # a conversation generates one turn at a time
            if self.ended:
                raise BadRequest("the rollout has ended")
            messages, limit, stops = self._take(body)
            turn = await self.conversation.generate(max_tokens=limit, stop=stops)
            message, reason = _message(turn, stops, bool(self.tools), self.requests)
            self.requests += 1
            self.known = [*messages, _plain(message)]
            return _reply(message, reason, turn, len(self.conversation.tokens))

    def _take(self, body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int | None, list[str]]:
        """Its messages, which are then part of the conversation, max_tokens and stop. A request that cannot be used
        changes nothing: agents get a 400 and go on."""
        try:
            messages = [_plain(message) for message in _listed(body, "messages")]
            if not messages:
                raise BadRequest("messages is empty")
            if body.get("n") not in (None, 1):
                raise BadRequest("n must be 1: a rollout has one next turn")
            limit, stops = _limit(body), _stops(body)
            self._continue(messages, _listed(body, "tools"))
            return messages, limit, stops
        except (BadRequest, UserError):
            raise
        except Exception as error:  # also of the chat template and the tokenizer
            raise BadRequest(f"the request cannot be used: {type(error).__name__}: {error}") from error

    def _continue(self, messages: list[dict[str, Any]], tools: list[Any]) -> None:
        same_tools = tools == self.tools
        if self.known and same_tools and _same(messages[: len(self.known)], self.known):
            new = messages[len(self.known) :]
            if new:
                self.conversation.append_messages(new)
                self.conversation.write_messages()
                return
        elif not self.requests and not tools and _same(messages, [_plain(m) for m in self.conversation.messages]):
            return  # the prompt itself
        self.conversation.new_sample(messages, tools)
        self.tools = tools


def _listed(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadRequest(f"{name} must be a list of objects")
    return value


def _limit(body: Mapping[str, Any]) -> int | None:
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or None
    if limit is not None and (type(limit) is not int or limit < 1):
        raise BadRequest("max_tokens must be a positive whole number")
    return limit


def _stops(body: Mapping[str, Any]) -> list[str]:
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise BadRequest("stop must be a text or a list of texts")
    return stops


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as the chat template wants it: content is a text, arguments of tool calls are objects."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        if not all(isinstance(part, str) for part in parts):
            raise BadRequest("content may have parts of type text only")
        content = "".join(map(str, parts))
    role = message.get("role")
    if not isinstance(role, str) or not isinstance(content, str | None):
        raise BadRequest("a message needs a role, and content as a text")
    found: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content or ""}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_plain_call(call) for call in calls]
    return found


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments)
    return {"type": "function", "function": {"name": function.get("name"), "arguments": arguments}}


def _same(some: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> bool:
    """Libraries strip the white space around a response; that is no change of the history."""
    key = [(m["role"], m["content"].strip(), m.get("tool_calls")) for m in some]
    return key == [(m["role"], m["content"].strip(), m.get("tool_calls")) for m in others]


def _message(turn: Turn, stops: Sequence[str], tools: bool, request: int) -> tuple[dict[str, Any], str]:
    """The assistant's message, and why it ended. The stop text, which was sampled, is not shown."""
    text = turn.text
    ends = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    if ends:
        text = text[: min(ends)]
    reason = "length" if turn.truncated else "stop"
    content, calls = find_tool_calls(text) if tools else (text, [])
    if not calls or any(call.problem for call in calls):
        return {"role": "assistant", "content": text}, reason
    listed = [
        {
            "id": f"call_{request}_{i}", "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for i, call in enumerate(calls)
    ]  # fmt: skip
    return {"role": "assistant", "content": content, "tool_calls": listed}, "tool_calls"


def _reply(message: dict[str, Any], reason: str, turn: Turn, tokens: int) -> dict[str, Any]:
    generated = len(turn.tokens)
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}", "object": "chat.completion", "created": int(time.time()),
        "model": MODEL, "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": tokens - generated, "completion_tokens": generated, "total_tokens": tokens,
        },
    }  # fmt: skip


class OpenAIServer:
    """One HTTP server on the loopback interface for all rollouts of an event loop."""

    def __init__(self) -> None:
        self._rollouts: dict[str, Rollout] = {}
        self._runner: web.AppRunner | None = None
        self._address = ""
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Once; rollouts that begin at the same time wait for it."""
        async with self._starting:
            if self._address:
                return
            app = web.Application(client_max_size=LARGEST_REQUEST)
            for prefix in ("/rollouts/{key}/v1", "/v1"):
                app.router.add_post(prefix + "/chat/completions", self._chat)
                app.router.add_get(prefix + "/models", self._models)
            self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
            await self._runner.setup()
            await web.TCPSite(self._runner, "127.0.0.1", 0).start()
            host, port = self._runner.addresses[0][:2]
            self._address = f"http://{host}:{port}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def open(self, conversation: Conversation) -> Rollout:
        key = secrets.token_hex(12)
        self._rollouts[key] = Rollout(conversation, key, f"{self._address}/rollouts/{key}/v1")
        return self._rollouts[key]

    def end(self, rollout: Rollout) -> None:
        """Later requests of the rollout are refused: its agent may run on in a thread."""
        rollout.ended = True
        self._rollouts.pop(rollout.api_key, None)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "run"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        rollout = self._rollouts.get(request.match_info.get("key") or bearer)
        if rollout is None:
            return _error(404, "there is no such rollout, or it has ended")
        if rollout.failure is not None:
            return _error(400, "the rollout has failed")
        try:
            body = await request.json()
        except (ValueError, LookupError, RecursionError) as error:  # LookupError: of an unknown charset
            return _error(400, f"the request is not JSON: {error}")
        if not isinstance(body, dict):
            return _error(400, "expected an object")
        try:
            reply = await rollout.complete(body)
        except BadRequest as error:
            return _error(400, str(error))
        except UserError as error:
            rollout.failure = error
            return _error(400, str(error))
        except asyncio.CancelledError:  # the client has gone away
            raise
        except BaseException as error:  # also RolloutInterrupted: the rollout function raises it
            rollout.failure = error
            return _error(400, "the rollout was interrupted")
        return await _stream(request, reply) if body.get("stream") else web.json_response(reply)


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)


async def _stream(request: web.Request, reply: dict[str, Any]) -> web.StreamResponse:
    (choice,) = reply["choices"]
    delta = dict(choice["message"])
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    part = {"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}
    chunk = reply | {"object": "chat.completion.chunk", "choices": [part]}
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())
    await response.write_eof()
    return response


@asynccontextmanager
async def openai_endpoint(conversation: Conversation) -> AsyncIterator[Rollout]:
    """Yields the rollout's `base_url` and `api_key`. Raises what has ended the conversation, whatever the agent made of
    the error that it got."""
    server = shared("openai_endpoint", OpenAIServer)
    await server.start()
    rollout = server.open(conversation)
    try:
        yield rollout
    except Exception:
        if rollout.failure is not None:
            raise rollout.failure from None
        raise
    finally:
        server.end(rollout)
        async with rollout.lock:  # the turn of a request that its client gave up is part of the rollout
            pass
    if rollout.failure is not None:
        raise rollout.failure
