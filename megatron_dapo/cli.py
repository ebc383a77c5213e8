"""The `megatron-dapo` command: parses arguments. Each command imports its package when it runs."""

from __future__ import annotations

import argparse
import io
import logging
import runpy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_dapo import __version__
from megatron_dapo.arguments import (
    Commands,
    Parser,
    add_command,
    add_config,
    add_settings,
    at_least,
    quiet_libraries,
    set_log_level,
    with_set,
)  # fmt: skip
from megatron_dapo.errors import UserError

PACKAGE = Path(__file__).resolve().parent
DEMOS = PACKAGE / "observe" / "demo"


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="megatron-dapo", description="DAPO reinforcement learning on Megatron-Core.",
        epilog="`megatron-dapo COMMAND --help` explains a command.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"megatron-dapo {__version__}")
    sub = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    commands = (
        _add_quickstart, _add_train, _add_init, _add_import, _add_explain, _add_ablate, _add_eval, _add_convert,
        _add_report, _add_watch, _add_runs, _add_selfcheck, _add_plan, _add_simulate, _add_slurm, _add_doctor,
    )  # fmt: skip
    for add in commands:
        add(sub)
    return parser


def _add_quickstart(sub: Commands) -> None:
    def quickstart(args: argparse.Namespace) -> int:
        from megatron_dapo.config import load_config

        file = "lora.yaml" if args.lora else "config.yaml"
        load_config(_examples_folder() / "quickstart" / file, args.set)  # a mistake is found before it trains
        options = {"--run-dir": args.run_dir, "--seed": args.seed, "--pretraining-updates": args.pretraining_updates}
        given = [word for name, value in options.items() if value is not None for word in (name, str(value))]
        given += [name for name, wanted in (("--fresh", args.fresh), ("--lora", args.lora)) if wanted]
        return _run_quickstart([*given, *(f"--set={item}" for item in args.set)])

    def examples(args: argparse.Namespace) -> int:
        if (target := Path(args.target)).exists():
            raise UserError(f"{target} exists: name a new directory")
        try:
            shutil.copytree(_examples_folder(), target, ignore=shutil.ignore_patterns("__pycache__"))
        except OSError as error:
            why = error.strerror or error.args[0][-1][-1]  # shutil.Error has a reason for every file
            raise UserError(f"{target} cannot be created ({why}): name another directory") from None
        print(f"copied to {target}; start with {target / 'README.md'}")
        return 0

    parser = add_command(
        sub, "quickstart", quickstart,
        "A complete DAPO run with a tiny model on this machine: two CPU cores, a few minutes.",
        "examples:\n  megatron-dapo quickstart\n  megatron-dapo quickstart --run-dir runs/seed1 --seed 1",
    )  # fmt: skip
    parser.add_argument("--run-dir", metavar="DIR", help="default: runs/quickstart, or runs/quickstart_lora")
    parser.add_argument("--seed", type=at_least(0), help="default: 0")
    parser.add_argument("--fresh", action="store_true", help="first remove what an earlier quickstart left there")
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 4 instead of the model")
    parser.add_argument("--pretraining-updates", type=at_least(1), metavar="N", help="maximum number of pre-training "
                        "updates (default 1500)")  # fmt: skip
    add_settings(parser)
    parser = add_command(
        sub, "examples", examples,
        "Copy the examples of this installation to a new directory: configurations, custom objectives, the quickstart.",
        "example:\n  megatron-dapo examples my-examples",
    )  # fmt: skip
    parser.add_argument("target", metavar="DIR", help="directory to create")


def _examples_folder() -> Path:
    """In a checkout `examples/`; the wheel holds a copy."""
    for folder in (PACKAGE / "_examples", PACKAGE.parent / "examples"):
        if (folder / "quickstart" / "quickstart.py").is_file():
            return folder
    raise UserError(f"this installation has no examples ({PACKAGE}): install the wheel, or use a checkout")


def _run_quickstart(arguments: Sequence[str]) -> int:
    script = _examples_folder() / "quickstart" / "quickstart.py"
    before = sys.argv
    sys.argv = ["megatron-dapo quickstart", *arguments]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = before
    return 0


