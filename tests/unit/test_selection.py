"""What an administrator selects, and which chains of a leaving worker are worth moving."""

from __future__ import annotations

import pytest

from kvpool.errors import RequestError
from kvpool.store.pool import BlockPool
from kvpool.store.selection import HotChain, Selection, hot_chains, hot_hashes, select
from kvpool.types import BlockHash


def h(*names: str) -> list[BlockHash]:
    return [BlockHash(name.encode().ljust(16, b".")) for name in names]


def tree() -> BlockPool:
    """root ─ a ─ b ─ c ─ d  and  b ─ x; z alone, of another tenant, used late."""
    pool = BlockPool(16)
    root = BlockHash(bytes(16))
    for tenant, names in (("", "abcd"), ("", "abx"), ("t", "z")):
        chain = h(*names)
        held = pool.match(chain)
        pool.acquire(held)
        fresh = pool.allocate(len(chain) - len(held), tenant=tenant).block_ids
        parents = [root, *chain]
        kept = [pool.seal(page, chain[place], parents[place]) for place, page in enumerate(fresh, start=len(held))]
        pool.release([*held, *kept], now_ns=1000 if tenant else 100)
    return pool


def test_a_prefix_selects_its_blocks_and_everything_that_continues_it() -> None:
    blocks = tree().blocks()
    assert set(select(blocks, Selection(chain=tuple(h("a", "b", "c"))), 2000)) == set(h("a", "b", "c", "d"))
    assert set(select(blocks, Selection(chain=tuple(h("b"))), 2000)) == set(h("b", "c", "d", "x"))
    assert select(blocks, Selection(chain=tuple(h("unknown"))), 2000) == []


def test_purging_a_prefix_leaves_what_others_continue() -> None:
    pool = tree()
    purge = pool.purge(select(pool.blocks(), Selection(chain=tuple(h("a", "b", "c"))), 2000))
    assert [victim.block_hash for victim in purge.victims] == h("d", "c")
    assert purge.needed == 2  # a and b, because x continues them


def test_tenant_and_age_select_and_conditions_add_up() -> None:
    blocks = tree().blocks()
    assert select(blocks, Selection(tenant="t"), 2000) == h("z")
    assert set(select(blocks, Selection(idle_ns=1500), 2000)) == set(h("a", "b", "c", "d", "x"))
    assert select(blocks, Selection(idle_ns=1500, tenant="t"), 2000) == []
    assert len(select(blocks, Selection(idle_ns=0), 2000)) == 6


def test_a_selection_of_nothing_in_particular_is_refused() -> None:
    with pytest.raises(RequestError, match="say which blocks"):
        Selection()
    with pytest.raises(RequestError, match="at least 0"):
        Selection(idle_ns=-1)


def test_hot_sole_blocks_are_moved_as_whole_chains_the_most_valuable_first() -> None:
    pool = tree()
    pool.acquire(pool.match(h("a", "b", "c")))
    pool.release(pool.match(h("a", "b", "c")))
    blocks = pool.blocks()
    hot = hot_hashes(blocks)
    assert set(hot) == set(h("a", "b", "c"))  # asked for again; d, x and z never were
    assert hot_chains(blocks, hot, hot) == [HotChain("", tuple(h("a", "b", "c")), 3)]
    assert hot_chains(blocks, h("b"), hot) == [HotChain("", tuple(h("a", "b")), 1)]
    assert hot_chains(blocks, [], hot) == []
