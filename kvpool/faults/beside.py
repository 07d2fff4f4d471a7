"""Another store under the same faults: what its reader wrote down, as one row for the report.  (pure)

Nothing here is judged: it stands beside our own runs, and its failures break no rule of ours. Recovery is measured as
ours is (`kvpool.faults.measures`): from the healing until a whole window of calls is as good as it must be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvpool.faults.measures import Bounds

OK, WRONG, MISSED = "ok", "wrong", "missed"
"""Outcomes of a get that are no failure of the call; any other is the store's own code for one."""

COLUMNS = (
    ("fault", "fault"),
    ("system", "system"),
    ("requests", "sent"),
    ("ok", "ok"),
    ("missed", "missed"),
    ("failed", "failed"),
    ("wrong", "wrong"),
    ("hung", "hung"),
    ("max_stall_ms", "stall ms"),
    ("detect_ms", "detect ms"),
    ("recover_ms", "recover ms"),
    ("lost_keys", "lost keys"),
)
"""Keys of a row, and what its column is called."""

OURS = (
    ("scenario", "fault"),
    ("requests", "requests"),
    ("ok", "ok"),
    ("lost", "failed"),
    ("wrong", "wrong"),
    ("max_stall_ms", "max_stall_ms"),
    ("detect_ms_max", "detect_ms"),
    ("recover_ms_max", "recover_ms"),
)
"""What of a row of ours is comparable, and where it belongs."""


@dataclass(slots=True)
class Call:
    """One call of the reader. ``ended_ns`` and ``outcome`` are None while it has no end."""

    what: str  # get, put, ask
    key: str
    begun_ns: int
    ended_ns: int | None = None
    outcome: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One fault on the other store. Gets that still run when it is over count only when they are ``hung``.

    Attributes:
        missed: gets that were told that the store has no such key.
        failed: gets that ended with an error, counted by its code in ``codes``.
        hung: gets that had not ended after `Bounds.deadline_grace_ns` when the reader was killed.
        detect_ms: from the fault until the store no longer says that it has the key; None when it never does, or
            when the fault takes the memory of it.
        recover_ms: from the healing; None when it did not within the time that it was given.
        lost_keys: known once, and gone afterwards: they had to be put again.
        note: what went wrong with the comparison itself.
    """

    fault: str
    system: str
    requests: int = 0
    ok: int = 0
    missed: int = 0
    failed: int = 0
    wrong: int = 0
    hung: int = 0
    max_stall_ms: float | None = None
    detect_ms: float | None = None
    recover_ms: float | None = None
    lost_keys: int = 0
    codes: tuple[tuple[str, int], ...] = ()
    note: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**asdict(self), "codes": dict(self.codes)}


@dataclass(frozen=True, slots=True)
class Comparison:
    """All faults that were repeated on another store, or why there were none.

    Attributes:
        system: its name.
        settings: how it was run, for readers.
        outcomes: one for every fault.
        why_not: None when it is installed.
    """

    system: str
    settings: str
    outcomes: tuple[Outcome, ...] = ()
    why_not: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        outcomes = [outcome.as_dict() for outcome in self.outcomes]
        return {"system": self.system, "settings": self.settings, "outcomes": outcomes, "why_not": self.why_not}

    def rows(self, ours: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows of ours (see `kvpool.faults.report.row`) and of the other, those of a fault beneath each other."""
        faults = {outcome.fault for outcome in self.outcomes if outcome.requests}
        found = [
            {"system": "kvpool", **{name: numbers.get(key) for key, name in OURS}}
            for numbers in ours
            if numbers.get("scenario") in faults
        ]
        order = [outcome.fault for outcome in self.outcomes]
        found += [asdict(outcome) for outcome in self.outcomes if outcome.requests]
        return sorted(found, key=lambda item: order.index(item["fault"]))  # stable: ours stay first

    def remarks(self) -> list[str]:
        """One line for everything that the numbers do not say."""
        if self.why_not is not None:
            return [f"without the optional comparison with {self.system}, another KV store: {self.why_not}"]
        lines = [f"beside {self.system}: {self.settings}; never judged"]
        for outcome in self.outcomes:
            if outcome.note is not None:
                lines.append(f"{outcome.fault} on {self.system}: {outcome.note}")
            if outcome.hung:
                lines.append(f"{outcome.fault} on {self.system}: {outcome.hung} gets never ended and were killed")
            if outcome.codes:
                codes = ", ".join(f"{code} {count}" for code, count in outcome.codes)
                lines.append(f"{outcome.fault} on {self.system}: failed with {codes}")
        return lines