def _add_train(sub: Commands) -> None:
    def run(args: argparse.Namespace) -> int:
        from megatron_dapo.trainer.signals import end_at_once

        with end_at_once():  # before the imports, which take seconds
            from megatron_dapo.config.load import for_this_machine, load_config
            from megatron_dapo.launch.local import check_not_its_own_output, run_training
            from megatron_dapo.observe.console import waiting

            config = load_config(args.config, args.set)
            check_not_its_own_output(config, Path(args.config))
            with waiting(f"looking for the model {config.policy.model}"):
                config = for_this_machine(config, args.config)
            return run_training(config, dry_run=args.dry_run)

    parser = add_command(
        sub, "train", run,
        "Train a policy with DAPO, or resume the run that is in its run directory.",
        "On one machine it starts engines and ranks; under torchrun or srun it joins the job.\n\nexamples:\n"
        "  megatron-dapo train run.yaml --dry-run\n"
        "  megatron-dapo train run.yaml --set policy.tensor_parallel=2 --set trainer.run_dir=runs/tp2\n\n"
        "exit codes: 0 finished and saved, 1 failed, 2 wrong configuration or set-up, 75 stopped on request after "
        "saving (130 after Ctrl-C); rerun to resume",
    )  # fmt: skip
    add_config(parser, "YAML file")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything that can be checked without training, then exit"
    )


def _add_init(sub: Commands) -> None:
    def run(args: argparse.Namespace) -> int:
        from megatron_dapo.planner.init import run

        return run(args.model, args.data, args.gpus, args.gpu, args.slurm, args.output, args.set)

    parser = add_command(
        sub, "init", run,
        "Write a configuration for a model, prompts and GPUs. The layout is the fastest that `plan` finds to fit.",
        "examples:\n  megatron-dapo init --model Qwen/Qwen2.5-1.5B --data prompts.jsonl --gpus 1 --output run.yaml\n"
        "  megatron-dapo init --model Qwen2.5-32B --data BytedTsinghua-SIA/DAPO-Math-17k --gpus 128 --slurm",
    )  # fmt: skip
    parser.add_argument("--model", required=True, help="HF directory, or a name on the hub")
    parser.add_argument("--data", required=True, help="prompts: a file, folder, pattern, or dataset of the hub")
    parser.add_argument("--gpus", type=at_least(0), default=1, metavar="N", help="total GPUs (default 1); 0: the CPU")
    parser.add_argument("--gpu", default="h100", help="h100 (default), h200, a100, … as for plan")
    parser.add_argument("--slurm", action="store_true", help="name the command that submits a Slurm job")
    parser.add_argument("--output", metavar="FILE", help="file to create (default: print it)")
    add_settings(parser)

    def show(args: argparse.Namespace) -> int:
        from megatron_dapo.config.explain import diff

        print(diff(args.run_or_file, args.other))
        return 0

    group = sub.add_parser("config", help="Compare settings.")
    parser = add_command(
        group.add_subparsers(title="commands", metavar="COMMAND", required=True), "diff", show,
        "Print the settings of a run, or of a YAML file, that differ from the defaults or from another run or file.",
        "examples:\n  megatron-dapo config diff runs/first\n  megatron-dapo config diff runs/second runs/first",
    )  # fmt: skip
    parser.add_argument("run_or_file", metavar="RUN", help="run directory or YAML file")
    parser.add_argument("other", metavar="OTHER", nargs="?", help="compare with this one (default: the defaults)")


def _add_import(sub: Commands) -> None:
    def run(args: argparse.Namespace) -> int:
        from megatron_dapo.config.importing import run

        return run(args.file, args.tool, args.gpus, args.output)

    parser = add_command(
        sub, "import", run,
        "Convert a launch script or configuration of verl, slime, TRL, AReaL and others to a configuration. Units are\n"
        "converted; comments name what to check and what has no equivalent. The file is read, not executed.",
        "examples:\n  megatron-dapo import run_qwen3_8b.sh --output run.yaml\n"
        "  megatron-dapo import grpo.py --gpus 8   # TRL: batches are per device",
    )  # fmt: skip
    parser.add_argument("file", metavar="FILE", help="shell script, YAML file, or Python with a GRPOConfig")
    parser.add_argument("--from", dest="tool", metavar="TOOL", help="verl, slime, areal, trl, ms-swift or nemo-rl "
                        "(default: recognised by its settings)")  # fmt: skip
    parser.add_argument("--gpus", type=at_least(1), metavar="N", help="devices that the script ran on (TRL)")
    parser.add_argument("--output", metavar="FILE", help="file to create (default: print it)")


