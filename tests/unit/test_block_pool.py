"""The block pool, case by case; random runs against a naive model are in ``tests/property``."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest

from kvpool.errors import CapacityError, InvariantViolation
from kvpool.store.answers import PoolCounts
from kvpool.store.pool import BlockPool
from kvpool.store.ranges import FreeRanges
from kvpool.store.worth import WORK_UNIT
from kvpool.types import BlockHash, BlockId


def hashes(*names: str) -> list[BlockHash]:
    return [BlockHash(name.encode().ljust(16, b".")) for name in names]


def store(pool: BlockPool, chain: Sequence[BlockHash]) -> list[BlockId]:
    """Compute a chain and let go of it."""
    block_ids = list(pool.allocate(len(chain)).block_ids)
    for index, block_id in enumerate(block_ids):
        pool.seal(block_id, chain[index], chain[index - 1] if index else None)
    pool.release(block_ids)
    pool.check()
    return block_ids


def test_free_ids_come_in_runs_and_join_again() -> None:
    free = FreeRanges(10)
    assert free.take(3) == [0, 1, 2]
    assert free.take(2) == [3, 4]
    for block_id in (1, 3, 2):
        free.give(block_id)
    assert free.runs() == [(1, 4), (5, 10)]
    assert 2 in free
    assert 4 not in free
    assert len(free) == 8


def test_a_chain_gets_the_shortest_run_that_fits_and_its_own_neighbours_first() -> None:
    free = FreeRanges(20)
    free.take(20)
    for block_id in (0, 1, 2, 5, 6, 11, 12, 13):
        free.give(block_id)
    assert free.take(2) == [5, 6], "not the head of a longer run"
    assert free.take(2, after=10) == [11, 12], "right behind the chain's last block"
    assert free.take(4) == [0, 1, 2, 13], "the longest run first when none fits"


def test_a_sealed_block_is_found_and_stays_after_its_last_reference() -> None:
    pool = BlockPool(4)
    chain = hashes("a", "b", "c")
    block_ids = store(pool, chain)
    assert pool.match(chain) == block_ids
    assert pool.match([*hashes("x"), *chain]) == []
    assert pool.lookup(chain[2]) == block_ids[2]
    assert pool.counts() == PoolCounts(free=1, cached=3, referenced=0, in_flight=0, pinned=0, total=4)


def test_a_block_without_content_is_free_after_its_last_reference() -> None:
    pool = BlockPool(2)
    block_ids = pool.allocate(2).block_ids
    pool.release(block_ids)
    assert pool.counts().free == 2


def test_eviction_takes_the_least_recently_used_chain_tail_first() -> None:
    pool = BlockPool(6)
    old, new = hashes("old0", "old1", "old2"), hashes("new0", "new1", "new2")
    store(pool, old)
    store(pool, new)
    assert pool.allocate(1).evicted == (old[2],)
    assert pool.allocate(1).evicted == (old[1],)
    pool.acquire(pool.match(new))
    pool.release(pool.match(new))
    assert pool.allocate(2).evicted == (old[0], new[2])
    pool.check()


def test_a_parent_leaves_after_its_children_even_when_it_was_used_less_recently() -> None:
    pool = BlockPool(3)
    chain = hashes("p", "c")
    store(pool, chain)
    child = pool.match(chain)[1]
    pool.acquire([child])
    pool.release([child])
    other = store(pool, hashes("z"))
    pool.acquire(other)
    pool.release(other)
    assert pool.allocate(1).evicted == (chain[1],)
    assert pool.allocate(1).evicted == (chain[0],)


def test_an_orphan_adopted_later_still_goes_before_its_parent() -> None:
    pool = BlockPool(3)
    chain = hashes("p", "c")
    tail = pool.allocate(1).block_ids[0]
    pool.seal(tail, chain[1], chain[0])
    head = pool.allocate(1).block_ids[0]
    pool.seal(head, chain[0], None)
    pool.release([tail])
    pool.release([head])
    assert pool.allocate(2).evicted == (chain[1],)
    pool.check()


def test_referenced_and_pinned_blocks_are_never_evicted() -> None:
    pool = BlockPool(4)
    chain = hashes("a", "b", "c", "d")
    block_ids = store(pool, chain)
    pool.acquire(block_ids[:1])
    assert pool.pin([chain[3], *hashes("unknown")]) == (block_ids[3], None)
    assert pool.available_blocks == 2
    with pytest.raises(CapacityError, match="3 blocks are needed and 2 of 4"):
        pool.allocate(3)
    assert set(pool.allocate(2).evicted) == {chain[1], chain[2]}
    pool.check()
    pool.unpin([block_ids[3]])
    assert pool.allocate(1).evicted == (chain[3],)
    pool.check()


def test_a_refused_allocation_changes_nothing_and_its_error_travels() -> None:
    pool = BlockPool(3)
    store(pool, hashes("a", "b"))
    before = pool.counts()
    with pytest.raises(CapacityError) as caught:
        pool.allocate(4)
    assert pool.counts() == before
    assert pool.match(hashes("a", "b")) == [0, 1]
    copy = pickle.loads(pickle.dumps(caught.value))
    assert copy.details == {"needed_blocks": 4, "available_blocks": 3, "total_blocks": 3}


def test_a_block_in_flight_is_not_freed_before_its_load_is_terminal() -> None:
    pool = BlockPool(2)
    block_ids = pool.allocate(2).block_ids
    pool.begin_flight(block_ids)
    pool.release(block_ids)
    assert pool.counts() == PoolCounts(free=0, cached=0, referenced=0, in_flight=2, pinned=0, total=2)
    with pytest.raises(CapacityError):
        pool.allocate(1)
    pool.end_flight(block_ids)
    assert pool.counts().free == 2
    pool.check()


def test_sealing_what_is_held_already_keeps_the_first_copy() -> None:
    pool = BlockPool(3)
    (first,) = store(pool, hashes("a"))
    twin = pool.allocate(1).block_ids[0]
    assert pool.seal(twin, hashes("a")[0], None) == first
    assert pool.counts() == PoolCounts(free=2, cached=0, referenced=1, in_flight=0, pinned=0, total=3)
    pool.release([first])
    pool.check()


def test_misuse_is_our_bug_and_says_so() -> None:
    pool = BlockPool(3)
    (block_id,) = pool.allocate(1).block_ids
    pool.begin_flight([block_id])
    for misuse in (
        lambda: pool.seal(block_id, hashes("a")[0], None),
        lambda: pool.begin_flight([block_id]),
        lambda: pool.release([BlockId(2)]),
        lambda: pool.acquire([BlockId(2)]),
        lambda: pool.end_flight([BlockId(2)]),
        lambda: pool.unpin([BlockId(2)]),
    ):
        with pytest.raises(InvariantViolation):
            misuse()


def test_check_sees_a_counter_that_lies() -> None:
    pool = BlockPool(3)
    store(pool, hashes("a"))
    pool._evictable += 1
    with pytest.raises(InvariantViolation, match="evictable"):
        pool.check()


def test_a_prompt_that_is_asked_for_again_outlives_a_scan_of_prompts_that_are_not() -> None:
    pool = BlockPool(4)
    hot = hashes("hot0", "hot1")
    block_ids = store(pool, hot)
    for _ in range(3):
        pool.acquire(block_ids)
        pool.release(block_ids)
    for number in range(4):
        store(pool, hashes(f"cold{number}a", f"cold{number}b"))
    assert pool.match(hot) == block_ids
    for number in range(4, 40):
        store(pool, hashes(f"cold{number}a", f"cold{number}b"))
    assert pool.match(hot) == []  # its merits fade


def test_of_equal_blocks_the_copy_that_lives_elsewhere_leaves_before_the_sole_one() -> None:
    pool = BlockPool(3)
    for item in ("a", "b", "c"):
        store(pool, hashes(item))
    pool.set_spare(hashes("a", "b", "c"), set(hashes("c", "b")))
    assert pool.counts().spare == 2
    assert pool.allocate(2).evicted == (*hashes("b"), *hashes("c"))
    pool.check()


def test_a_block_that_costs_more_to_compute_again_stays_longer() -> None:
    pool = BlockPool(2)
    for item, work in (("deep", 4 * WORK_UNIT), ("shallow", WORK_UNIT)):
        (block_id,) = pool.allocate(1).block_ids
        pool.seal(block_id, hashes(item)[0], None, work)
        pool.release([block_id])
    assert pool.allocate(1).evicted == tuple(hashes("shallow"))


def test_what_shall_be_kept_leaves_only_when_nothing_else_is_left() -> None:
    pool = BlockPool(3)
    pool.set_wanted(set(hashes("a", "later")))
    store(pool, hashes("a"))
    store(pool, hashes("b"))
    store(pool, hashes("later"))
    assert pool.counts().kept == 2
    assert pool.allocate(1).evicted == tuple(hashes("b"))
    last = pool.allocate(2)
    assert [victim.kept for victim in last.victims] == [True, True]  # better than a request that never runs
    pool.check()


def test_a_tenant_over_its_quota_evicts_its_own_and_is_never_refused() -> None:
    pool = BlockPool(8, {"*": 2, "big": 4})
    first, second = (pool.allocate(1, tenant="small").block_ids[0] for _ in range(2))
    pool.seal(first, hashes("s0")[0], None)
    pool.seal(second, hashes("s1")[0], None)
    pool.release([first])
    pool.release([second])
    assert pool.allocate(1, tenant="small").evicted == tuple(hashes("s0"))  # although others are free
    assert pool.allocate(3, tenant="small").evicted == tuple(hashes("s1"))  # all in use: over the quota for now
    assert pool.allocate(3, tenant="").evicted == ()
    assert pool.tenants() == {"small": 4, "": 3}
    pool.check()


def test_a_purge_says_why_the_rest_stays() -> None:
    pool = BlockPool(6)
    chain = hashes("a", "b", "c", "d")
    block_ids = store(pool, chain)
    pool.acquire(block_ids[3:])
    purge = pool.purge(chain)
    assert (purge.victims, purge.in_use, purge.needed) == ((), 1, 3)
    pool.release(block_ids[3:])
    pool.set_wanted({chain[0]})
    purge = pool.purge([*chain, *hashes("unknown")])
    assert [victim.block_hash for victim in purge.victims] == [chain[3], chain[2], chain[1]]
    assert (purge.in_use, purge.kept, purge.needed) == (0, 1, 0)
    pool.check()
