"""Traces: what arrives when, and which prefixes are shared.

The native format is Mooncake's: one JSON object a line with ``timestamp`` (ms), ``input_length``, ``output_length``
(tokens) and ``hash_ids``, chained ids of the prompt's blocks of 512 tokens, the last of which may be partial. Equal
ids mean equal prefixes. Files may be plain, ``.gz`` or ``.xz``. Files, lines, prompts and traces have bounds, so that
a small file cannot unpack to more than a machine holds.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import lzma
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, TextIO

from kvpool.errors import RequestError
from kvpool.jsontext import parse_json

MOONCAKE_BLOCK_TOKENS = 512
MS_NS = 1_000_000
MAX_FILE_CHARS = 1 << 30
MAX_LINE_CHARS = 1 << 24
MAX_REQUEST_TOKENS = 1 << 24
MAX_TRACE_BLOCKS = 1 << 25
MAX_TIME_NS = 1 << 62


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One arrival.

    Attributes:
        arrival_ns: moment from the start of the trace.
        prompt_tokens, output_tokens: lengths, at least 1.
        blocks: ids of the prompt's blocks; all but the last are full.
    """

    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def duration_ns(self) -> int:
        """First to last arrival."""
        return self.requests[-1].arrival_ns - self.requests[0].arrival_ns if self.requests else 0

    def head(self, count: int) -> Trace:
        """The first requests."""
        return replace(self, requests=self.requests[:count])

    def part(self, start: int, stop: int) -> Trace:
        """Requests ``[start, stop)``, with arrivals from 0 again."""
        chosen = self.requests[start:stop]
        first_ns = chosen[0].arrival_ns if chosen else 0
        return replace(self, requests=tuple(replace(item, arrival_ns=item.arrival_ns - first_ns) for item in chosen))

    def faster(self, factor: float) -> Trace:
        """The same requests, arriving ``factor`` times as fast."""
        if factor <= 0:
            raise RequestError(f"the rate factor must be positive, got {factor}", field="rate")
        return replace(
            self,
            requests=tuple(replace(item, arrival_ns=round(item.arrival_ns / factor)) for item in self.requests),
        )

    def spread(self, seed: int = 0) -> Trace:
        """Arrivals that share a timestamp spread uniformly up to the next one: traces are rounded to seconds."""
        rng = Random(seed)
        moments = sorted({item.arrival_ns for item in self.requests})
        gaps = {first: second - first for first, second in itertools.pairwise(moments)}
        moved = [
            replace(item, arrival_ns=item.arrival_ns + int(rng.random() * gaps.get(item.arrival_ns, 0)))
            for item in self.requests
        ]
        return replace(self, requests=tuple(sorted(moved, key=lambda item: item.arrival_ns)))