def _add_explain(sub: Commands) -> None:
    def run(args: argparse.Namespace) -> int:
        from megatron_dapo.config.explain import SCHEMA, completion, explain

        if len(args.key) == 3 and args.key[1].isdigit() and args.key[2].isdigit():
            from megatron_dapo.observe.console import importing

            with importing("torch and Megatron-Core"):
                from megatron_dapo.trainer.explain import explain_sample

            print(explain_sample(args.key[0], int(args.key[1]), int(args.key[2])))
        elif args.completion:
            print(completion(args.completion, _options(build_parser())))
        elif args.schema:
            print(SCHEMA)
        elif not args.key:
            raise UserError("name a KEY to explain, for example policy.optimizer.lr")
        elif (Path(args.key[0]) / "metrics.jsonl").exists():
            raise UserError(f"{args.key[0]} is a run: megatron-dapo explain {args.key[0]} STEP SAMPLE")
        else:
            print("\n\n".join(explain(key) for key in args.key))
        return 0

    parser = add_command(
        sub, "explain", run,
        "Explain a setting: its values, default, and what other tools call it; or our name for one of theirs.\n"
        "Or, with RUN_DIR STEP SAMPLE, what each token of a sample added to the loss (needs observe.samples_tokens).",
        "examples:\n  megatron-dapo explain rollout.sampler.oversampling\n  megatron-dapo explain global_batch_size\n"
        "  megatron-dapo explain runs/dapo 10 17\n"
        "  eval \"$(megatron-dapo explain --completion bash)\"   # in ~/.bashrc: Tab completes commands and settings",
    )  # fmt: skip
    parser.add_argument("key", metavar="KEY", nargs="*", help="a setting of ours or of another tool, or a section; or "
                        "RUN_DIR STEP SAMPLE")  # fmt: skip
    parser.add_argument("--completion", choices=("bash", "zsh"), help="print a completion script for this shell")
    parser.add_argument("--schema", action="store_true", help="print the path of the JSON schema, for editors")


