"""What a history tells, gathered in one pass: requests, attempts, faults, audits.  (pure)

Nothing is judged here; `kvpool.faults.checker` does that. Every item keeps the number of its line, so that a verdict
can point into the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpool.faults.history import Kind, Record


@dataclass(slots=True)
class Attempt:
    """One try of a request: a route and a stream. ``end_line`` is None while it is open."""

    line: int
    at_ns: int
    number: int
    worker: str = ""
    plan: str = ""
    holders: tuple[str, ...] = ()
    planned_tokens: int = 0
    forced: bool = False
    end_line: int | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """A response or an error: what a request ended with."""

    line: int
    at_ns: int
    code: str | None  # of the error; None for a response
    finish: str = ""
    tokens: tuple[int, ...] = ()
    stats: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Request:
    """One request as its client saw it."""

    id: str
    line: int
    at_ns: int
    prompt: str | None
    style: str
    timeout_ns: int
    may_expire: bool
    max_tokens: int
    attempts: list[Attempt] = field(default_factory=list)
    delivered: list[int] = field(default_factory=list)
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    max_gap_ns: int = 0
    cancelled: bool = False
    endings: list[Ending] = field(default_factory=list)
    late_lines: list[int] = field(default_factory=list)  # chunks after the end

    @property
    def end(self) -> Ending | None:
        """The first ending."""
        return self.endings[0] if self.endings else None

    @property
    def ttft_ns(self) -> int | None:
        """From the invocation to the first token; None without any."""
        return None if self.first_token_ns is None else self.first_token_ns - self.at_ns


@dataclass(slots=True)
class Fault:
    """One fault, and when it was healed."""

    id: str
    line: int
    at_ns: int
    name: str
    target: str
    mechanism: str
    key: str | None
    heal_line: int | None = None
    heal_ns: int | None = None


@dataclass(frozen=True, slots=True)
class State:
    """A look at the router."""

    line: int
    at_ns: int
    alive: frozenset[str]
    error: str | None


@dataclass(slots=True)
class Story:
    """Everything a history tells. ``strays`` are lines about requests that were never invoked."""

    run: Mapping[str, Any] = field(default_factory=dict)
    references: dict[str, tuple[int, ...]] = field(default_factory=dict)
    start_ns: int | None = None
    rest_ns: int | None = None
    end: Record | None = None
    last_ns: int = 0
    last_line: int = 0
    requests: dict[str, Request] = field(default_factory=dict)
    faults: dict[str, Fault] = field(default_factory=dict)
    states: list[State] = field(default_factory=list)
    audits: list[Record] = field(default_factory=list)
    strays: list[int] = field(default_factory=list)


def read_story(records: Iterable[Record]) -> Story:
    """Gather a story. The records are consumed one by one."""
    story = Story()
    for record in records:
        story.last_ns, story.last_line = record.at_ns, record.line
        if "id" in record.data and record.kind is not Kind.INVOKE:
            request = story.requests.get(record.data["id"])
            if request is None:
                story.strays.append(record.line)
            else:
                _tell_request(request, record)
        else:
            _tell(story, record)
    return story


def _tell(story: Story, record: Record) -> None:
    data = record.data
    match record.kind:
        case Kind.RUN:
            story.run = data
        case Kind.REFERENCE:
            story.references[data["prompt"]] = tuple(data["tokens"])
        case Kind.START:
            story.start_ns = record.at_ns
        case Kind.INVOKE:
            story.requests[data["id"]] = _invoked(record)
        case Kind.FAULT:
            story.faults[data["fault"]] = Fault(
                data["fault"],
                record.line,
                record.at_ns,
                data["name"],
                data["target"],
                data.get("mechanism", ""),
                data.get("key"),
            )
        case Kind.HEAL:
            fault = story.faults.get(data["fault"])
            if fault is None:
                story.strays.append(record.line)
            else:
                fault.heal_line, fault.heal_ns = record.line, record.at_ns
        case Kind.STATE:
            alive = frozenset(data.get("alive", ()))
            story.states.append(State(record.line, record.at_ns, alive, data.get("error")))
        case Kind.REST:
            story.rest_ns = record.at_ns
        case Kind.AUDIT:
            story.audits.append(record)
        case Kind.END:
            story.end = record
        case _:
            story.strays.append(record.line)


def _invoked(record: Record) -> Request:
    data = record.data
    return Request(
        id=data["id"],
        line=record.line,
        at_ns=record.at_ns,
        prompt=data.get("prompt"),
        style=data["style"],
        timeout_ns=data["timeout_ns"],
        may_expire=data.get("may_expire", False),
        max_tokens=data["max_tokens"],
    )


def _tell_request(request: Request, record: Record) -> None:
    data = record.data
    match record.kind:
        case Kind.ATTEMPT:
            request.attempts.append(_attempt(record))
        case Kind.ATTEMPT_END:
            _end_attempt(request, record)
        case Kind.CHUNK:
            _deliver(request, record)
        case Kind.CANCEL:
            request.cancelled = True
        case Kind.RESPONSE:
            ending = Ending(
                record.line, record.at_ns, None, data["finish"], tuple(data["tokens"]), data.get("stats", {})
            )
            request.endings.append(ending)
        case Kind.ERROR:
            request.endings.append(Ending(record.line, record.at_ns, data["code"]))


def _attempt(record: Record) -> Attempt:
    data = record.data
    return Attempt(
        line=record.line,
        at_ns=record.at_ns,
        number=data["number"],
        worker=data["worker"],
        plan=data["plan"],
        holders=tuple(data.get("holders", ())),
        planned_tokens=data.get("planned_tokens", 0),
        forced=data.get("forced", False),
    )


def _end_attempt(request: Request, record: Record) -> None:
    """Close the attempt of that number; one that never got a route begins and ends here."""
    number = record.data["number"]
    for attempt in request.attempts:
        if attempt.number == number:
            break
    else:
        attempt = Attempt(record.line, record.at_ns, number)
        request.attempts.append(attempt)
    attempt.end_line, attempt.code = record.line, record.data.get("code")


def _deliver(request: Request, record: Record) -> None:
    if request.endings:
        request.late_lines.append(record.line)
    if not record.data["tokens"]:
        return
    since_ns = request.at_ns if request.last_token_ns is None else request.last_token_ns
    request.max_gap_ns = max(request.max_gap_ns, record.at_ns - since_ns)
    if request.first_token_ns is None:
        request.first_token_ns = record.at_ns
    request.last_token_ns = record.at_ns
    request.delivered.extend(record.data["tokens"])
