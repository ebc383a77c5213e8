"""Which SGLang versions are installed for the tests, and what a running server of one is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SGLANG_VERSIONS = ("0.5.18", "0.5.23")


def sglang_python(version: str) -> Path:
    return ROOT / f".venv-sglang-{version}" / "bin" / "python"


@dataclass
class RealServer:
    """A running server, the HF directory it was started with, and the transformers model with its current weights."""

    process: Any
    directory: Path
    model: Any
    version: int = 0
