"""Arguments of the commands quickstart, examples, slurm and kubernetes; `megatron_dapo/cli.py` has the others."""

from __future__ import annotations

import argparse

from megatron_dapo.arguments import Commands, add_command, add_settings, at_least
from megatron_dapo.errors import UserError


def seeds(text: str) -> tuple[int, ...]:
    """0,1,2 as numbers, each once."""
    found = tuple(at_least(0)(part) for part in text.split(","))
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} has a seed twice")
    return found


def add_quickstart(sub: Commands) -> None:
    def quickstart(args: argparse.Namespace) -> int:
        from megatron_dapo.launch.examples import run_quickstart

        options = {"--run-dir": args.run_dir, "--seed": args.seed, "--pretraining-updates": args.pretraining_updates}
        given = [word for name, value in options.items() if value is not None for word in (name, str(value))]
        return run_quickstart([*given, *(["--fresh"] if args.fresh else []), *(f"--set={item}" for item in args.set)])

    def examples(args: argparse.Namespace) -> int:
        from pathlib import Path

        from megatron_dapo.launch.examples import copy_examples

        copy_examples(Path(args.target))
        return 0

    parser = add_command(
        sub, "quickstart", quickstart,
        "See it work on this machine: a complete DAPO run with a tiny model, on two CPU cores, in a few minutes.",
        "examples:\n  megatron-dapo quickstart\n  megatron-dapo quickstart --run-dir runs/seed1 --seed 1",
    )  # fmt: skip
    parser.add_argument("--run-dir", metavar="DIR", help="default: runs/quickstart")
    parser.add_argument("--seed", type=at_least(0), help="default: 0")
    parser.add_argument("--fresh", action="store_true", help="remove what an earlier quickstart made there first")
    parser.add_argument("--pretraining-updates", type=at_least(1), metavar="N", help="at most (default 1500)")
    add_settings(parser)
    parser = add_command(
        sub, "examples", examples,
        "Copy the examples of this installation into a new directory: configurations, own objectives, the quickstart.",
        "example:\n  megatron-dapo examples my-examples",
    )  # fmt: skip
    parser.add_argument("target", metavar="DIR", help="directory to create")


def add_slurm(sub: Commands) -> None:
    def run(args: argparse.Namespace) -> int:
        from pathlib import Path

        from megatron_dapo.config import load_config
        from megatron_dapo.config.hub import with_local_model
        from megatron_dapo.launch.slurm import run_slurm
        from megatron_dapo.launch.slurm_status import print_status, run_on_nodes

        if args.status:
            return print_status(Path(args.status).resolve())
        if args.on:
            return run_on_nodes(Path(args.on).resolve(), args.config, args.command, args.node)
        if args.config is None:
            raise UserError("name a CONFIG to submit, or a run directory with --status or --on")
        nodes = [f"slurm.nodes={args.nodes}"] if args.nodes else []
        config = with_local_model(load_config(args.config, [*args.set, *nodes]))
        return run_slurm(config, dry_run=args.dry_run, chain=args.chain, seeds=args.seeds)

    parser = add_command(
        sub, "slurm", run,
        "Check a run, write its sbatch script into the run directory and submit it. The job resumes by itself.",
        "examples:\n  megatron-dapo slurm run.yaml --nodes 16 --dry-run\n"
        "  megatron-dapo slurm run.yaml --nodes 16 --set slurm.partition=h100\n"
        "  megatron-dapo slurm run.yaml --chain 5      # five jobs in a row, where requeueing is not allowed\n"
        "  megatron-dapo slurm run.yaml --seeds 0,1,2  # an array of runs in RUN_DIR/seed_N\n"
        "  megatron-dapo slurm --status runs/32b\n"
        "  megatron-dapo slurm --on runs/32b -- nvidia-smi -L\n\n"
        "exit codes: 0 submitted (--status: alive or finished), 1 --status: ended otherwise, 2 refused",
    )  # fmt: skip
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="YAML file; its slurm section describes the job")
    add_settings(parser)
    parser.add_argument("--nodes", type=at_least(1), metavar="N", help="all nodes of the job (slurm.nodes)")
    parser.add_argument("--dry-run", action="store_true", help="check the run, write and print the script, and stop")
    parser.add_argument("--chain", type=at_least(1), default=1, metavar="K", help="submit K jobs, each after the last")
    parser.add_argument("--seeds", type=seeds, default=(), metavar="S1,S2", help="submit an array, one run per seed")
    parser.add_argument("--status", metavar="RUN_DIR", help="print the state of a run's jobs")
    parser.add_argument("--on", metavar="RUN_DIR", help="run a command on the nodes of a run's job, beside the run")
    parser.add_argument("--node", metavar="NODE", help="with --on: only on this node")
    parser.add_argument("command", nargs="*", metavar="COMMAND", help=argparse.SUPPRESS)


def add_kubernetes(sub: Commands) -> None:
    def run(args: argparse.Namespace) -> int:
        from megatron_dapo.config import load_config
        from megatron_dapo.config.hub import with_local_model
        from megatron_dapo.launch.kubernetes import run_kubernetes

        config = with_local_model(load_config(args.config, args.set))
        return run_kubernetes(config, args.image, args.claim, args.name, args.output)

    parser = add_command(
        sub, "kubernetes", run,
        "Print a Kubernetes JobSet for a run; the nodes and GPUs of its slurm section become pods.",
        "example:\n  megatron-dapo kubernetes run.yaml --image dapo:cuda13 --claim shared --output jobset.yaml",
    )  # fmt: skip
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    add_settings(parser)
    parser.add_argument("--image", required=True, help="container image with megatron-dapo")
    parser.add_argument("--claim", required=True, help="PersistentVolumeClaim with model, data and run directory")
    parser.add_argument("--name", default="megatron-dapo", help="of the JobSet (default megatron-dapo)")
    parser.add_argument("--output", metavar="FILE", help="write it here instead of printing it")
