"""Transcripts: some responses of every n-th step, in samples/.

`step_000010.txt` is for reading, also in a terminal; `step_000010.jsonl` holds the same for the report. The choice of
responses depends only on the batch, so a resumed run writes the same files as an uninterrupted one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from megatron_dapo.files import remove, write_atomically
from megatron_dapo.observe.console import printable
from megatron_dapo.types import Group, Sample

FILE = re.compile(r"step_(\d+)\.(?:txt|jsonl)")
VERDICTS = {True: "right", False: "wrong", None: "ungraded"}


@dataclass(slots=True, frozen=True)
class Transcript:
    """One response as it is shown."""

    step: int
    prompt_id: str
    prompt: str
    reference: str
    group: str  # the result of the whole group: "3 of 8 right"
    index: int
    verdict: str
    reason: str
    extracted: str | None
    score: float | None
    tokens: int
    finish_reason: str
    text: str
    part: int = 0  # of a rollout with several samples


def is_due(step: int, every: int) -> bool:
    return every > 0 and (step <= 1 or step % every == 0)


def choose(step: int, groups: Sequence[Group], prompts: int, responses: int) -> list[Transcript]:
    """Some responses of the first groups; right and wrong ones alternate, so that both are shown."""
    return [
        _transcript(step, group, sample)
        for group in groups[:prompts]
        for sample in _alternating(group.samples)[:responses]
    ]


def _alternating(samples: Sequence[Sample]) -> list[Sample]:
    right = [s for s in samples if s.grade is not None and s.grade.correct]
    others = [s for s in samples if not (s.grade is not None and s.grade.correct)]
    return [s for pair in zip_longest(right, others) for s in pair if s is not None]


def _transcript(step: int, group: Group, sample: Sample) -> Transcript:
    grade = sample.grade
    question = str(group.prompt.meta.get("question", group.prompt.text))
    return Transcript(
        step=step,
        prompt_id=group.prompt.id,
        prompt=question,
        reference=group.prompt.answer,
        group=f"{sum(group.accuracies)} of {len(group.rollouts)} right",
        index=sample.index,
        verdict=VERDICTS[None if grade is None else grade.correct],
        reason="" if grade is None else grade.reason,
        extracted=None if grade is None else grade.extracted,
        score=None if grade is None else grade.score,
        tokens=sample.trained_tokens,
        finish_reason=sample.finish_reason.value,
        text=sample.text,
        part=sample.part,
    )


def write(folder: Path, transcripts: Sequence[Transcript]) -> None:
    """The transcripts of one step."""
    step = transcripts[0].step
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(item)) + "\n" for item in transcripts]  # ASCII, so that lone surrogates survive
    readable = printable(_readable(step, transcripts)).encode("utf-8", errors="backslashreplace")
    write_atomically(folder / f"step_{step:06d}.jsonl", "".join(lines).encode())
    write_atomically(folder / f"step_{step:06d}.txt", readable)


def read(folder: Path) -> list[Transcript]:
    """All transcripts, oldest step first. Lines that are not transcripts are skipped."""
    found: list[Transcript] = []
    for path in sorted(folder.glob("step_*.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                raw: dict[str, Any] = json.loads(line)
                found.append(Transcript(**raw))
            except (ValueError, TypeError):
                continue
    return sorted(found, key=lambda item: item.step)


def rewind(folder: Path, step: int) -> None:
    """Removes the transcripts of every later step."""
    for path in folder.glob("step_*"):
        match = FILE.fullmatch(path.name)
        if match and int(match[1]) > step:
            remove(path)


def _readable(step: int, transcripts: Sequence[Transcript]) -> str:
    lines: list[str] = []
    shown = ""
    for item in transcripts:
        if item.prompt_id != shown:
            shown = item.prompt_id
            title = f"step {step} · prompt {item.prompt_id} · {item.group} · reference {item.reference}"
            lines += ["=" * 100, title, "=" * 100, item.prompt]
        name = f"response {item.index}" + (f", sample {item.part + 1}" if item.part else "")
        head = f"{name}: {item.verdict} ({item.reason}), {item.tokens} tokens, {item.finish_reason}"
        lines += ["", "-" * 100, f"{head}, extracted: {item.extracted}", "-" * 100, item.text, ""]
    return "\n".join(lines) + "\n"
