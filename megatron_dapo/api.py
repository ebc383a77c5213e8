"""Training, evaluation and conversion from Python, for notebooks and scripts. The same as the commands, and they run as
processes of their own: a notebook can start several runs, and stopping a cell stops its run, which saves.

    import megatron_dapo as md

    def grade(prompt, response):
        return prompt.answer in response

    run = md.train("Qwen/Qwen2.5-0.5B", "prompts.jsonl", reward=grade, trainer__steps=50)
    run.steps.plot(y="reward/accuracy_all")
"""

from __future__ import annotations

import ast
import builtins
import inspect
import json
import os
import signal
import subprocess
import symtable
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_origin

from megatron_dapo.config.base import dump_yaml, parse_yaml
from megatron_dapo.config.load import load_config, parse_config, set_value
from megatron_dapo.errors import UserError
from megatron_dapo.observe.report import write_report
from megatron_dapo.observe.runs import Run, load_run

if TYPE_CHECKING:
    import pandas

FUNCTIONS = "run_functions"  # the module, in the run directory, that holds functions of a notebook
Setting = Any
Function = Callable[..., Any] | str


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """What a run has written. `steps` and `evaluations` are pandas frames with one row for each, indexed by step;
    `samples` has the transcripts, one row for each response. They need pandas; `records` does not."""

    path: Path
    records: Run = field(repr=False)

    @property
    def config(self) -> dict[str, Any]:
        """The settings, in sections, as the run resolved them."""
        found: dict[str, Any] = parse_yaml((self.path / "config.yaml").read_text()) or {}
        return found

    @property
    def steps(self) -> pandas.DataFrame:
        return _frame([{"step": record.step, **record.metrics} for record in self.records.steps], "step")

    @property
    def evaluations(self) -> pandas.DataFrame:
        return _frame([{"step": record.step, **record.metrics} for record in self.records.evaluations], "step")

    @property
    def samples(self) -> pandas.DataFrame:
        return _frame([asdict(transcript) for transcript in self.records.transcripts])

    def report(self) -> Path:
        """Writes report.html and returns its path."""
        return Path(write_report([self.path], self.path / "report.html"))


def read_run(path: str | Path) -> TrainedRun:
    """The metrics, evaluations, transcripts and settings of a run directory; the run may be running."""
    path = Path(path).expanduser()
    return TrainedRun(path, load_run(path, path.name))


def train(
    model: str | Path,
    data: str | Path | Sequence[str | Path],
    reward: Function | None = None,
    *,
    run_dir: str | Path | None = None,
    config: str | Path | None = None,
    objective: Function | None = None,
    rollout: Function | None = None,
    group_filter: Function | None = None,
    dry_run: bool = False,
    **settings: Setting,
) -> TrainedRun:
    """Trains a policy with DAPO, or resumes the run in `run_dir`, and returns what it wrote.

    model     HF directory, or a name on the hub
    data      prompts: a file, folder, pattern, dataset of the hub, or a list of them
    reward    `f(prompt, response)` returns a bool, a score or a `Grade`; or the name of a grader such as "math"
    objective, rollout, group_filter   functions: `algorithm.objective`, `rollout.generate`, `rollout.group_filter`
    config    a YAML file whose settings come first
    run_dir   if None: that of `config`, or else runs/python
    settings  every other key, as `**{"trainer.steps": 50}` or `trainer__steps=50`

    A function that a process cannot import, because it was written in a notebook, is copied into the run directory with
    what it uses: other functions, modules, plain values. Raises UserError with the message of the command.
    """
    if run_dir is None:
        of_file = load_config(config).trainer if config is not None else None
        run_dir = of_file.run_dir if of_file and "run_dir" in of_file.model_fields_set else "runs/python"
    folder = Path(run_dir).expanduser().resolve()
    if {"trainer.run_dir", "trainer__run_dir"} & settings.keys():
        raise UserError("trainer.run_dir: give it as run_dir=, which is also where the results are read")
    given = {"policy.model": str(model), "trainer.run_dir": str(folder), **_files("data", data)}
    plugins = {
        "reward.grader": reward, "algorithm.objective": objective, "rollout.generate": rollout,
        "rollout.group_filter": group_filter,
    }  # fmt: skip
    file = _write(config, given | settings, plugins, folder)
    _command("train", str(file), *(["--dry-run"] if dry_run else []), folder=folder, config=config)
    return read_run(folder) if not dry_run else TrainedRun(folder, load_run(folder, folder.name, running=True))


