"""DAPO's changes switched off one at a time, with real weights: one SGLang server, started once for all runs.

    python benchmarks/ablation.py --set policy.model=MODEL --out runs/ablation_gsm8k --minutes 9 [-- SERVER ARGUMENTS]

The server has `--share` of the free GPU memory, the trainers the rest of the same GPU, one after the other. A start of
SGLang takes longer than several of their steps. Every other argument goes to `megatron-dapo ablate`; the same command
continues what was interrupted. `--config` names another file than examples/ablations/gsm8k.yaml.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_dapo.cli import main as megatron_dapo
from megatron_dapo.config import load_config
from megatron_dapo.engines.sglang.server_process import ServerProcess

ROOT = Path(__file__).resolve().parent.parent
KEY = "ABLATION_SERVER_KEY"  # environment variable: server and trainers get a random key


@contextmanager
def started_server(
    config_file: str, settings: list[str], share: float, arguments: list[str], logs: Path
) -> Iterator[list[str]]:
    """Yields the settings of a run that uses it. The server is ended at the end, or with this process."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server is ended then, too
    os.environ.setdefault(KEY, secrets.token_hex(24))
    config = load_config(config_file, settings)
    servers = config.rollout.servers
    memory = ["--mem-fraction-static", str(share)] if servers.device == "cuda" else []
    servers = servers.model_copy(update={"api_key_env": KEY, "arguments": [*memory, *servers.arguments, *arguments]})
    server = ServerProcess(servers.model or config.policy.model, servers, 0, logs)
    server.spawn()

    async def ready() -> None:
        client = server.client()
        try:
            await server.wait_ready(client)
        finally:
            await client.close()

    try:
        asyncio.run(ready())
        yield [f"rollout.servers.api_key_env={KEY}", f"rollout.servers.urls={json.dumps([server.url])}"]
    finally:
        asyncio.run(server.end())


def split_arguments(*default: str) -> tuple[list[str], list[str]]:
    """Those before `--`, and the server's after it; without `--` the server's `default`."""
    own = sys.argv[1:]
    return (own[: own.index("--")], own[own.index("--") + 1 :]) if "--" in own else (own, list(default))


def main() -> int:
    own, arguments = split_arguments()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(ROOT / "examples/ablations/gsm8k.yaml"))
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, help="for everything, the start of the server included")
    parser.add_argument("--share", type=float, default=0.25, help="of the GPU memory, for the server (default 0.25)")
    args, rest = parser.parse_known_args(own)
    began = time.monotonic()
    with started_server(args.config, args.set, args.share, arguments, args.out / "server") as served:
        words = [word for item in [*args.set, *served] for word in ("--set", item)]
        if args.minutes is not None:
            words += ["--minutes", str(max(0.0, args.minutes - (time.monotonic() - began) / 60))]
        design = [] if "--design" in rest or "--grid" in rest else ["--design", "leave-one-out"]
        return megatron_dapo(["ablate", args.config, "--out", str(args.out), "--discard-runs", *design, *words, *rest])


if __name__ == "__main__":
    sys.exit(main())
