"""Loads from a worker's own disk, as part of a request's plan: one loader for both, one load out of two.

The router knows which blocks lie on a worker's disk and plans as if they were there. So the worker adds a slice that
reads them (`with_disk`), and the scheduler waits for it or computes, as with any load.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from kvpool.errors import KVPoolError
from kvpool.plan import LoadSlice, Plan, PlanKind
from kvpool.reports import LoadSample
from kvpool.store.disk import DiskTier
from kvpool.types import BlockHash, RequestId, Tier, WorkerKey
from workers.ports import Load, Loader, LoadProgress
from workers.puller import PullOrder, PullResult, PullSource

DISK = "disk"
"""In place of a transport's name."""

MIN_DEADLINE_NS = 2_000_000_000
DEADLINE_FACTOR = 4
STALL_NS = 2_000_000_000
PROMOTE_DEADLINE_NS = 5_000_000_000
MAX_WISHES = 32
JOIN_S = 10.0
FIRST_ALPHA_NS, FIRST_BYTE_NS = 2_000_000.0, 1.0
"""What a read costs before the first one was measured: 2 ms and 1 GB/s."""

_WEIGHT = 0.2


class DiskSpeed:
    """What reading from disk takes: a fixed part that is assumed, and a time per byte that is learned."""

    def __init__(self) -> None:
        self._byte_ns = FIRST_BYTE_NS
        self._lock = threading.Lock()

    def expect_ns(self, num_bytes: int) -> int:
        """Expected time of a read."""
        with self._lock:
            return round(FIRST_ALPHA_NS + num_bytes * self._byte_ns)

    def observe(self, num_bytes: int, elapsed_ns: int) -> None:
        """A read of ``num_bytes`` bytes took ``elapsed_ns``, waiting for others included."""
        if num_bytes > 0:
            with self._lock:
                seen = max(0.0, elapsed_ns - FIRST_ALPHA_NS) / num_bytes
                self._byte_ns += _WEIGHT * (seen - self._byte_ns)


def with_disk(plan: Plan, start: int, stop: int, key: WorkerKey, expected_ns: int) -> Plan:
    """The plan with blocks ``[start, stop)`` read from the own disk, whatever it said about them."""
    loads = [LoadSlice(start, stop, key, DISK, b"", Tier.DISK)]
    for part in plan.loads:
        for first, last in ((part.start, min(part.stop, start)), (max(part.start, stop), part.stop)):
            if first < last:
                loads.append(part._replace(start=first, stop=last))
    return plan._replace(
        kind=PlanKind.LOAD,
        loads=tuple(sorted(loads, key=lambda part: part.start)),
        split_tokens=None,
        load_deadline_ns=max(plan.load_deadline_ns, MIN_DEADLINE_NS, DEADLINE_FACTOR * expected_ns),
        stall_ns=plan.stall_ns or STALL_NS,
        predicted_load_ns=max(plan.predicted_load_ns, expected_ns),
    )


@dataclass(frozen=True, slots=True)
class _Both:
    """Progress of two loads as of one."""

    arrived: Collection[int]
    terminal: bool
    failures: Sequence[str]
    bytes_arrived: int
    started_ns: int
    finished_ns: int | None


class _Pair:
    """Two loads as one."""

    def __init__(self, loads: tuple[Load, Load]) -> None:
        self._loads = loads

    def progress(self) -> _Both:
        """Current snapshot of both."""
        one, two = (load.progress() for load in self._loads)
        terminal = one.terminal and two.terminal
        ends = [part.finished_ns for part in (one, two) if part.finished_ns is not None]
        return _Both(
            {*one.arrived, *two.arrived},
            terminal,
            (*one.failures, *two.failures),
            one.bytes_arrived + two.bytes_arrived,
            min(one.started_ns, two.started_ns),
            max(ends) if terminal and ends else None,
        )

    def cancel(self) -> None:
        """Give both up."""
        for load in self._loads:
            load.cancel()

    def on_change(self, callback: Callable[[LoadProgress], None]) -> None:
        """Call after every change of either."""
        for load in self._loads:
            load.on_change(lambda _: callback(self.progress()))


