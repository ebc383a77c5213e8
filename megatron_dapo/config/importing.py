"""`megatron-dapo import`: another tool's settings as a configuration of ours. Every setting that is found is converted,
or named as the default here, as one without an equivalent, or as unknown; none is dropped silently."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path, PurePath
from typing import Any

from megatron_dapo.config.base import ConfigError, admits, dump_yaml
from megatron_dapo.config.data import file_label
from megatron_dapo.config.load import annotation_of, parse_config, set_value
from megatron_dapo.config.megatron_fields import OWNED, REFUSED, found_in
from megatron_dapo.config.other_names import Row, Tool, plain, tools
from megatron_dapo.config.schema import Config
from megatron_dapo.config.scripts import Script, read_script
from megatron_dapo.files import create_atomically, explain

Entry = tuple[str, Any, str]  # their key, its value, and why
# Keys of ours whose null is a value rather than a sign that nothing is to be written.
TAKE_NULL = ("rollout.sampler.max_generation_batches", "algorithm.off_policy.opsm_delta", "trainer.checkpoint.keep")


class _FillInError(Exception):
    """Our key is known, its value is not."""


@dataclass
class Imported:
    """Every setting of a file is in one of `converted`, `fill_in`, `same`, `none` and `unknown`."""

    tool: Tool
    given: dict[str, Any]
    devices: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    converted: list[str] = field(default_factory=list)
    fill_in: list[Entry] = field(default_factory=list)
    same: list[Entry] = field(default_factory=list)
    none: list[Entry] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def ours(self, key: str) -> Any:
        """The value of one of our keys: converted so far, or the default."""
        return self.settings[key] if key in self.settings else reduce(getattr, key.split("."), Config())

    def theirs(self, name: str, default: Any = None) -> Any:
        return self.given.get(name, self.given.get(self.tool.prefix + name, self.tool.defaults.get(name, default)))

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @property
    def devices_there(self) -> int:
        if self.devices is None:
            self.note("batches were counted for one device: import with --gpus N if there are more")
        return self.devices or 1


def import_file(path: Path, tool: str | None = None, gpus: int | None = None) -> Imported:
    script = read_script(path)
    if tool is not None and tool not in tools():
        raise ConfigError(f"--from {tool}: expected one of {', '.join(tools())}")
    return convert(script, tools()[tool] if tool else recognise(script, path), gpus)


def recognise(script: Script, path: Path) -> Tool:
    """The tool with the most rows for these keys, among those with one of their marks in keys and program; of equal
    ones the last, which has the others as its base."""

    def known(tool: Tool) -> int:
        marked = any(fnmatchcase(name, mark) for name in [script.program, *script.settings] for mark in tool.marks)
        return sum(tool.row(key) is not None for key in script.settings) if marked else 0

    best = max(reversed(tools().values()), key=known)
    if not known(best):
        raise ConfigError(
            f"{path}: these are settings of no tool that is known here; --from names one of {', '.join(tools())}"
        )
    return best


def convert(script: Script, tool: Tool, gpus: int | None = None) -> Imported:
    found = Imported(tool, script.settings, gpus, notes=list(dict.fromkeys(script.notes)))
    rows: dict[str, Row] = {}
    for key, value in script.settings.items():
        row = tool.row(key)
        if row is None:
            found.unknown.append(key)
        elif unread := _unread(found, row):
            found.same.append((key, value, unread))
        elif row.same == "any" or (row.same is not None and any(value == one for one in row.same)):
            found.same.append((key, value, plain(row.note) or "as it is here"))
        elif row.to and value is None and not (None in row.values or _admits(row.to, type(None))):
            found.same.append((key, value, "not set"))
        elif row.to:
            rows[key] = row
        elif value is None or (row.same is None and value in (False, "", [], {})):
            found.same.append((key, value, "off"))
        else:
            found.none.append((key, value, plain(row.none or row.note)))
    targets = {row.to for row in rows.values()}
    steps = [(row, key, script.settings[key], True) for key, row in rows.items()]
    given = {key.removeprefix(tool.prefix) for key, value in script.settings.items() if value is not None}
    defaults = {key: value for key, value in tool.defaults.items() if value is not None and key not in given}
    steps += [(row, f"{tool.title}'s default", value, False) for key, value in defaults.items()
              if (row := tool.row(key)) and row.to and row.to not in targets and not _unread(found, row)]  # fmt: skip
    order = list(tool.rows)
    # Units need the plain numbers, also those that the tool has by default.
    for row, key, value, counted in sorted(steps, key=lambda step: (bool(step[0].unit), order.index(step[0].name))):
        _apply(found, key, value, row, counted)
    # Where engines and trainer take turns, these tools start the groups of a batch and wait for all of them.
    whole_batches = {} if found.ours("rollout.max_staleness") else {"rollout.sampler.oversampling": 1.0}
    for ours, value in (whole_batches | _transport(found) | _columns(found) | tool.settings).items():
        if ours not in found.settings:
            found.settings[ours], found.sources[ours] = value, f"as in {tool.title}"
    _enough_tokens(found)
    if found.ours("policy.tensor_parallel") == found.ours("policy.pipeline_parallel") == 1:
        found.note(
            "policy.tensor_parallel, policy.pipeline_parallel: both are 1, so each GPU holds all weights and gradients "
            "(FSDP splits them); megatron-dapo plan FILE names layouts that fit"
        )
    return found


def _unread(found: Imported, row: Row) -> str:
    """Why nothing reads the setting in this file; empty: something does, or may (a variable)."""
    for name, values in row.when.items():
        value = found.theirs(name)
        if value not in values and "$" not in str(value):
            return f"read only with {row.condition}"
    return ""


def _apply(found: Imported, key: str, value: Any, row: Row, counted: bool = True) -> None:
    """Writes what one of their settings means here."""
    text = isinstance(value, str) and "$" in value
    try:
        if text and not (row.unit in ("", "files") and _admits(row.to, str)):
            raise _FillInError(f"{value} is not a constant")
        if row.values and value in row.values:
            ours = {} if (value := row.values[value]) is None and row.to not in TAKE_NULL else {row.to: value}
        elif row.unit == "fill_in":
            raise _FillInError(f"from {value!r}")
        elif row.unit:
            result = UNITS[row.unit](value, found, row, key)
            ours = result if isinstance(result, dict) else {row.to: result}
        elif row.values and not text and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise _FillInError(f"{value!r} is none of {', '.join(map(str, row.values))}")
        else:
            ours = {row.to: value}
    except _FillInError as error:
        why = str(error)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError):  # not a value of that setting
        why = f"{value!r} cannot be converted"
    else:
        why = ""
    if why:
        why = f"{row.to}: {why}" + (f" ({plain(row.note)})" if row.note else "")
        if counted:
            found.fill_in.append((key, value, why))
        else:
            found.note(f"{key}, {row.name}={value}: {why}")
        return
    if ours and value:
        ours |= {name: new for name, new in row.also.items() if name not in found.settings}
    if text:
        found.note(f"{row.to}: replace the variables in {value}")
    for name, new in ours.items():
        found.settings[name] = new
        found.sources[name] = key
    if counted:
        found.converted.append(key)
        if row.note and ours and not row.note.startswith("both"):
            found.note(f"{', '.join(ours)}: {plain(row.note)}")


def _admits(key: str, kind: type) -> bool:
    return admits(annotation_of(key), kind)


def _transport(found: Imported) -> dict[str, Any]:
    """Weights go from memory to memory, as in all of these tools; engines on the trainer's GPUs use all of them."""
    names = ("slurm.nodes", "slurm.engine_nodes", "slurm.gpus_per_node", "rollout.servers.tensor_parallel")
    nodes, engine_nodes, gpus, size = (found.settings.get(name) for name in names)
    shared, gpus, size = found.ours("rollout.servers.share_gpus"), gpus or found.devices, size or 1
    if not shared and not engine_nodes:
        return {}
    settings: dict[str, Any] = {"rollout.weights.transport": "tensor" if shared else "distributed"}
    if isinstance(nodes, int) and nodes > 1:
        settings["rollout.weights.keep_snapshot"] = False  # the nodes have no local directory in common
    if shared and isinstance(gpus, int) and isinstance(size, int) and 0 < size < gpus <= 8:
        settings["rollout.servers.count"] = gpus // size
    return settings


