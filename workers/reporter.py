"""What a worker tells the routers about itself, at a bounded rate.

Samples and outcomes are collected until the next report; a first token makes a report due at once, any other news
after `BUSY_NS`, silence after `IDLE_NS`. Collections are bounded: what does not fit is dropped and counted, because
losing a sample loses accuracy, never correctness. Owned by the engine thread, except `accept`, which the core calls
under its lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from kvpool.reports import LoadSample, PrefillSample, RequestOutcome, WorkerLoad, WorkerReport
from kvpool.types import RequestId, WorkerKey
from workers.ports import Publisher

BUSY_NS = 100_000_000
IDLE_NS = 1_000_000_000
URGENT_NS = 10_000_000
MAX_PENDING = 1024

_T = TypeVar("_T")


class Reporter:
    """Collects and sends `WorkerReport`s.

    Args:
        key: this worker.
        publisher: where reports go.
    """

    def __init__(self, key: WorkerKey, publisher: Publisher) -> None:
        self._key = key
        self._publisher = publisher
        self.counters: Counter[str] = Counter()
        self._prefills: list[PrefillSample] = []
        self._loads: list[LoadSample] = []
        self._outcomes: list[RequestOutcome] = []
        self._accepted: list[RequestId] = []
        self._sequence = 0
        self._sent_ns: int | None = None
        self._news = False
        self._urgent = False

    def accept(self, request_id: RequestId) -> None:
        """A request was accepted; the router may drop its promise."""
        self.counters["requests"] += 1
        self._keep(self._accepted, request_id)

    def prefill(self, sample: PrefillSample) -> None:
        """One pass that did nothing but prefill one request."""
        self._keep(self._prefills, sample)

    def load(self, sample: LoadSample) -> None:
        """One read from one holder ended."""
        self._keep(self._loads, sample)

    def outcome(self, outcome: RequestOutcome) -> None:
        """A request got its first token."""
        self.counters["tokens_cached"] += outcome.tokens_cached
        self.counters["tokens_loaded"] += outcome.tokens_loaded
        self.counters["tokens_redone"] += outcome.tokens_redone
        self._urgent = True
        self._keep(self._outcomes, outcome)

    def due_ns(self, now_ns: int) -> int:
        """When the next report should go out."""
        if self._sent_ns is None:
            return now_ns
        gap_ns = URGENT_NS if self._urgent else BUSY_NS if self._news else IDLE_NS
        return self._sent_ns + gap_ns

    def send(self, now_ns: int, load: WorkerLoad, counters: Mapping[str, int]) -> None:
        """Report now: the collected news, the queue and every counter."""
        accepted, self._accepted = tuple(self._accepted), []
        self._sequence += 1
        self._publisher.report(
            WorkerReport(
                key=self._key,
                sequence=self._sequence,
                load=replace(load, served_request_ids=accepted),
                prefills=tuple(self._prefills),
                loads=tuple(self._loads),
                outcomes=tuple(self._outcomes),
                counters=tuple(sorted(counters.items())),
            )
        )
        self._prefills, self._loads, self._outcomes = [], [], []
        self._news = self._urgent = False
        self._sent_ns = now_ns

    def _keep(self, kept: list[_T], item: _T) -> None:
        self._news = True
        if len(kept) < MAX_PENDING:
            kept.append(item)
        else:
            self.counters["samples_dropped"] += 1
