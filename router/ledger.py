"""Reservations: work this router has promised and no report has shown yet.  (pure)

Choosing and reserving are one step of the caller, so a burst of requests sees its own promises and spreads. GPU and
both ends of a link are virtual clocks: a promise moves the moment at which they are free, passing time drains it. A
promise of GPU time ends when the worker's report names the request as accepted (the report then contains the work),
when it is released, or after a bound; link time simply passes, or is given back by a release.

Invariants: a worker's free moment is its reported moment plus its live promises; a request has at most one entry;
nothing promised is negative; memory is bounded by the requests of the last `PROMISE_BOUND_NS` and of the queues.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from kvpool.types import RequestId, WorkerKey
from router.planning import Promise

PROMISE_BOUND_NS = 5_000_000_000  # after the promised end: how long a report may be missing


@dataclass(slots=True)
class _Entry:
    """One request's promises. ``live`` while its GPU time is not yet in the worker's report."""

    promise: Promise
    due_ns: float
    ends_ns: tuple[float, ...]  # one per transfer
    live: bool = True


@dataclass(slots=True)
class Totals:
    """What is promised with one worker. Written by the ledger; for all others it counts until the ledger's next call.

    Moments are in the router's clock; 0 when nothing ever was.

    Attributes:
        gpu_free_ns: when reported and promised prefill ends.
        in_free_ns, out_free_ns: when promised loads in and out end.
        live: requests of live promises.
        tokens: their prompt tokens to compute.
    """

    gpu_free_ns: float = 0.0
    in_free_ns: float = 0.0
    out_free_ns: float = 0.0
    live: set[RequestId] = field(default_factory=set)
    tokens: int = 0

    @property
    def requests(self) -> int:
        """Live promises."""
        return len(self.live)

    def settle(self, request: RequestId, promise: Promise) -> None:
        """A live promise is one no longer."""
        self.live.discard(request)
        self.tokens -= promise.tokens


class Ledger:
    """Promises of one router. Not thread-safe."""

    def __init__(self, bound_ns: int = PROMISE_BOUND_NS) -> None:
        self._bound_ns = bound_ns
        self._accounts: dict[WorkerKey, Totals] = {}
        self._entries: dict[RequestId, _Entry] = {}
        self._expiry: list[tuple[float, RequestId]] = []
        self.lapsed = 0
        """Promises that ran out before a worker had named the request."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._entries

    def totals(self, worker: WorkerKey) -> Totals:
        """What is promised with a worker."""
        found = self._accounts.get(worker)
        return Totals() if found is None else found

    def reserve(self, request: RequestId, promise: Promise, now_ns: int) -> tuple[WorkerKey, ...]:
        """Promise a decision's work, replacing an earlier promise of the same request (a retry).

        Returns:
            The workers whose totals changed.
        """
        changed = [promise.worker]
        if request in self._entries:
            changed += self.release(request, now_ns)
        reader = self._account(promise.worker)
        reader.gpu_free_ns = max(reader.gpu_free_ns, now_ns) + promise.gpu_ns
        reader.live.add(request)
        reader.tokens += promise.tokens
        ends = []
        for transfer in promise.transfers:
            holder = self._account(transfer.holder)
            ends.append(max(holder.out_free_ns, reader.in_free_ns, now_ns) + transfer.busy_ns)
            holder.out_free_ns = max(holder.out_free_ns, now_ns) + transfer.busy_ns
            reader.in_free_ns = max(reader.in_free_ns, now_ns) + transfer.in_ns
            changed.append(transfer.holder)
        due_ns = max(reader.gpu_free_ns, reader.in_free_ns) + self._bound_ns
        self._entries[request] = _Entry(promise, due_ns, tuple(ends))
        heapq.heappush(self._expiry, (due_ns, request))
        return tuple(dict.fromkeys(changed)) if len(changed) > 2 else tuple(changed)

    def on_report(self, worker: WorkerKey, work_ns: float, accepted: tuple[RequestId, ...], now_ns: int) -> None:
        """A worker says how much prefill work it has, and which requests are newly part of it."""
        account = self._account(worker)
        for request in accepted:
            entry = self._entries.get(request)
            if entry is not None and entry.promise.worker == worker:
                self._settle(request, entry)
        promised = sum(self._entries[request].promise.gpu_ns for request in account.live)
        account.gpu_free_ns = now_ns + work_ns + promised

    def release(self, request: RequestId, now_ns: int) -> tuple[WorkerKey, ...]:
        """Give back what is left of a request's promises: it is over, failed or routed anew. May be repeated.

        Returns:
            The workers whose totals changed.
        """
        entry = self._entries.pop(request, None)
        if entry is None:
            return ()
        promise = entry.promise
        changed = {promise.worker, *(transfer.holder for transfer in promise.transfers)}
        reader = self._accounts.get(promise.worker)
        if reader is not None and entry.live:
            reader.settle(request, promise)
            reader.gpu_free_ns = max(0.0, reader.gpu_free_ns - promise.gpu_ns)
        for transfer, end_ns in zip(promise.transfers, entry.ends_ns, strict=True):
            unused = min(transfer.busy_ns, max(0.0, end_ns - now_ns))
            if reader is not None:
                reader.in_free_ns = max(0.0, reader.in_free_ns - min(unused, transfer.in_ns))
            holder = self._accounts.get(transfer.holder)
            if holder is not None:
                holder.out_free_ns = max(0.0, holder.out_free_ns - unused)
        return tuple(changed)

    def expire(self, now_ns: int) -> tuple[WorkerKey, ...]:
        """Drop promises past their bound; returns the workers whose totals changed."""
        if not self._expiry or self._expiry[0][0] > now_ns:
            return ()
        changed: set[WorkerKey] = set()
        while self._expiry and self._expiry[0][0] <= now_ns:
            due_ns, request = heapq.heappop(self._expiry)
            entry = self._entries.get(request)
            if entry is not None and entry.due_ns == due_ns:
                self.lapsed += entry.live
                changed.update(self.release(request, now_ns))
        return tuple(changed)

    def forget(self, worker: WorkerKey, now_ns: int) -> None:
        """A worker is gone, and its promises with it."""
        account = self._accounts.get(worker)
        if account is None:
            return
        for request in tuple(account.live):
            self.release(request, now_ns)
        del self._accounts[worker]

    def _account(self, worker: WorkerKey) -> Totals:
        account = self._accounts.get(worker)
        if account is None:
            account = self._accounts[worker] = Totals()
        return account

    def _settle(self, request: RequestId, entry: _Entry) -> None:
        """The report contains the request's GPU time now; its loads may still run."""
        if entry.live:
            entry.live = False
            self._accounts[entry.promise.worker].settle(request, entry.promise)
        if not entry.ends_ns:
            del self._entries[request]
