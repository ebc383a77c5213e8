"""The judge grader: a model behind an OpenAI-compatible server reads question, reference answer and response.

The score is the number in the last match of `score_pattern` in its reply. A reply without one, or with a number
outside of the scale, makes the response ungraded.
"""

from __future__ import annotations

import re
from typing import Any

from megatron_dapo.config.reward import RewardConfig
from megatron_dapo.reward.grader import Scores
from megatron_dapo.reward.remote import RemoteFailure, RemoteGrader
from megatron_dapo.types import Grade, Prompt

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