def evaluate(
    model: str | Path,
    data: str | Path | Sequence[str | Path],
    reward: Function | None = None,
    *,
    samples: int = 1,
    out: str | Path = "runs/evaluation",
    config: str | Path | None = None,
    **settings: Setting,
) -> dict[str, Any]:
    """Generates `samples` responses to every problem of `data` and grades them: avg@k, pass@k and maj@k, as in
    `out`/results.json; of several files, by their names. The arguments are those of `train`."""
    folder = Path(out).expanduser().resolve()
    given = {"policy.model": str(model), "evaluate.samples": samples, **_files("evaluate.data", data)}
    file = _write(config, given | settings, {"reward.grader": reward}, folder)
    _command("eval", str(file), "--out", str(folder), folder=folder, config=config)
    data_config = load_config(file).evaluate.data
    names = data_config.files if data_config.sources else [""]
    found = {name: json.loads((folder / name / "results.json").read_text()) for name in names}
    return found if data_config.sources else dict(found[""])


def convert(source: str | Path, destination: str | Path, **options: Any) -> Path:
    """Converts a HF model to a Megatron checkpoint, or a Megatron checkpoint or a run to a HF model: whichever `source`
    is not. `options`: those of `megatron-dapo convert`, for example `reference`, `step`, `dtype`, `overwrite`."""
    from megatron_dapo.weights.command import hf_to_megatron, megatron_to_hf
    from megatron_dapo.weights.locate import Format, format_of, locate

    source, destination = Path(source).expanduser(), Path(destination).expanduser()
    is_hf = format_of(locate(source, options.get("step"))) is Format.HF
    change = hf_to_megatron if is_hf else megatron_to_hf
    if change(str(source), str(destination), **options):
        raise UserError(f"{destination} is written, but has NaN or infinite values; allow_nan=True accepts them")
    return destination


# ---- settings and functions ----


def _files(section: str, data: str | Path | Sequence[str | Path]) -> dict[str, Any]:
    """The settings of `section` for these files, instead of those of `config`."""
    paths = [str(data)] if isinstance(data, str | Path) else list(map(str, data))
    return {f"{section}.path": paths[0] if len(paths) == 1 else paths, f"{section}.sources": []}


def _write(
    config: str | Path | None, settings: dict[str, Any], functions: Mapping[str, Function | None], folder: Path
) -> Path:
    sections = load_config(config).model_dump(mode="json", exclude_unset=True) if config is not None else {}
    files: dict[Path, str] = {}
    named = {key: _named(function, folder, files) for key, function in functions.items() if function is not None}
    plain = json.dumps(named | settings, default=lambda x: x.item() if hasattr(x, "item") else os.fspath(x))
    for key, value in json.loads(plain).items():
        set_value(sections, key.replace("__", "."), value)
    file = folder / "from_python.yaml"
    files[file] = dump_yaml(sections)
    parse_config(sections, str(file))  # a mistake is found before anything is written
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text)
    return file


