"""One suite over every transport, both ends in this process. Faults that need processes: the multiprocess layer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvpool.errors import IntegrityError, PeerGoneError, RequestError, StaleError, StallError, TransferCancelledError
from kvpool.transport import create_transport
from kvpool.transport.base import BlockStatus, Peer, ReadProgress, ReadState, Transport
from kvpool.transport.memory import MemoryTransport
from kvpool.transport.nixl import NixlTransport
from kvpool.transport.nixl.agent import installed
from kvpool.transport.shaping import ShapingTransport
from kvpool.transport.ucx import UcxOptions, UcxTransport
from kvpool.transport.ucx.settings import Compression
from kvpool.types import WorkerEpoch, WorkerId, WorkerKey
from tests.contract.transport_rig import MS, POISON, End, S, block_hash, eventually, pattern, request, start_end

BLOCK = 64 * 1024
BLOCKS = 64

MAKERS: dict[str, Callable[[], Transport]] = {
    "memory": MemoryTransport,
    "ucx": UcxTransport,
    "ucx-tcp": lambda: UcxTransport(UcxOptions(settings={"TLS": "tcp,self"})),
    "ucx-frames": lambda: UcxTransport(UcxOptions(settings={"TLS": "tcp,self"}, compression=Compression.ALWAYS)),
    "shaped-memory": lambda: ShapingTransport(MemoryTransport()),
    "shaped-ucx": lambda: ShapingTransport(UcxTransport()),
    "nixl": NixlTransport,
}


@pytest.fixture(params=MAKERS, scope="module")
def make(request: pytest.FixtureRequest) -> Callable[[], Transport]:
    if request.param == "nixl" and not installed():
        pytest.skip("NIXL is not installed: pip install 'kvpool[nixl]'")
    return MAKERS[request.param]


@pytest.fixture
def ends(make: Callable[[], Transport]) -> Iterator[tuple[End, End]]:
    holder = start_end(make(), "holder", blocks=BLOCKS, block_bytes=BLOCK, filled=True)
    reader = start_end(make(), "reader", blocks=BLOCKS, block_bytes=BLOCK, filled=False)
    yield holder, reader
    for end in (reader, holder):
        end.transport.close()
    assert holder.store.leases == {}, "a read lease outlived the transports"


def assert_blocks(reader: End, numbers: list[int], slots: list[int] | None = None) -> None:
    for number, slot in zip(numbers, slots or numbers, strict=True):
        assert np.array_equal(reader.slot(slot), pattern(number, BLOCK)), f"block {number} differs"


def test_a_contiguous_chain_arrives_verified_and_leaves_other_pages_alone(ends: tuple[End, End]) -> None:
    holder, reader = ends
    handle = reader.transport.read(request(holder.peer, list(range(8, 40)), BLOCK))
    progress = handle.wait(20 * S)
    assert progress.state is ReadState.DONE, progress
    assert progress.error is None
    assert set(progress.statuses) == {BlockStatus.ARRIVED}
    assert progress.bytes_arrived == 32 * BLOCK
    assert_blocks(reader, list(range(8, 40)))
    assert (reader.store.segment[: 8 * BLOCK] == POISON).all()
    assert (reader.store.segment[40 * BLOCK :] == POISON).all()
    eventually(lambda: holder.store.leases == {}, "the read lease is released")


def test_a_read_that_takes_long_renews_its_lease_and_never_after_it_ended(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("ucx.reader", "ucx.server", "nixl.reader"):
        monkeypatch.setattr(f"kvpool.transport.{module}.LEASE_RENEW_NS", 0, raising=True)
    holder, reader = ends
    for _ in range(200):  # until a timer fell into a read
        assert reader.transport.read(request(holder.peer, list(range(BLOCKS)), BLOCK)).wait(20 * S).error is None
        if holder.store.renewals:
            break
    assert holder.store.renewals
    eventually(lambda: holder.store.leases == {}, "the read lease is released")


def test_scattered_blocks_land_where_each_was_asked_for(ends: tuple[End, End]) -> None:
    holder, reader = ends
    numbers, slots = [3, 4, 9, 8, 20, 21, 22, 5], [60, 2, 3, 4, 30, 31, 33, 0]
    progress = reader.transport.read(request(holder.peer, numbers, BLOCK, slots=slots)).wait(20 * S)
    assert progress.state is ReadState.DONE
    assert_blocks(reader, numbers, slots)
    untouched = sorted(set(range(BLOCKS)) - set(slots))
    assert all((reader.slot(slot) == POISON).all() for slot in untouched)


def test_missing_blocks_are_a_result_and_their_pages_stay_untouched(ends: tuple[End, End]) -> None:
    holder, reader = ends
    del holder.store.held[block_hash(5)]
    wanted = [4, 5, 6, 1000]
    progress = reader.transport.read(request(holder.peer, wanted, BLOCK, slots=[4, 5, 6, 7])).wait(20 * S)
    assert progress.state is ReadState.DONE
    assert progress.statuses == (BlockStatus.ARRIVED, BlockStatus.MISSING, BlockStatus.ARRIVED, BlockStatus.MISSING)
    assert (reader.slot(5) == POISON).all()
    assert (reader.slot(7) == POISON).all()


def test_a_read_of_nothing_but_missing_blocks_ends_done(ends: tuple[End, End]) -> None:
    holder, reader = ends
    progress = reader.transport.read(request(holder.peer, [500, 501], BLOCK, slots=[0, 1])).wait(20 * S)
    assert progress.state is ReadState.DONE
    assert set(progress.statuses) == {BlockStatus.MISSING}


def test_an_empty_read_is_done(ends: tuple[End, End]) -> None:
    holder, reader = ends
    assert reader.transport.read(request(holder.peer, [], BLOCK)).wait(20 * S).state is ReadState.DONE


def test_another_epoch_is_refused_as_stale(ends: tuple[End, End]) -> None:
    holder, reader = ends
    for epoch in (0, 2):
        older = Peer(WorkerKey(holder.key.worker_id, WorkerEpoch(epoch)), holder.transport.address)
        progress = reader.transport.read(request(older, [1, 2], BLOCK)).wait(20 * S)
        assert progress.state is ReadState.FAILED
        assert isinstance(progress.error, StaleError)
        assert set(progress.statuses) == {BlockStatus.FAILED}
    assert (reader.store.segment == POISON).all()


def test_a_corrupt_block_is_refused_counted_and_the_others_are_kept(ends: tuple[End, End]) -> None:
    holder, reader = ends
    holder.store.segment[6 * BLOCK + 77] ^= 1
    progress = reader.transport.read(request(holder.peer, [5, 6, 7], BLOCK)).wait(20 * S)
    assert progress.state is ReadState.FAILED
    assert isinstance(progress.error, IntegrityError)
    assert progress.statuses == (BlockStatus.ARRIVED, BlockStatus.CORRUPT, BlockStatus.ARRIVED)
    assert reader.transport.stats().corrupt_blocks == 1
    assert_blocks(reader, [5, 7])


def test_destinations_outside_the_segment_or_overlapping_are_refused_at_once(ends: tuple[End, End]) -> None:
    holder, reader = ends
    with pytest.raises(RequestError, match="outside"):
        reader.transport.read(request(holder.peer, [1], BLOCK, slots=[BLOCKS]))
    with pytest.raises(RequestError, match="overlap"):
        reader.transport.read(request(holder.peer, [1, 2], BLOCK, slots=[3, 3]))
    for budget in ({"deadline_ns": 0}, {"stall_ns": -1}, {"deadline_ns": 2**63}, {"stall_ns": 2**80}):
        with pytest.raises(RequestError, match="must be in"):
            reader.transport.read(request(holder.peer, [1], BLOCK, **budget))


def test_cancel_ends_the_read_and_nothing_lands_after_it(ends: tuple[End, End]) -> None:
    holder, reader = ends
    for _ in range(20):
        handle = reader.transport.read(request(holder.peer, list(range(BLOCKS)), BLOCK))
        handle.cancel()
        handle.cancel()
        progress = handle.wait(20 * S)
        assert progress.state in (ReadState.CANCELLED, ReadState.DONE)
        if progress.state is ReadState.CANCELLED:
            assert isinstance(progress.error, TransferCancelledError)
        reader.store.segment[:] = POISON
        again = reader.transport.read(request(holder.peer, [0], BLOCK)).wait(20 * S)
        assert again.state is ReadState.DONE
        assert (reader.store.segment[BLOCK:] == POISON).all(), "a byte landed after the read was terminal"
    eventually(lambda: holder.store.leases == {}, "every read lease is released")


def test_a_holder_that_answers_late_costs_a_typed_error_within_the_deadline(ends: tuple[End, End]) -> None:
    holder, reader = ends
    release = threading.Event()
    holder.store.on_pin = lambda: release.wait(5) and None
    handle = reader.transport.read(request(holder.peer, [1, 2], BLOCK, deadline_ns=50 * MS, stall_ns=S))
    if holder.transport.name == "memory":
        release.set()  # in one process the reader's thread pins; it cannot be late and look at its watch too
        progress = handle.wait(20 * S)
        assert progress.state is ReadState.DONE
        return
    progress = handle.wait(20 * S)
    release.set()
    assert progress.state is ReadState.FAILED
    assert isinstance(progress.error, StallError)
    assert (reader.store.segment == POISON).all()
    holder.store.on_pin = lambda: None
    assert reader.transport.read(request(holder.peer, [1, 2], BLOCK)).wait(20 * S).state is ReadState.DONE


def test_a_holder_that_says_nothing_is_dropped_at_the_stall_bound(ends: tuple[End, End]) -> None:
    holder, reader = ends
    if holder.transport.name == "memory":
        pytest.skip("in one process a holder cannot be silent")
    release = threading.Event()
    holder.store.on_pin = lambda: release.wait(5) and None
    handle = reader.transport.read(request(holder.peer, [1, 2], BLOCK, deadline_ns=15 * S, stall_ns=50 * MS))
    progress = handle.wait(20 * S)
    release.set()
    assert progress.state is ReadState.FAILED
    assert isinstance(progress.error, StallError)
    assert progress.elapsed_ns < 10 * S


def test_progress_is_called_back_and_the_last_call_is_terminal(ends: tuple[End, End]) -> None:
    holder, reader = ends
    seen: list[ReadProgress] = []
    ended = threading.Event()

    def note(progress: ReadProgress) -> None:
        seen.append(progress)
        if progress.state.terminal:
            ended.set()

    handle = reader.transport.read(request(holder.peer, list(range(BLOCKS)), BLOCK))
    handle.on_progress(note)
    assert ended.wait(20)
    assert [item.state.terminal for item in seen].count(True) == 1
    arrived = [item.bytes_arrived for item in seen]
    assert arrived == sorted(arrived)
    assert arrived[-1] == BLOCKS * BLOCK
    late: list[ReadProgress] = []
    handle.on_progress(late.append)
    assert [item.state for item in late] == [ReadState.DONE]


def test_many_reads_at_once_all_end_whole(ends: tuple[End, End]) -> None:
    holder, reader = ends
    handles = [
        reader.transport.read(request(holder.peer, [number], BLOCK, urgency_ns=BLOCKS - number))
        for number in range(BLOCKS)
    ]
    assert all(handle.wait(20 * S).state is ReadState.DONE for handle in handles)
    assert_blocks(reader, list(range(BLOCKS)))
    stats = reader.transport.stats()
    assert stats.blocks_read == BLOCKS
    assert stats.bytes_read == BLOCKS * BLOCK
    assert stats.in_flight_bytes == 0


def test_both_ends_read_from_each_other_at_once(ends: tuple[End, End]) -> None:
    holder, reader = ends
    for number in range(100, 110):
        reader.store.put(number, number - 60)
    there = [reader.transport.read(request(holder.peer, list(range(32)), BLOCK)) for _ in range(1)]
    back = holder.transport.read(request(reader.peer, list(range(100, 110)), BLOCK, slots=list(range(50, 60))))
    assert all(handle.wait(20 * S).state is ReadState.DONE for handle in [*there, back])
    assert_blocks(holder, list(range(100, 110)), list(range(50, 60)))


def test_forgetting_a_peer_ends_its_reads_and_a_new_read_connects_again(ends: tuple[End, End]) -> None:
    holder, reader = ends
    handle = reader.transport.read(request(holder.peer, list(range(BLOCKS)), BLOCK))
    reader.transport.forget(holder.key)
    progress = handle.wait(20 * S)
    assert progress.state in (ReadState.DONE, ReadState.FAILED)
    if progress.state is ReadState.FAILED:
        assert isinstance(progress.error, PeerGoneError)
    assert reader.transport.read(request(holder.peer, [7], BLOCK)).wait(20 * S).state is ReadState.DONE


def test_a_holder_that_closed_is_a_typed_error_and_other_holders_go_on(
    make: Callable[[], Transport], ends: tuple[End, End]
) -> None:
    holder, reader = ends
    other = start_end(make(), "other", blocks=8, block_bytes=BLOCK, filled=True)
    try:
        assert reader.transport.read(request(holder.peer, [1], BLOCK)).wait(20 * S).state is ReadState.DONE
        holder.transport.close()
        handle = reader.transport.read(request(holder.peer, [2], BLOCK, deadline_ns=2 * S, stall_ns=300 * MS))
        fine = reader.transport.read(request(other.peer, [3], BLOCK))
        assert fine.wait(20 * S).state is ReadState.DONE
        progress = handle.wait(20 * S)
        assert progress.state is ReadState.FAILED
        assert isinstance(progress.error, PeerGoneError | StallError)
    finally:
        other.transport.close()


def test_a_restarted_holder_serves_its_new_epoch_under_the_same_id(
    make: Callable[[], Transport], ends: tuple[End, End]
) -> None:
    holder, reader = ends
    assert reader.transport.read(request(holder.peer, [1], BLOCK)).wait(20 * S).state is ReadState.DONE
    holder.transport.close()
    again = start_end(make(), "holder", blocks=BLOCKS, block_bytes=BLOCK, filled=True, epoch=2)
    try:
        progress = reader.transport.read(request(again.peer, list(range(BLOCKS)), BLOCK)).wait(20 * S)
        assert progress.state is ReadState.DONE
        zombie = Peer(holder.key, again.transport.address)
        refused = reader.transport.read(request(zombie, [2], BLOCK, stall_ns=S)).wait(20 * S)
        assert isinstance(refused.error, StaleError)
    finally:
        again.transport.close()


def test_closing_cancels_reads_and_may_be_repeated(make: Callable[[], Transport], ends: tuple[End, End]) -> None:
    holder, _ = ends
    reader = start_end(make(), "short-lived", blocks=BLOCKS, block_bytes=BLOCK, filled=False)
    handles = [reader.transport.read(request(holder.peer, list(range(BLOCKS)), BLOCK)) for _ in range(1)]
    reader.transport.close()
    reader.transport.close()
    for handle in handles:
        progress = handle.wait(20 * S)
        assert progress.state in (ReadState.CANCELLED, ReadState.DONE)
    with pytest.raises(TransferCancelledError):
        reader.transport.read(request(holder.peer, [1], BLOCK))


def test_a_huge_batch_is_split_and_arrives(make: Callable[[], Transport]) -> None:
    size, count = 512, 20_000
    holder = start_end(make(), "holder", blocks=count, block_bytes=size, filled=False)
    for number in range(count):
        at = number * size
        holder.store.segment[at : at + size] = number % 251
    import xxhash

    from kvpool.transport.base import HeldBlock

    for number in range(count):
        data = holder.store.segment[number * size : (number + 1) * size]
        holder.store.held[block_hash(number)] = HeldBlock(number * size, xxhash.xxh3_64_intdigest(data))
    reader = start_end(make(), "reader", blocks=count, block_bytes=size, filled=False)
    try:
        progress = reader.transport.read(request(holder.peer, list(range(count)), size)).wait(60 * S)
        assert progress.state is ReadState.DONE
        assert np.array_equal(reader.store.segment, holder.store.segment)
        eventually(lambda: holder.store.leases == {}, "every read lease is released")
    finally:
        reader.transport.close()
        holder.transport.close()


def test_unknown_transports_are_refused_by_name() -> None:
    from kvpool.errors import ConfigError

    with pytest.raises(ConfigError, match="smoke-signals"):
        create_transport("smoke-signals")


def test_a_transport_starts_only_once(make: Callable[[], Transport]) -> None:
    end = start_end(make(), "once", blocks=2, block_bytes=BLOCK, filled=False)
    try:
        with pytest.raises(RequestError, match="started"):
            end.transport.start(
                WorkerKey(WorkerId("twice"), WorkerEpoch(1)), memoryview(end.store.segment), BLOCK, end.store
            )
    finally:
        end.transport.close()
