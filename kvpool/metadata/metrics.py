"""Prometheus metrics of the metadata service: one collector that reads the state when it is scraped.

Nothing in the state knows of metrics. Labels are states, tiers and nothing that grows with the cluster: a label per
worker would make the metrics as large as the index.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import asdict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpool.metadata.state import DirectoryState
from kvpool.metadata.worker_totals import WORKER_TOTALS, WorkerTotals
from kvpool.types import MemberState, Tier

PREFIX = "kvpool_metadata_"
SCRAPE_TIMEOUT_S = 5.0

_HELP = {
    "joins": "Workers that joined",
    "leaves": "Workers that left of themselves",
    "expired": "Workers whose membership lease ended",
    "replaced": "Workers replaced by a newer epoch",
    "fenced": "Calls refused because of an old epoch",
    "incompatible": "Joins refused because of another layout or hash scheme",
    "suspects": "Suspicions started",
    "suspects_ignored": "Reports about workers that were suspected already",
    "restored": "Suspicions ended by probe and back-off",
    "batches": "Event batches applied",
    "duplicate_batches": "Event batches that had been applied before",
    "gaps": "Gaps in event streams",
    "snapshots": "Block snapshots begun",
    "stored_blocks": "Entries added",
    "removed_blocks": "Entries removed",
    "refused_blocks": "Blocks refused at the bound of the index",
    "reports": "Worker reports relayed",
    "lookups": "Lookups answered",
    "watchers_dropped": "Watchers that were too slow and started over",
    "refused_pins": "Pins that found no room",
}


class LoopCollector(Collector):
    """Collects on the event loop that owns the state, once per scrape."""

    def __init__(self, collect: Callable[[], list[Metric]], loop: asyncio.AbstractEventLoop) -> None:
        self._collect = collect
        self._loop = loop

    def describe(self) -> list[Metric]:
        """Nothing in advance: registering must not wait for the loop it happens on."""
        return []

    def collect(self) -> list[Metric]:
        """All metrics of this moment; called by the exporter's thread."""
        return asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(SCRAPE_TIMEOUT_S)

    async def _read(self) -> list[Metric]:
        return self._collect()


def gauge(name: str, text: str, value: float) -> Metric:
    """A gauge without labels."""
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def metrics_of(state: DirectoryState) -> list[Metric]:
    """The metrics of a state."""
    index, members = state.index, state.members()
    by_state = GaugeMetricFamily(PREFIX + "members", "Members by state", labels=["state"])
    held = GaugeMetricFamily(PREFIX + "held_blocks", "Blocks of members by tier", labels=["tier"])
    states = [member.state for member in members]
    counts = [index.counts(member.info.key) for member in members]
    for kind in MemberState:
        by_state.add_metric([kind.value], states.count(kind))
    for tier in Tier:
        held.add_metric([tier.name.lower()], sum(count[tier] for count in counts))
    lag_s = max((member.event_lag_ns for member in members), default=0) / 1e9
    return [
        *(CounterMetricFamily(PREFIX + name, _HELP[name], value=n) for name, n in asdict(state.counters).items()),
        *_worker_metrics(state.worker_totals),
        by_state,
        held,
        gauge("event_lag_seconds", "Age of the oldest unanswered event batch of any worker", lag_s),
        gauge("entries", "(block, worker, tier) entries, those of departed workers until swept", index.entries),
        gauge("max_entries", "Bound on entries", state.limits.max_entries),
        gauge("blocks", "Different blocks", index.blocks),
        gauge("unknown_removals", "Removals of blocks that were not known", index.unknown_removals),
        gauge(
            "entry_bytes", "Resident memory of the process for every entry", resident_bytes() / max(1, index.entries)
        ),
        gauge("pins", "Prefixes that administrators want to stay", len(state.pins.active())),
        gauge("resident_bytes", "Resident memory of the process", resident_bytes()),
    ]


def _worker_metrics(sums: WorkerTotals) -> list[Metric]:
    """What all workers together have done."""
    failures = CounterMetricFamily(
        "kvpool_worker_failures", "Failures of loads, pulls and requests by code", labels=["kind", "code"]
    )
    for (family, code), count in sorted(sums.failures.items()):
        failures.add_metric([family.removesuffix("_failures"), code], count)
    totals = [
        CounterMetricFamily(f"kvpool_worker_{name}", text, value=sums.totals[name])
        for name, text in WORKER_TOTALS.items()
    ]
    return [*totals, failures]


def resident_bytes() -> int:
    """Resident memory of this process; 0 where ``/proc`` does not tell."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0
