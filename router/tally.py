"""What one router did, and what it heard of failures, counted since it started.  (pure)

Not thread-safe, as the core it belongs to. What it did is its own; what it heard, all routers of a cluster hear.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvpool.types import WorkerId
from router.admission import Admission


class Tally:
    """Counts of one router.

    Attributes:
        decided: decisions by plan kind, those that nobody followed included.
        unfollowed: of those by plan kind what was given back before a worker had the request: another router's answer
            came first, or the client had gone.
        admissions: rulings by name; see `router.admission`.
        events: everything else, by name.
        failures: failed loads by code.
        failures_by_link: the same by holder, reader and code.
    """

    def __init__(self) -> None:
        self.decided: Counter[str] = Counter()
        self.unfollowed: Counter[str] = Counter()
        self.admissions: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.failures_by_link: Counter[tuple[WorkerId, WorkerId, str]] = Counter()

    def load_failed(self, holder: WorkerId, reader: WorkerId, code: str) -> None:
        """A load from ``holder`` to ``reader`` ended without what it was to bring."""
        self.failures[code] += 1
        self.failures_by_link[holder, reader, code] += 1

    @property
    def shed(self) -> int:
        """Requests that were refused because a limit could not be met."""
        return self.admissions[Admission.SHED.value]

    def to_dict(self) -> dict[str, Any]:
        """For ``kvpool status``. Decisions are those that somebody followed."""
        return {
            "decisions": {kind: count - self.unfollowed[kind] for kind, count in self.decided.items()},
            "unfollowed": dict(self.unfollowed),
            "admissions": dict(self.admissions),
            "failures": dict(self.failures),
            "failures_by_link": [
                {"holder": holder, "reader": reader, "kind": kind, "count": count}
                for (holder, reader, kind), count in sorted(self.failures_by_link.items())
            ],
            "counters": dict(self.events),
        }
