"""What a worker sends when batches are lost, answers are late, queues overflow and directories restart."""

from __future__ import annotations

from kvpool.metadata.events import BatchAck, BlockAction, BlockEvent, EventBatch, Welcome
from kvpool.metadata.outbox import MAX_BATCH_BLOCKS, WINDOW_BATCHES, Outbox
from kvpool.types import BlockHash, Tier
from tests.contract.metadata_support import hashes, member

KEY = member().key
FRESH = Welcome(directory_epoch=1, lease_ns=1, applied_sequence=None)


def _stored(blocks: list[BlockHash]) -> BlockEvent:
    return BlockEvent(BlockAction.STORED, Tier.HOST, tuple(blocks))


def _drain(outbox: Outbox) -> list[EventBatch]:
    batches = []
    while (batch := outbox.next_batch()) is not None:
        batches.append(batch)
    return batches


def _synced(held: list[BlockHash] | None = None) -> Outbox:
    """An outbox whose first snapshot was sent and acknowledged."""
    outbox = Outbox(KEY, max_queued_blocks=100)
    outbox.joined(FRESH)
    ticket = outbox.begin_snapshot()
    outbox.load_snapshot(ticket, [(Tier.HOST, item) for item in held or []])
    for batch in _drain(outbox):
        outbox.acked(BatchAck(batch.sequence, batch.sequence))
    assert outbox.idle
    return outbox


def test_nothing_is_sent_before_a_snapshot_was_taken() -> None:
    outbox = Outbox(KEY)
    outbox.add(_stored(hashes(1)))
    outbox.joined(FRESH)
    assert outbox.snapshot_due
    assert outbox.next_batch() is None
    ticket = outbox.begin_snapshot()
    assert outbox.next_batch() is None
    outbox.load_snapshot(ticket, [])
    (batch,) = _drain(outbox)
    assert (batch.sequence, batch.snapshot_begin, batch.snapshot_end, batch.events) == (1, True, True, ())


def test_a_large_snapshot_is_cut_into_batches_that_begin_and_end_once() -> None:
    outbox, held = Outbox(KEY), hashes(2 * MAX_BATCH_BLOCKS + 5)
    outbox.joined(FRESH)
    ticket = outbox.begin_snapshot()
    outbox.load_snapshot(
        ticket, [(tier, item) for item, tier in zip(held, [Tier.HOST, Tier.DISK] * len(held), strict=False)]
    )
    batches = _drain(outbox)
    assert [batch.snapshot_begin for batch in batches] == [True] + [False] * (len(batches) - 1)
    assert [batch.snapshot_end for batch in batches] == [False] * (len(batches) - 1) + [True]
    sent = [(event.tier, item) for batch in batches for event in batch.events for item in event.hashes]
    assert len(sent) == len(held)
    assert {item for tier, item in sent if tier is Tier.HOST} == set(held[::2])


def test_events_during_a_snapshot_follow_it() -> None:
    outbox, (early, late) = Outbox(KEY), hashes(2)
    outbox.joined(FRESH)
    ticket = outbox.begin_snapshot()
    outbox.add(_stored([late]))
    outbox.load_snapshot(ticket, [(Tier.HOST, early)])
    first, second = _drain(outbox)
    assert [event.hashes for event in first.events] == [(early,)]
    assert [event.hashes for event in second.events] == [(late,)]


def test_waiting_events_travel_together_and_in_order() -> None:
    outbox, blocks = _synced(), hashes(10)
    for item in blocks:
        outbox.add(_stored([item]))
    (batch,) = _drain(outbox)
    assert [event.hashes[0] for event in batch.events] == blocks


def test_the_window_bounds_what_is_in_flight() -> None:
    outbox = _synced()
    for _ in range(WINDOW_BATCHES + 3):
        outbox.add(_stored(hashes(1)))
        outbox.next_batch()
    assert outbox.next_batch() is None
    assert outbox.queued_blocks == 3
    outbox.acked(BatchAck(2, 2))
    (batch,) = _drain(outbox)
    assert len(batch.events) == 3