def _options(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """The options of each command, and the names of the commands inside it."""
    (commands,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    found = {}
    for name, command in commands.choices.items():
        inner = [action.choices for action in command._actions if isinstance(action, argparse._SubParsersAction)]
        options = [option for action in command._actions for option in action.option_strings]
        found[name] = [*options, *(word for choices in inner for word in choices)]
    return found


def _add_ablate(sub: Commands) -> None:
    def run(args: argparse.Namespace) -> int:
        from megatron_dapo.ablation.command import run_ablation

        return run_ablation(
            args.config, args.set, args.seeds, Path(args.out), design="grid" if args.grid else args.design,
            jobs=args.jobs, minutes=args.minutes, discard=args.discard_runs,
        )  # fmt: skip

    parser = add_command(
        sub, "ablate", run,
        "Switch DAPO's changes (VAPO's if the file has a critic) on and off in real runs; write a table and an "
        "interactive page.",
        "examples:\n  megatron-dapo ablate examples/ablations/arithmetic.yaml --seeds 3\n"
        "  megatron-dapo ablate examples/ablations/{entropy,signal}.yaml --grid --seeds 5 --jobs 14",
    )  # fmt: skip
    add_config(parser, "YAML file of the full recipe; several: one task each", nargs="+")
    parser.add_argument(
        "--design", choices=("order", "grid", "leave-one-out"), default="order",
        help="order: changes added one by one, as in the paper (default). grid: all 16 combinations of the changes. "
        "leave-one-out: all changes, none, and all but one. With a critic, order is DAPO plus leave-one-out",
    )  # fmt: skip
    parser.add_argument("--grid", action="store_true", help="short for --design grid")
    parser.add_argument("--seeds", type=at_least(1), default=3, help="runs per combination (default 3)")
    parser.add_argument("--jobs", type=at_least(1), default=1, help="runs at a time, one thread each (default 1)")
    parser.add_argument("--minutes", type=at_least(0, float), help="stop after MINUTES; run it again to continue")
    parser.add_argument("--discard-runs", action="store_true", help="keep only the curves of finished runs")
    parser.add_argument("--out", metavar="DIR", default="runs/ablation", help="for the results (default runs/ablation)")


def _add_eval(sub: Commands) -> None:
    def run(args: argparse.Namespace) -> int:
        from megatron_dapo.config.load import for_this_machine, load_config
        from megatron_dapo.evaluation import run

        short = {"policy.model": args.model, "evaluate.data.path": args.data, "evaluate.samples": args.samples}
        settings = [f"{key}={value}" for key, value in short.items() if value is not None]
        settings += ["evaluate.data.sources=[]"] if args.data is not None else []  # it replaces those of the file
        config = for_this_machine(load_config(args.config, [*args.set, *settings]), args.config)
        run(config, args.out, args.seed)
        return 0

    parser = add_command(
        sub, "eval", run,
        "Generate k responses to every problem of a benchmark and report avg@k, pass@k and maj@k.",
        "examples:\n  megatron-dapo eval run.yaml --data aime_2024.jsonl --samples 32 --out results/aime\n"
        "  megatron-dapo eval run.yaml --model RUN/hf --set evaluate.top_p=1.0",
    )  # fmt: skip
    add_config(parser, "YAML file; evaluate, reward, rollout and policy are used")
    parser.add_argument("--model", metavar="DIR", help="HF directory or name on the hub (policy.model)")
    parser.add_argument("--data", metavar="FILE", help="benchmark, jsonl or parquet (evaluate.data.path)")
    parser.add_argument("--samples", type=int, metavar="K", help="responses per problem (evaluate.samples)")
    parser.add_argument("--out", metavar="DIR", help="results.json and responses/ (default: RUN_DIR/eval, eval_2, …)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the responses (default 0)")


def _add_convert(sub: Commands) -> None:
    def run(args: argparse.Namespace) -> int:
        from megatron_dapo.weights import command

        options = {key: value for key, value in vars(args).items() if key not in ("run", "convert")}
        return int(getattr(command, args.convert.replace("-", "_"))(**options))

    group = sub.add_parser("convert", help="Convert HF checkpoints to Megatron and back, and compare them.")
    inner = group.add_subparsers(title="conversions", dest="convert", metavar="CONVERSION", required=True)
    codes = "\n\nexit codes: 0 done, 2 refused or failed (nothing is written), 3 done, but weights are NaN or infinite"
    to_megatron = add_command(
        inner, "hf-to-megatron", run,
        "Write the weights of a HF model as a Megatron torch_dist checkpoint that loads at any TP, PP and EP.",
        "example:\n  megatron-dapo convert hf-to-megatron Qwen3-32B /checkpoints/qwen3-32b" + codes,
    )  # fmt: skip
    to_hf = add_command(
        inner, "megatron-to-hf", run,
        "Write the weights of a Megatron checkpoint (optimizer state is not read) as a complete HF model: weights,\n"
        "index, config, tokenizer, generation config. SRC: a run directory, Megatron-LM's save directory, or one of\n"
        "the checkpoints in them.",
        "examples:\n  megatron-dapo convert megatron-to-hf RUN_DIR out --step 100\n"
        "  megatron-dapo convert megatron-to-hf /checkpoints/pretrained out --reference Qwen3-32B" + codes,
    )  # fmt: skip
    for parser in (to_megatron, to_hf):
        parser.add_argument("source", metavar="SRC", help="checkpoint to read")
        parser.add_argument("destination", metavar="DST", help="directory to create; it appears when complete")
        parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="default: as stored")
        parser.add_argument("--overwrite", action="store_true", help="replace DST if it is a checkpoint")
        parser.add_argument("--allow-nan", action="store_true", help="exit with 0 even if weights are not finite")
        parser.add_argument("--workers", type=at_least(1), help="threads (default: one per core, 2 to 8)")
    to_hf.add_argument("--reference", metavar="HF_DIR", help="HF model with the config and tokenizer (default: the "
                       "copy in SRC, from hf-to-megatron or the run)")  # fmt: skip
    to_hf.add_argument("--step", type=at_least(0), metavar="N", help="which checkpoint of a run (default: the newest)")
    to_hf.add_argument(
        "--shard-size", type=at_least(0.001, float), default=5.0, metavar="GB", help="largest weight file (default 5)"
    )
    to_fp8 = add_command(
        inner, "hf-to-fp8", run,
        "Write a HF model with fp8 matrices, like the published Qwen FP8 checkpoints, for servers that get their\n"
        "weights in fp8 (rollout.servers.model, rollout.weights.quantization).",
        "example:\n  megatron-dapo convert hf-to-fp8 Qwen3-32B Qwen3-32B-fp8" + codes,
    )  # fmt: skip
    to_fp8.add_argument("source", metavar="SRC", help="HF model in bf16")
    merge = add_command(
        inner, "merge-adapter", run,
        "Write a HF model with a LoRA adapter added to its weights. The adapter is a PEFT directory; a run with\n"
        "policy.lora writes one into each checkpoint.",
        "example:\n  megatron-dapo convert merge-adapter Qwen3 lora/checkpoints/step_100/policy/adapter merged" + codes,
    )  # fmt: skip
    merge.add_argument("model", metavar="MODEL", help="HF model that the adapter was trained on")
    merge.add_argument("adapter", metavar="ADAPTER", help="PEFT directory")
    for parser in (to_fp8, merge):
        parser.add_argument("destination", metavar="DST", help="directory to create; it appears when complete")
        parser.add_argument("--overwrite", action="store_true", help="replace DST if it is a checkpoint")
    check = add_command(
        inner, "verify", run,
        "Check that two checkpoints, HF or torch_dist, hold the same weights: names, shapes, dtypes, every value.",
        "example:\n  megatron-dapo convert verify Qwen3-32B /checkpoints/qwen3-32b\n\n"
        "exit codes: 0 same, 1 different, 2 refused or failed",
    )  # fmt: skip
    check.add_argument("a", metavar="A")
    check.add_argument("b", metavar="B")
    check.add_argument("--reference", metavar="HF_DIR", help="HF model whose config.json describes the weights")
    check.add_argument(
        "--tolerance", type=at_least(0, float), default=0.0, help="largest difference (default 0: bitwise equal)"
    )
    check.add_argument("--workers", type=at_least(1), help="threads (default: one per core, 2 to 8)")


def _add_report(sub: Commands) -> None:
    def run(args: argparse.Namespace) -> int:
        from megatron_dapo.observe.report import write_report

        output = args.output or f"{args.runs[0]}/{'report' if len(args.runs) == 1 else 'comparison'}.html"
        print(write_report(args.runs, output))
        return 0

    parser = add_command(
        sub, "report", run,
        "Write one self-contained HTML file about a run, or several to compare: curves, warnings, transcripts, config.",
        "examples:\n  megatron-dapo report runs/quickstart\n"
        "  megatron-dapo report runs/dapo runs/grpo --output comparison.html",
    )  # fmt: skip
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="run directories; the runs may still be running")
    parser.add_argument("--output", metavar="FILE", help="default: report.html (several runs: comparison.html) in the "
                        "first RUN_DIR")  # fmt: skip


