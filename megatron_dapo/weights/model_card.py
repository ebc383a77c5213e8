"""The model card of a trained model: base model, data, steps, objective, scores, versions and commit, from the files of
the run directory. Names of this machine's folders stay out of it."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

from megatron_dapo.errors import UserError
from megatron_dapo.weights.locate import STEP

CARD, BASE_CARD, GENERATION = "README.md", "README.base.md", "generation_config.json"
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")  # a folder of the hub's cache
SCORE = re.compile(r"/(avg|pass|maj)@\d+$")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_model_card(checkpoint: Path, directory: Path, notes: list[str]) -> list[str]:
    """Make the exported model in `directory` ready for publication, if the checkpoint is one of a run. Returns the
    notes of the export that remain, and one if there is no card because the run's configuration cannot be read.

    The card of the base model, which was copied with its side files, becomes README.base.md. A missing generation
    config is made of the token ids in config.json, as transformers would do.
    """
    checkpoint = checkpoint.absolute()
    found = STEP.fullmatch(checkpoint.parent.name)
    run = checkpoint.parent.parent.parent
    if found is None or checkpoint.name != "policy" or not (run / "config.yaml").exists():
        return notes
    if not (directory / GENERATION).exists():
        config = json.loads((directory / "config.json").read_text())
        tokens = {key: config[key] for key in _TOKENS if config.get(key) is not None}
        (directory / GENERATION).write_text(json.dumps({"_from_model_config": True} | tokens, indent=2) + "\n")
        notes = [note for note in notes if not note.endswith(f"has no {GENERATION}")]
    try:
        card = _card(run, int(found[1]), (directory / CARD).exists())
    except (OSError, UserError, ValueError, LookupError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        return [*notes, f"there is no model card: {run / 'config.yaml'} cannot be read ({why})"]
    if (directory / CARD).exists():
        (directory / CARD).rename(directory / BASE_CARD)
    (directory / CARD).write_text(card, encoding="utf-8")
    return notes


def _card(run: Path, step: int, has_base_card: bool) -> str:
    from megatron_dapo.config.base import parse_yaml  # imports pydantic, which most conversions do without

    config = parse_yaml((run / "config.yaml").read_text(encoding="utf-8"))
    policy, algorithm, data = config["policy"], config["algorithm"], config["data"]
    base = _public_name(policy["model"])
    sources = [source["path"] for source in data.get("sources") or []] or [data.get("path")]
    rows = {
        "base model": base,
        "data": ", ".join(_public_name(source) for source in sources if source) or "unknown",
        "steps": str(step),
        "prompts per step": str(config["trainer"]["prompts_per_step"]),
        "samples per prompt": str(config["rollout"]["samples_per_prompt"]),
        "objective": f"{algorithm['objective']}, {algorithm['aggregation']}",
        "learning rate": str(policy["optimizer"]["lr"]),
        **_environment(run / "environment.json"),
    }
    head = ["---", "library_name: transformers", *([f"base_model: {base}"] if "/" in base else [])]
    head += ["tags: [reinforcement-learning, dapo, megatron-dapo]", "---", "", f"# {base.split('/')[-1]}, DAPO", ""]
    table = [f"| {name} | {value} |" for name, value in rows.items()]
    lines = [*head, "Trained with reinforcement learning by megatron-dapo.", "", "| | |", "|---|---|", *table]
    lines += _scores(run / "metrics.jsonl", step)
    more = ["", f"The card of the base model is [{BASE_CARD}]({BASE_CARD})."] if has_base_card else []
    return "\n".join([*lines, *more]) + "\n"


def _public_name(path: str) -> str:
    """The name on the hub, or the last part of a path."""
    cached = _CACHED.search(path)
    if cached:
        return f"{cached[1]}/{cached[2]}"
    return Path(path).name if path.startswith(("/", ".", "~")) or path.count("/") != 1 else path


def _environment(file: Path) -> dict[str, str]:
    try:
        last = json.loads(file.read_text())[-1]
        versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
        return {"hardware": last["hardware"], "versions": versions, "commit": last["commit"]}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _scores(file: Path, step: int) -> list[str]:
    """A table of the evaluations before the first step, and of the newest up to `step`."""
    found: list[tuple[int, dict[str, str]]] = []
    for line in file.read_bytes().splitlines() if file.exists() else []:
        with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):  # damaged or not complete
            record = json.loads(line)
            scores = {name: f"{float(value):.3f}" for name, value in record["metrics"].items() if SCORE.search(name)}
            found += [(record["step"], scores)] if record["kind"] == "eval" and record["step"] <= step else []
    if not found:
        return []
    (first, before), (last, after) = found[0], found[-1]
    rows = [f"| {name} | {before.get(name, '—')} | {value} |" for name, value in after.items()]
    return ["", f"| evaluation | step {first} | step {last} |", "|---|---|---|", *rows]
