"""Files of decision records: JSON lines, or Parquet where pyarrow is installed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpool.errors import RequestError
from kvpool.jsontext import parse_json

JSONL, PARQUET = ".jsonl", ".parquet"


def check_target(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is fetched.

    Raises:
        RequestError: another ending, no such folder, or Parquet without pyarrow.
    """
    if path.suffix not in (JSONL, PARQUET):
        raise RequestError(f"--out must end in {JSONL} or {PARQUET}, got {path.name!r}", field="out")
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise RequestError(f"cannot write {path}: its folder does not exist, or it is one", path=str(path))
    if path.suffix == PARQUET:
        _parquet()


def write_records(path: Path, lines: Sequence[str]) -> None:
    """Write records, given as JSON lines.

    Raises:
        RequestError: see `check_target`, or the file system refuses.
    """
    check_target(path)
    try:
        if path.suffix == JSONL:
            path.write_text("".join(line + "\n" for line in lines))
            return
        parquet = _parquet()
        import pyarrow

        rows = [json.loads(line) for line in lines]
        try:
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        except (OverflowError, pyarrow.ArrowException) as error:
            raise RequestError(f"Parquet cannot hold these records: {error}; use {JSONL}", path=str(path)) from error
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error}", path=str(path)) from error


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read records back.

    Raises:
        RequestError: the file is missing or malformed; the message names the line.
    """
    try:
        if path.suffix == PARQUET:
            return _read_parquet(path)
        with path.open(encoding="utf-8") as lines:
            return [_parsed(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read the records {path}: {error}", path=str(path)) from error


def _parsed(number: int, line: str) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise RequestError(f"record line {number} is not JSON: {error}", line=number) from error
    if not isinstance(record, dict):
        raise RequestError(f"record line {number} must be an object, got {type(record).__name__}", line=number)
    return record


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    parquet = _parquet()
    import pyarrow

    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise RequestError(f"{path} is not a Parquet file: {error}", path=str(path)) from error
    return rows


def _parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise RequestError(
            "Parquet needs pyarrow, which is not installed: pip install 'kvpool[parquet]', or use .jsonl",
            package="pyarrow",
        ) from error
    return parquet
