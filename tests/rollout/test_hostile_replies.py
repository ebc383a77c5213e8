"""Mutated server replies, grades and rewards: every step gets its batch, and nothing of them is in it.

FUZZ_REPLIES=10000 python -m pytest -s tests/rollout/test_hostile_replies.py     # default: 300 mutated replies each

Replies are mutated in their values, in their bytes, and below JSON: lengths, chunks, headers, statuses, Retry-After.
"""

import json
import math
import os
import random
import re
from contextlib import asynccontextmanager

import numpy as np
import orjson
import pytest
from aiohttp import web
from connect_engine import connect_engine
from fake_server import FakeServer, damaged_http, raw_reply, response_of
from faults import Texts, settings
from simulation import Prompts

from megatron_dapo.config import parse_config
from megatron_dapo.config.data import RewardConfig
from megatron_dapo.engines.sglang import load_balancer, server_state
from megatron_dapo.reward.combined import open_graders
from megatron_dapo.rollout import generation
from megatron_dapo.rollout.agents.functions import RolloutFunction
from megatron_dapo.rollout.sampler import Sampler
from megatron_dapo.trainer.advantages import shape_batch
from megatron_dapo.types import LARGEST_SCORE, Grade, StepBatch, json_default

VERSION, VOCABULARY = 3, 250
REPLIES = int(os.environ.get("FUZZ_REPLIES", "300"))
JUNK = (
    None, True, -1, 0, 7, 2**31, 2**32 + 5, 10**30, 10**400, 1.5, 1e39, 1e308, math.nan, math.inf, -math.inf, "", "x",
    "-1", "default", "2", "99", "updating-to-9", "\ud800", [], [None], [[1, 2]], {}, {"a": []},
)  # fmt: skip
NUMBERS = (math.nan, math.inf, -math.inf, 1e308, -1e38, 1e9, "1", np.float32(0.5), -1, 0)


def mutated(chance, reply):
    """A reply with one to three changes of its values, or of its bytes."""
    for _ in range(chance.randint(1, 3)):
        place, key = None, None
        inner = reply
        while isinstance(inner, dict | list) and inner and (place is None or chance.random() < 0.8):
            place, key = inner, chance.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
            inner = place[key]
        change = chance.choice(("junk", "junk", "remove", "repeat"))
        if change == "remove":
            del place[key]
        elif change == "repeat" and isinstance(place, list):
            place.insert(key, place[key])
        else:
            place[key] = chance.choice(JUNK)
    content = bytearray(json.dumps(reply).encode() if chance.random() < 0.5 else _compact(reply))
    if chance.random() < 0.2 and content:
        start = chance.randrange(len(content))
        content[start : start + chance.randint(0, 9)] = chance.randbytes(chance.randint(0, 3))
    return bytes(content)


def _compact(reply):
    return json.dumps(reply, separators=(",", ":")).encode()


def hostile(chance, counts):
    def fault(server, body):
        if body.get("logprob_start_len") == 0 or chance.random() > 0.35:
            return None
        counts["mutated"] += 1
        if chance.random() < 0.15:
            return refused(chance)
        count = min(8, body["sampling_params"]["max_new_tokens"]) + chance.choice((0, 0, 0, 1, 16))
        reply = response_of(count, "stop", server.label, body["rid"].__hash__())
        if chance.random() < 0.25:
            return damaged_http(chance, json.dumps(reply).encode())
        return web.Response(body=mutated(chance, reply))

    return fault


def refused(chance):
    status, later = chance.choice((429, 500, 503)), chance.choice(("0.01", "soon", "-5", "nan", ""))
    return web.Response(status=status, headers={"Retry-After": later} if chance.random() < 0.5 else {})


def hostile_service(chance, counts):
    """Grades at random; a third of the replies are mutated: of HTTP, of their JSON, or of the text of a judge."""

    async def answer(request):
        asked, score = await request.json(), chance.choice((0, 1))
        kind = chance.choice(("http", "json", "text", "text", "refused")) if chance.random() < 0.35 else ""
        counts["mutated"] += bool(kind)
        if kind == "refused":
            return refused(chance)
        if "responses" in asked:
            grade = {"score": score, "correct": score > 0, "extracted": "a", "reason": "", "turns": [0.5]}
            reply = {"grades": [chance.choice((grade.copy(), score, score > 0)) for _ in asked["responses"]]}
        else:
            number = re.findall(r'"id": "(\w{16})"', asked["messages"][-1]["content"])[-1]
            verdict = {"reason": "why", "score": score, "id": number}
            text = mutated(chance, verdict).decode(errors="replace") if kind == "text" else json.dumps(verdict)
            reply = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}], "usage": {"total_tokens": 9}}
        if kind == "http":
            return raw_reply(request, damaged_http(chance, json.dumps(reply).encode()))
        changes = kind == "json" or (kind == "text" and "grades" in reply)
        return web.Response(body=mutated(chance, reply) if changes else json.dumps(reply).encode())

    return answer


