"""What one worker still has to tell one directory: events, batches in flight, snapshots.  (pure)

The owner of the blocks is the truth; this is only the way there. Whatever goes wrong (a gap, an overflow, a directory
that restarted) has one remedy, a snapshot, and the outbox says when it is due.

Order: everything queued before `Outbox.begin_snapshot` is dropped, because the snapshot, taken after it, contains it.
Events that come while the snapshot is taken follow it; those it already contains are applied twice, which is harmless.
So an owner changes its state first and tells the outbox second.

Not thread-safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from kvpool.metadata.events import BatchAck, BlockAction, BlockEvent, EventBatch, Welcome
from kvpool.types import BlockHash, Tier, WorkerKey

MAX_QUEUED_BLOCKS = 262_144
MAX_QUEUED_EVENTS = 65_536
MAX_BATCH_BLOCKS = 4_096
MAX_BATCH_EVENTS = 1_024
WINDOW_BATCHES = 8
"""Batches in flight; with the bounds above this is the back-pressure."""


class Outbox:
    """Queue and send window of one (worker, directory) pair.

    Args:
        key: the worker.
        max_queued_blocks: more than this waiting means that a snapshot is cheaper.
    """

    def __init__(self, key: WorkerKey, *, max_queued_blocks: int = MAX_QUEUED_BLOCKS) -> None:
        self._key = key
        self._max_queued_blocks = max_queued_blocks
        self._queue: deque[BlockEvent] = deque()
        self._queued_blocks = 0
        self._snapshot: deque[BlockEvent] | None = None
        self._taking = False
        self._ticket = 0
        self._snapshot_begun = False
        self._snapshot_sequence = 0
        self._in_flight: deque[EventBatch] = deque()
        self._unsent = 0  # of the batches in flight, the last this many have to be sent (again)
        self._sequence = 0
        self._directory_epoch = 0
        self._snapshot_due = True
        self.snapshots = 0
        self.overflows = 0
        self.resyncs = 0
        self.refused_blocks = 0

    @property
    def snapshot_due(self) -> bool:
        """The directory cannot be told by events alone: call `begin_snapshot`, take one, `load_snapshot`."""
        return self._snapshot_due

    @property
    def queued_blocks(self) -> int:
        """Blocks of events that wait to be sent."""
        return self._queued_blocks

    @property
    def idle(self) -> bool:
        """Everything was sent and acknowledged."""
        loading = self._snapshot_due or self._taking or self._snapshot is not None
        return not (loading or self._queue or self._in_flight)

    def add(self, event: BlockEvent) -> None:
        """Queue an event; over the bound everything queued is dropped and a snapshot becomes due."""
        if self._snapshot_due or not event.hashes:
            return
        self._queue.extend(_parts(event))
        self._queued_blocks += len(event.hashes)
        if self._queued_blocks > self._max_queued_blocks or len(self._queue) > MAX_QUEUED_EVENTS:
            self.overflows += 1
            self.require_snapshot()

    def joined(self, welcome: Welcome) -> None:
        """A join succeeded: go on after what the directory has applied, or start from a snapshot."""
        known = welcome.directory_epoch == self._directory_epoch and welcome.applied_sequence is not None
        known &= not self._taking  # a snapshot that was begun and never loaded is lost
        self._directory_epoch = welcome.directory_epoch
        if known and welcome.applied_sequence is not None:
            self._forget(welcome.applied_sequence)
            first = self._in_flight[0].sequence if self._in_flight else self._sequence + 1
            if first == welcome.applied_sequence + 1:
                self._unsent = len(self._in_flight)
                return
        self.require_snapshot()

    def begin_snapshot(self) -> int:
        """From here on events are queued behind the snapshot that is about to be taken.

        Returns:
            A ticket for `load_snapshot`. A snapshot that was taken for an earlier ticket lacks what was dropped here.
        """
        self._drop_queue()
        self._in_flight.clear()
        self._unsent = 0
        self._snapshot_due, self._taking = False, True
        self._snapshot, self._snapshot_begun = None, False
        self._ticket += 1
        return self._ticket

    def load_snapshot(self, ticket: int, blocks: Sequence[tuple[Tier, BlockHash]]) -> None:
        """Everything the owner holds, taken after `begin_snapshot` gave ``ticket``.

        Passed over when a newer one has become due or was begun since.
        """
        if not self._taking or ticket != self._ticket:
            return
        self._taking, self._snapshot = False, deque()
        by_tier: dict[Tier, list[BlockHash]] = {}
        for tier, item in blocks:
            by_tier.setdefault(tier, []).append(item)
        for tier, hashes in by_tier.items():
            self._snapshot.extend(_parts(BlockEvent(BlockAction.STORED, tier, tuple(hashes))))
        self.snapshots += 1

    def next_batch(self) -> EventBatch | None:
        """The next batch to send, None when there is nothing or the window is full."""
        if self._snapshot_due or self._taking:
            return None
        if self._unsent:
            batch = self._in_flight[-self._unsent]
            self._unsent -= 1
            return batch
        if len(self._in_flight) >= WINDOW_BATCHES:
            return None
        if self._snapshot is not None:
            batch = self._snapshot_batch(self._snapshot)
        elif self._queue:
            batch = self._batch(self._take_queued())
        else:
            return None
        self._in_flight.append(batch)
        return batch

    def acked(self, ack: BatchAck) -> None:
        """Take the answer to a batch."""
        self.refused_blocks += ack.refused_blocks
        self._forget(ack.applied)
        if ack.resync and ack.received >= self._snapshot_sequence and not self._snapshot_due:
            self.resyncs += 1
            self.require_snapshot()

    def require_snapshot(self) -> None:
        """Forget what was to be sent: a snapshot is due."""
        self._drop_queue()
        self._in_flight.clear()
        self._unsent = 0
        self._snapshot, self._taking = None, False
        self._snapshot_due = True
        self._snapshot_sequence = self._sequence + 1  # answers to anything older no longer matter

    # -- private ------------------------------------------------------------------------------------------------

    def _drop_queue(self) -> None:
        self._queue.clear()
        self._queued_blocks = 0

    def _forget(self, applied: int) -> None:
        while self._in_flight and self._in_flight[0].sequence <= applied:
            self._in_flight.popleft()
        self._unsent = min(self._unsent, len(self._in_flight))

    def _take_queued(self) -> tuple[BlockEvent, ...]:
        events = _take(self._queue)
        self._queued_blocks -= sum(len(event.hashes) for event in events)
        return events

    def _batch(
        self, events: tuple[BlockEvent, ...], *, snapshot_begin: bool = False, snapshot_end: bool = False
    ) -> EventBatch:
        self._sequence += 1
        return EventBatch(
            self._key, self._directory_epoch, self._sequence, events, snapshot_begin=snapshot_begin,
            snapshot_end=snapshot_end,
        )  # fmt: skip

    def _snapshot_batch(self, snapshot: deque[BlockEvent]) -> EventBatch:
        events = _take(snapshot)
        begin, end = not self._snapshot_begun, not snapshot
        self._snapshot_begun = True
        if end:
            self._snapshot = None
        return self._batch(events, snapshot_begin=begin, snapshot_end=end)


def _take(queue: deque[BlockEvent]) -> tuple[BlockEvent, ...]:
    """The next events for one batch."""
    events: list[BlockEvent] = []
    blocks = 0
    while queue and len(events) < MAX_BATCH_EVENTS and blocks < MAX_BATCH_BLOCKS:
        event = queue.popleft()
        events.append(event)
        blocks += len(event.hashes)
    return tuple(events)


def _parts(event: BlockEvent) -> list[BlockEvent]:
    """The event in parts that fit a batch."""
    if len(event.hashes) <= MAX_BATCH_BLOCKS:
        return [event]
    starts = range(0, len(event.hashes), MAX_BATCH_BLOCKS)
    return [replace(event, hashes=event.hashes[start : start + MAX_BATCH_BLOCKS]) for start in starts]