def _columns(found: Imported) -> dict[str, Any]:
    """These tools read benchmarks as the training data."""
    names = ("data.question_column", "data.answer_column", "data.tools_column")
    evaluates = {"evaluate.data.path", "evaluate.data.sources"} & found.settings.keys()
    return {f"evaluate.{name}": found.settings[name] for name in names if evaluates and name in found.settings}


def _enough_tokens(found: Imported) -> None:
    """A micro-batch holds the longest sequence, in multiples of what the layout splits it into."""
    names = ("rollout.max_prompt_tokens", "rollout.max_response_tokens", "policy.context_parallel",
             "policy.tensor_parallel")  # fmt: skip
    before, *numbers = (found.ours(name) for name in ("policy.micro_batch_tokens", *names))
    if not all(isinstance(number, int) and number > 0 for number in (before, *numbers)):
        return  # the configuration is refused for another reason
    longest, align = numbers[0] + numbers[1], 2 * numbers[2] * numbers[3]
    needed = math.ceil(max(before, longest) / align) * align
    if needed != before:
        found.settings["policy.micro_batch_tokens"] = needed
        found.sources.setdefault("policy.micro_batch_tokens", "the longest sequence")
        found.note(f"policy.micro_batch_tokens: {needed} instead of {before}, for the longest sequence in whole shares")


