"""Runs a Python module as a program, with API keys that come from environment variables.

    python run_with_keys.py sglang.launch_server --key-from api-key=VARIABLE --model-path DIR ...

The module sees `--api-key=KEY` among its arguments, but the process does not have it on its command line, which every
user of the machine can read. Lines that the module logs show `***` instead of the key: SGLang logs all its arguments.
This file needs nothing but the standard library: it runs in the Python that has SGLang.
"""

import sys

if __name__ == "__main__" and __spec__ is None:
    del sys.path[0]  # this directory, whose http.py is not the standard library's

import logging
import os
import runpy

OPTION = "--key-from"


def main() -> None:
    module, arguments, keys = sys.argv[1], [], []
    rest = iter(sys.argv[2:])
    for argument in rest:
        if argument != OPTION:
            arguments.append(argument)
            continue
        option, _, variable = next(rest).partition("=")
        # Removed, so that the processes that the module starts do not inherit it.
        keys.append((option, os.environ.pop(variable, "")))
        if not keys[-1][1]:
            raise SystemExit(f"run_with_keys: the environment variable {variable} (for --{option}) is not set")
    hide_in_logs([key for _, key in keys])
    sys.argv[1:] = [*arguments, *(f"--{option}={key}" for option, key in keys)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def hide_in_logs(secrets: "list[str]") -> None:
    original = logging.getLogRecordFactory()

    def make(*args: object, **kwargs: object) -> logging.LogRecord:
        record = original(*args, **kwargs)
        try:
            message = record.getMessage()
        except Exception:  # the arguments do not fit; logging reports that, and the program goes on
            message = f"{record.msg} {record.args}"
        if any(secret in message for secret in secrets):
            for secret in secrets:
                message = message.replace(secret, "***")
            record.msg, record.args = message, None
        return record

    logging.setLogRecordFactory(make)


if __name__ == "__main__":
    main()