def test_after_a_broken_stream_only_what_was_not_applied_is_sent_again() -> None:
    outbox = _synced()
    for _ in range(4):
        outbox.add(_stored(hashes(1)))
        outbox.next_batch()
    outbox.joined(Welcome(1, 1, applied_sequence=3))
    assert [batch.sequence for batch in _drain(outbox)] == [4, 5]
    assert not outbox.snapshot_due


def test_another_directory_or_a_lost_past_needs_a_snapshot() -> None:
    for welcome in (Welcome(2, 1, applied_sequence=1), Welcome(1, 1, None), Welcome(1, 1, applied_sequence=0)):
        outbox = _synced()
        outbox.joined(welcome)
        assert outbox.snapshot_due, welcome


def test_an_overflow_drops_the_queue_and_asks_for_a_snapshot() -> None:
    outbox = _synced()
    for _ in range(11):
        outbox.add(_stored(hashes(10)))
    assert (outbox.snapshot_due, outbox.queued_blocks, outbox.overflows) == (True, 0, 1)


def test_late_answers_to_batches_before_a_snapshot_ask_for_no_second_one() -> None:
    outbox = _synced()
    for _ in range(3):
        outbox.add(_stored(hashes(1)))
        outbox.next_batch()
    outbox.acked(BatchAck(2, 1, resync=True))
    assert outbox.snapshot_due
    ticket = outbox.begin_snapshot()
    outbox.load_snapshot(ticket, [])
    (batch,) = _drain(outbox)
    for late in (3, 4):
        outbox.acked(BatchAck(late, 1, resync=True))
    outbox.acked(BatchAck(batch.sequence, batch.sequence))
    assert outbox.idle
    assert outbox.resyncs == 1


def test_sequences_grow_by_one_across_snapshots() -> None:
    outbox = _synced()
    outbox.add(_stored(hashes(1)))
    (second,) = _drain(outbox)
    outbox.acked(BatchAck(2, 1, resync=True))
    ticket = outbox.begin_snapshot()
    outbox.load_snapshot(ticket, [])
    (third,) = _drain(outbox)
    assert (second.sequence, third.sequence) == (2, 3)


def test_a_snapshot_that_was_begun_and_never_loaded_is_due_again_after_a_reconnect() -> None:
    outbox = _synced()
    outbox.require_snapshot()
    ticket = outbox.begin_snapshot()
    outbox.joined(Welcome(1, 1, applied_sequence=1))
    assert outbox.snapshot_due
    outbox.load_snapshot(ticket, [])
    assert outbox.next_batch() is None, "what it took belongs to the stream that broke"


def test_one_huge_event_travels_in_batches_that_fit() -> None:
    outbox, blocks = Outbox(KEY), hashes(3 * MAX_BATCH_BLOCKS)
    outbox.joined(FRESH)
    ticket = outbox.begin_snapshot()
    outbox.load_snapshot(ticket, [])
    outbox.next_batch()
    outbox.add(BlockEvent(BlockAction.STORED, Tier.HOST, tuple(blocks), linked=True))
    batches = _drain(outbox)
    assert [len(event.hashes) for batch in batches for event in batch.events] == [MAX_BATCH_BLOCKS] * 3
    assert all(event.linked for batch in batches for event in batch.events)


def test_a_snapshot_taken_for_an_earlier_begin_is_not_used() -> None:
    """Between the two begins the queue was dropped, so the earlier snapshot lacks what was in it."""
    outbox, (early, late) = _synced(), hashes(2)
    outbox.require_snapshot()
    first = outbox.begin_snapshot()
    outbox.add(_stored([late]))
    outbox.joined(Welcome(1, 1, applied_sequence=1))
    second = outbox.begin_snapshot()
    outbox.load_snapshot(first, [(Tier.HOST, early)])
    assert outbox.next_batch() is None
    outbox.load_snapshot(second, [(Tier.HOST, early), (Tier.HOST, late)])
    (batch,) = _drain(outbox)
    assert [event.hashes for event in batch.events] == [(early, late)]
