"""One generate request to one server: sent over HTTP, its reply parsed. `GenerateCall` is all that this needs, so it
runs where the caller is or in a client process (`client_process`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_dapo.engines.protocol import Completion
from megatron_dapo.engines.sglang.http import Connection
from megatron_dapo.engines.sglang.response_parser import parse_completion
from megatron_dapo.types import Tokens


@dataclass(slots=True, frozen=True)
class GenerateCall:
    """`url` may be a router's; `server` is the name for errors. `routed_from`: return the experts of the tokens from
    this position of the prompt on."""

    url: str
    api_key: str | None
    server: str
    request_id: str
    prompt: Tokens
    sampling: dict[str, Any]
    seconds: float
    routed_from: int | None = None

    async def send(self, connection: Connection) -> Completion:
        """One try. `connection` is to `url`, with `api_key`."""
        body: dict[str, Any] = {
            "rid": self.request_id, "input_ids": self.prompt, "sampling_params": self.sampling,
            "return_logprob": True, "logprob_start_len": -1,
        }  # fmt: skip
        routed = None
        if self.routed_from is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": self.routed_from}
            routed = len(self.prompt) - self.routed_from
        content = await connection.generate(body, self.seconds)
        return parse_completion(content, f"server {self.server}, request {self.request_id}", routed)
