"""The state of the loop as two files: small JSON, and all numpy arrays in one binary file.

`trainer.json` holds the nested dictionaries; where an array was, it says the array's type, shape and position in
`trainer.arrays`. Tokens and log-probs of unfinished groups are most of the state: as JSON they take six times the
space and a minute to parse.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson

from megatron_dapo.policy.checkpoint_files import CheckpointError, CheckpointFile

STATE, ARRAYS = "trainer.json", "trainer.arrays"
MARK = "$array"
ALIGN = 8


def state_files(state: dict[str, Any]) -> list[CheckpointFile]:
    """A snapshot: later changes of the arrays do not reach the files."""
    arrays: list[bytes] = []
    position = 0

    def extract(value: Any) -> Any:
        nonlocal position
        if isinstance(value, dict):
            if MARK in value:
                raise ValueError(f"{MARK!r} is not allowed as a key of the state")
            return {key: extract(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [extract(item) for item in value]
        if not isinstance(value, np.ndarray):
            return value
        if value.dtype.kind not in "biuf":
            raise TypeError(f"an array of {value.dtype} cannot be part of the state")
        content, start = value.tobytes(), position
        arrays.append(content + bytes(-len(content) % ALIGN))
        position += len(arrays[-1])
        return {MARK: [value.dtype.str, list(value.shape), start]}

    text = orjson.dumps(extract(state), option=orjson.OPT_SERIALIZE_NUMPY)
    return [CheckpointFile(STATE, [text]), CheckpointFile(ARRAYS, [b"".join(arrays)])]


def read_state(folder: Path) -> dict[str, Any]:
    """The state that `state_files` wrote. Older checkpoints have lists in place of arrays and no second file."""
    path = folder / STATE
    try:
        state = orjson.loads(path.read_bytes())
        path = folder / ARRAYS
        content = path.read_bytes() if path.exists() else b""
        restored = _restore(state, content)
    except (OSError, ValueError, TypeError) as error:  # orjson's error is a ValueError
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(restored, dict):
        raise CheckpointError(f"{folder / STATE} does not hold a state")
    return restored


def _restore(value: Any, content: bytes) -> Any:
    if isinstance(value, list):
        return [_restore(item, content) for item in value]
    if not isinstance(value, dict):
        return value
    if MARK in value:
        kind, shape, start = value[MARK]
        dtype = np.dtype(kind)
        count = int(np.prod(shape, dtype=np.int64))
        return (
            np.frombuffer(content, dtype, count=count, offset=start).reshape(shape).copy()
            if count
            else np.empty(shape, dtype)
        )
    return {key: _restore(item, content) for key, item in value.items()}