@asynccontextmanager
async def remote_graders(grader, chance, counts):
    """The real grader in front of such a server."""
    app = web.Application()
    app.router.add_post("/{path:.*}", hostile_service(chance, counts))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    service = {"urls": ["http://{}:{}".format(*runner.addresses[0])], "backoff": 0.001, "retries": 1}
    service |= {"max_failures": 10**6} | ({"model": "m"} if grader == "judge" else {"batch_wait": 0.001, "batch": 4})
    try:
        async with open_graders(RewardConfig(grader=grader, **{grader: service})) as graders:
            yield graders
    finally:
        await runner.cleanup()


def hostile_grade(chance, index):
    fields = {"correct": index % 2 == 0, "score": 1.0, "extracted": "a", "reason": "", "parts": {}, "turns": ()}
    if chance.random() < 0.3:
        name = chance.choice(list(fields))
        junk = chance.choice(NUMBERS if name == "score" else JUNK)
        wrapped = {"parts": {"other": junk}, "turns": (0.5, junk)}
        fields[name] = wrapped[name] if name in wrapped and chance.random() < 0.7 else junk
    return Grade(**fields)


@pytest.mark.parametrize("rewarded_by", ["grader", "function", "judge", "http"])
async def test_no_step_is_lost_and_nothing_hostile_is_trained_or_saved(rewarded_by, monkeypatch):
    monkeypatch.setattr(server_state, "BACKOFF", (0.001, 0.004))
    monkeypatch.setattr(load_balancer, "TICK", 0.002)
    monkeypatch.setattr(generation, "EMPTY_ABORT_PAUSE", 0.001)
    chance, counts = random.Random(rewarded_by), {"mutated": 0, "rejected": 0, "ungraded": 0, "steps": 0}
    config = settings(attempts=6, sample_timeout=20).model_copy(update={"max_response_tokens": 12})

    async def grade(prompt, sample):
        return hostile_grade(chance, sample.index)

    async def function(prompt, conversation, settings):
        for number in range(2):
            await conversation.generate(max_tokens=4)
            conversation.append([7, number])
            conversation.reward(chance.choice(NUMBERS) if chance.random() < 0.1 else 0.25)
        return hostile_grade(chance, conversation.samples[0].index)

    servers = [await FakeServer(fault=hostile(chance, counts)).start() for _ in range(2)]
    for server in servers:
        server.label = str(VERSION)
    engine = await connect_engine([server.url for server in servers], config, version=VERSION)
    engine.vocabulary = VOCABULARY
    made = RolloutFunction("python:a.b", function, {}, Texts()) if rewarded_by == "function" else None
    remote = rewarded_by in ("judge", "http")
    async with remote_graders(rewarded_by if remote else "judge", chance, counts) as graders:
        how = graders.grade if remote else grade
        sampler = Sampler(engine, how, Prompts(), config, groups_per_step=8, function=made)
        while counts["mutated"] < REPLIES:
            batch = await sampler.collect(counts["steps"])
            check(batch, sampler)
            counts["steps"] += 1
            counts["rejected"] += batch.metrics.get("rollout/rejected_replies", 0)
            counts["ungraded"] += batch.metrics.get("rollout/rejected_grades", 0)
        counts["ungraded"] += graders.metrics()["reward/ungraded"]
    await engine.close()
    print(rewarded_by, counts)
    assert counts["rejected"] > 0.1 * counts["mutated"] and counts["ungraded"] > counts["steps"]


def check(batch, sampler):
    assert len(batch.groups) == 8 and batch.metrics["rollout/staleness_max"] == 0
    for sample in batch.samples:
        tokens = sample.response_tokens
        assert 0 < sample.length <= 12 and 0 <= tokens.min() <= tokens.max() < VOCABULARY
        assert {span.version for span in sample.weight_spans} == {VERSION}
        assert (sample.engine_logprobs <= 0.01).all() and (sample.engine_logprobs >= -1000).all()
        assert type(sample.grade.score) is float and abs(sample.grade.score) <= 4 * LARGEST_SCORE
    saved = orjson.loads(orjson.dumps(batch.to_state(), default=json_default))
    assert StepBatch.from_state(saved).metrics == batch.metrics
    for credit in ("rollout", "turn"):
        shaped, metrics = shape_batch(StepBatch.from_state(saved), parse_config({"algorithm": {"turn_credit": credit}}))
        assert np.isfinite(shaped.advantages).all() and all(map(math.isfinite, metrics.values()))
    sampler.restore(orjson.loads(orjson.dumps(sampler.state(), default=json_default)))