# Units: (value, everything so far, row, their key) -> the value of row.to, or several of our keys.
Unit = Callable[[Any, Imported, Row, str], Any]
UNITS: dict[str, Unit] = {}


def unit(function: Unit) -> Unit:
    """other_tools.yaml names it."""
    UNITS[function.__name__] = function
    return function


def _whole(value: float, what: str) -> int:
    if value < 1 or value != int(value):
        raise _FillInError(f"{what} is {value:g}, not a whole number of at least 1")
    return int(value)


@unit
def files(value: Any, found: Imported, row: Row, key: str) -> Any:
    files = value if isinstance(value, list) else [value]
    if len({file_label(file) for file in files}) == len(files):
        return files[0] if len(files) == 1 else files
    # Files of one name, as gsm8k/train.parquet and math/train.parquet: the folder tells them apart in metrics.
    return {row.to.replace(".path", ".sources"): [{"path": file, "name": PurePath(file).parent.name} for file in files]}


@unit
def named_files(value: Any, found: Imported, row: Row, key: str) -> Any:
    pairs = value if isinstance(value, list) else [value]
    if len(pairs) < 3:
        return pairs[-1]
    sources = [{"name": name, "path": path} for name, path in zip(pairs[::2], pairs[1::2], strict=False)]
    return {row.to.replace(".path", ".sources"): sources}


@unit
def other_folder(value: Any, found: Imported, row: Row, key: str) -> Any:
    if value == found.theirs("save", value):
        return {}  # a run that is in trainer.run_dir is resumed
    raise _FillInError(f"from {value!r}")


@unit
def samples_to_prompts(value: Any, found: Imported, row: Row, key: str) -> int:
    return _whole(value / found.ours("rollout.samples_per_prompt"), f"{value} / samples per prompt")


