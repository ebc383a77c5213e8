"""Reads the rows of a prompt file with their line numbers: jsonl, parquet, or a dataset of the hub.

For a row that cannot be read, the reason is yielded instead, so that the caller can count and name it. Files are never
read as a whole: the hub's DAPO-Math-17k has 1.79 million rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_dapo.errors import UserError

Row = dict[str, Any]
BATCH_ROWS = 2048
PARQUET_ENDINGS = {".parquet", ".pq"}
JSONL_ENDINGS = {".jsonl", ".json", ".ndjson"}


class DataError(UserError):
    """A prompt file that cannot be used; the message says what was expected and what was found."""


def read_rows(path: str, split: str = "train") -> Iterator[tuple[int, Row | str]]:
    """(line number from 1, the row or what is wrong with it). In a parquet file, a line is a row."""
    file = Path(path).expanduser()
    if file.is_file():
        if file.suffix in PARQUET_ENDINGS:
            return _parquet_rows([file])
        if file.suffix in JSONL_ENDINGS:
            return _jsonl_rows(file)
        raise DataError(
            f"data.path: {path} ends in {file.suffix!r}; expected one of {', '.join(sorted(JSONL_ENDINGS))} "
            f"(one JSON object a line) or {', '.join(sorted(PARQUET_ENDINGS))}"
        )
    if looks_like_hub_name(path):
        return _parquet_rows(download(path, split))
    raise DataError(f"data.path: no file {path!r}" if path else "data.path is empty: name a jsonl or parquet file")


def looks_like_hub_name(path: str) -> bool:
    parts = path.split("/")
    return len(parts) == 2 and all(parts) and not path.startswith((".", "~")) and not Path(path).suffix


def download(name: str, split: str) -> list[Path]:
    """The parquet files of a split of a hub dataset, from the local cache if they are there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        folder = Path(snapshot_download(name, repo_type="dataset", allow_patterns=["*.parquet", "**/*.parquet"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise DataError(
            f"data.path: {name!r} is not a file, and the hub dataset of that name could not be fetched "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}). Check the name "
            "and the network (HF_HUB_OFFLINE must not be set), or download the parquet file and give its path"
        ) from error
    files = sorted(folder.rglob("*.parquet"))
    chosen = [f for f in files if f.name.startswith(split) or split in f.relative_to(folder).parts] or (
        files if len(files) == 1 else []
    )
    if not chosen:
        found = ", ".join(str(f.relative_to(folder)) for f in files) or "no parquet file at all"
        raise DataError(f"data.split: the hub dataset {name!r} has no parquet file of split {split!r}; it has {found}")
    return chosen


def _jsonl_rows(file: Path) -> Iterator[tuple[int, Row | str]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, _json_row(line)


def _json_row(line: bytes) -> Row | str:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"invalid UTF-8 at byte {error.start} of the line"
    except json.JSONDecodeError as error:
        return f"invalid JSON: {error.msg} at character {error.pos}"
    except RecursionError:
        return "invalid JSON: nested too deeply"
    return row if isinstance(row, dict) else f"expected an object, found {type(row).__name__}"


def _parquet_rows(files: list[Path]) -> Iterator[tuple[int, Row | str]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    for file in files:
        try:
            table = pq.ParquetFile(file)
            batches = table.iter_batches(batch_size=BATCH_ROWS)
            for batch in batches:
                for row in _batch_rows(batch):
                    number += 1
                    yield number, row
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
            raise DataError(f"{file} cannot be read as parquet after row {number}: {error}") from error


def _batch_rows(batch: Any) -> Iterator[Row | str]:
    try:
        yield from batch.to_pylist()
        return
    except UnicodeDecodeError:
        pass  # one bad string fails the whole batch: find its row
    for index in range(batch.num_rows):
        try:
            yield batch.slice(index, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            yield f"invalid UTF-8 at byte {error.start} of a value"
