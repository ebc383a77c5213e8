"""The http grader: sends responses in batches to a server of the user's and reads one grade for each.

    request  {"responses": [{"prompt_id", "prompt", "answer", "source", "meta", "response"}, …]}
    reply    {"grades": [grade, …]}, in the same order and of the same length

A grade is a number (the score), a boolean, null (ungraded), or an object with `score`, and optionally `correct`,
`extracted`, `reason` and `turns` (a reward for each turn). A reply that cannot be matched with its request, and a
request that the server refuses or fails on, is repeated with one response at a time: one response that the server
cannot handle does not make the others ungraded.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dapo.config.data import RewardConfig
from megatron_dapo.reward.grader import Scores
from megatron_dapo.reward.remote import RemoteFailure, RemoteGrader
from megatron_dapo.types import Grade, Prompt


@dataclass(slots=True, eq=False)
class _Waiting:
    body: dict[str, Any]
    future: asyncio.Future[Grade]


class HttpReward(RemoteGrader):
    kind = "http"

    def __init__(self, config: RewardConfig, key: str = "reward.http") -> None:
        super().__init__(config.http, key)
        self._config, self._scores = config.http, Scores(config)
        self._waiting: list[_Waiting] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sending: set[asyncio.Task[None]] = set()

    async def ask(self, prompt: Prompt, response: str) -> Grade:
        body = {
            "prompt_id": prompt.id, "prompt": prompt.text, "answer": prompt.answer, "source": prompt.source,
            "meta": prompt.meta, "response": response,
        }  # fmt: skip
        loop = asyncio.get_running_loop()
        waiting = _Waiting(body, loop.create_future())
        self._waiting.append(waiting)
        if len(self._waiting) >= self._config.batch:
            self._flush()
        elif self._timer is None:
            self._timer = loop.call_later(self._config.batch_wait, self._flush)
        return await waiting.future

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = [item for item in self._waiting if not item.future.cancelled()]
        self._waiting = []
        if batch:
            task = asyncio.ensure_future(self._send(batch))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send(self, batch: list[_Waiting]) -> None:
        try:
            grades: Sequence[Grade | RemoteFailure] = await self._grades(batch)
        except RemoteFailure as failure:
            if len(batch) > 1 and (failure.status == 500 or not failure.passing):
                grades = await asyncio.gather(*(self._alone(item) for item in batch))
            else:
                grades = [failure] * len(batch)
        except BaseException as error:  # whatever happens, the callers that wait must be told
            for item in batch:
                if not item.future.done():
                    item.future.set_exception(error)
            raise
        for item, grade in zip(batch, grades, strict=True):
            if item.future.done():
                continue
            if isinstance(grade, RemoteFailure):
                item.future.set_exception(grade)
            else:
                item.future.set_result(grade)

    async def _alone(self, item: _Waiting) -> Grade | RemoteFailure:
        try:
            return (await self._grades([item], retries=0))[0]
        except RemoteFailure as failure:
            return failure

    async def _grades(self, batch: list[_Waiting], retries: int | None = None) -> list[Grade]:
        reply = await self._server.post("", {"responses": [item.body for item in batch]}, retries)
        grades = reply.get("grades") if isinstance(reply, dict) else None
        if not isinstance(grades, list) or len(grades) != len(batch):
            found = f"{len(grades)} grades" if isinstance(grades, list) else f"{reply!r:.200}"
            raise RemoteFailure("unusable-reply", f"expected {len(batch)} grades, found {found}")
        return [self._adopt(grade) for grade in grades]

    def _adopt(self, value: Any) -> Grade:
        if value is None:
            return Grade(None, 0.0, None, "the server could not grade it")
        if isinstance(value, bool) or _is_number(value):
            return self._scores.adopt(value)
        if isinstance(value, dict) and _is_grade(value):
            return self._from_object(value)
        raise RemoteFailure("unusable-reply", f"expected a grade, found {value!r:.200}")

    def _from_object(self, value: dict[str, Any]) -> Grade:
        extracted, reason = value.get("extracted"), str(value.get("reason") or "")
        if value["score"] is None:
            return Grade(None, 0.0, extracted, reason or "the server could not grade it")
        base = self._scores.adopt(float(value["score"]))
        correct = base.correct if value.get("correct") is None else value["correct"]
        turns = tuple(float(reward) for reward in value.get("turns") or ())
        return Grade(correct, base.score, extracted, reason, turns=turns)


def _is_grade(value: dict[str, Any]) -> bool:
    turns = value.get("turns") or []
    return (
        "score" in value
        and (value["score"] is None or _is_number(value["score"]))
        and isinstance(value.get("correct"), bool | None)
        and isinstance(value.get("extracted"), str | None)
        and isinstance(turns, list)
        and all(map(_is_number, turns))
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# The judge grader: a model behind an OpenAI-compatible server reads question, reference answer and response.


_FIELD = re.compile(r"\{(question|answer|response)\}")
QUOTED = 200


class Judge(RemoteGrader):
    kind = "judge"

    def __init__(self, config: RewardConfig, key: str = "reward.judge") -> None:
        super().__init__(config.judge, key)
        self._config, self._scores = config.judge, Scores(config)
        self._pattern = re.compile(config.judge.score_pattern)

    async def ask(self, prompt: Prompt, response: str) -> Grade:
        body = {
            "model": self._config.model, "messages": self._messages(prompt, response),
            "temperature": self._config.temperature, "max_tokens": self._config.max_tokens,
        }  # fmt: skip
        return self._grade(_content(await self._server.post("/chat/completions", body)))

    def _messages(self, prompt: Prompt, response: str) -> list[dict[str, str]]:
        values = {
            "question": str(prompt.meta.get("question", prompt.text)), "answer": prompt.answer, "response": response,
        }  # fmt: skip
        # In one pass: a response that contains {answer} must not be filled in.
        text = _FIELD.sub(lambda found: values[found[1]], self._config.prompt)
        system = [{"role": "system", "content": self._config.system}] if self._config.system else []
        return [*system, {"role": "user", "content": text}]

    def _grade(self, reply: str) -> Grade:
        found = self._pattern.findall(reply)
        quoted = reply.strip()[-QUOTED:]
        try:
            score = float(found[-1])
        except (IndexError, ValueError):
            return Grade(None, 0.0, None, f"no score in the judge's reply: {quoted!r}")
        low, high = self._config.lowest, self._config.highest
        if not low <= score <= high:
            return Grade(None, 0.0, None, f"the judge's score {score:g} is outside of {low:g} to {high:g}: {quoted!r}")
        share = (score - low) / (high - low)
        limit = self._config.correct_from
        correct = share > 0.5 if limit is None else score >= limit
        scaled = self._scores.wrong + share * (self._scores.right - self._scores.wrong)
        return Grade(correct, scaled, f"{score:g}", quoted)


def _content(reply: Any) -> str:
    try:
        content = reply["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        content = None
    if not isinstance(content, str):
        raise RemoteFailure("unusable-reply", f"expected a chat completion, found {reply!r:.200}")
    return content
