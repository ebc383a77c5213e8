"""The SGLang versions that the tests use, and a running server of one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from long_lists import some

ROOT = Path(__file__).resolve().parents[2]
SGLANG_VERSIONS = tuple(some(("0.5.18", "0.5.23"), "0.5.23"))  # oldest first
API_KEY_VARIABLE = "MEGATRON_DAPO_TEST_KEY"  # environment variable with the key of these servers


def sglang_python(version: str) -> Path:
    return ROOT / f".venv-sglang-{version}" / "bin" / "python"


@dataclass
class RealServer:
    """A running server, the HF directory it was started with, and the transformers model with its current weights."""

    process: Any
    config: Any
    directory: Path
    model: Any
    version: int = 0
