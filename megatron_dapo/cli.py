"""The `megatron-dapo` command: argument parsing only. Each command imports its room when it runs."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence

from megatron_dapo import __version__
from megatron_dapo.errors import UserError


def add_command(
    sub: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    epilog: str = "",
) -> argparse.ArgumentParser:
    """A sub-command whose --help starts with what it is for and ends with an example."""
    parser = sub.add_parser(
        name, help=summary, description=summary, epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.set_defaults(run=run)
    return parser


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-dapo", description="DAPO reinforcement learning on Megatron-Core.",
        epilog="`megatron-dapo COMMAND --help` explains a command.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"megatron-dapo {__version__}")
    sub = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_train(sub)
    _add_ablate(sub)
    _add_eval(sub)
    _add_convert(sub)
    _add_report(sub)
    _add_selfcheck(sub)
    _add_plan(sub)
    _add_slurm(sub)
    _add_doctor(sub)
    return parser


def _add_train(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    def run(args: argparse.Namespace) -> int:
        from megatron_dapo.trainer.signals import end_at_once

        with end_at_once():  # before the imports, which take seconds
            from megatron_dapo.config import load_config
            from megatron_dapo.launch.local import run_training

            return run_training(load_config(args.config, args.set), dry_run=args.dry_run)

    parser = add_command(
        sub, "train", run,
        "Train a policy with DAPO, or resume the run that is in its run directory.",
        "On one machine it starts the engines and the ranks itself; under torchrun or srun it joins.\n\nexamples:\n"
        "  megatron-dapo train run.yaml --dry-run\n"
        "  megatron-dapo train run.yaml --set policy.tensor_parallel=2 --set trainer.run_dir=runs/tp2\n\n"
        "exit codes: 0 finished, 1 failed, 2 wrong configuration, 75 asked to stop and saved: start it again",
    )  # fmt: skip
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    parser.add_argument("--dry-run", action="store_true", help="resolve and check everything, print the plan and stop")


def _add_ablate(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    def run(args: argparse.Namespace) -> int:
        from pathlib import Path

        from megatron_dapo.launch.ablate import run_ablation

        return run_ablation(args.config, args.set, args.seeds, Path(args.out))

    parser = add_command(
        sub, "ablate", run,
        "Run the paper's ablation: naive GRPO, then each of DAPO's fixes added in turn; a table and a figure.",
        "example:\n  make quickstart && megatron-dapo ablate examples/ablations/arithmetic.yaml --seeds 3",
    )  # fmt: skip
    parser.add_argument("config", metavar="CONFIG", help="YAML file of the full recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    parser.add_argument("--seeds", type=int, default=3, help="runs per row (default 3)")
    parser.add_argument(
        "--out", metavar="DIR", default="runs/ablation", help="where the runs go (default runs/ablation)"
    )


def _add_eval(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    def run(args: argparse.Namespace) -> int:
        from megatron_dapo.config import load_config
        from megatron_dapo.evaluate import run

        short = {"policy.model": args.model, "evaluate.data.path": args.data, "evaluate.samples": args.samples}
        settings = [f"{key}={value}" for key, value in short.items() if value is not None]
        config = load_config(args.config, [*args.set, *settings])
        run(config, args.out or f"{config.trainer.run_dir}/eval", args.seed)
        return 0

    parser = add_command(
        sub, "eval", run,
        "Generate k responses to every problem of a benchmark and report avg@k, pass@k and maj@k.",
        "examples:\n  megatron-dapo eval run.yaml --data aime_2024.jsonl --samples 32 --out results/aime\n"
        "  megatron-dapo eval run.yaml --model RUN/hf --set evaluate.top_p=1.0",
    )  # fmt: skip
    parser.add_argument("config", metavar="CONFIG", help="YAML file; its evaluate, reward, rollout and policy count")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    parser.add_argument("--model", metavar="DIR", help="HF model directory (policy.model)")
    parser.add_argument("--data", metavar="FILE", help="benchmark, jsonl or parquet (evaluate.data.path)")
    parser.add_argument("--samples", type=int, metavar="K", help="responses per problem (evaluate.samples)")
    parser.add_argument("--out", metavar="DIR", help="where results.json and responses/ go (default: RUN_DIR/eval)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the responses (default 0)")


def _add_convert(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    def run(args: argparse.Namespace) -> int:
        from megatron_dapo.weights import command

        options = {key: value for key, value in vars(args).items() if key not in ("run", "convert")}
        return int(getattr(command, args.convert)(**options))

    group = sub.add_parser("convert", help="HF checkpoints to Megatron torch_dist and back, and compare them")
    inner = group.add_subparsers(title="conversions", metavar="CONVERSION", required=True)
    to_megatron = add_command(
        inner, "hf-to-megatron", run,
        "Write the weights of a HF Qwen model as a Megatron torch_dist checkpoint that loads at any TP, PP and EP.",
        "example:\n  megatron-dapo convert hf-to-megatron Qwen3-32B /checkpoints/qwen3-32b\n\n"
        "exit codes: 0 done, 2 refused or failed (nothing is written), 3 done, but some weights are NaN or infinite",
    )  # fmt: skip
    to_hf = add_command(
        inner, "megatron-to-hf", run,
        "Write the weights of a torch_dist checkpoint (a trainer's, too: its optimizer state is not read) as a\n"
        "complete HF model: weights, index, config, tokenizer, generation config.",
        "example:\n  megatron-dapo convert megatron-to-hf RUN/checkpoints/step_100 out --reference Qwen3-32B\n\n"
        "exit codes: 0 done, 2 refused or failed (nothing is written), 3 done, but some weights are NaN or infinite",
    )  # fmt: skip
    for parser, name in ((to_megatron, "hf_to_megatron"), (to_hf, "megatron_to_hf")):
        parser.set_defaults(convert=name)
        parser.add_argument("source", metavar="SRC", help="checkpoint to read")
        parser.add_argument("destination", metavar="DST", help="directory to create; appears when it is complete")
        parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="default: as it is stored")
        parser.add_argument("--overwrite", action="store_true", help="replace DST if it is a checkpoint")
        parser.add_argument("--allow-nan", action="store_true", help="exit with 0 although weights are not finite")
        parser.add_argument("--workers", type=int, help="threads (default: one per core, 2 to 8)")
    to_hf.add_argument("--reference", metavar="HF_DIR", help="HF model with the config and tokenizer (default: the "
                       "copy that hf-to-megatron leaves in SRC)")  # fmt: skip
    to_hf.add_argument("--shard-size", type=float, default=5.0, metavar="GB", help="largest weight file (default 5)")
    check = add_command(
        inner, "verify", run,
        "Prove that two checkpoints, HF or torch_dist, hold the same weights: names, shapes, dtypes, every value.",
        "example:\n  megatron-dapo convert verify Qwen3-32B /checkpoints/qwen3-32b\n\nexit codes: 0 same, 1 different",
    )  # fmt: skip
    check.set_defaults(convert="verify")
    check.add_argument("a", metavar="A")
    check.add_argument("b", metavar="B")
    check.add_argument("--reference", metavar="HF_DIR", help="HF model whose config.json describes the weights")
    check.add_argument("--tolerance", type=float, default=0.0, help="largest difference allowed (default: bitwise)")
    check.add_argument("--workers", type=int, help="threads (default: one per core, 2 to 8)")


def _add_report(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    def run(args: argparse.Namespace) -> int:
        from megatron_dapo.observe.report import write_report

        output = args.output or f"{args.runs[0]}/{'report' if len(args.runs) == 1 else 'comparison'}.html"
        for path in write_report(args.runs, output, png=args.png):
            print(path)
        return 0

    parser = add_command(
        sub, "report", run,
        "Make one self-contained HTML file of a run, or of several to compare: curves, warnings, transcripts, config.",
        "examples:\n  megatron-dapo report runs/quickstart\n"
        "  megatron-dapo report runs/dapo runs/grpo --output comparison.html --png",
    )  # fmt: skip
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="run directories; a run may still be going on")
    parser.add_argument("--output", metavar="FILE", help="default: report.html (several runs: comparison.html) in the "
                        "first RUN_DIR")  # fmt: skip
    parser.add_argument("--png", action="store_true", help="also write curves.png beside it")


def _add_selfcheck(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    def run(args: argparse.Namespace) -> int:
        from megatron_dapo.selfcheck.layouts import run_layouts

        return run_layouts(args.layouts.split(",") if args.layouts else None, args.tolerance, args.updates)

    group = sub.add_parser("selfcheck", help="prove that this installation computes the right thing")
    inner = group.add_subparsers(title="checks", metavar="CHECK", required=True)
    parser = add_command(
        inner, "layouts", run,
        "Run the same DAPO updates in one process and in each parallel layout, and compare.",
        "example:\n  megatron-dapo selfcheck layouts --layouts tp2,pp2,cp2,tp2pp2",
    )  # fmt: skip
    parser.add_argument("--layouts", help="comma-separated, e.g. tp2,pp2vpp2,tp2cp2sp,ep2 (default: all that fit)")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest relative difference (default 1e-5)")
    parser.add_argument("--updates", type=int, default=3, help="optimizer updates to compare (default 3)")


def _add_plan(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    def run(args: argparse.Namespace) -> int:
        from megatron_dapo.planner.command import run

        return run(**{key: value for key, value in vars(args).items() if key != "run"})

    parser = add_command(
        sub, "plan", run,
        "Predict, from the model's config.json alone, whether a configuration fits the GPUs, how long a step takes,\n"
        "which layouts are fastest, and what to change when it does not fit. Needs no GPU.",
        "examples:\n  megatron-dapo plan run.yaml --gpu h100 --gpus 128\n"
        "  megatron-dapo plan run.yaml --gpu h200 --gpus 64 --engine-gpus 16 --set policy.tensor_parallel=4\n"
        "  megatron-dapo plan --model Qwen2.5-32B --gpus 128        # no layout given: the fastest that fits\n\n"
        "exit codes: 0 fits, 1 does not fit, 2 cannot be planned",
    )  # fmt: skip
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="YAML file (left out: defaults, best layout)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    parser.add_argument("--model", metavar="DIR", help="directory with config.json (policy.model)")
    parser.add_argument("--gpu", default="h100", help="h100 (default), h200, h800, b200, a100, a100-40g, l40s, …")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs in all (default: slurm.nodes × gpus_per_node)")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="default: slurm.gpus_per_node")
    parser.add_argument("--engine-gpus", type=int, metavar="N", help="GPUs that only serve engines; 0: engines and "
                        "trainer share all GPUs (default: slurm.engine_nodes × gpus_per_node)")  # fmt: skip
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help="another memory size than the GPU's own")
    parser.add_argument("--mfu", type=float, default=0.4, help="share of the peak that kernels reach (default 0.4)")
    parser.add_argument("--mean-prompt", type=int, metavar="TOKENS", help="default: 256")
    parser.add_argument("--mean-response", type=int, metavar="TOKENS", help="default: a quarter of the longest")
    parser.add_argument("--kept", type=float, metavar="SHARE", help="of groups that dynamic sampling keeps "
                        "(default 0.5)")  # fmt: skip
    parser.add_argument("--layers", choices=["te", "local"], default="te", help="Transformer Engine (default) or torch")
    parser.add_argument("--top", type=int, default=8, metavar="N", help="layouts to show (default 8)")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print the plan as JSON")


def _add_slurm(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    def run(args: argparse.Namespace) -> int:
        from pathlib import Path

        from megatron_dapo.config import load_config
        from megatron_dapo.launch.slurm import run_slurm
        from megatron_dapo.launch.slurm_status import print_status

        if args.status:
            return print_status(Path(args.status).resolve())
        if args.config is None:
            raise UserError("name a CONFIG to submit, or a run directory with --status")
        nodes = [f"slurm.nodes={args.nodes}"] if args.nodes else []
        return run_slurm(load_config(args.config, [*args.set, *nodes]), dry_run=args.dry_run, chain=args.chain)

    parser = add_command(
        sub, "slurm", run,
        "Check a run, write its sbatch script into the run directory and submit it. The job resumes by itself.",
        "examples:\n  megatron-dapo slurm run.yaml --nodes 16 --dry-run\n"
        "  megatron-dapo slurm run.yaml --nodes 16 --set slurm.partition=h100\n"
        "  megatron-dapo slurm run.yaml --chain 5      # jobs one after the other, where requeueing is not allowed\n"
        "  megatron-dapo slurm --status runs/32b\n\n"
        "exit codes: 0 submitted (--status: alive or finished), 1 --status: ended otherwise, 2 refused",
    )  # fmt: skip
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="YAML file; its slurm section describes the job")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    parser.add_argument("--nodes", type=int, metavar="N", help="all nodes of the job (slurm.nodes)")
    parser.add_argument("--dry-run", action="store_true", help="check, write and print the script, and stop")
    parser.add_argument("--chain", type=int, default=1, metavar="K", help="submit K jobs, each after the one before")
    parser.add_argument("--status", metavar="RUN_DIR", help="say in words what became of the jobs of a run")


def _add_doctor(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    def run(args: argparse.Namespace) -> int:
        from megatron_dapo.doctor import run

        return run(args.config, args.set, args.as_json, args.timeout, args.only)

    parser = add_command(
        sub, "doctor", run,
        "Look at this machine and say what is wrong with it for a run, and how to put it right.",
        "examples:\n  megatron-dapo doctor\n  megatron-dapo doctor run.yaml --json\n"
        "  megatron-dapo doctor run.yaml --only attention,ports\n\n"
        "exit codes: 0 nothing failed (there may be warnings), 1 something failed, 2 the configuration is wrong",
    )  # fmt: skip
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="YAML file whose model, servers and paths to check")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print the checks as JSON")
    parser.add_argument("--only", metavar="NAMES", help="comma-separated names of checks (default: all)")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="for each check (default: the check's own)")


def quiet_libraries() -> None:
    """What Megatron and torch warn about here (no apex, renamed collectives) is nothing a user can act on."""
    for module in ("megatron", "torch"):
        warnings.filterwarnings("ignore", module=module)


def main(argv: Sequence[str] | None = None) -> int:
    quiet_libraries()
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except UserError as error:
        print(f"megatron-dapo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("megatron-dapo: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
