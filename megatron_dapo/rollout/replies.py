"""Reading SGLang's answer to `/generate`: either every token has a finite log-prob, or it is a ServerFailure.

A training step of a 32B model brings over a gigabyte of these answers, nearly all of it log-probs, so this is the
bridge's hot path: orjson for the text, one transposition for the columns, numpy from there on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from megatron_dapo.rollout.engine import Completion
from megatron_dapo.rollout.http import LOOK, ServerFailure
from megatron_dapo.types import FinishReason, LogProbs, Tokens, WeightSpan


def parse_completion(content: bytes, where: str) -> Completion:
    """`where` names the server and the request, for errors."""
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
        # Not zip(*rows): that passes thousands of arguments, and is slower.
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