@unit
def share_of_step(value: Any, found: Imported, row: Row, key: str) -> Any:
    share = value / found.ours("trainer.prompts_per_step")
    if share < 1:
        raise _FillInError(
            f"{value} is less than a batch of {found.ours('trainer.prompts_per_step')}; waves are at least a batch"
        )
    return share


@unit
def updates_to_steps(value: Any, found: Imported, row: Row, key: str) -> int:
    if 0 < value < 1:  # Hugging Face's share of the run
        return share_of_steps(value, found, row, key)
    updates = found.ours("trainer.prompts_per_step") / found.ours("trainer.mini_batch_prompts")
    return math.ceil(max(0, value) / max(1, updates))


@unit
def completions_per_update(value: Any, found: Imported, row: Row, key: str) -> dict[str, int]:
    batches = 1 if found.theirs("global_batch_size") else found.theirs("gradient_accumulation_steps", 1)
    prompts = completions_per_step(batches, found, row, key)
    alone = found.theirs("steps_per_generation") is None and found.theirs("generation_batch_size") is None
    return {row.to: prompts, **({"trainer.prompts_per_step": prompts} if alone else {})}


@unit
def completions_per_step(value: Any, found: Imported, row: Row, key: str) -> int:
    """Of so many micro-batches on each device, or of so many of Megatron's global batches."""
    size = found.theirs("global_batch_size") or found.theirs("per_device_train_batch_size") * found.devices_there
    return samples_to_prompts(size * value, found, row, key)


@unit
def epochs(value: Any, found: Imported, row: Row, key: str) -> Any:
    if found.settings.get(row.to) is not None:
        return {}
    raise _FillInError(f"{value} epochs × prompts / {found.ours('trainer.prompts_per_step')} prompts per step")


@unit
def share_of_steps(value: Any, found: Imported, row: Row, key: str) -> Any:
    if value and "trainer.steps" not in found.settings:
        raise _FillInError(f"{value} × trainer.steps")
    return round(value * found.ours("trainer.steps"))


@unit
def both_clips(value: Any, found: Imported, row: Row, key: str) -> dict[str, Any]:
    given = {"algorithm.clip_high"} if found.sources.get("algorithm.clip_high") in found.converted else set()
    return {name: value for name in (row.to, "algorithm.clip_high") if name not in given}


@unit
def loggers(value: Any, found: Imported, row: Row, key: str) -> dict[str, Any]:
    names = value if isinstance(value, list) else [value]
    other = [name for name in names if name not in ("console", "wandb", "tensorboard", "none", "all")]
    if other:
        found.note(f"{key}: {', '.join(map(str, other))} is not offered; wandb and TensorBoard are")
    modes = {row.to: "online"} if "wandb" in names else {}
    return {**modes, **({"observe.tensorboard": True} if "tensorboard" in names else {})}


@unit
def server_argument(value: Any, found: Imported, row: Row, key: str) -> Any:
    if value in (None, False):
        return {}
    name = row.option or "--" + re.split(r"sglang[._]", key)[-1].replace("_", "-")
    values = [] if value is True else value if isinstance(value, list) else [value]
    return [*found.settings.get(row.to, []), name, *map(str, values)]


@unit
def megatron_field(value: Any, found: Imported, row: Row, key: str) -> Any:
    name = key.rpartition(".")[2]
    if why := found_in(REFUSED[row.kind] | OWNED[row.kind], name):
        raise _FillInError(f"{name} is not an option of policy.megatron: {why}")
    return {f"{row.to}.{name}": value}


@unit
def layout(value: Any, found: Imported, row: Row, key: str) -> dict[str, int]:
    """`megatron:d4p1t2`; the option names our key of each letter."""
    ours = dict(pair.split("=") for pair in row.option.split())
    sizes = re.findall(r"([a-z])(\d+)", str(value).partition(":")[2])
    return {ours[letter]: int(size) for letter, size in sizes if letter in ours}


