"""A worker's side of the metadata service: membership, block events, reports, to every replica.

Every replica has a `kvpool.metadata.link.Link`. Links know nothing of each other, so a dead replica costs nothing but
its own threads' retries. Callers never wait: `MetadataPublisher.stored`, ``removed``, ``report`` and ``suspect`` put
into bounded queues and return. What overflows is counted and, for block events, made good by a snapshot.

A broken metadata service never stops a worker; `MetadataPublisher.status` shows it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvpool.errors import KVPoolError
from kvpool.metadata.client import check_endpoints
from kvpool.metadata.disturbance import Disturbance
from kvpool.metadata.events import BlockAction, BlockEvent
from kvpool.metadata.link import CALL_TIMEOUT_S, Link
from kvpool.reports import WorkerReport
from kvpool.types import BlockHash, MemberInfo, Tier, WorkerKey

log = logging.getLogger(__name__)


class MetadataPublisher:
    """Registers one worker with every replica and keeps it registered.

    Args:
        endpoints: addresses of the replicas.
        member: what the worker says about itself.
        snapshot: returns every block the worker holds; called from the publisher's threads, at any time after `start`,
            without any lock of the publisher. The owner must change its own state before it calls `stored` or
            `removed`, so that a snapshot taken after a call contains it.
        on_fenced: called once, from a thread of the publisher, when a replica says that a newer epoch of this worker
            exists: this incarnation is a zombie and should stop. Nothing is published any more.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        member: MemberInfo,
        snapshot: Callable[[], Sequence[tuple[Tier, BlockHash]]],
        on_fenced: Callable[[str], None],
    ) -> None:
        self.member = member
        self._on_fenced = on_fenced
        self._fenced = threading.Event()
        self._draining = threading.Event()
        self._links = [
            Link(address, member, snapshot, self._fence, self._draining) for address in check_endpoints(endpoints)
        ]

    def start(self, timeout_s: float = 5.0) -> None:
        """Join every replica that answers, then go on in the background. Replicas that are down are joined later.

        Raises:
            IncompatibleError: a replica's pool has another layout or hash scheme; nothing was started.
            StaleError: a newer epoch of this worker is known; nothing was started.
            CapacityError: a replica has as many members as it takes; nothing was started.
            RequestError: the member info is malformed; nothing was started.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            for link in self._links:
                link.first_join(max(0.1, min(CALL_TIMEOUT_S, deadline_s - time.monotonic())))
        except KVPoolError:
            self.close()
            raise  # replicas that had accepted were told that this epoch left
        for link in self._links:
            link.start()

    def close(self, *, leave: bool = True) -> None:
        """Leave the pool (unless told not to, or fenced) and end all threads. May be repeated."""
        for link in self._links:
            link.stop()
        for link in self._links:
            link.finish(leave=leave and not self._fenced.is_set())

    def stored(self, tier: Tier, hashes: Sequence[BlockHash], *, group: int = 0, linked: bool = False) -> None:
        """Blocks are complete and readable in ``tier``. Never waits.

        ``linked``: each hash is the child of the one before it in one chain. It makes lookups faster; never claim it
        when a block between two of them is left out.
        """
        self._add(BlockEvent(BlockAction.STORED, tier, tuple(hashes), group, linked))

    def removed(self, tier: Tier, hashes: Sequence[BlockHash], *, group: int = 0) -> None:
        """Blocks are no longer in ``tier``. Never waits."""
        self._add(BlockEvent(BlockAction.REMOVED, tier, tuple(hashes), group))

    def report(self, report: WorkerReport) -> None:
        """Send a report. Never waits; the oldest waiting reports are dropped and counted when too many wait."""
        for link in self._links:
            link.queue_report(report)

    def suspect(self, key: WorkerKey, reason: str) -> None:
        """A load from ``key`` failed with this `KVPoolError.code`. Never waits."""
        for link in self._links:
            link.queue_suspicion(key, reason)

    def disturb(self, disturbance: Disturbance) -> None:
        """Lose, repeat or hold back block events from now on; for fault injection. `CALM` ends it."""
        for link in self._links:
            link.disturbance = disturbance

    def resync(self) -> None:
        """Send every replica a snapshot, as after a gap. Never waits."""
        for link in self._links:
            link.resync()

    def flush(self, timeout_s: float) -> bool:
        """Wait until every connected replica has acknowledged everything; False when the time is over."""
        deadline_s = time.monotonic() + timeout_s
        return all(link.flush(deadline_s) for link in self._links)

    @property
    def fenced(self) -> bool:
        """A newer epoch of this worker exists."""
        return self._fenced.is_set()

    @property
    def draining(self) -> bool:
        """A replica was told to drain this worker, or `drain` was called; every replica learns of it."""
        return self._draining.is_set()

    def drain(self) -> None:
        """Take no more requests or readers: every replica hears it with the next heartbeat. There is no way back."""
        self._draining.set()

    def status(self) -> dict[str, Any]:
        """Per replica: connected, member state, and counters, as JSON-able data."""
        return {
            "fenced": self.fenced,
            "draining": self.draining,
            "endpoints": {link.address: link.status() for link in self._links},
        }

    def _add(self, event: BlockEvent) -> None:
        if event.hashes:
            for link in self._links:
                link.add(event)

    def _fence(self, reason: str) -> None:
        if not self._fenced.is_set():
            self._fenced.set()
            for link in self._links:
                link.stop()
            log.error("%s is fenced: %s", self.member.key, reason)
            self._on_fenced(reason)
