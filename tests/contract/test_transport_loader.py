"""Loads over real transports: partial results, alternates, failures by name, samples and suspects."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvpool.errors import RequestError
from kvpool.plan import HolderRef, LoadSlice, Plan, PlanKind
from kvpool.reports import LoadSample
from kvpool.transfer.loader import Loader, LoadProgress
from kvpool.transport.base import Transport
from kvpool.transport.memory import MemoryTransport
from kvpool.transport.ucx import UcxTransport
from kvpool.types import BlockHash, RequestId, Tier, WorkerEpoch, WorkerKey
from tests.contract.transport_rig import MS, POISON, End, S, block_hash, pattern, start_end

BLOCK = 16 * 1024
BLOCKS = 32
CHAIN: tuple[BlockHash, ...] = tuple(block_hash(number) for number in range(BLOCKS))
PAGES = {index: index * BLOCK for index in range(BLOCKS)}
REQUEST = RequestId("r-1")


class Pool:
    """Two holders, one reader, and what its loader told."""

    def __init__(self, make: Callable[[], Transport]) -> None:
        self.first = start_end(make(), "first", blocks=BLOCKS, block_bytes=BLOCK, filled=True)
        self.second = start_end(make(), "second", blocks=BLOCKS, block_bytes=BLOCK, filled=True)
        self.reader = start_end(make(), "reader", blocks=BLOCKS, block_bytes=BLOCK, filled=False)
        self.suspects: list[tuple[WorkerKey, str]] = []
        self.samples: list[LoadSample] = []
        self.loader = Loader(
            self.reader.transport,
            on_suspect=lambda holder, code: self.suspects.append((holder, code)),
            on_sample=self.samples.append,
        )

    def plan(self, *loads: LoadSlice, deadline_ns: int = 20 * S, stall_ns: int = 10 * S) -> Plan:
        return Plan(PlanKind.LOAD, loads, load_deadline_ns=deadline_ns, stall_ns=stall_ns)

    def slice(self, start: int, stop: int, holder: End, *alternates: End) -> LoadSlice:
        refs = tuple(HolderRef(end.key, end.transport.address, Tier.HOST, BLOCKS) for end in alternates)
        transport = holder.transport
        return LoadSlice(start, stop, holder.key, transport.name, transport.address, Tier.HOST, refs)


@pytest.fixture(params=[MemoryTransport, UcxTransport], ids=["memory", "ucx"])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    pool = Pool(request.param)
    yield pool
    for end in (pool.reader, pool.first, pool.second):
        end.transport.close()


def assert_arrived(pool: Pool, indices: set[int]) -> None:
    for index in range(BLOCKS):
        expected = pattern(index, BLOCK) if index in indices else np.full(BLOCK, POISON, np.uint8)
        assert np.array_equal(pool.reader.slot(index), expected), f"page {index} is wrong"


def test_slices_from_two_holders_make_the_prefix_whole(pool: Pool) -> None:
    on_disk = pool.slice(20, 32, pool.second)._replace(tier=Tier.DISK)
    plan = pool.plan(pool.slice(0, 20, pool.first), on_disk)
    progress = pool.loader.start(REQUEST, plan, CHAIN, PAGES).wait(20 * S)
    assert progress.terminal
    assert progress.arrived == frozenset(range(BLOCKS))
    assert progress.front == BLOCKS
    assert progress.failures == ()
    assert progress.bytes_arrived == BLOCKS * BLOCK
    assert progress.finished_ns is not None
    assert {(item.holder, item.blocks, item.failure, item.tier) for item in pool.samples} == {
        (pool.first.key, 20, None, Tier.HOST),
        (pool.second.key, 12, None, Tier.DISK),
    }
    assert pool.suspects == []
    assert_arrived(pool, set(range(BLOCKS)))


def test_only_the_given_pages_are_loaded(pool: Pool) -> None:
    pages = {index: PAGES[index] for index in range(8, 16)}
    progress = pool.loader.start(REQUEST, pool.plan(pool.slice(0, 32, pool.first)), CHAIN, pages).wait(20 * S)
    assert progress.arrived == frozenset(range(8, 16))
    assert progress.front == 8
    assert_arrived(pool, set(range(8, 16)))


def test_missing_blocks_come_from_the_alternate(pool: Pool) -> None:
    for index in range(10, 32):
        del pool.first.store.held[block_hash(index)]
    plan = pool.plan(pool.slice(0, 32, pool.first, pool.second))
    progress = pool.loader.start(REQUEST, plan, CHAIN, PAGES).wait(20 * S)
    assert progress.arrived == frozenset(range(BLOCKS))
    assert progress.failures == ("stale",)
    assert [item.failure for item in pool.samples] == ["stale", None]


def test_without_an_alternate_the_front_is_kept(pool: Pool) -> None:
    for index in range(10, 32):
        del pool.first.store.held[block_hash(index)]
    progress = pool.loader.start(REQUEST, pool.plan(pool.slice(0, 32, pool.first)), CHAIN, PAGES).wait(20 * S)
    assert progress.terminal
    assert progress.front == 10
    assert progress.failures == ("stale",)
    assert_arrived(pool, set(range(10)))


def test_a_corrupt_block_makes_the_holder_suspect_and_comes_from_the_alternate(pool: Pool) -> None:
    pool.first.store.segment[3 * BLOCK] ^= 0xFF
    plan = pool.plan(pool.slice(0, 32, pool.first, pool.second))
    progress = pool.loader.start(REQUEST, plan, CHAIN, PAGES).wait(20 * S)
    assert progress.front == BLOCKS
    assert progress.failures == ("integrity",)
    assert pool.suspects == [(pool.first.key, "integrity")]
    assert_arrived(pool, set(range(BLOCKS)))


def test_a_holder_of_another_epoch_is_a_stale_failure_and_nobody_is_suspect(pool: Pool) -> None:
    old = WorkerKey(pool.first.key.worker_id, WorkerEpoch(0))
    transport = pool.first.transport
    part = LoadSlice(0, 32, old, transport.name, transport.address, Tier.HOST)
    progress = pool.loader.start(REQUEST, pool.plan(part), CHAIN, PAGES).wait(20 * S)
    assert progress.failures == ("stale",)
    assert progress.arrived == frozenset()
    assert pool.suspects == []


def test_a_holder_that_is_gone_is_suspect_and_the_alternate_serves(pool: Pool) -> None:
    plan = pool.plan(pool.slice(0, 32, pool.first, pool.second), stall_ns=200 * MS)
    pool.first.transport.close()
    progress = pool.loader.start(REQUEST, plan, CHAIN, PAGES).wait(20 * S)
    assert progress.front == BLOCKS
    assert len(progress.failures) == 1
    assert [key for key, _ in pool.suspects] == [pool.first.key]


def test_a_holder_that_speaks_another_transport_is_a_typed_failure(pool: Pool) -> None:
    part = LoadSlice(0, 32, pool.first.key, "pigeon", b"", Tier.HOST)
    progress = pool.loader.start(REQUEST, pool.plan(part), CHAIN, PAGES).wait(20 * S)
    assert progress.terminal
    assert progress.failures == ("incompatible",)


def test_cancel_ends_terminal_and_says_so(pool: Pool) -> None:
    load = pool.loader.start(REQUEST, pool.plan(pool.slice(0, 32, pool.first)), CHAIN, PAGES)
    load.cancel()
    progress = load.wait(20 * S)
    assert progress.terminal
    assert progress.failures in ((), ("cancelled",))
    pool.reader.store.segment[:] = POISON
    again = pool.loader.start(REQUEST, pool.plan(pool.slice(0, 1, pool.first)), CHAIN, {0: 0}).wait(20 * S)
    assert again.front == 1
    assert (pool.reader.store.segment[BLOCK:] == POISON).all()


def test_changes_are_called_back_until_terminal(pool: Pool) -> None:
    seen: list[LoadProgress] = []
    ended = threading.Event()

    def note(progress: LoadProgress) -> None:
        seen.append(progress)
        if progress.terminal:
            ended.set()

    load = pool.loader.start(REQUEST, pool.plan(pool.slice(0, 32, pool.first)), CHAIN, PAGES)
    load.on_change(note)
    assert ended.wait(20)
    assert [item.terminal for item in seen].count(True) == 1
    assert seen[-1].front == BLOCKS


def test_malformed_loads_are_refused(pool: Pool) -> None:
    with pytest.raises(RequestError, match="deadline"):
        pool.loader.start(REQUEST, pool.plan(pool.slice(0, 1, pool.first), deadline_ns=0), CHAIN, PAGES)
    with pytest.raises(RequestError, match="chain"):
        pool.loader.start(REQUEST, pool.plan(pool.slice(0, 1, pool.first)), CHAIN, {99: 0})
