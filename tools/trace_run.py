"""How long the way of a run is: trains a tiny model for two steps and counts the files that its calls pass through.

    python tools/trace_run.py              the table
    python tools/trace_run.py --pairs      also the pairs of files that call each other both ways
    python tools/trace_run.py --files      also every file, in the order in which the run enters it
    python tools/trace_run.py --json FILE  all of it, and every function in the order of its first call

Imports cannot show this: a callback has no import. A call counts from the nearest caller inside the package, in any
thread. tests/docs/test_architecture.py keeps the numbers from growing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = f"{ROOT / 'megatron_dapo'}{os.sep}"
FIRST, LAST = "PromptMixture.next_prompt", "UpdateStep.step_optimizer"  # "take a prompt" and "optimizer step"


@dataclass
class Trace:
    functions: dict[tuple[str, str], None] = field(
        default_factory=dict
    )  # (file, function), in the order of first calls
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)  # (calling file, called file), if they differ

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        file = frame.f_code.co_filename[len(PACKAGE) :]
        self.functions.setdefault((file, frame.f_code.co_qualname))
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        if caller is not None and (source := caller.f_code.co_filename[len(PACKAGE) :]) != file:
            self.calls[source, file] += 1

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(file for file, _ in self.functions))

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return sorted((a, b) for a, b in self.calls if a < b and (b, a) in self.calls)

    @property
    def files_to_optimizer(self) -> set[str]:
        """The files whose functions are first called between taking a prompt and stepping the optimizer."""
        order = list(self.functions)
        first = next(i for i, (_, name) in enumerate(order) if name == FIRST)
        last = next(i for i, (_, name) in enumerate(order) if name == LAST)
        return {file for file, _ in order[first : last + 1]}

    def table(self) -> dict[str, int]:
        sources = sorted(Path(PACKAGE).rglob("*.py"))
        return {
            "package lines": sum(len(path.read_text().splitlines()) for path in sources),
            "package files": len(sources),
            "files entered by the run": len(self.files),
            "file → file call edges": len(self.calls),
            "pairs of files that call each other both ways": len(self.pairs),
            "files from taking a prompt to the optimizer step": len(self.files_to_optimizer),
        }


def trace_run(folder: Path, steps: int = 2) -> Trace:
    """Trains in this process, under `folder`."""
    support = str(ROOT / "tests" / "support")
    sys.path[:0] = [str(ROOT), support]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), support])  # of grading processes
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from tiny_run import raw_config

    from megatron_dapo.config import check_config, parse_config
    from megatron_dapo.trainer.loop import train

    torch.set_num_threads(1)
    config = parse_config(raw_config(folder / "model", folder / "run", trainer__steps=steps))
    shape = check_config(config, 1)
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        code = train(config, shape)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    if code:
        raise SystemExit(f"the run ended with code {code}")
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", action="store_true", help="list the pairs of files that call each other both ways")
    parser.add_argument("--files", action="store_true", help="list the files in the order in which they are entered")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table, the pairs and all functions")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = trace_run(Path(folder))
    for name, value in trace.table().items():
        print(f"{value:>7,}  {name}")
    if arguments.pairs:
        print(*(f"{a} ↔ {b}" for a, b in trace.pairs), sep="\n")
    if arguments.files:
        print(*trace.files, sep="\n")
    if arguments.json:
        found = {"table": trace.table(), "pairs": trace.pairs, "functions": list(trace.functions)}
        arguments.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
