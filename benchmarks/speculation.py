"""What speculative decoding could save in the steps of the 32B recipes, by `megatron-dapo simulate`.

    python benchmarks/speculation.py [CONFIG …]      # some minutes

A pass that verifies DRAFTS drafted tokens of every sequence reads what a plain pass reads and computes DRAFTS + 1 times
as much; it yields `accepted` tokens of a sequence on average, which is an input here: published runs report 2.0 to 3.3.
Drafting itself is free. "tail": an engine speculates with at most TAIL running sequences, as SGLang's adaptive mode
does; "any": whenever it is faster. Both are the most that it could give.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

from megatron_dapo.cli import main as command
from megatron_dapo.planner.server_model import DecodeModel

DRAFTS, TAIL = 4, 32
ACCEPTED = (1.5, 2.0, 2.5, 3.3)
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
RECIPES = [str(EXAMPLES / name / "dapo.yaml") for name in ("qwen2.5_32b_dapo", "qwen2.5_32b_fast")]
Step = Callable[[DecodeModel, float, float], float]


def speculating(plain: Step, accepted: float, most_running: float) -> Step:
    def step(model: DecodeModel, running: float, context_tokens: float) -> float:
        usual = plain(model, running, context_tokens)
        if running > most_running:
            return usual
        verifying = replace(model, arithmetic=model.arithmetic * (DRAFTS + 1))
        return min(usual, plain(verifying, running, context_tokens) / accepted)

    return step


def step_seconds(config: str, gpu: str, accepted: float, most_running: float) -> float:
    patch = mock.patch.object(DecodeModel, "step", speculating(DecodeModel.step, accepted, most_running))
    with patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        if code := command(["simulate", config, "--gpu", gpu, "--json"]):
            raise SystemExit(code)
    return json.loads(printed.getvalue())[0]["step_seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", default=RECIPES, metavar="CONFIG")
    parser.add_argument("--gpu", default="h100")
    args = parser.parse_args()
    print("| recipe | speculation | none | " + " | ".join(f"{accepted} accepted" for accepted in ACCEPTED) + " |")
    print("|---" * (len(ACCEPTED) + 3) + "|")
    for config in args.configs:
        plain = step_seconds(config, args.gpu, 1.0, 0)
        for name, most in (("tail", TAIL), ("any", math.inf)):
            found = [step_seconds(config, args.gpu, accepted, most) for accepted in ACCEPTED]
            cells = [f"{plain:.0f} s", *(f"{seconds:.0f} s ({plain / seconds:.2f} ×)" for seconds in found)]
            print(f"| {Path(config).parent.name} | {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
