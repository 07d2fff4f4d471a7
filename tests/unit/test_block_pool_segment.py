"""The segment: checksums, read leases, and what the directory is told."""

from __future__ import annotations

import pytest
import xxhash

from kvpool.store.segment import SealRequest, Segment, SegmentConfig
from kvpool.transport.base import HeldBlock
from kvpool.types import BlockHash, BlockId, WorkerEpoch, WorkerId, WorkerKey
from tests.worker_support import RecordingPublisher

BLOCK_BYTES = 64
READER = WorkerKey(WorkerId("reader"), WorkerEpoch(3))


class Bench:
    """A segment of four blocks with a clock that the test turns."""

    def __init__(self, **config: int) -> None:
        self.now_ns = 0
        self.publisher = RecordingPublisher()
        self.memory = memoryview(bytearray(4 * BLOCK_BYTES))
        self.segment = Segment(
            SegmentConfig(BLOCK_BYTES, 4, **config), self.memory, self.publisher, lambda: self.now_ns
        )

    def store(self, *names: str) -> list[BlockHash]:
        chain = [BlockHash(name.encode().ljust(16, b".")) for name in names]
        block_ids = self.segment.allocate(len(chain)).block_ids
        parents = [BlockHash(bytes(16)), *chain]
        for block_id, block_hash in zip(block_ids, chain, strict=True):
            start = self.segment.offset(block_id)
            self.memory[start : start + BLOCK_BYTES] = block_hash * (BLOCK_BYTES // 16)
        self.segment.seal([SealRequest(*parts) for parts in zip(block_ids, chain, parents[:-1], strict=True)])
        self.segment.release(block_ids)
        return chain


def test_a_pinned_block_is_described_by_offset_and_checksum() -> None:
    bench = Bench()
    chain = bench.store("a", "b")
    missing = BlockHash(b"?" * 16)
    _, held = bench.segment.pin(READER, [chain[1], missing])
    expected = xxhash.xxh3_64_intdigest(bytes(bench.memory[BLOCK_BYTES : 2 * BLOCK_BYTES]))
    assert held == (HeldBlock(BLOCK_BYTES, expected), None)


def test_the_directory_is_told_of_chains_and_of_evictions() -> None:
    bench = Bench()
    chain = bench.store("a", "b", "c")
    assert bench.publisher.held == set(chain)
    assert bench.publisher.linked == [True]
    bench.store("x", "y")
    assert set(bench.segment.held_hashes()) == bench.publisher.held
    assert chain[2] not in bench.publisher.held
    assert bench.segment.totals()["evictions"] == 1


def test_a_block_under_a_read_lease_stays_until_it_is_released() -> None:
    bench = Bench()
    chain = bench.store("a", "b", "c", "d")
    lease, _ = bench.segment.pin(READER, chain[2:])
    assert bench.segment.available_blocks == 2
    assert bench.segment.leases == 1
    called: list[bool] = []
    bench.segment.on_room(lambda: called.append(True))
    bench.segment.unpin(lease)
    bench.segment.unpin(lease)
    assert called == [True], "released once, told once"
    assert (bench.segment.available_blocks, bench.segment.leases) == (4, 0)


def test_a_lease_that_is_never_released_runs_out() -> None:
    bench = Bench(lease_ns=100)
    chain = bench.store("a", "b", "c", "d")
    lease, _ = bench.segment.pin(READER, chain)
    bench.now_ns = 99
    with pytest.raises(Exception, match="4 blocks are needed and 0"):
        bench.segment.allocate(4)
    bench.now_ns = 100
    assert len(bench.segment.allocate(4).evicted) == 4
    assert bench.segment.totals()["leases_expired"] == 1
    bench.segment.unpin(lease)
    bench.segment.check()


def test_room_that_a_lease_which_ran_out_gives_back_is_seen_by_who_only_asks() -> None:
    bench = Bench(lease_ns=100)
    chain = bench.store("a", "b", "c", "d")
    bench.segment.pin(READER, chain)
    bench.now_ns = 99
    assert bench.segment.available_blocks == 0
    bench.now_ns = 100
    assert bench.segment.available_blocks == 4
    bench.segment.check()


def test_a_renewed_lease_begins_again_and_one_that_ran_out_stays_over() -> None:
    bench = Bench(lease_ns=100)
    chain = bench.store("a", "b", "c", "d")
    slow, _ = bench.segment.pin(READER, chain[:2])
    silent, _ = bench.segment.pin(READER, chain[2:])
    for bench.now_ns in (60, 120, 180):
        bench.segment.renew(slow)
    assert len(bench.segment.allocate(2).evicted) == 2, "only what the silent one held"
    bench.segment.renew(silent)
    assert (bench.segment.leases, bench.segment.totals()["leases_expired"]) == (1, 1)
    bench.segment.unpin(slow)
    bench.segment.renew(slow)
    assert bench.segment.leases == 0
    bench.segment.check()


def test_more_leases_than_the_bound_see_nothing_held() -> None:
    bench = Bench(max_leases=1)
    chain = bench.store("a")
    assert bench.segment.pin(READER, chain)[1][0] is not None
    assert bench.segment.pin(READER, chain)[1] == (None,)
    assert bench.segment.totals()["leases_refused"] == 1


def test_a_twin_is_not_announced_twice() -> None:
    bench = Bench()
    chain = bench.store("a")
    (block_id,) = bench.segment.allocate(1).block_ids
    kept = bench.segment.seal([SealRequest(block_id, chain[0], BlockHash(bytes(16)))])
    assert kept == [BlockId(0)]
    bench.segment.release(kept)
    bench.segment.check()


def test_clearing_evicts_and_withdraws_all_but_what_is_in_use() -> None:
    bench = Bench()
    chain = bench.store("a", "b", "c")
    bench.segment.pin(READER, chain[:1])
    assert bench.segment.clear() == 2
    assert bench.publisher.held == {chain[0]}
    assert bench.segment.clear() == 0
    bench.segment.check()


def test_a_full_segment_says_how_long_the_next_block_to_leave_has_been_idle() -> None:
    bench = Bench()
    bench.store("a", "b")
    bench.now_ns = 5
    assert bench.segment.idle_ns() == 0  # two blocks are empty, nothing would leave
    bench.store("x", "y")
    bench.now_ns = 12
    assert bench.segment.idle_ns() == 12
    bench.store("z")  # the tail of the oldest chain leaves
    bench.now_ns = 20
    assert bench.segment.idle_ns() == 20
