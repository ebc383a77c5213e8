"""The `megatron-dapo` command: argument parsing only. Each command imports its room when it runs."""

from __future__ import annotations

import argparse
import sys
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
    _add_selfcheck(sub)
    return parser


def _add_selfcheck(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    def run(args: argparse.Namespace) -> int:
        from megatron_dapo.policy.selfcheck import run_layouts

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


def main(argv: Sequence[str] | None = None) -> int:
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