def _add_watch(sub: Commands) -> None:
    def run(args: argparse.Namespace) -> int:
        from megatron_dapo.observe.watch import watch

        if not (runs := [DEMOS / args.demo] if args.demo else args.runs):
            raise UserError("name a DIR to show, or --demo")
        return watch(runs, args.port, args.token_file)

    parser = add_command(
        sub, "watch", run,
        "Live dashboard for one or more runs, or for all runs in a folder (localhost only, read-only), and\n"
        "/metrics for Prometheus.",
        "examples:\n  megatron-dapo watch runs/quickstart\n  megatron-dapo watch runs/dapo runs/grpo --port 9000\n"
        "  megatron-dapo watch runs --token-file ~/.megatron-dapo-token\n  megatron-dapo watch --demo",
    )  # fmt: skip
    parser.add_argument("runs", nargs="*", metavar="DIR", help="run directories, which may not have started yet, or "
                        "folders that hold runs")  # fmt: skip
    demos = sorted(path.name for path in DEMOS.iterdir())
    parser.add_argument("--demo", nargs="?", const="quickstart", choices=demos, help="show a finished run that this "
                        f"package contains: {' or '.join(demos)} (default quickstart)")  # fmt: skip
    parser.add_argument("--port", type=at_least(0), default=8642, help="default 8642; 0: any free port")
    parser.add_argument("--token-file", metavar="FILE", help="keep the secret part of the address in this file, for "
                        "Prometheus; created if it does not exist (default: a new one at every start)")  # fmt: skip


def _add_runs(sub: Commands) -> None:
    def run(args: argparse.Namespace) -> int:
        from megatron_dapo.observe.runs import named_runs, overview, table

        if not (found := named_runs([Path(folder) for folder in args.folders])):
            raise UserError(f"no run in {', '.join(args.folders)}: name a folder that holds run directories")
        print(table(overview(found)))
        return 0

    parser = add_command(
        sub, "runs", run,
        "List all runs in a folder: state, step, time left, accuracy, last warning, and the settings that differ.",
        "examples:\n  megatron-dapo runs runs",
    )  # fmt: skip
    parser.add_argument("folders", nargs="+", metavar="DIR", help="folders that hold runs, up to 3 levels deep")


