"""`megatron-dapo simulate`: reads the configuration, simulates its steps, and prints them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from megatron_dapo.arguments import print_json, table_console
from megatron_dapo.errors import UserError
from megatron_dapo.files import write_atomically
from megatron_dapo.observe.timeline import trace_text
from megatron_dapo.planner.simulation.incidents import Incidents
from megatron_dapo.planner.simulation.report import events, print_variants, variant_json
from megatron_dapo.planner.simulation.run import Inputs, parse_sweep, run_sweep


def run(sweep: list[str], output: str | None, as_json: bool, incidents: dict[str, Any], **inputs: Any) -> int:
    """`incidents`: the arguments of `Incidents.of`. `inputs`: the other fields of `Inputs`."""
    variants = run_sweep(Inputs(**inputs, incidents=Incidents.of(**incidents)), parse_sweep(sweep))
    if not any(variant.simulation for variant in variants):
        raise UserError(f"nothing could be simulated: {variants[0].problem}")
    if as_json:
        print_json([variant_json(variant) for variant in variants])
    else:
        print_variants(variants, table_console())
    if output:
        path = Path(output)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, trace_text(events(variants)))
        except OSError as error:
            raise UserError(f"{path}: the trace cannot be written: {error}") from None
        print(path, file=sys.stderr if as_json else sys.stdout)
    return 0
