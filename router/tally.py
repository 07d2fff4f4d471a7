"""What one router did, and what it heard of failures, counted since it started.  (pure)

Not thread-safe, as the core it belongs to. What it did is its own; what it heard, all routers of a cluster hear.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate
from typing import Any

from kvpool.types import WorkerId
from router.admission import Admission

DECISION_BOUNDS_S = (25e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3, 0.2, 1.0)
TTFT_ERROR_BOUNDS_S = (1e-3, 5e-3, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0)
TTFT_RATIO_BOUNDS = (0.25, 0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)


class Histogram:
    """Values counted by the least bound that is not below them.

    Attributes:
        total: the sum of all values.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, int]]:
        """For every bound, the last one ``+Inf``, how many values are not above it."""
        return list(zip((*map(str, self._bounds), "+Inf"), accumulate(self._counts), strict=True))


class Tally:
    """Counts of one router.

    Attributes:
        decided: decisions by plan kind, those that nobody followed included.
        unfollowed: of those by plan kind what nobody followed: another router's answer came first, or the user gave up.
        admissions: rulings by name; see `router.admission`.
        events: everything else, by name.
        failures: failed loads by code.
        failures_by_link: the same by holder, reader and code.
        failovers: requests that came here as a ``worker`` had failed them, or the ``router`` that they ask first.
        lapsed: promises that ran out before a worker had named the request.
        decision_s: how long decisions took, hashing and waiting for the lock included.
        ttft_error_s, ttft_ratio: real against predicted time to first token: |real - predicted|, and real / predicted.
    """

    def __init__(self) -> None:
        self.decided: Counter[str] = Counter()
        self.unfollowed: Counter[str] = Counter()
        self.admissions: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.failures_by_link: Counter[tuple[WorkerId, WorkerId, str]] = Counter()

        self.failovers: Counter[str] = Counter()
        self.lapsed = 0
        self.decision_s = Histogram(DECISION_BOUNDS_S)
        self.ttft_error_s = Histogram(TTFT_ERROR_BOUNDS_S)
        self.ttft_ratio = Histogram(TTFT_RATIO_BOUNDS)

    def first_token(self, real_ns: int, predicted_ns: int) -> None:
        """A request had its first token."""
        self.ttft_error_s.add(abs(real_ns - predicted_ns) / 1e9)
        self.ttft_ratio.add(real_ns / max(1, predicted_ns))

    def count_failed_load(self, holder: WorkerId, reader: WorkerId, code: str) -> None:
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