def load_trace(path: Path, *, seed: int = 0) -> Trace:
    """Read a trace: Mooncake's JSON lines, or a CSV in the Azure or BurstGPT form (``.csv``), compressed or not.

    Raises:
        RequestError: the file cannot be read or a line is malformed; the message names line and key.
    """
    try:
        with _open_text(path) as stream:
            lines = _bounded(path.name, stream)
            if ".csv" in path.suffixes:
                return _from_csv(path.name, lines, seed)
            return from_mooncake(path.name, lines)
    except (OSError, EOFError, lzma.LZMAError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise RequestError(f"cannot read the trace {path}: {error}", path=str(path)) from error


def from_mooncake(name: str, lines: Iterable[str]) -> Trace:
    """Parse Mooncake's JSON lines.

    Raises:
        RequestError: a line is malformed.
    """
    counted = _Counted()
    requests = [counted.take(*_mooncake_request(number, line)) for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise RequestError(f"the trace {name} holds no request", trace=name)
    requests.sort(key=lambda item: item.arrival_ns)
    return Trace(name, MOONCAKE_BLOCK_TOKENS, tuple(requests))


def _mooncake_request(number: int, line: str) -> tuple[int, TraceRequest]:
    try:
        data = parse_json(line)
        blocks = tuple(int(value) for value in data["hash_ids"])
        made = TraceRequest(
            round(float(data["timestamp"]) * MS_NS), int(data["input_length"]), int(data["output_length"]), blocks
        )
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise RequestError(f"trace line {number} is malformed: {error!r:.200}", line=number) from error
    covered = -(-made.prompt_tokens // MOONCAKE_BLOCK_TOKENS)
    if made.prompt_tokens < 1 or made.arrival_ns < 0 or len(blocks) != covered:
        raise RequestError(
            f"trace line {number}: {made.prompt_tokens} tokens need {covered} hash_ids, got {len(blocks)}", line=number
        )
    return number, replace(made, output_tokens=max(1, made.output_tokens))


class _Counted:
    """Keeps a trace inside its bounds while it is read."""

    def __init__(self) -> None:
        self._blocks = 0

    def take(self, number: int, request: TraceRequest) -> TraceRequest:
        """The request of a line, checked.

        Raises:
            RequestError: a number is out of range, or the trace is too large.
        """
        self.check(number, request.arrival_ns, request.prompt_tokens, request.output_tokens)
        return request

    def check(self, number: int, arrival_ns: int, prompt_tokens: int, output_tokens: int) -> None:
        """As `take`, before the request is made."""
        if max(prompt_tokens, output_tokens) > MAX_REQUEST_TOKENS or abs(arrival_ns) > MAX_TIME_NS:
            raise RequestError(
                f"trace line {number}: a length is above {MAX_REQUEST_TOKENS} tokens, or the time out of range",
                line=number,
            )
        self._blocks += -(-prompt_tokens // MOONCAKE_BLOCK_TOKENS)
        if self._blocks > MAX_TRACE_BLOCKS:
            raise RequestError(
                f"the trace has more than {MAX_TRACE_BLOCKS} blocks; cut it at line {number}", line=number
            )


_CSV_TIME = ("TIMESTAMP", "Timestamp", "timestamp", "arrival_s")
_CSV_PROMPT = ("ContextTokens", "Request tokens", "input_length", "prompt_tokens")
_CSV_OUTPUT = ("GeneratedTokens", "Response tokens", "output_length", "output_tokens")


def _from_csv(name: str, lines: Iterable[str], seed: int) -> Trace:
    """Lengths and times from the CSV; prefixes, which such traces lack, are drawn as multi-turn conversations."""
    rows = csv.DictReader(lines)
    columns = rows.fieldnames or []
    time_key = _pick(columns, _CSV_TIME)
    prompt_key, output_key = _pick(columns, _CSV_PROMPT), _pick(columns, _CSV_OUTPUT)
    drawn, counted = _Conversations(Random(seed)), _Counted()
    requests = []
    for number, row in enumerate(rows, 2):
        try:
            arrival_ns = round(_seconds(row[time_key]) * 1e9)
            prompt, output = int(float(row[prompt_key])), int(float(row[output_key]))
        except (ValueError, TypeError, OverflowError) as error:
            raise RequestError(f"trace line {number} is malformed: {error!r:.200}", line=number) from error
        if prompt < 1:
            continue  # BurstGPT logs failed calls with no tokens
        counted.check(number, arrival_ns, prompt, output)
        requests.append(TraceRequest(arrival_ns, prompt, max(1, output), drawn.blocks(prompt)))
    if not requests:
        raise RequestError(f"the trace {name} holds no request", trace=name)
    first_ns = min(item.arrival_ns for item in requests)
    shifted = (replace(item, arrival_ns=item.arrival_ns - first_ns) for item in requests)
    return Trace(name, MOONCAKE_BLOCK_TOKENS, tuple(sorted(shifted, key=lambda item: item.arrival_ns)))


def _pick(columns: Iterable[str], names: tuple[str, ...]) -> str:
    found = next((name for name in names if name in columns), None)
    if found is None:
        raise RequestError(
            f"the CSV trace has none of the columns {', '.join(names)}", columns=", ".join(columns)[:200]
        )
    return found


def _seconds(text: str) -> float:
    """Seconds from a number or from an ISO timestamp."""
    try:
        return float(text)
    except ValueError:
        from datetime import datetime

        return datetime.fromisoformat(text[:26]).timestamp()


class _Conversations:
    """Draws prefixes: a prompt either continues a conversation that is shorter than it, or opens one."""

    def __init__(self, rng: Random, continue_share: float = 0.5, remembered: int = 256) -> None:
        self._rng = rng
        self._share = continue_share
        self._remembered = remembered
        self._open: list[tuple[int, ...]] = []
        self._next = 1

    def blocks(self, prompt_tokens: int) -> tuple[int, ...]:
        """Block ids of the next prompt."""
        size = -(-prompt_tokens // MOONCAKE_BLOCK_TOKENS)
        prefix: tuple[int, ...] = (0,)  # the shared system prompt
        shorter = [item for item in self._open if len(item) < size]
        if shorter and self._rng.random() < self._share:
            prefix = self._rng.choice(shorter)
            self._open.remove(prefix)
        fresh = max(0, size - len(prefix))
        made = (*prefix[:size], *range(self._next, self._next + fresh))
        self._next += fresh
        self._open.append(made)
        del self._open[: -self._remembered]
        return made


def _open_text(path: Path) -> Any:
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8")
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _bounded(name: str, stream: TextIO) -> Iterator[str]:
    """Lines of a stream, never more than one of bounded length in memory.

    Raises:
        RequestError: a line or the whole is too long.
    """
    read_chars = 0
    while line := stream.readline(MAX_LINE_CHARS):
        read_chars += len(line)
        if len(line) == MAX_LINE_CHARS or read_chars > MAX_FILE_CHARS:
            raise RequestError(
                f"the trace {name} unpacks to more than {MAX_FILE_CHARS} characters, or has a line of {MAX_LINE_CHARS}",
                trace=name,
            )
        yield line
