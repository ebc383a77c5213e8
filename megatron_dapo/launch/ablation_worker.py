"""Trains runs one after another, each in a fork of this process, so that imports are made once and not per run.

`python -m megatron_dapo.launch.ablation_worker` reads a line of JSON per run from stdin: configuration file, settings
and log file. It answers with the exit code of the run. SIGTERM asks the running trainer to end, and then ends the
worker. If the worker is killed, Linux kills the trainer.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from megatron_dapo.arguments import quiet_libraries
from megatron_dapo.config import load_config
from megatron_dapo.errors import UserError
from megatron_dapo.launch.local import import_trainer, run_training
from megatron_dapo.policy.gpu_count import gpu_count


class Worker:
    def __init__(self) -> None:
        self._trainer: int | None = None
        self._stopped = False

    def serve(self) -> None:
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: `ablate` sends SIGTERM
        for line in sys.stdin:
            print(self._run(json.loads(line)), flush=True)
            if self._stopped:
                break

    def _run(self, job: dict[str, Any]) -> int:
        worker = os.getpid()
        self._trainer = os.fork()
        if self._trainer == 0:
            _become_trainer(worker, job)
        _, status = os.waitpid(self._trainer, 0)
        self._trainer = None
        return os.waitstatus_to_exitcode(status)

    def _stop(self, number: int, frame: Any) -> None:
        self._stopped = True
        if not self._trainer:
            sys.exit(0)
        os.kill(self._trainer, signal.SIGTERM)


def _become_trainer(worker: int, job: dict[str, Any]) -> None:
    """Trains and exits. Output goes to the log."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        from megatron_dapo.policy.fork_ranks import die_with

        die_with(worker)
        code = _train(job["config"], job["settings"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _train(config_file: str, settings: Sequence[str]) -> int:
    try:
        return run_training(load_config(config_file, settings))
    except UserError as error:
        print(f"megatron-dapo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def main() -> None:
    quiet_libraries()
    # With GPUs each trainer imports for itself, as in local.py.
    if gpu_count() == 0:
        import_trainer(driver=True)
        gc.freeze()  # what is imported is never collected, so its memory stays shared
    Worker().serve()


if __name__ == "__main__":
    main()