def _add_selfcheck(sub: Commands) -> None:
    def run(args: argparse.Namespace) -> int:
        from megatron_dapo.observe.console import importing

        with importing("torch and Megatron-Core"):
            from megatron_dapo.selfcheck.cases import Variants
            from megatron_dapo.selfcheck.layouts import Settings, run_layouts

        names = args.layouts.split(",") if args.layouts else None
        updates = args.updates or (1 if args.random else 3)
        settings = Settings(args.tolerance, updates, args.timeout, args.json)
        variants = Variants.parse(args.models, args.dtype, args.fp8, args.layers)
        return run_layouts(names, settings, variants, random=args.random, seed=args.seed)

    group = sub.add_parser("selfcheck", help="Check that this installation computes correctly.")
    inner = group.add_subparsers(title="checks", metavar="CHECK", required=True)
    parser = add_command(
        inner, "layouts", run,
        "Run the same DAPO updates in one process and in each parallel layout, and compare.",
        "examples:\n  megatron-dapo selfcheck layouts --layouts tp2,pp2,cp2,tp2pp2\n"
        "  megatron-dapo selfcheck layouts --random 200 --seed 7\n"
        "  torchrun --nproc-per-node 2 -m megatron_dapo selfcheck layouts --layouts tp2sp,cp2+a2a,dp2do --dtype bf16 "
        "--layers te",
    )  # fmt: skip
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--layouts", help="comma-separated, e.g. tp2,pp2vpp2,tp2cp2sp,ep2; + adds options, e.g. "
                       "cp2+a2a,pp2+uneven,tp2sp+full (default: all that fit)")  # fmt: skip
    which.add_argument("--random", type=at_least(1), metavar="N", help="N random combinations of layout, model, "
                       "objective and aggregation, on at most 8 ranks")  # fmt: skip
    parser.add_argument("--seed", type=at_least(0), default=0, help="random seed for --random (default 0)")
    parser.add_argument("--tolerance", type=at_least(0, float), default=1e-5,
                        help="relative difference that is always allowed (default 1e-5)")  # fmt: skip
    parser.add_argument("--dtype", default="", metavar="LIST", help="fp32, bf16 or both: fp32,bf16 (default fp32)")
    parser.add_argument(
        "--fp8", default="", metavar="LIST", help="recipes, e.g. blockwise,tensorwise; needs --layers te"
    )
    parser.add_argument("--layers", default="torch", metavar="LIST", help="torch (default), te (Transformer Engine)")
    parser.add_argument(
        "--models", default="", metavar="LIST", help="e.g. dense,moe,llama (default: all of Qwen that fit)"
    )
    parser.add_argument("--timeout", type=at_least(1, float), default=180.0, metavar="SECONDS",
                        help="limit of one case (default 180)")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table, with kernels, to this file")
    parser.add_argument("--updates", type=at_least(1), help="optimizer updates to compare (default 3; with --random 1)")

    def run_one(args: argparse.Namespace) -> int:
        from megatron_dapo.selfcheck.objective import run_objective

        return run_objective(args.objective, args.set)

    parser = add_command(
        inner, "objective", run_one,
        "Check that a custom objective gives the same update for every micro-batch, packing and layout.",
        "example:\n  megatron-dapo selfcheck objective python:my_objectives.Mine algorithm.objective_options.tau=0.5\n"
        "\nexit codes: 0 every rule holds, 1 one is broken, 2 wrong input",
    )  # fmt: skip
    parser.add_argument("objective", metavar="OBJECTIVE", help="python:module.name, or a built-in one")
    add_settings(parser)

    def run_engine(args: argparse.Namespace) -> int:
        from megatron_dapo.config.load import for_this_machine, load_config
        from megatron_dapo.observe.console import importing

        config = for_this_machine(load_config(args.config, args.set), args.config)
        with importing("torch and Megatron-Core"):
            from megatron_dapo.selfcheck.engine import run_engine_check

        return run_engine_check(config, args.tokens)

    parser = add_command(
        inner, "engine", run_engine,
        "Compare the engine of a run with its trainer, token by token, and name what differs: weights, prompt tokens,\n"
        "the first layer, or the engine with itself. It sends weights: external servers must be free.",
        "examples:\n  megatron-dapo selfcheck engine run.yaml\n"
        "  torchrun --nproc-per-node 8 -m megatron_dapo selfcheck engine run.yaml --tokens 100000\n"
        "\nexit codes: 0 the gap is within trainer.gate, 1 it is not, 2 wrong input",
    )  # fmt: skip
    add_config(parser, "YAML file of the run")
    parser.add_argument(
        "--tokens", type=at_least(1), default=4096, metavar="N", help="compare at least N tokens (default 4096)"
    )


def _add_plan(sub: Commands) -> None:
    def run(args: argparse.Namespace) -> int:
        from megatron_dapo.planner.command import run

        return run(**_planner_options(args))

    parser = add_command(
        sub, "plan", run,
        "Predict from the model's config.json whether a configuration fits the GPUs, how long a step takes, which\n"
        "layouts are fastest, and what to change when it does not fit. Needs no GPU.",
        "examples:\n  megatron-dapo plan run.yaml --gpu h100 --gpus 128\n"
        "  megatron-dapo plan run.yaml --gpu h200 --gpus 96 --engine-gpus 32 --set policy.tensor_parallel=4\n"
        "  megatron-dapo plan --model Qwen2.5-32B --gpus 128   # no layout given: the fastest that fits\n"
        "\n"
        "exit codes: 0 fits, 1 does not fit, 2 wrong input",
    )  # fmt: skip
    add_config(parser, "YAML file (omitted: defaults, best layout)", nargs="?")
    parser.add_argument("--model", metavar="MODEL", help="directory with config.json, name on the hub, or a published "
                        "Qwen (policy.model)")  # fmt: skip
    _add_workload(parser)
    parser.add_argument(
        "--gpu-memory", type=at_least(1, float), metavar="GIB", help="memory of a GPU (default: from its data sheet)"
    )
    parser.add_argument(
        "--compare", action="store_true", help="rank every trainer/engine split (and colocation), then exit"
    )
    parser.add_argument("--layers", choices=["te", "local"], default="te", help="Transformer Engine (default) or torch")
    parser.add_argument("--top", type=at_least(1), default=8, metavar="N", help="layouts to show (default 8)")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print the plan as JSON")