def calls_of(lines: Iterable[Sequence[Any]]) -> list[Call]:
    """Calls from the reader's lines ``[number, what, key, at_ns, outcome]``, in the order in which they began.

    Raises:
        ValueError, TypeError, KeyError: a line is something else.
    """
    calls: dict[int, Call] = {}
    for number, what, key, at_ns, outcome in lines:
        if outcome is None:
            calls[number] = Call(str(what), str(key), int(at_ns))
        else:
            calls[number].ended_ns, calls[number].outcome = int(at_ns), str(outcome)
    return list(calls.values())


@dataclass(frozen=True, slots=True)
class Times:
    """Of one fault, on the machine's monotonic clock: struck, healed, and the end of the reader."""

    fault_ns: int
    heal_ns: int
    end_ns: int


def tally(
    fault: str, system: str, calls: Sequence[Call], times: Times, bounds: Bounds, *, detectable: bool = True
) -> Outcome:
    """The numbers of one fault.

    Args:
        fault: name of the scenario of ours.
        system: the other store.
        calls: see `calls_of`.
        times: of the fault.
        bounds: as for our own runs.
        detectable: False where the fault takes the store's memory of all keys, so that a miss shows no detection.
    """
    gets = [call for call in calls if call.what == "get"]
    ended = [call for call in gets if call.outcome is not None]
    hung = [call for call in gets if call.outcome is None and call.begun_ns < times.end_ns - bounds.deadline_grace_ns]
    stalls_ns = [(call.ended_ns or times.end_ns) - call.begun_ns for call in (*ended, *hung)]
    counts = Counter(call.outcome for call in ended if call.outcome is not None)
    codes = sorted((code, count) for code, count in counts.items() if code not in (OK, WRONG, MISSED))
    detected_ns = _detected_ns(calls, times) if detectable else None
    recovered_ns = recovered_after_ns(calls, times, bounds)
    return Outcome(
        fault,
        system,
        requests=len(ended) + len(hung),
        ok=counts[OK],
        missed=counts[MISSED],
        failed=sum(count for _, count in codes),
        wrong=counts[WRONG],
        hung=len(hung),
        max_stall_ms=max(stalls_ns, default=0) / 1e6,
        detect_ms=None if detected_ns is None else detected_ns / 1e6,
        recover_ms=None if recovered_ns is None else recovered_ns / 1e6,
        lost_keys=len({call.key for call in ended if call.outcome == MISSED and call.begun_ns >= times.fault_ns}),
        codes=tuple(codes),
    )


def _detected_ns(calls: Sequence[Call], times: Times) -> int | None:
    """From the fault to the first answer, asked for after it, that the key is not there."""
    for call in calls:
        if call.what == "ask" and call.outcome == MISSED and call.begun_ns >= times.fault_ns:
            assert call.ended_ns is not None
            return call.ended_ns - times.fault_ns
    return None


def recovered_after_ns(calls: Sequence[Call], times: Times, bounds: Bounds) -> int | None:
    """From the healing to the first get from which on a whole window of gets is good enough."""
    gets = [call for call in calls if call.what == "get" and call.begun_ns >= times.heal_ns]
    for at, first in enumerate(gets):
        until_ns = first.begun_ns + bounds.window_ns
        if until_ns > times.end_ns:
            return None
        window = [call for call in gets[at:] if call.begun_ns < until_ns]
        if sum(call.outcome == OK for call in window) >= bounds.recovery_share * len(window):
            return first.begun_ns - times.heal_ns if at else 0
    return None