@unit
def engine_nodes(value: Any, found: Imported, row: Row, key: str) -> dict[str, int]:
    return {row.to: value, "slurm.nodes": value + found.ours("slurm.nodes")} if value else {}


@unit
def engine_gpus(value: Any, found: Imported, row: Row, key: str) -> dict[str, int]:
    nodes = 0 if found.theirs("colocate") else math.ceil(value / found.ours("slurm.gpus_per_node"))
    return engine_nodes(nodes, found, row, key)


@unit
def divided_by_std(value: Any, found: Imported, row: Row, key: str) -> Any:
    name = "use_leave_one_out_baseline"
    others = found.theirs(f"grpo.adv_estimator.{name}", found.theirs(f"grpo.{name}"))
    return {} if value else "rloo" if others else "group-mean"


@unit
def warmup_of_list(value: Any, found: Imported, row: Row, key: str) -> int:
    names = {one.get("name", "LR").rpartition(".")[2]: one.get("kwargs") for one in value}
    if names.keys() - {"LR", "LinearLR", "ConstantLR"}:
        raise _FillInError(f"from {', '.join(names)}")
    return updates_to_steps(names.get("LinearLR", {"total_iters": 0})["total_iters"], found, row, key)


@unit
def weights_or_masks(value: Any, found: Imported, row: Row, key: str) -> dict[str, Any]:
    """The level of the weights, their bound, and what removes those beyond the bounds."""
    modes = {"tis": "token_truncate", "icepop": "token_mask", "seq-mask-tis": "token_geometric"}
    level, _, kind = modes.get(value, value).partition("_")
    low, high = (found.theirs(name) for name in row.option.split())
    by_kind = {
        "truncate": "",
        "geometric": "geometric_mask",
        "mask": "token_mask" if level == "token" else "product_mask",
    }
    masks = {f"algorithm.off_policy.{by_kind[kind]}": [low or 0.0, high]} if by_kind[kind] else {}
    return {row.to: level, "algorithm.off_policy.weight_cap": 1e9 if kind == "geometric" else high, **masks}


