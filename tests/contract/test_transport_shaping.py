"""What the shaping decorator promises beyond the contract: the shape itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvpool.errors import IntegrityError, StallError
from kvpool.transport.base import BlockStatus, ReadState
from kvpool.transport.memory import MemoryTransport
from kvpool.transport.shaping import LinkShape, ShapingTransport
from tests.contract.transport_rig import MS, POISON, End, S, request, start_end

BLOCK = 16 * 1024


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    holder = start_end(ShapingTransport(MemoryTransport()), "holder", blocks=64, block_bytes=BLOCK, filled=True)
    reader = start_end(ShapingTransport(MemoryTransport()), "reader", blocks=64, block_bytes=BLOCK, filled=False)
    yield holder, reader
    reader.transport.close()
    holder.transport.close()


def shape(end: End, other: End, how: LinkShape) -> None:
    assert isinstance(end.transport, ShapingTransport)
    end.transport.shape(other.key.worker_id, how)


def test_a_rate_makes_a_read_take_at_least_its_bytes_over_the_rate(ends: tuple[End, End]) -> None:
    holder, reader = ends
    shape(reader, holder, LinkShape(rate_bytes_per_s=10e6))
    progress = reader.transport.read(request(holder.peer, list(range(64)), BLOCK)).wait(20 * S)
    assert progress.state is ReadState.DONE
    assert progress.elapsed_ns >= 64 * BLOCK / 10e6 * 1e9


def test_two_reads_share_the_rate_of_their_link(ends: tuple[End, End]) -> None:
    holder, reader = ends
    shape(reader, holder, LinkShape(rate_bytes_per_s=10e6))
    first = reader.transport.read(request(holder.peer, list(range(32)), BLOCK))
    second = reader.transport.read(request(holder.peer, list(range(32, 64)), BLOCK))
    slowest = max(first.wait(20 * S).elapsed_ns, second.wait(20 * S).elapsed_ns)
    assert slowest >= 0.9 * 64 * BLOCK / 10e6 * 1e9


def test_a_delay_is_added(ends: tuple[End, End]) -> None:
    holder, reader = ends
    shape(reader, holder, LinkShape(delay_ns=50 * MS))
    assert reader.transport.read(request(holder.peer, [1], BLOCK)).wait(20 * S).elapsed_ns >= 50 * MS


def test_a_stalled_link_costs_a_stall_error_and_clears(ends: tuple[End, End]) -> None:
    holder, reader = ends
    shape(reader, holder, LinkShape(stalled=True))
    progress = reader.transport.read(request(holder.peer, [1], BLOCK, stall_ns=30 * MS)).wait(20 * S)
    assert isinstance(progress.error, StallError)
    assert (reader.store.segment == POISON).all()
    shape(reader, holder, LinkShape())
    assert reader.transport.read(request(holder.peer, [1], BLOCK)).wait(20 * S).state is ReadState.DONE


def test_a_lost_piece_ends_the_read_at_its_stall_bound(ends: tuple[End, End]) -> None:
    holder, reader = ends
    shape(reader, holder, LinkShape(loss=1.0))
    progress = reader.transport.read(request(holder.peer, [1, 2], BLOCK, stall_ns=30 * MS)).wait(20 * S)
    assert isinstance(progress.error, StallError)
    assert set(progress.statuses) == {BlockStatus.FAILED}


def test_corruption_is_caught_by_the_reader(ends: tuple[End, End]) -> None:
    holder, reader = ends
    shape(holder, reader, LinkShape(corruption=0.5))
    handle = reader.transport.read(request(holder.peer, list(range(64)), BLOCK))
    progress = handle.wait(20 * S)
    assert isinstance(progress.error, IntegrityError)
    assert set(progress.statuses) == {BlockStatus.ARRIVED, BlockStatus.CORRUPT}


def test_a_shape_holds_as_soon_as_it_was_given(ends: tuple[End, End]) -> None:
    never_started = ShapingTransport(MemoryTransport())  # no thread that could apply it later
    never_started.shape(ends[1].key.worker_id, LinkShape(corruption=1.0))
    assert next(never_started.wrong_checksums(ends[1].key))


def test_a_truncated_piece_brings_its_front_and_ends_the_read_at_its_stall_bound(ends: tuple[End, End]) -> None:
    holder, reader = ends
    shape(reader, holder, LinkShape(truncation=1.0))
    progress = reader.transport.read(request(holder.peer, list(range(64)), BLOCK, stall_ns=30 * MS)).wait(20 * S)
    assert isinstance(progress.error, StallError)
    arrived = progress.statuses.count(BlockStatus.ARRIVED)
    assert 0 < arrived < 64
    assert set(progress.statuses[:arrived]) == {BlockStatus.ARRIVED}
    assert (reader.store.segment[arrived * BLOCK :] == POISON).all()


@pytest.mark.parametrize("how", [LinkShape(duplication=1.0), LinkShape(reordering=True, duplication=0.5)])
def test_pieces_that_come_twice_or_in_any_order_settle_every_block_once(ends: tuple[End, End], how: LinkShape) -> None:
    holder, reader = ends
    shape(reader, holder, how)
    progress = reader.transport.read(request(holder.peer, list(range(64)), BLOCK)).wait(20 * S)
    assert progress.state is ReadState.DONE
    assert progress.bytes_arrived == 64 * BLOCK
    assert (reader.store.segment[: 64 * BLOCK] == holder.store.segment[: 64 * BLOCK]).all()
    assert reader.transport.stats().blocks_read > 64
