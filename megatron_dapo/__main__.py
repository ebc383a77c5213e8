"""`megatron-dapo` and `python -m megatron_dapo`: the command line. Ctrl-C while it is imported ends in one line."""

import os
import select
import signal
import sys
from types import FrameType


def main() -> int:
    before = signal.signal(signal.SIGINT, _end)
    from megatron_dapo.cli import main as run_command

    signal.signal(signal.SIGINT, before)
    try:
        try:
            return run_command()
        finally:  # --help ends with SystemExit
            print(end="", flush=True)
    except SystemExit as end:  # rich ends so, and leaves /dev/null as the output
        if not isinstance(end.__context__, BrokenPipeError):
            raise
    except BrokenPipeError:
        output = select.poll()
        output.register(1, 0)
        if not output.poll(0):  # it was another pipe
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is flushed at exit
    return 128 + signal.SIGPIPE  # `head` has read enough


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\nmegatron-dapo: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
