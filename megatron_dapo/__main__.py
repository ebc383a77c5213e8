"""`megatron-dapo` and `python -m megatron_dapo`: the command line. Ctrl-C while it is imported ends in one line."""

import os
import signal
import sys
from types import FrameType


def main() -> int:
    before = signal.signal(signal.SIGINT, _end)
    from megatron_dapo.cli import main as run_command

    signal.signal(signal.SIGINT, before)
    return run_command()


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\nmegatron-dapo: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
