"""The history of a fault run: one JSON object a line, append-only, in the order things were seen.

Every record has ``at_ns`` (monotonic clock of the process that runs the workload) and ``kind``; the rest depends on
the kind, see `Kind`. Lines are written as they happen, so memory does not grow with the run and a killed run keeps
what it saw.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvpool.errors import RequestError
from kvpool.faults.shapes import ALWAYS, OPTIONAL, REQUIRED, first_wrong
from kvpool.jsontext import parse_json

KILLED, STOPPED, DRAINED, CORRUPTING = "SIGKILL", "SIGSTOP", "drain", "corrupting transport"
"""Beginnings of a fault's mechanism that say what must follow from it."""


class Kind(Enum):
    """What a line tells, and its fields."""

    RUN = "run"  # scenario, mechanism, seed, lease_ns, rate_rps, ttft_limit_ns, settings: the first line
    REFERENCE = "reference"  # prompt (label), tokens: what the prompt's answer must be
    START = "start"  # the workload begins
    INVOKE = "invoke"  # id, prompt (label or None), style, timeout_ns, may_expire, max_tokens
    ATTEMPT = "attempt"  # id, number, worker (key), plan, holders (keys), planned_tokens, forced
    ATTEMPT_END = "attempt_end"  # id, number, code (None when its stream ended in order)
    CHUNK = "chunk"  # id, tokens
    CANCEL = "cancel"  # id: the client asked for the end
    RESPONSE = "response"  # id, tokens, finish, stats
    ERROR = "error"  # id, code, message
    FAULT = "fault"  # fault (id), name, target, key, pid, mechanism
    HEAL = "heal"  # fault (id), how
    STATE = "state"  # router's view: alive, suspect, error; decisions, failures
    REST = "rest"  # the last request has ended
    AUDIT = "audit"  # workers, router, directories: digests of what is held and what is believed
    END = "end"  # errors of the run itself: the last line


@dataclass(frozen=True, slots=True)
class Record:
    """One line.

    Attributes:
        line: its number in the file, from 1.
        at_ns: monotonic time at which it was seen.
        kind: what it tells.
        data: the other fields.
    """

    line: int
    at_ns: int
    kind: Kind
    data: Mapping[str, Any]


class HistoryWriter:
    """Writes one history. Safe to use from several threads; `close` may be repeated.

    Raises:
        RequestError: the file exists already, or cannot be written.
    """

    def __init__(self, path: Path, clock_ns: Callable[[], int]) -> None:
        self.path = path
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        try:
            self._file = path.open("x", encoding="utf-8", buffering=1)
        except FileExistsError as error:
            raise RequestError(f"{path} exists; histories are never overwritten, choose another path") from error
        except OSError as error:
            raise RequestError(f"cannot write the history {path}: {error.strerror}") from error

    def add(self, kind: Kind, **data: Any) -> int:
        """Append a record; returns its time."""
        with self._lock:
            at_ns = self._clock_ns()
            self._file.write(json.dumps({"at_ns": at_ns, "kind": kind.value, **data}, separators=(",", ":")) + "\n")
        return at_ns

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_history(path: Path) -> Iterator[Record]:
    """Records of a file, in order, one in memory at a time.

    Raises:
        RequestError: the file cannot be read, or a line is not a record.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                yield parse_record(number, line)
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read the history {path}: {error}") from error


def parse_record(number: int, line: str) -> Record:
    """One line as a record.

    Raises:
        RequestError: it is not one.
    """
    try:
        data = parse_json(line)
        record = Record(number, int(data.pop("at_ns")), Kind(data.pop("kind")), data)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise RequestError(f"line {number} is not a record of a history: {error!s:.200}", line=number) from error
    name = record.kind.value
    wrong = first_wrong({**data, "at_ns": record.at_ns}, ALWAYS | REQUIRED.get(name, {}), OPTIONAL.get(name, {}))
    if wrong is not None:
        raise RequestError(f"line {number}: a record of kind {name!r} has no or a malformed {wrong!r}", line=number)
    return record


def history_path(folder: Path, scenarios: Sequence[str], seed: int) -> Path:
    """Where the history of a run goes: named by what it ran, numbered so that none is overwritten.

    Raises:
        RequestError: the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"cannot keep histories in {folder}: {error.strerror}", field="history") from error
    base = scenarios[0] if len(scenarios) == 1 else f"mix-{len(scenarios)}"
    return next(path for number in count(1) if not (path := folder / f"{base}-seed{seed}-{number}.jsonl").exists())