def _named(function: Function, folder: Path, files: dict[Path, str]) -> str:
    """As a setting names it: by its module, or by the module in `folder` that is added to `files`."""
    if isinstance(function, str):
        return function
    if _is_importable(function):
        return f"python:{function.__module__}.{function.__name__}"
    if not (inspect.isfunction(function) or inspect.isclass(function)):
        raise UserError(f"{function}: expected a function, found a {type(function).__name__}; define one that calls it")
    if os.pathsep in str(folder):
        raise UserError(f"{folder}: Python finds no modules in directories with {os.pathsep!r}; choose another one")
    known: dict[str, str] = {}
    _copy_source(function, known)
    lines = [f'"""Written by megatron_dapo.train: {function.__name__} and what it uses."""', *known.values()]
    name = f"{FUNCTIONS}_{function.__name__}"
    files[folder / f"{name}.py"] = "\n\n\n".join(lines) + "\n"
    return f"python:{name}.{function.__name__}"


def _is_importable(value: Any) -> bool:
    """Whether another process can import it by its own name."""
    module = getattr(value, "__module__", "__main__")
    found = getattr(sys.modules.get(module), getattr(value, "__name__", ""), None)
    return module != "__main__" and found is value


def _copy_source(function: Any, known: dict[str, str]) -> None:
    """Adds the source of a function or class, after that of what it uses, to `known`."""
    name = function.__name__
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise UserError(f"{name}: its source is not known; write it into a module and import it from there") from None
    if name == "<lambda>" or (inspect.isfunction(function) and inspect.getclosurevars(function).nonlocals):
        raise UserError(f"{name}: expected a function that uses only global names; define it with def at the top level")
    known[name] = ""  # it may use itself
    used = {member for member in _names(source) if member not in known and not hasattr(builtins, member)}
    values = vars(sys.modules[function.__module__])
    for member in sorted(used & values.keys()):
        known[member] = ""
        known[member] = _definition(member, values[member], known)
    del known[name]
    known[name] = source.rstrip()


def _names(source: str) -> set[str]:
    """The global names that the source of a function or class uses."""
    found: set[str] = set()
    tables = [symtable.symtable(source, "<source>", "exec")]
    while tables:
        table = tables.pop()
        used = [symbol for symbol in table.get_symbols() if symbol.is_referenced()]
        found |= {symbol.get_name() for symbol in used if symbol.is_global() or table.get_type() == "module"}
        tables += table.get_children()
    return found


def _definition(name: str, value: Any, known: dict[str, str]) -> str:
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    if _is_importable(value):
        return f"from {value.__module__} import {value.__name__} as {name}"
    if get_origin(value) is not None:  # a type such as list[int]
        return f"import collections.abc, typing\n{name} = {value!r}"
    if inspect.isfunction(value) or inspect.isclass(value):
        _copy_source(value, known)
        return known.pop(value.__name__)
    try:
        if ast.literal_eval(repr(value)) == value:
            return f"{name} = {value!r}"
    except (TypeError, ValueError, SyntaxError):
        pass
    raise UserError(f"{name} is a {type(value).__name__}, which cannot be copied; write the function into a module")


# ---- processes ----


def _command(*arguments: str, folder: Path, config: str | Path | None) -> None:
    """Runs a command and shows its output. An interruption is passed on: the run saves, and then ends. Modules are in
    `folder`, here, or beside the file `config`."""
    beside = str(Path(config).expanduser().resolve().parent) if config is not None else None
    paths = os.pathsep.join([str(folder), os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH"), beside])])
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_dapo", *arguments], env=os.environ | {"PYTHONPATH": paths}, text=True,
        errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    printed: list[str] = []
    while True:
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                printed.append(line)
            code = process.wait()
            break
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
    if code:
        said = "".join(["\n", *printed[-100:]]).rpartition("\nmegatron-dapo: ")[2].strip()
        raise UserError(said or f"megatron-dapo {arguments[0]} ended with code {code}")


def _frame(rows: list[dict[str, Any]], index: str | None = None) -> pandas.DataFrame:
    try:
        import pandas
    except ImportError:
        raise UserError("frames need pandas: pip install pandas; `records` has the same values without it") from None
    frame = pandas.DataFrame(rows)
    return frame.set_index(index) if index and rows else frame
