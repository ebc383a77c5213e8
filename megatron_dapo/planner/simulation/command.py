"""`megatron-dapo simulate`: reads the configuration, simulates its steps, and prints and draws them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megatron_dapo.arguments import table_console
from megatron_dapo.config import load_config
from megatron_dapo.planner.command import model_shape
from megatron_dapo.planner.hardware import Cluster, find_gpu
from megatron_dapo.planner.simulation.engine import SimulationError
from megatron_dapo.planner.simulation.page import write_page
from megatron_dapo.planner.simulation.report import print_variants, variants_json
from megatron_dapo.planner.simulation.sweep import Inputs, parse_sweep, run_sweep


def run(
    config: str,
    set: list[str],
    gpu: str,
    gpus: int | None,
    gpus_per_node: int | None,
    engine_gpus: int | None,
    mfu: float,
    mean_prompt: int | None,
    mean_response: int | None,
    kept: float | None,
    sigma: float | None,
    from_run: str | None,
    steps: int,
    seed: int,
    whole: bool,
    sweep: list[str],
    output: str | None,
    as_json: bool,
) -> int:
    loaded = load_config(config, set)
    per_node = gpus_per_node or loaded.slurm.gpus_per_node or 8
    total = gpus or loaded.slurm.nodes * per_node
    apart = loaded.slurm.engine_nodes * per_node if engine_gpus is None else engine_gpus
    cluster = Cluster(find_gpu(gpu), total, per_node, apart)
    inputs = Inputs(
        config, set, model_shape(loaded), cluster, mfu, mean_prompt, mean_response, kept, sigma, from_run, steps, seed,
        whole,
    )  # fmt: skip
    variants = run_sweep(inputs, parse_sweep(sweep))
    if not any(variant.simulation for variant in variants):
        raise SimulationError(f"nothing could be simulated: {variants[0].problem}")
    if as_json:
        print(json.dumps(variants_json(variants), indent=2))
    else:
        print_variants(variants, table_console())
    if output:
        path = Path(output)
        try:
            write_page(variants, path)
        except OSError as error:
            raise SimulationError(f"{path}: the picture cannot be written: {error}") from None
        print(path, file=sys.stderr if as_json else sys.stdout)
    return 0
