"""What every token contributed to the updates of a step: `megatron-dapo explain RUN STEP SAMPLE`.

With `observe.samples_tokens` a step leaves what its updates read of every token in samples/step_N.npz, and computes its
metrics in fp64. `explain_step` evaluates the same `PolicyLoss` on these numbers, so that its sums are those of
metrics.jsonl up to the order of addition. It says so, or says which differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_dapo.algorithm import PolicyLoss, Proximal, Scores
from megatron_dapo.config import Config, load_config
from megatron_dapo.data import load_tokenizer
from megatron_dapo.errors import UserError
from megatron_dapo.observe import transcripts
from megatron_dapo.observe.metrics_file import STEP, read_records
from megatron_dapo.policy.batch import Floats, TrainBatch, trained_tokens
from megatron_dapo.policy.loss_func import SKIPPED, StepMetrics, mean_metrics
from megatron_dapo.policy.step import LossInputs
from megatron_dapo.types import StepBatch, printable

TOLERANCE = 1e-9  # relative to the larger of 1 and the recorded value
CLIPPED = "clip_fraction_"  # metrics of an objective that say which bound replaced a token's ratio
REMOVED = {"token_mask_share": "token mask", "sequence_mask_share": "sequence mask", "opsm_share": "OPSM"}
COLUMNS = (
    "token", "text", "engine", "old", "new", "ratio", "clipped", "advantage", "weight", "importance", "masked", "loss",
    "share",
)  # fmt: skip


def recorded_arrays(
    batch: TrainBatch, updates: Sequence[int], scores: Sequence[Floats], source: StepBatch, config: Config
) -> dict[str, NDArray[Any]]:
    """What `explain_step` and the explorer read. `updates`: samples of each update."""
    names = [f.name for f in fields(TrainBatch) if f.name != "routed_experts"]
    found = {name: value for name in names if (value := getattr(batch, name)) is not None}
    found["new_logprobs"], found["entropy"] = np.concatenate(scores, axis=1)
    found["trained"] = trained_tokens(source.samples)
    found["updates"] = np.array(updates)
    ids = np.unique(batch.tokens)
    pieces = _tokenizer(config.policy.model).batch_decode([[token] for token in ids.tolist()])
    found["piece_ids"], found["pieces"] = ids, np.array(pieces)
    return found


@lru_cache(maxsize=1)
def _tokenizer(model: str) -> Any:
    return load_tokenizer(model, vocab=2**31)  # it was compared with the model when the run started


@dataclass(slots=True)
class StepExplanation:
    metrics: dict[str, float]  # of the step, recomputed
    values: dict[str, NDArray[Any]]  # [responses]: ratio, clipped, weight, importance, masked, loss, share
    differences: dict[str, tuple[float, float]]  # metric: recorded, recomputed
    compared: int


def explain_step(run: Path, step: int) -> StepExplanation:
    config, arrays = load_config(run / "config.yaml"), transcripts.read_arrays(run / "samples", step)
    if not arrays:
        steps = sorted(int(path.stem.removeprefix("step_")) for path in (run / "samples").glob("step_*.npz"))
        known = f"recorded: {', '.join(map(str, steps[:8]))}{' …' if len(steps) > 8 else ''}" if steps else "none is"
        raise UserError(
            f"{run}: the tokens of step {step} are not recorded ({known}); set observe.samples_tokens=true, and "
            "observe.samples_every to the steps you want"
        )
    known_fields = {f.name for f in fields(TrainBatch)}
    own: dict[str, Any] = {name: value for name, value in arrays.items() if name in known_fields}
    batch = TrainBatch(**own)
    loss, totals = PolicyLoss(config.algorithm), StepMetrics()
    parts: list[dict[str, NDArray[Any]]] = []
    for number, (a, b) in enumerate(pairwise([0, *np.cumsum(arrays["updates"]).tolist()])):
        mini = slice(batch.response_offsets[a], batch.response_offsets[b])
        scores = Scores(*(torch.from_numpy(arrays[name][mini]).double() for name in ("new_logprobs", "entropy")))
        first = number == totals.totals.get(SKIPPED, 0)
        found, metrics = _explain_update(loss, scores, batch.select(range(a, b)), config, first=first)
        totals.add(metrics)
        parts.append(found)
    values = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    values["masked"] = np.where(values["masked"] == "", _why_masked(run, step, batch, arrays), values["masked"])
    recomputed = totals.result("train/")
    recorded = next((r.metrics for r in read_records(run / "metrics.jsonl") if (r.step, r.kind) == (step, STEP)), {})
    common = {name: (recorded[name], value) for name, value in recomputed.items() if name in recorded}
    differences = {n: (a, b) for n, (a, b) in common.items() if not abs(a - b) <= TOLERANCE * max(1.0, abs(a))}
    return StepExplanation(recomputed, values, differences, len(common))


def _explain_update(
    loss: PolicyLoss, scores: Scores, batch: TrainBatch, config: Config, *, first: bool
) -> tuple[dict[str, NDArray[Any]], dict[str, float]]:
    proximal: Proximal = "old" if batch.old_logprobs is not None else "current" if first else "unknown"
    tokens = LossInputs(batch, config, proximal, loss).everything().double()
    with torch.no_grad():
        outputs = loss(scores, tokens)
        details = loss.details(scores, tokens)
    sums = {"loss_sum": outputs.loss_sum, "denominator": outputs.denominator} | outputs.sums
    values = {name: float(value) for name, value in (sums | outputs.maxima).items()}
    metrics = mean_metrics(values, list(sums)) | {"update_skipped": float(values["denominator"] == 0)}
    share = details["loss"] / max(1.0, values["denominator"])
    sides = {name.removeprefix(CLIPPED): tensor for name, tensor in details.items() if name.startswith(CLIPPED)}
    removed = {label: details[name] for name, label in REMOVED.items() if name in details}
    return {
        "ratio": details["ratio_mean"].numpy(),
        "clipped": _labels(sides, tokens.mask),
        "weight": details["weight"].numpy(),
        "importance": details.get("importance_weight", torch.ones_like(share)).numpy(),
        "masked": _labels(removed, tokens.mask),
        "loss": details["loss"].numpy(),
        "share": share.numpy(),
    }, metrics


def _labels(flags: dict[str, Tensor], mask: Tensor) -> NDArray[Any]:
    """[tokens]: the name of the flag that is set."""
    found = np.full(len(mask), "", dtype="<U16")
    for name, flag in flags.items():
        found[(flag.bool() & mask).numpy()] = name
    return found


def _why_masked(run: Path, step: int, batch: TrainBatch, arrays: dict[str, NDArray[Any]]) -> NDArray[Any]:
    """[responses]: why a token carries no loss, before any off-policy mask."""
    why = np.full(batch.samples, "masked", dtype="<U16")
    for item in transcripts.read(run / "samples", [step]):
        if item.place < batch.samples and (item.verdict == "ungraded" or item.finish_reason == "length"):
            why[item.place] = "ungraded" if item.verdict == "ungraded" else "truncated"
    spread = np.repeat(why, batch.response_lengths)
    return np.where(batch.loss_mask, "", np.where(arrays["trained"], spread, "not generated"))


def explain_sample(run: str | Path, step: int, sample: int) -> str:
    """A table of the sample's tokens, and whether the sums of the step are those of metrics.jsonl."""
    folder = Path(run)
    found = explain_step(folder, step)
    arrays = transcripts.read_arrays(folder / "samples", step)
    lengths = arrays["response_lengths"]
    if not 0 <= sample < len(lengths):
        raise UserError(f"step {step} has samples 0 to {len(lengths) - 1}, not {sample}")
    stop = int(np.cumsum(lengths)[sample])
    own = slice(stop - int(lengths[sample]), stop)
    shown = transcripts.token_values(arrays, sample)
    assert shown is not None
    rows = [list(COLUMNS)]
    for i in range(int(lengths[sample])):
        at, values = own.start + i, found.values
        old = arrays.get("old_logprobs", arrays["engine_logprobs"])[at]
        numbers = [arrays["engine_logprobs"][at], old, arrays["new_logprobs"][at], values["ratio"][at]]
        text = printable(repr(shown["text"][i]))[1:-1]
        rows.append([
            str(i), text[:20], *(f"{number:.6f}" for number in numbers), values["clipped"][at] or "-",
            f"{shown['advantage'][i]:.4g}", f"{values['weight'][at]:.4g}", f"{values['importance'][at]:.4g}",
            values["masked"][at] or "-", f"{values['loss'][at]:.6g}", f"{values['share'][at]:.6g}",
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*table, "", *_summary(found, float(found.values["share"][own].sum()), step)])


def _summary(found: StepExplanation, share: float, step: int) -> list[str]:
    loss = found.metrics.get("train/loss", 0.0)
    lines = [f"This sample adds {share:.9g} to the loss of its update; the loss of step {step} is {loss:.9g}."]
    if found.differences:
        lines += [f"{name}: recorded {a!r}, recomputed {b!r}" for name, (a, b) in found.differences.items()]
        return [*lines, f"{len(found.differences)} of {found.compared} metrics differ by more than {TOLERANCE:g}."]
    if not found.compared:
        return [*lines, f"metrics.jsonl has no record of step {step} to compare with."]
    return [*lines, f"{found.compared} metrics, recomputed in fp64, equal those of metrics.jsonl to {TOLERANCE:g}."]