class DiskLoader:
    """Starts loads whose slices name this worker on the disk, and all others on the data plane.

    Args:
        key: this worker.
        disk: started.
        remote: the data plane's loader, None without one.
        speed: learns.
        on_sample: told how each read from disk went, given up or not; must not block.
    """

    def __init__(
        self,
        key: WorkerKey,
        disk: DiskTier,
        remote: Loader | None,
        speed: DiskSpeed,
        on_sample: Callable[[LoadSample], None],
    ) -> None:
        self._key = key
        self._disk = disk
        self._remote = remote
        self._speed = speed
        self._on_sample = on_sample

    def start(self, request_id: RequestId, plan: Plan, chain: Sequence[BlockHash], pages: Mapping[int, int]) -> Load:
        """As `workers.ports.Loader.start`.

        Raises:
            KVPoolError: a part could not be started; then none was.
        """
        own = [part for part in plan.loads if part.holder == self._key]
        indices = {index for index in pages if any(part.start <= index < part.stop for part in own)}
        here = {index: (chain[index], offset) for index, offset in sorted(pages.items()) if index in indices}
        there = {index: offset for index, offset in pages.items() if index not in indices}
        remote = None
        if there and self._remote is not None:
            others = tuple(part for part in plan.loads if part.holder != self._key)
            remote = self._remote.start(request_id, plan._replace(loads=others), chain, there)
        if not here:
            if remote is None:
                return self._disk.load({}, plan.load_deadline_ns)
            return remote
        try:
            local = self._disk.load(here, plan.load_deadline_ns)
        except KVPoolError:
            if remote is None:
                raise
            return remote  # what the disk would have brought is redone
        local.on_change(self._learn)
        return local if remote is None else _Pair((local, remote))

    def _learn(self, progress: LoadProgress) -> None:
        if not progress.terminal or progress.finished_ns is None:
            return
        elapsed_ns, size = progress.finished_ns - progress.started_ns, progress.bytes_arrived
        if not progress.failures:
            self._speed.observe(size, elapsed_ns)
        failure = progress.failures[0] if progress.failures else None
        self._on_sample(LoadSample(self._key, size, len(progress.arrived), elapsed_ns, failure, Tier.DISK))


class Promoter:
    """Reads from disk into memory what peers asked for in vain, so that the next one finds it.

    A peer is never made to wait for a disk: it redoes, or asks another. One thread; a few wishes wait, the rest are
    dropped and counted.

    Args:
        key: this worker.
        disk: started.
        pull: carries one promotion out and waits for it.
    """

    def __init__(self, key: WorkerKey, disk: DiskTier, pull: Callable[[PullOrder], PullResult]) -> None:
        self._key = key
        self._disk = disk
        self._pull = pull
        self._wishes: queue.Queue[tuple[BlockHash, ...] | None] = queue.Queue(MAX_WISHES)
        self.counters: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name=f"kvpool-promote-{key.worker_id}", daemon=True)
        self._thread.start()

    def missed(self, hashes: Sequence[BlockHash]) -> None:
        """A reader did not find these, in chain order. Never waits."""
        start = next((place for place, item in enumerate(hashes) if self._disk.origin(item) is not None), None)
        if start is None:
            return
        try:
            self._wishes.put_nowait(tuple(hashes[start:]))
        except queue.Full:
            self.counters["promotions_dropped"] += 1

    def close(self) -> None:
        """End the thread, after `Puller.close` has ended what it waits for."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._wishes.get_nowait()
        self._wishes.put(None)
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        while (wish := self._wishes.get()) is not None:
            blocks = self._disk.run(wish, 0)
            origin = self._disk.origin(wish[0])
            if not blocks or origin is None:
                continue
            source = PullSource(self._key, DISK, b"", blocks)
            order = PullOrder(origin[1], wish[:blocks], (source,), PROMOTE_DEADLINE_NS, parent=origin[0])
            try:
                self.counters["promotions"] += self._pull(order).held > 0
            except KVPoolError:
                self.counters["promotions_failed"] += 1