def _add_workload(parser: argparse.ArgumentParser) -> None:
    """What both plan and simulate assume about GPUs, lengths and yield."""
    parser.add_argument("--gpu", default="h100", help="h100 (default), h200, h800, b200, a100, a100-40g, l40s, …")
    parser.add_argument("--gpus", type=at_least(1), metavar="N", help="GPUs (default: slurm.nodes × gpus_per_node)")
    parser.add_argument("--gpus-per-node", type=at_least(1), metavar="N", help="default: slurm.gpus_per_node")
    parser.add_argument("--engine-gpus", type=at_least(0), metavar="N", help="GPUs that only run engines; 0: engines "
                        "and trainer share all GPUs (default: slurm.engine_nodes × gpus_per_node)")  # fmt: skip
    parser.add_argument("--mfu", type=float, default=0.65, help="share of peak FLOPs that very wide products reach "
                        "(default 0.65)")  # fmt: skip
    parser.add_argument("--mean-prompt", type=at_least(1), metavar="TOKENS", help="default: typical, or 256")
    parser.add_argument("--mean-response", type=at_least(1), metavar="TOKENS", help="default: typical for model and "
                        "data, or a quarter of the longest")  # fmt: skip
    parser.add_argument("--kept", type=float, metavar="SHARE", help="share of groups that dynamic sampling keeps "
                        "(default 0.5)")  # fmt: skip
    parser.add_argument("--sigma", type=float, metavar="S", help="spread of response lengths: standard deviation of "
                        "their logarithm (default 0.92; 0: all equal)")  # fmt: skip
    parser.add_argument("--pareto", type=float, metavar="INDEX", help="Pareto instead of log-normal lengths; 1.5 is a "
                        "heavy tail")  # fmt: skip


def _planner_options(args: argparse.Namespace) -> dict[str, Any]:
    options = {key: value for key, value in vars(args).items() if key != "run"}
    gpus = [key for key in options if key.startswith("gpu") or key == "engine_gpus"]
    hardware = {key: options.pop(key) for key in gpus}
    estimates = {key: options.pop(key) for key in ("mean_prompt", "mean_response", "kept", "sigma", "pareto")}
    return {**options, "hardware": hardware, "estimates": estimates}


def _add_simulate(sub: Commands) -> None:
    def run(args: argparse.Namespace) -> int:
        from megatron_dapo.planner.simulation.command import run

        options = _planner_options(args)
        incidents = {key: options.pop(key) for key in (*INCIDENTS, "tool_seconds", "tool_calls", "kept_end")}
        return run(**options, incidents=incidents)

    parser = add_command(
        sub, "simulate", run,
        "Run the sampler on a virtual clock against a model of the engines: step time, utilisation, waste, staleness.\n"
        "Needs no GPU.",
        "examples:\n  megatron-dapo simulate run.yaml --gpu h100 --output simulation.json\n"
        "  megatron-dapo simulate run.yaml --from runs/32b --set rollout.sampler.oversampling=3\n"
        "  megatron-dapo simulate run.yaml --sweep rollout.max_staleness=0,1 --sweep engine_gpus=32,64\n"
        "  megatron-dapo simulate run.yaml --slow 1:0.3 --dies 2@600 --joins 4@1800 --tool-seconds 20",
    )  # fmt: skip
    add_config(parser, "YAML file")
    parser.add_argument("--sweep", action="append", default=[], metavar="KEY=V1,V2", help="simulate every combination "
                        "of these values; engine_gpus is also a key")  # fmt: skip
    parser.add_argument("--from", dest="from_run", metavar="RUN_DIR", help="take lengths and yield from this run")
    _add_workload(parser)
    parser.add_argument("--steps", type=at_least(1), default=6, help="steps to simulate (default 6)")
    parser.add_argument("--seed", type=int, default=0, help="seed of lengths and grades (default 0)")
    parser.add_argument(
        "--whole", action="store_true", help="simulate every server even in a large fleet (default: a sample)"
    )
    _add_incidents(parser)
    parser.add_argument("--output", metavar="FILE", help="write engines and trainer over time, for ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print the results as JSON")


# What may happen to servers: the form of the argument, and its help.
INCIDENTS = {
    "slow": ("N:SPEED", "N servers at this share of the speed of the others"),
    "mixed": ("N:GPU", "N servers on another GPU"),
    "dies": ("N@SECONDS", "N servers die after SECONDS; their requests start again elsewhere"),
    "joins": ("N@SECONDS", "N servers join after SECONDS"),
}


