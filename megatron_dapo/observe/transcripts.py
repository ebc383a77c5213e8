"""Samples: responses of every n-th step, in samples/.

`step_000010.txt` is for reading, also in a terminal; `step_000010.jsonl` is for the explorer of report and live page.
Its first line has the result of every prompt of the step, each further line is a response. With
`observe.samples_tokens`, `step_000010.npz` has what the updates read of every token (trainer/explain.py). The choice of
responses depends only on the batch, so a resumed run writes the same files as an uninterrupted one.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dapo.files import remove, write_atomically
from megatron_dapo.observe.metrics_file import finite, skipping
from megatron_dapo.types import Group, Sample, printable

FILE = re.compile(r"step_(\d+)\.(?:txt|jsonl|npz)")
VERDICTS = {True: "right", False: "wrong", None: "ungraded"}
READABLE = 64  # responses in the .txt file
Arrays = Mapping[str, NDArray[Any]]
KINDS = {"prompt_id": str, "prompt": str, "text": str, "tokens": int, "place": int}  # of a transcript


@dataclass(slots=True, frozen=True)
class Transcript:
    """One response as it is shown."""

    step: int
    prompt_id: str
    prompt: str  # as the model sees it
    reference: str
    group: str  # the result of the whole group: "3 of 8 right"; of a rejected one also the reason
    index: int
    verdict: str
    reason: str
    extracted: str | None
    score: float | None
    tokens: int
    finish_reason: str
    text: str
    part: int = 0  # of a rollout with several samples
    place: int = 0  # among all samples of the step, the rejected ones last
    source: str = ""  # of the prompt
    advantage: float | None = None


@dataclass(slots=True, frozen=True)
class StepSamples:
    """What is kept of a step. `prompts`: of every group right, graded and all rollouts, and mean tokens per sample."""

    step: int
    prompts: dict[str, list[float]]
    transcripts: list[Transcript]
    arrays: Arrays = field(default_factory=dict)


def is_due(step: int, every: int) -> bool:
    return every > 0 and (step <= 1 or step % every == 0)


def choose(
    step: int, groups: Sequence[Group], prompts: int, responses: int, arrays: Arrays | None = None,
    rejected: Mapping[str, Group] | None = None,
) -> StepSamples:  # fmt: skip
    """Some responses of the first groups, and of a rejected one for each reason. Right and wrong ones alternate, so
    that both are shown. 0: all of them. `arrays`: "advantages" [trained samples], and what `explain` reads."""
    arrays, rejected = arrays or {}, rejected or {}
    samples = [sample for group in (*groups, *rejected.values()) for sample in group.samples]
    places = {id(sample): i for i, sample in enumerate(samples)}
    advantages = dict(enumerate(arrays.get("advantages", ())))
    chosen = []
    for why, group in [*(("", group) for group in groups[: prompts or None]), *sorted(rejected.items())]:
        for sample in _alternating(group.samples)[:responses] if responses else group.samples:
            place = places[id(sample)]
            chosen.append(_transcript(step, group, why, sample, place, advantages.get(place)))
    lengths = {group.prompt.id: float(np.mean([s.trained_tokens for s in group.samples])) for group in groups}
    results = {
        group.prompt.id: [sum(group.accuracies), len(group.accuracies), len(group.rollouts), lengths[group.prompt.id]]
        for group in groups
    }
    return StepSamples(step, results, chosen, arrays if len(arrays) > 1 else {})


def _alternating(samples: Sequence[Sample]) -> list[Sample]:
    right = [s for s in samples if s.grade is not None and s.grade.correct]
    others = [s for s in samples if not (s.grade is not None and s.grade.correct)]
    return [s for pair in zip_longest(right, others) for s in pair if s is not None]


def _transcript(
    step: int, group: Group, rejected: str, sample: Sample, place: int, advantage: float | None
) -> Transcript:
    grade, result = sample.grade, f"{sum(group.accuracies)} of {len(group.rollouts)} right"
    return Transcript(
        step=step,
        prompt_id=group.prompt.id,
        prompt=group.prompt.text,
        reference=group.prompt.answer,
        group=f"{result}, dropped: {rejected}" if rejected else result,
        index=sample.index,
        verdict=VERDICTS[None if grade is None else grade.correct],
        reason="" if grade is None else grade.reason,
        extracted=None if grade is None else grade.extracted,
        score=None if grade is None else grade.score,
        tokens=sample.trained_tokens,
        finish_reason=sample.finish_reason.value,
        text=sample.text,
        part=sample.part,
        place=place,
        source=group.prompt.source,
        advantage=None if advantage is None else float(advantage),
    )


def write(folder: Path, samples: StepSamples) -> None:
    """The samples of one step."""
    path = folder / f"step_{samples.step:06d}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    head = {"step": samples.step, "prompts": samples.prompts}
    lines = [json.dumps(item) + "\n" for item in (head, *map(asdict, samples.transcripts))]  # ASCII: lone surrogates
    readable = printable(_readable(samples)).encode("utf-8", errors="backslashreplace")
    if samples.arrays:
        content = io.BytesIO()
        np.savez(content, **samples.arrays)  # type: ignore[arg-type]
        write_atomically(path.with_suffix(".npz"), content.getvalue())
    write_atomically(path, "".join(lines).encode())
    write_atomically(path.with_suffix(".txt"), readable)


def recorded_steps(folder: Path) -> list[int]:
    """From the names of the files alone."""
    return sorted(int(path.stem.removeprefix("step_")) for path in folder.glob("step_*.jsonl") if FILE.match(path.name))


def read(folder: Path, steps: Iterable[int] | None = None) -> list[Transcript]:
    """The transcripts of these steps, or of all, oldest step first. Lines that are not transcripts are skipped."""
    found: list[Transcript] = []
    for step in recorded_steps(folder) if steps is None else steps:
        file = folder / f"step_{step:06d}.jsonl"
        with skipping(file):  # a resumed run may have just removed it
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            for number, line in enumerate(lines, start=1):
                with skipping(f"{file}, line {number}"):
                    fields = json.loads(line, parse_constant=lambda name: None)  # a custom grader's score may be NaN
                    if "prompts" not in fields:  # as the first line
                        found.append(_checked(Transcript(**fields | {"step": step})))
    return found


def _checked(item: Transcript) -> Transcript:
    """Raises for what readers cannot compute with or show."""
    if wrong := [name for name, kind in KINDS.items() if type(getattr(item, name)) is not kind]:
        raise TypeError(f"another type: {', '.join(wrong)}")
    for value in (item.score, item.advantage):
        finite(value or 0.0)
    return item


def histories(folder: Path, prompts: Iterable[str]) -> dict[str, list[list[float]]]:
    """[step, right, graded, rollouts, mean tokens] of each prompt, in each recorded step that trained on it."""
    found: dict[str, list[list[float]]] = {name: [] for name in prompts}
    for step in recorded_steps(folder):
        path = folder / f"step_{step:06d}.jsonl"
        with skipping(f"{path}, line 1"), path.open("rb") as file:  # a resumed run may have just removed it
            results = json.loads(file.readline()).get("prompts", {})
            for name in found.keys() & results.keys():
                with skipping(f"{path}, line 1, {name}"):
                    found[name].append([step, *map(finite, results[name])])
    return found


def read_arrays(folder: Path, step: int) -> dict[str, NDArray[Any]]:
    """Of the .npz file; empty if there is none."""
    try:
        with np.load(folder / f"step_{step:06d}.npz", allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile):
        return {}


def token_values(arrays: Arrays, place: int) -> dict[str, list[Any]] | None:
    """What the explorer shows of each response token of one sample; None if it was not recorded."""
    if not arrays or place not in range(len(arrays["response_lengths"])):
        return None
    ends = np.cumsum(arrays["response_lengths"])
    stop, start = int(ends[place]), int(ends[place] - arrays["response_lengths"][place])
    last = int(np.cumsum(arrays["prompt_lengths"] + arrays["response_lengths"])[place])
    ids = arrays["tokens"][last - (stop - start) : last]
    new, engine = arrays["new_logprobs"][start:stop], arrays["engine_logprobs"][start:stop]
    old = arrays.get("old_logprobs", arrays["engine_logprobs"])[start:stop]
    advantages = np.full(stop - start, arrays["advantages"][place])
    if "token_advantages" in arrays:
        advantages = advantages + arrays["token_advantages"][start:stop]
    values = {"log-prob": new, "log-prob gap": old - engine, "ratio": np.exp(np.clip(new - old, -20, 20))}
    values |= {"advantage": advantages, "entropy": arrays["entropy"][start:stop]}
    pieces = arrays["pieces"][np.searchsorted(arrays["piece_ids"], ids)]
    mask = arrays["loss_mask"][start:stop].astype(int)
    return {"text": pieces.tolist(), "mask": mask.tolist(), **{name: _rounded(array) for name, array in values.items()}}


def _rounded(values: NDArray[Any]) -> list[float | None]:
    return [float(f"{value:.4g}") if np.isfinite(value) else None for value in values]


def rewind(folder: Path, step: int) -> None:
    """Removes the samples of every later step."""
    for path in folder.glob("step_*"):
        match = FILE.fullmatch(path.name)
        if match and int(match[1]) > step:
            remove(path)


def _readable(samples: StepSamples) -> str:
    lines: list[str] = []
    shown = ""
    for item in samples.transcripts[:READABLE]:
        if item.prompt_id != shown:
            shown = item.prompt_id
            reference = f" · reference {item.reference}" if item.reference else ""
            title = f"step {samples.step} · prompt {item.prompt_id} · {item.group}{reference}"
            lines += ["=" * 100, title, "=" * 100, item.prompt]
        name = f"response {item.index}" + (f", sample {item.part + 1}" if item.part else "")
        values = {"score": item.score, "advantage": item.advantage}
        numbers = [f"{what} {value:.4g}" for what, value in values.items() if value is not None]
        lines += [*readable_response(f"{name}: {item.verdict}", item, *numbers), ""]
    left_out = len(samples.transcripts) - READABLE
    return "\n".join([*lines, *([f"… and {left_out} more, in the .jsonl file"] if left_out > 0 else [])]) + "\n"


def readable_response(title: str, item: Any, *more: str) -> list[str]:
    """Lines. `item`: a Transcript, or a Response of an evaluation. Empty fields are left out."""
    head = title + (f" ({item.reason})" if item.reason else "")
    extracted = [f"extracted: {item.extracted}"] if item.extracted else []
    facts = ", ".join([head, *more, f"{item.tokens} tokens", item.finish_reason, *extracted])
    return ["", "-" * 100, facts, "-" * 100, item.text]
