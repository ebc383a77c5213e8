"""`megatron-dapo eval`: evaluates a model on one or more benchmarks."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path

from megatron_dapo.config import Config, ConfigError, check_config
from megatron_dapo.errors import UserError
from megatron_dapo.evaluation.requests import evaluate_sets
from megatron_dapo.evaluation.results import Evaluation
from megatron_dapo.files import check_writable, explain


def create_output(out: str | Path | None, run_dir: str) -> Path:
    """Creates `out` (default: `run_dir`/eval, or eval_2, … if it has results); checks that files can be written."""
    folders = (Path(run_dir, f"eval_{number}" if number > 1 else "eval") for number in count(1))
    folder = Path(out or next(folder for folder in folders if not any(folder.glob("**/results.json"))))
    try:
        check_writable(folder)
    except OSError as error:
        raise UserError(f"--out {folder}: cannot write results there: {explain(error, folder)}") from None
    return folder


def run(config: Config, out: str | Path | None, seed: int) -> Evaluation:
    """Loads the benchmarks and the policy, evaluates, writes `out` and prints a table for each benchmark."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    from megatron_dapo.data import load_prompts, load_tokenizer
    from megatron_dapo.engines import open_engine
    from megatron_dapo.reward.combined import ResponseGrader
    from megatron_dapo.rollout.agents.functions import load_rollout_function

    shape = check_config(config)
    if shape is None:
        raise ConfigError("policy.model is empty: name a HF directory, or a model of the hub, to evaluate")
    files = config.evaluate.data.files
    if not files:
        raise ConfigError("evaluate.data.path is empty: name the problems to evaluate")
    folder, settings = create_output(out, config.trainer.run_dir), config.resolved_evaluate
    console = Console(markup=False, emoji=False)
    tokenizer = load_tokenizer(config.policy.model, shape.vocab)
    function = load_rollout_function(config, tokenizer)
    sets = {name: load_prompts(file, tokenizer, config.rollout.max_prompt_tokens) for name, file in files.items()}
    for prompts in sets.values():
        console.print(prompts.report.summary(), highlight=False, soft_wrap=True)

    async def main() -> Evaluation:
        engine = await open_engine(config.rollout, config.policy.model, folder / "logs")
        try:
            with Bar(console=console, transient=True) as bar:
                task = bar.add_task("responses")
                responses = ResponseGrader(config.reward, tokenizer)
                async with responses.graders:
                    return await evaluate_sets(
                        engine, sets, responses, settings, seed,
                        lambda done, total: bar.update(task, completed=done, total=total), function,
                    )  # fmt: skip
        finally:
            await engine.close()

    found = asyncio.run(main())
    for name, result in found.results.items():
        console.print(result.table(name))
    try:
        found.write(folder)
    except OSError as error:
        raise UserError(f"--out {folder}: cannot write results there: {explain(error, folder)}") from None
    console.print(f"written: results.json and readable responses of {config.policy.model} in {folder}")
    return found
