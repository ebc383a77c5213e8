#!/usr/bin/env python
"""Starts an SGLang server without a GPU for a model directory, to try it or to try a client against it.

    make sglang-cpu                                            # once: installs SGLang for the CPU
    python tools/serve_sglang_on_cpu.py MODEL_DIR              # prints URL and HEADER_FILE, serves until Ctrl-C
    curl -s -H @HEADER_FILE URL/generate --json '{"text": "1+1=", "sampling_params": {"max_new_tokens": 8}}'

MODEL_DIR is an HF directory (config.json, safetensors, tokenizer) of a small Qwen model: a CPU core generates a few
hundred tokens a second with a million parameters. The server listens on loopback only and has a random API key, which
is in HEADER_FILE; only you can read that file.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from megatron_dapo.config.rollout import ServerConfig
from megatron_dapo.engines.sglang.server_process import ServerProcess
from megatron_dapo.errors import EngineError, UserError

ROOT = Path(__file__).resolve().parent.parent


def find_python(version: str | None) -> str:
    """The Python of the newest environment from `make sglang-cpu`, or of the given version."""
    found = sorted(ROOT.glob(f".venv-sglang-{version or '*'}/bin/python"))
    if not found:
        raise EngineError(f"SGLang {version or ''} for the CPU is not installed: run `make sglang-cpu` in {ROOT}")
    return str(found[-1])


async def serve(model: str, config: ServerConfig, log_dir: Path) -> None:
    if not (Path(model) / "config.json").is_file():
        raise EngineError(f"{model} is not an HF model directory: it has no config.json")
    process = ServerProcess(model, config, 0, log_dir)
    process.spawn()
    client = process.client()
    header = log_dir / "header"
    header.touch(mode=0o600)
    header.write_text(f"Authorization: Bearer {process.keys.api}\n")
    try:
        print(f"starting {model}; log: {process.log}", file=sys.stderr)
        await process.wait_ready(client)
        print(f"{process.url} {header}", flush=True)
        while process.alive():
            await asyncio.sleep(1)
        raise EngineError(f"the server ended; {process.log_tail()}")
    finally:
        await client.close()
        await process.end()


def main() -> int:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="HF directory")
    parser.add_argument("--port", type=int, default=30000, help="first port to try (default 30000)")
    parser.add_argument("--version", help="SGLang version (default: the newest that is installed)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--log-dir", type=Path, help="where the server's log goes (default: a temporary directory)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds until it must be ready (default 300)")
    args, more = parser.parse_known_args()
    try:
        config = ServerConfig(
            device="cpu", python=find_python(args.version), port=args.port, dtype=args.dtype, arguments=more,
            start_timeout=args.timeout,
        )  # fmt: skip
        asyncio.run(serve(args.model, config, args.log_dir or Path(tempfile.mkdtemp(prefix="sglang-"))))
    except UserError as error:
        print(f"serve_sglang_on_cpu: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
