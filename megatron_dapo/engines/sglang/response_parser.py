"""Reading SGLang's answer to `/generate`: either every token has a finite log-prob, or it is a ServerFailure.

A training step of a 32B model brings gigabytes of these answers, nearly all of it log-probs, so this is the bridge's
hot path. The log-probs are cut out and read as one flat list: a list per token would cost more in Python's garbage
collector than in parsing. Anything unexpected takes the plain way, which knows what to say about it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from megatron_dapo.engines.protocol import Completion
from megatron_dapo.engines.sglang.http import LOOK, ServerFailure
from megatron_dapo.types import FinishReason, LogProbs, Tokens, WeightSpan

_ROWS, _IDS = b'"output_token_logprobs":[[', b'"output_ids":['


def parse_completion(content: bytes, where: str) -> Completion:
    """`where` names the server and the request, for errors."""
    return _parse_flat(content, where) or _parse_plain(content, where)


def _parse_flat(content: bytes, where: str) -> Completion | None:
    """None when the answer is not exactly as SGLang writes it."""
    ids, rows = content.find(_IDS) + len(_IDS), content.find(_ROWS) + len(_ROWS)
    # From the back: little follows the log-probs, and if it has such brackets too, the counts below do not match.
    ids_end, rows_end = content.find(b"]", ids), content.rfind(b"]]", rows)
    if not len(_IDS) <= ids < ids_end < rows - len(_ROWS) < rows_end:
        return None
    try:
        flat = orjson.loads(b"[" + content[rows:rows_end].translate(None, b"[]") + b"]")
        first, last = content[ids:ids_end].split(b",", 1)[0], content[ids:ids_end].rsplit(b",", 1)[-1]
        count = content.count(b",", ids, ids_end) + 1
        if len(flat) != 3 * count or (flat[1], flat[-2]) != (int(first), int(last)):
            return None
        logprobs = np.array(flat[0::3], np.float32)
        tokens = np.array(flat[1::3], np.int32)
        reply = orjson.loads(content[:ids] + content[ids_end : rows - 1] + content[rows_end + 1 :])
        meta = reply["meta_info"]
        reason = FinishReason(meta["finish_reason"]["type"])
        if reason is FinishReason.ABORT or not np.isfinite(logprobs).all():
            return None
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return None
    return Completion(tokens, logprobs, reason, reply.get("text", ""), _spans(meta, count, where))


def _parse_plain(content: bytes, where: str) -> Completion:
    try:
        reply = orjson.loads(content)
        meta = reply["meta_info"]
        finish = meta["finish_reason"]
        reason = FinishReason(finish["type"])
        rows, ids = meta["output_token_logprobs"], reply["output_ids"]
        text = reply.get("text", "")
    except orjson.JSONDecodeError as error:
        look = content[:LOOK].decode("utf-8", "replace")
        raise ServerFailure(f"{where}: the answer is not JSON ({error}): {look!r}") from error
    except (KeyError, TypeError, ValueError) as error:
        look = content[:LOOK].decode("utf-8", "replace")
        raise ServerFailure(f"{where}: the answer lacks {error}: {look!r}") from error
    if reason is FinishReason.ABORT and finish.get("status_code"):
        raise ServerFailure(f"{where}: the server gave up ({finish['status_code']}): {finish.get('message')}")
    tokens, logprobs = _columns(rows, ids, where)
    return Completion(tokens, logprobs, reason, text, _spans(meta, len(tokens), where))


def _columns(rows: list[list[Any]], ids: list[int], where: str) -> tuple[Tokens, LogProbs]:
    if len(rows) != len(ids):
        raise ServerFailure(f"{where}: {len(ids)} tokens but {len(rows)} log-probs")
    if not rows:
        return np.empty(0, np.int32), np.empty(0, np.float32)
    try:
        logprobs = np.fromiter([row[0] for row in rows], np.float32, len(rows))
        tokens = np.fromiter(ids, np.int32, len(ids))
        same = rows[0][1] == ids[0] and rows[-1][1] == ids[-1]
    except (TypeError, IndexError, ValueError) as error:
        broken = next((i for i, row in enumerate(rows) if not row or not isinstance(row[0], float | int)), 0)
        raise ServerFailure(f"{where}: log-prob {broken} of {len(rows)} is {rows[broken]!r}: {error}") from error
    if not np.isfinite(logprobs).all():
        broken = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        raise ServerFailure(f"{where}: log-prob {broken} of {len(rows)} is {logprobs[broken]}")
    if not same:
        raise ServerFailure(f"{where}: the log-probs belong to other tokens than output_ids")
    return tokens, logprobs


def _spans(meta: dict[str, Any], count: int, where: str) -> list[WeightSpan]:
    """Newer servers say which version made which tokens; older ones give the version at the end."""
    if not count:
        return []
    pieces = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": count}]
    spans = [WeightSpan(version_number(piece["version"], where), piece["start"], piece["end"]) for piece in pieces]
    edges = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != edges[:-1] or edges[-1] != count:
        raise ServerFailure(f"{where}: weight versions {pieces} do not cover its {count} tokens")
    return spans


def version_number(label: Any, where: str) -> int:
    """SGLang calls the weights it started with `default`; ours are numbers."""
    if label in (None, "default"):
        return 0
    try:
        return int(label)
    except (TypeError, ValueError):
        raise ServerFailure(f"{where}: its weights are labelled {label!r}, not with a version of this run") from None