def _add_incidents(parser: argparse.ArgumentParser) -> None:
    for name, (form, text) in INCIDENTS.items():
        parser.add_argument(f"--{name}", action="append", default=[], metavar=form, help=text)
    parser.add_argument("--tool-seconds", type=at_least(0, float), default=0.0, metavar="S", help="mean time of a tool "
                        "call; the response waits for it without using an engine")  # fmt: skip
    parser.add_argument("--tool-calls", type=at_least(1), default=1, metavar="N", help="tool calls of a response")
    parser.add_argument("--kept-end", type=float, metavar="SHARE", help="share of kept groups in the last step")


def _add_slurm(sub: Commands) -> None:
    def run(args: argparse.Namespace) -> int:
        from megatron_dapo.config import load_config
        from megatron_dapo.launch.local import check_not_its_own_output
        from megatron_dapo.launch.slurm import run_slurm
        from megatron_dapo.launch.slurm_status import print_status

        if args.status:
            return print_status(Path(args.status).resolve())
        if args.config is None:
            raise UserError("name a CONFIG to submit, or a run directory with --status")
        nodes = [f"slurm.nodes={args.nodes}"] if args.nodes else []
        config = load_config(args.config, [*args.set, *nodes])
        check_not_its_own_output(config, Path(args.config))
        beside = Path(args.config).resolve().parent
        return run_slurm(config, dry_run=args.dry_run, chain=args.chain, seeds=args.seeds, modules=beside)

    parser = add_command(
        sub, "slurm", run,
        "Check a run, write its sbatch script into the run directory and submit it. The job resumes by itself.",
        "examples:\n  megatron-dapo slurm run.yaml --nodes 16 --dry-run\n"
        "  megatron-dapo slurm run.yaml --nodes 16 --set slurm.partition=h100\n"
        "  megatron-dapo slurm run.yaml --chain 5      # five jobs in a row, where requeueing is not allowed\n"
        "  megatron-dapo slurm run.yaml --seeds 0,1,2  # an array of runs in RUN_DIR/seed_N\n"
        "  megatron-dapo slurm --status runs/32b\n\n"
        "exit codes: 0 submitted (--status: alive or finished), 1 --status: ended otherwise, 2 refused",
    )  # fmt: skip
    add_config(parser, "YAML file; its slurm section describes the job", nargs="?")
    parser.add_argument("--nodes", type=at_least(1), metavar="N", help="all nodes of the job (slurm.nodes)")
    parser.add_argument("--dry-run", action="store_true", help="check the run, write and print the script, then exit")
    parser.add_argument("--chain", type=at_least(1), default=1, metavar="K", help="submit K jobs, one after another")
    parser.add_argument("--seeds", type=_seeds, default=(), metavar="S1,S2", help="submit an array, one run per seed")
    parser.add_argument("--status", metavar="RUN_DIR", help="print the state of a run's jobs")


def _seeds(text: str) -> tuple[int, ...]:
    """0,1,2 as numbers, each once."""
    found = tuple(at_least(0)(part) for part in text.split(","))
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} has a seed twice")
    return found


def _add_doctor(sub: Commands) -> None:
    def run(args: argparse.Namespace) -> int:
        from megatron_dapo.doctor.command import run

        return run(args.config, args.set, args.as_json, args.timeout, args.only)

    parser = add_command(
        sub, "doctor", run,
        "Find what is wrong with this machine, or with a run directory, before a run starts, and how to fix it.",
        "examples:\n  megatron-dapo doctor\n  megatron-dapo doctor run.yaml --json\n  megatron-dapo doctor runs/first\n"
        "  megatron-dapo doctor run.yaml --only attention,ports\n\n"
        "exit codes: 0 no check failed (there may be warnings), 1 a check failed, 2 wrong input",
    )  # fmt: skip
    text = "YAML file: check its model, servers and paths; run directory: check what the next start would find"
    add_config(parser, text, nargs="?")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print the checks as JSON")
    parser.add_argument("--only", metavar="NAMES", help="comma-separated names of checks (default: all)")
    parser.add_argument("--timeout", type=at_least(0.1, float), metavar="SECONDS", help="time limit of each check")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        quiet_libraries()
        if isinstance(sys.stdout, io.TextIOWrapper):  # the encoding of a terminal may not have all characters
            sys.stdout.reconfigure(errors="backslashreplace")
        words = sys.argv[1:] if argv is None else argv
        if not words:
            build_parser().print_help(sys.stderr)
            return 2
        args = build_parser().parse_args(with_set(words))
        set_log_level(args.__dict__.pop("verbose"))
        return int(args.run(args))
    except UserError as error:
        from megatron_dapo.types import printable

        logging.getLogger("megatron_dapo").debug("where the error was raised:", exc_info=True)
        print(printable(f"megatron-dapo: {error}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("megatron-dapo: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