UNITS |= {
    "tokens_of_all_ranks": lambda value, found, *_: int(value * found.ours("policy.context_parallel")),
    "server_switch": lambda value, found, row, key: [*found.settings.get(row.to, []), row.option] if value else {},
    "lora_targets": lambda value, *_: {} if value == "all-linear" else value if isinstance(value, list) else [value],
    "lora_rank": lambda value, found, *_: (
        0 if value in (False, "full") else found.theirs("lora_rank", found.theirs("lora_r", 16))),
    "weights_up_to": lambda value, _, row, key: {
        row.to: [0.0, float(value)], "algorithm.off_policy.weight_cap": float(value)},
    "updates_to_prompts": lambda value, found, *_: _whole(
        found.ours("trainer.prompts_per_step") / value, f"prompts per step / {value} updates"),
    "mini_batches_to_prompts": lambda value, found, *_: int(
        value * found.theirs("async_training.require_batches") * found.ours("trainer.mini_batch_prompts")),
    "recompute_layers": lambda value, found, _, key: (
        value if found.theirs(f"{key.removesuffix('num_layers')}method") == "block" else {}),
    "sequences_to_tokens": lambda value, found, *_: int(value * found.ours("policy.context_parallel") * (
        found.ours("rollout.max_prompt_tokens") + found.ours("rollout.max_response_tokens"))),
    "group_filter": lambda value, _, row, key: {
        row.to: True, "rollout.group_filter": "reward-range" if "nonzero_std" in str(value) else f"python:{value}"},
    "plugin": lambda value, *_: f"python:{value}",
    "one_item": lambda value, *_: [value],
    "plus_one": lambda value, *_: value + 1,
    "at_most_one": lambda value, *_: min(value, 1),
    "round_up": lambda value, *_: math.ceil(value),
    "prompts_to_steps": lambda value, found, *_: _whole(value // found.ours("trainer.prompts_per_step"), "steps"),
    "syncs": lambda value, found, *_: (
        math.ceil(max(0, value) / found.theirs("async_training.trigger_parameter_sync_step"))),
    "share_of_lr": lambda value, found, *_: value * found.ours("policy.optimizer.lr"),
    "megabytes": lambda value, *_: int(value) << 20,
    "both_lambdas": lambda value, _, row, key: {row.to: value, "algorithm.gae.lambda_critic": value},
    "minus_one": lambda value, *_: max(0, value - 1),
    "no_negative": lambda value, *_: max(0, int(value)),
    "betas": lambda value, _, row, key: {row.to: value[0], row.to.replace("beta1", "beta2"): value[1]},
    "split": lambda value, *_: re.sub(r"\[.*", "", str(value[0] if isinstance(value, list) else value)),
    "profile_steps": lambda value, *_: [min(value), max(value)] if value else {},
    "server_switch_off": lambda value, *rest: UNITS["server_switch"](not value, *rest),
}  # fmt: skip


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as sections, in the order of the schema."""
    raw: dict[str, Any] = {name: {} for name in Config.model_fields}
    for key, value in settings.items():
        set_value(raw, key, value)
    return {name: section for name, section in raw.items() if section}


def problem_with(found: Imported) -> str | None:
    """What still keeps the result from being a valid configuration; None: nothing."""
    try:
        parse_config(nested(found.settings), "to change")
    except ConfigError as error:
        return str(error)
    return None


def render(found: Imported, source: str) -> str:
    """The configuration as YAML; comments say where each key is from, and what else was found."""
    lines = [f"# Converted from {source} ({found.tool.title}) by megatron-dapo import: read the comments at its end."]
    lines += _yaml(nested(found.settings), found.sources, "", "")
    if problem := problem_with(found):
        lines += ["", *(f"# {line}" for line in problem.splitlines())]
    lists = {"To fill in": found.fill_in, "No equivalent": found.none, "Nothing to set": found.same}
    for title, entries in lists.items():
        if entries:
            lines += ["", f"# {title}:", *(f"#   {key}={_short(value)}: {why}" for key, value, why in entries)]
    if found.unknown:
        lines += ["", "# Not known to this command:"]
        lines += [f"#   {key}={_short(found.given[key])}" for key in found.unknown]
    if found.notes:
        lines += ["", "# Check:", *(f"#   {' '.join(note.split())}" for note in found.notes)]
    return "\n".join(lines) + "\n"


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) < 80 else f"{text[:77]}…"


def _yaml(node: dict[str, Any], sources: dict[str, str], prefix: str, indent: str) -> Iterator[str]:
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:"
            yield from _yaml(value, sources, f"{key}.", f"{indent}  ")
        else:
            text = (
                json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else dump_yaml({"x": value})[3:]
            )
            yield f"{indent}{name}: {text.strip()}" + (f"  # {sources[key]}" if key in sources else "")


def summary(found: Imported) -> str:
    counts: dict[str, list[Any]] = {
        "converted": found.converted, "to fill in": found.fill_in, "the default here": found.same,
        "without an equivalent": found.none, "unknown": found.unknown,
    }  # fmt: skip
    parts = ", ".join(f"{len(entries)} {what}" for what, entries in counts.items() if entries)
    return f"{found.tool.title}: {len(found.given)} settings: {parts}"


def write_or_print(text: str, output: str | None) -> None:
    if output is None:
        print(text, end="")
        return
    try:
        create_atomically(Path(output), text)
    except FileExistsError:
        raise ConfigError(f"{output} exists: name a new file") from None
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {explain(error, output)}") from None


def run(file: str, tool: str | None, gpus: int | None, output: str | None) -> int:
    found = import_file(Path(file), tool, gpus)
    write_or_print(render(found, Path(file).name), output)
    print(summary(found) + (f"; written to {output}" if output else ""), file=sys.stderr)
    return 0
