"""Prometheus metrics of one router: a collector that reads the core's tally and its state when it is scraped.

Labels are plans, rulings, causes, codes and states: nothing that grows with the cluster or that a worker makes up.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpool.errors import BY_CODE
from kvpool.metadata.watcher import MetadataWatcher
from kvpool.plan import PlanKind
from kvpool.types import MemberState
from router.admission import Admission
from router.core import RouterCore
from router.status import Vitals
from router.tally import Histogram, Tally

PREFIX = "kvpool_router_"
OTHER = "other"
RULINGS = (Admission.QUEUE, Admission.DEGRADE, Admission.SHED)


class RouterCollector(Collector):
    """Reads a core under the lock that guards it, and the watcher that feeds it."""

    def __init__(self, core: RouterCore, lock: threading.Lock, watcher: MetadataWatcher) -> None:
        self._core = core
        self._lock = lock
        self._watcher = watcher

    def describe(self) -> list[Metric]:
        """Nothing in advance; nobody registers twice."""
        return []

    def collect(self) -> list[Metric]:
        """All metrics of this moment; called by the exporter's thread."""
        with self._lock:
            did = tally_metrics(self._core.tally)
            vitals = self._core.vitals()
        return [*did, *vital_metrics(vitals), *index_metrics(self._watcher.status())]


def tally_metrics(tally: Tally) -> list[Metric]:
    """What the router did and heard since it started."""
    failures: Counter[str] = Counter()
    for code, count in tally.failures.items():
        failures[code if code in BY_CODE else OTHER] += count
    kinds, rulings = [kind.value for kind in PlanKind], [ruling.value for ruling in RULINGS]
    return [
        _counters("decisions", "Requests given a worker, by plan", "plan", kinds, tally.decided),
        _counters("unfollowed", "Decisions that nobody followed", "plan", kinds, tally.unfollowed),
        CounterMetricFamily(
            f"{PREFIX}lapsed_promises", "Promises whose request no worker ever named", value=tally.lapsed
        ),
        _counters(
            "rulings",
            "Rulings on requests with limits and on those that wait, whenever one asks",
            "ruling",
            rulings,
            tally.admissions,
        ),
        _counters(
            "failovers",
            "Requests that came since their worker, or the router they ask first, had failed",
            "failed",
            ("worker", "router"),
            tally.failovers,
        ),
        _counters("load_failures", "Failed loads of all workers", "code", sorted(failures), failures),
        _histogram("decision_seconds", "From a request's arrival to its decision", tally.decision_s),
        _histogram("ttft_error_seconds", "Time to first token, real against predicted, either way", tally.ttft_error_s),
        _histogram("ttft_ratio", "Time to first token, real / predicted", tally.ttft_ratio),
    ]


def vital_metrics(vitals: Vitals) -> list[Metric]:
    """The router's state now."""
    workers = GaugeMetricFamily(f"{PREFIX}workers", "Workers known; those alive take requests", labels=["state"])
    for state in MemberState:
        workers.add_metric([state.value], vitals.states[state])
    return [
        workers,
        _gauge("queued_requests", "Requests that wait at the router: they were told to ask again", vitals.queued),
        _gauge("promises", "Requests promised to workers that no report shows yet", vitals.promises),
        _gauge("report_age_seconds", "Oldest last report of a worker that has work", vitals.report_age_ns / 1e9),
    ]


def index_metrics(watched: Mapping[str, Any]) -> list[Metric]:
    """The router's copy of the directory, from `MetadataWatcher.status`. It has no age before the first snapshot."""
    age_ns = watched["age_ns"]
    aged = [] if age_ns is None else [_gauge("index_age_seconds", "Since the directory was last heard", age_ns / 1e9)]
    return [
        *aged,
        _gauge("index_connected", "1 while the index follows the directory, else 0", watched["connected"]),
        _gauge("index_blocks", "Different blocks in the index", watched["blocks"]),
        CounterMetricFamily(
            f"{PREFIX}directory_failovers", "Changes to another metadata server", value=watched["failovers"]
        ),
    ]


def _counters(name: str, text: str, label: str, values: Any, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for value in values:
        family.add_metric([value], counts.get(value, 0))
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _histogram(name: str, text: str, values: Histogram) -> Metric:
    return HistogramMetricFamily(PREFIX + name, text, buckets=values.cumulative(), sum_value=values.total)
