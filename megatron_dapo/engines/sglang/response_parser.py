"""Parses SGLang's reply to `/generate`: a completion with a log-prob for every token, or a `BadReply`, whatever the
server has sent. Whether the values make sense is checked by `Completion.problem`.

A training step of a 32B model receives gigabytes of these replies, nearly all of it log-probs, so this is the client's
hot path. The fast parser cuts the log-probs out and reads them as one flat list: a list per token would cost more in
Python's garbage collector than in parsing. Whatever it does not expect goes to the general parser, which finds out
what is wrong.

Version labels: SGLang calls the weights it started with `default`; versions of this run are numbers; a server in the
middle of an update is labelled `updating-to-N`. An external server's label also says which run leases it until when:
`N@RUN@SECONDS`. With LoRA adapters the label is that of the base, which never changes.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from megatron_dapo.engines.protocol import Completion
from megatron_dapo.engines.sglang.http import QUOTED, Connection, ServerFailure
from megatron_dapo.types import FinishReason, LogProbs, RoutedExperts, Tokens, WeightSpan, pack_experts

LARGEST_EXPERT = 65534
# What reading a reply of another form than expected can raise.
UNREADABLE = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, struct.error)
_LOGPROBS, _IDS, _EXPERTS = b'"output_token_logprobs":[[', b'"output_ids":[', b'"routed_experts":"'


class BadReply(ServerFailure):
    """The reply makes no sense; the server itself may be well."""


class UnfinishedUpdate(ServerFailure):
    """An update to this server has not ended: it holds no version."""


class UnknownLabel(ServerFailure):
    """Weights with a label that this project does not give."""


@dataclass(slots=True, frozen=True)
class GenerateCall:
    """One generate request to one server, and all that is needed to send it: by the caller or by a client process
    (`client_process`). `url` may be a router's; `server` is the name for errors. `routed_from`: return the experts of
    the tokens from this position of the prompt on. `adapter`: None for the base."""

    url: str
    api_key: str | None
    server: str
    request_id: str
    prompt: Tokens
    sampling: dict[str, Any]
    seconds: float
    routed_from: int | None = None
    adapter: str | None = None

    async def send(self, connection: Connection) -> Completion:
        """One try. `connection` is to `url`, with `api_key`."""
        body: dict[str, Any] = {
            "rid": self.request_id, "input_ids": self.prompt, "sampling_params": self.sampling,
            "return_logprob": True, "logprob_start_len": -1,
        }  # fmt: skip
        routed = None
        if self.adapter is not None:
            body["lora_path"] = self.adapter
        if self.routed_from is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": self.routed_from}
            routed = len(self.prompt) - self.routed_from
        content = await connection.generate(body, self.seconds)
        return parse_completion(content, f"server {self.server}, request {self.request_id}", routed)


def parse_completion(content: bytes, where: str, routed: int | None = None) -> Completion:
    """`where` names the server and the request, for errors. `routed`: the tokens of the prompt whose experts were asked
    for, besides those of the response; None: none were."""
    if routed is None:
        return _parse(content, where)
    rest, experts = _cut_experts(content)
    found = _parse(rest, where)
    found.routed_experts = _routed_experts(experts, routed, len(found.tokens), where)
    return found


def _parse(content: bytes, where: str) -> Completion:
    try:
        with np.errstate(over="ignore"):  # a log-prob of -1e39 is infinite in float32, and rejected later
            return _parse_fast(content, where) or _parse_general(content, where)
    except UNREADABLE as error:
        quoted = content[:QUOTED].decode("utf-8", "replace")
        what = f"is not JSON ({error})" if isinstance(error, orjson.JSONDecodeError) else f"lacks {error}"
        raise BadReply(f"{where}: the reply {what}: {quoted!r}") from error


def _cut_experts(content: bytes) -> tuple[bytes, bytes | None]:
    """The reply without its experts, and the experts: many megabytes that need not pass through a JSON parser. Inside
    of a string the quotes of the key would be escaped, so what is found is the key."""
    start = content.find(_EXPERTS) + len(_EXPERTS)
    end = content.find(b'"', start)
    if start >= len(_EXPERTS) and end > 0 and content.find(b"\\", start, end) < 0:
        return content[:start] + content[end:], content[start:end]
    try:  # not as SGLang writes it, or there are none
        return content, orjson.loads(content)["meta_info"]["routed_experts"].encode()
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return content, None


def _parse_fast(content: bytes, where: str) -> Completion | None:
    """None when the reply is not exactly as SGLang writes it."""
    ids, entries = content.find(_IDS) + len(_IDS), content.find(_LOGPROBS) + len(_LOGPROBS)
    # Searched from the end: little follows the log-probs, and if that has brackets too, the counts below differ.
    ids_end, entries_end = content.find(b"]", ids), content.rfind(b"]]", entries)
    if not len(_IDS) <= ids < ids_end < entries - len(_LOGPROBS) < entries_end:
        return None
    try:
        flat = orjson.loads(b"[" + content[entries:entries_end].translate(None, b"[]") + b"]")
        logprobs, tokens = _array("f", flat[0::3]), _array("i", flat[1::3])
        listed = np.fromstring(content[ids:ids_end], np.int64, sep=",")
        if len(flat) != 3 * len(listed) or not np.array_equal(tokens, listed):
            return None
        reply = orjson.loads(content[:ids] + content[ids_end : entries - 1] + content[entries_end + 1 :])
        meta = reply["meta_info"]
        reason = FinishReason(meta["finish_reason"]["type"])
        if reason is FinishReason.ABORT:
            return None
    except UNREADABLE:
        return None
    return Completion(tokens, logprobs, reason, _spans(meta, len(tokens), where))


def _parse_general(content: bytes, where: str) -> Completion:
    reply = orjson.loads(content)
    meta = reply["meta_info"]
    finish = meta["finish_reason"]
    reason = FinishReason(finish["type"])
    if reason is FinishReason.ABORT and finish.get("status_code"):
        raise ServerFailure(f"{where}: the server gave it up ({finish['status_code']}): {finish.get('message')}")
    tokens, logprobs = _columns(meta["output_token_logprobs"], reply["output_ids"], where)
    return Completion(tokens, logprobs, reason, _spans(meta, len(tokens), where))


def _routed_experts(encoded: bytes | None, prompt: int, response: int, where: str) -> RoutedExperts | None:
    """SGLang sends int32 [tokens, layers, experts per token] as base64, for all tokens but the last. None where it has
    fewer: a request that was retracted and then aborted has lost some, and it is not known which."""
    if not response:
        return None
    rows = prompt + response - 1
    if encoded is None:
        raise BadReply(f"{where}: the reply lacks 'routed_experts' (policy.routing_replay: engine)")
    try:
        values = np.frombuffer(base64.b64decode(encoded, validate=True), np.int32)
    except ValueError as error:
        raise BadReply(f"{where}: its routed_experts cannot be decoded: {error}") from error
    if rows == 0 or values.size % rows or not values.size:
        return None
    if int(values.min()) < 0 or int(values.max()) > LARGEST_EXPERT:
        raise BadReply(f"{where}: routed_experts has values from {values.min()} to {values.max()}")
    return pack_experts(values.reshape(rows, -1) + 1)


def _columns(entries: list[list[Any]], ids: list[int], where: str) -> tuple[Tokens, LogProbs]:
    if len(entries) != len(ids):
        raise BadReply(f"{where}: {len(ids)} tokens but {len(entries)} log-probs")
    for index, entry in enumerate(entries):
        if type(entry[0]) not in (float, int):
            raise BadReply(f"{where}: log-prob {index} of {len(entries)} is {entry!r}")
    if [entry[1] for entry in entries] != ids:
        raise BadReply(f"{where}: the log-probs belong to other tokens than output_ids")
    if not all(type(token) is int and abs(token) < 1 << 31 for token in ids):
        raise BadReply(f"{where}: a token id is not a whole number of 32 bits")
    return _array("i", ids), np.array([entry[0] for entry in entries], np.float32)


def _array(kind: str, values: list[Any]) -> Any:
    """[values], int32 (i) or float32 (f). Half the time of np.array. Raises for what is no number of this kind; a
    float beyond float32 becomes infinite, which `Completion.problem` rejects."""
    return np.frombuffer(bytearray(struct.pack(f"{len(values)}{kind}", *values)), kind)


def input_logprobs(reply: Any, tokens: Sequence[int], where: str) -> LogProbs:
    """[tokens]: the log-probs of the last tokens of a prompt. The reply's token ids must be the same: another tokenizer
    would give other tokens."""
    try:
        entries = reply["meta_info"]["input_token_logprobs"][-len(tokens) :]
        found = np.array([entry[0] for entry in entries], dtype=np.float32)
        scored = [int(entry[1]) for entry in entries]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ServerFailure(f"{where}: its reply has no usable input_token_logprobs ({error!r})") from error
    sent = list(tokens)
    last = max(sent, default=0)  # SGLang reports the last id of the vocabulary as 0
    if scored != sent and scored != [0 if token == last else token for token in sent]:
        raise ServerFailure(f"{where}: it scored {len(scored)} other tokens than the {len(tokens)} that it was given")
    if not np.isfinite(found).all():
        raise ServerFailure(f"{where}: a log-prob is {found[~np.isfinite(found)][0]}")
    return found


def _spans(meta: dict[str, Any], count: int, where: str) -> list[WeightSpan]:
    """Newer servers report the version of each token span; older ones one version for the whole reply."""
    if not count:
        return []
    pieces = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": count}]
    return [WeightSpan(version_number(piece["version"], where), piece["start"], piece["end"]) for piece in pieces]


BASE_LABEL = "0"  # of a server that gets adapters; after a restart it is `default`


def updating_label(version: int, bucket: int | None = None) -> str:
    """Of a server that is receiving `version`; `bucket`: the last one it has received, where that is recorded."""
    return f"updating-to-{version}" if bucket is None else f"updating-to-{version}.{bucket}"


def is_updating_label(label: str, version: int | None = None) -> bool:
    """To this version, or to any."""
    prefix, _, rest = label.partition("updating-to-")
    number = rest.partition(".")[0]
    return not prefix and number.isdigit() and version in (None, int(number))


def leased(label: str, owner: str, until: float) -> str:
    """`until`: seconds since 1970."""
    return f"{label}@{owner}@{until:.0f}"


def without_lease(label: str) -> str:
    return label.partition("@")[0]


def lease_of(label: str) -> tuple[str, float]:
    """The run that leases the server, and until when; an empty name: none does."""
    _, _, lease = label.partition("@")
    owner, _, until = lease.rpartition("@")
    return (owner, float(until)) if owner and until.isdigit() else ("", 0.0)


def version_number(label: Any, where: str) -> int:
    label = without_lease(label) if isinstance(label, str) else label
    if label in (None, "default"):
        return 0
    try:
        if isinstance(label, bool | float):
            raise TypeError
        return int(label)
    except (TypeError, ValueError):
        kind = UnfinishedUpdate if is_updating_label(str(label)) else UnknownLabel
        raise kind(f"{where}: its weights are labelled {label!r}, not with a version of this run") from None
