"""What all workers together have done, summed from their reports.  (pure)

Reports carry running totals of one incarnation; the sums grow by what is new in each. Names are a fixed list and
failures are counted by known codes, so nothing a worker sends makes the metrics grow.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from kvpool.errors import BY_CODE
from kvpool.reports import WorkerReport
from kvpool.types import WorkerKey

WORKER_TOTALS = {
    "requests": "Requests accepted",
    "tokens_cached": "Prompt tokens that were in the worker's memory",
    "tokens_loaded": "Prompt tokens loaded from peers and from disk",
    "tokens_redone": "Prompt tokens computed",
    "loads": "Loads that ended",
    "bytes_loaded": "Bytes loaded from peers and from disk",
    "bytes_served": "Bytes sent to peers",
    "device_fills": "Blocks put into a request's view from device memory",
    "device_fill_bytes": "Bytes of those",
    "host_fills": "Blocks put into a request's view from host memory by workers with a device tier",
    "host_fill_bytes": "Bytes of those",
    "device_promotions": "Blocks that came into device memory from host memory",
    "device_stores": "Blocks that came into device memory when they were computed",
    "device_evictions": "Blocks that left device memory to make room there",
    "device_drops": "Blocks that left device memory because host memory lost them",
    "disk_blocks_read": "Blocks read from disk",
    "disk_blocks_written": "Blocks written to disk",
    "disk_blocks_lost": "Blocks that were not written, or were damaged on disk",
    "evictions": "Blocks evicted from memory",
    "evicted_idle_ms": "Sum of how long evicted blocks had not been used, in milliseconds",
    "evicted_kept": "Pinned blocks that were evicted all the same",
    "leases": "Read leases taken by peers",
    "leases_expired": "Read leases that ran out",
    "leases_refused": "Read leases refused at the bound",
    "pulled_blocks": "Blocks copied for pins, drains and promotions",
    "preemptions": "Running requests that gave way",
}
FAILURE_FAMILIES = ("load_failures", "pull_failures", "request_failures")
OTHER = "other"
MAX_WORKERS = 4096
"""Incarnations whose last totals are remembered."""


class WorkerTotals:
    """Sums over all workers since the directory started. Not thread-safe."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter(dict.fromkeys(WORKER_TOTALS, 0))
        self.failures: Counter[tuple[str, str]] = Counter()
        """By family and code."""
        self._seen: OrderedDict[WorkerKey, dict[str, int]] = OrderedDict()

    def add(self, report: WorkerReport) -> None:
        """Take what is new in a report; one that repeats or goes back adds nothing."""
        before = self._seen.pop(report.key, {})
        now: dict[str, int] = {}
        for name, value in report.counters:
            family, _, code = name.partition(".")
            known = name in WORKER_TOTALS or (code and family in FAILURE_FAMILIES)
            if not known or len(now) > 4 * len(WORKER_TOTALS):
                continue
            now[name] = max(value, before.get(name, 0))
            gained = now[name] - before.get(name, 0)
            if name in WORKER_TOTALS:
                self.totals[name] += gained
            elif gained:
                self.failures[family, code if code in BY_CODE else OTHER] += gained
        self._seen[report.key] = {**before, **now}
        while len(self._seen) > MAX_WORKERS:
            self._seen.popitem(last=False)
