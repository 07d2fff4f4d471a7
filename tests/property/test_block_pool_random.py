"""The block pool against a naive model: random operations, invariants after every one.

The model keeps the worth of every block in the plainest way and says exactly who leaves next: of the tenant over its
quota first, then of all, the leaf of least order; a kept one only when nothing else could go.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from kvpool.errors import CapacityError, InvariantViolation
from kvpool.store.pool import BlockPool
from kvpool.store.ranges import FreeRanges
from kvpool.store.worth import MAX_USES, SPARE_DIVISOR, WORK_UNIT
from kvpool.types import BlockHash, BlockId


def name(path: tuple[int, ...]) -> BlockHash:
    """Hash of a chain given by its branch at every level."""
    return BlockHash(bytes(path).ljust(16, b"\xff"))


@dataclass
class Merit:
    """What the order of one sealed block depends on."""

    tenant: str
    work: int
    uses: int = 1
    floor: int = 0
    tick: int = 0
    keep: bool = False
    spare: bool = False

    def rank(self) -> int:
        value = min(self.uses, MAX_USES) * self.work
        return self.floor + max(1, value // SPARE_DIVISOR if self.spare else value)


@dataclass
class Naive:
    """What must be true, kept in the plainest way."""

    merits: dict[BlockHash, Merit] = field(default_factory=dict)
    owners: dict[BlockId, str] = field(default_factory=dict)
    wanted: set[BlockHash] = field(default_factory=set)
    floor: int = 0
    tick: int = 0
    refs: dict[BlockId, int] = field(default_factory=dict)
    pins: dict[BlockId, int] = field(default_factory=dict)
    flying: set[BlockId] = field(default_factory=set)
    sealed: dict[BlockHash, BlockId] = field(default_factory=dict)

    def evictable(self) -> set[BlockHash]:
        return {
            block_hash
            for block_hash, block_id in self.sealed.items()
            if not self.refs.get(block_id) and not self.pins.get(block_id)
        }

    def touch(self, block_id: BlockId) -> None:
        """The last reference, or a read lease of an unreferenced block, ended."""
        self.tick += 1
        for block_hash, held in self.sealed.items():
            if held == block_id:
                self.merits[block_hash].floor, self.merits[block_hash].tick = self.floor, self.tick

    def held(self, tenant: str) -> int:
        return sum(owner == tenant for owner in self.owners.values())

    def order(self, block_hash: BlockHash) -> tuple[bool, int, int]:
        merit = self.merits[block_hash]
        return merit.keep, merit.rank(), merit.tick


class Run:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.total = self.rng.choice([1, 5, 12, 30])
        self.quotas = self.rng.choice([{}, {"b": self.total // 3}, {"*": 2, "c": 4}])
        self.pool = BlockPool(self.total, self.quotas)
        self.naive = Naive()
        self.sequences: list[list[BlockId]] = []
        self.pinned: list[list[BlockId]] = []
        self.loads: list[list[BlockId]] = []

    def chain(self, tenant: str = "") -> list[BlockHash]:
        path = (ord(tenant or " "), *(self.rng.randrange(2) for _ in range(self.rng.randrange(1, 7))))
        return [name(path[: i + 2]) for i in range(len(path) - 1)]

    def tenant(self) -> str:
        return self.rng.choice(["", "", "b", "c"])

    def compute(self) -> None:
        """A sequence: reuse the held prefix, compute and seal the rest, keep the references."""
        tenant = self.tenant()
        chain = self.chain(tenant)
        held = self.pool.match(chain)
        assert held == [self.naive.sealed[block_hash] for block_hash in chain[: len(held)]]
        assert len(held) == len(chain) or chain[len(held)] not in self.naive.sealed
        self.pool.acquire(held)
        for block_hash, block_id in zip(chain, held, strict=False):
            self.naive.refs[block_id] = self.naive.refs.get(block_id, 0) + 1
            self.naive.merits[block_hash].uses += 1
        fresh = self.allocate(len(chain) - len(held), tenant)
        if fresh is None:
            self.sequences.append(held)
            return
        table = list(held)
        for index, block_id in enumerate(fresh, len(held)):
            table.append(self.seal(block_id, chain, index, tenant))
        self.sequences.append(table)

    def seal(self, block_id: BlockId, chain: list[BlockHash], index: int, tenant: str) -> BlockId:
        block_hash, work = chain[index], self.rng.choice([WORK_UNIT, 3 * WORK_UNIT])
        kept = self.pool.seal(block_id, block_hash, chain[index - 1] if index else None, work)
        assert kept == self.naive.sealed.get(block_hash, block_id)
        self.naive.refs[block_id] -= 1
        self.naive.refs[kept] = self.naive.refs.get(kept, 0) + 1
        if kept == block_id:
            self.naive.sealed[block_hash] = block_id
            self.naive.merits[block_hash] = Merit(tenant, work, keep=block_hash in self.naive.wanted)
        else:
            self.naive.merits[block_hash].uses += 1
            del self.naive.owners[block_id]
        return kept

    def allocate(self, count: int, tenant: str = "") -> list[BlockId] | None:
        used = {block_id for block_id, refs in self.naive.refs.items() if refs} | self.naive.flying
        free = self.total - len(used | set(self.naive.sealed.values()))
        assert self.pool.available_blocks == free + len(self.naive.evictable())
        if count > free + len(self.naive.evictable()):
            with pytest.raises(CapacityError):
                self.pool.allocate(count, tenant=tenant)
            return None
        expected = self.victims(count, free, tenant)
        got = self.pool.allocate(count, tenant=tenant)
        assert list(got.evicted) == expected
        for block_id in got.block_ids:
            assert not self.naive.refs.get(block_id)
            assert block_id not in self.naive.flying
            assert block_id not in self.naive.sealed.values()
            self.naive.refs[block_id] = 1
            self.naive.owners[block_id] = tenant
        return list(got.block_ids)

    def victims(self, count: int, free: int, tenant: str) -> list[BlockHash]:
        """Who has to leave for ``count`` blocks of a tenant; they leave the model."""
        naive = self.naive
        gone: list[BlockHash] = []
        quota = self.quotas.get(tenant, self.quotas.get("*") if tenant else None)
        while quota is not None and naive.held(tenant) + count > quota:
            own = [
                item for item in naive.evictable() if naive.merits[item].tenant == tenant and not self.children(item)
            ]
            if not own:
                break
            gone.append(self.leave(min(own, key=naive.order)))
        while free + len(gone) < count:
            able = naive.evictable()
            leaves = [item for item in able if not self.children(item)]
            plain = [item for item in able if not naive.merits[item].keep]
            if not leaves or (plain and all(naive.merits[item].keep for item in leaves)):
                leaves = plain or list(able)
            first = min(leaves, key=naive.order)
            naive.floor = max(naive.floor, naive.merits[first].rank())
            gone.append(self.leave(first))
        return gone

    def leave(self, block_hash: BlockHash) -> BlockHash:
        block_id = self.naive.sealed.pop(block_hash)
        del self.naive.merits[block_hash], self.naive.owners[block_id]
        return block_hash

    def children(self, block_hash: BlockHash) -> list[BlockHash]:
        path = block_hash.rstrip(b"\xff")
        return [child for branch in (0, 1) if (child := name((*path, branch))) in self.naive.sealed]

    def load(self) -> None:
        fresh = self.allocate(self.rng.randrange(1, 4))
        if fresh is None:
            return
        self.pool.begin_flight(fresh)
        self.naive.flying.update(fresh)
        if self.rng.random() < 0.5:  # cancelled in flight
            self.drop(fresh)
        else:
            self.sequences.append(fresh)
        self.loads.append(fresh)

    def land(self) -> None:
        if self.loads:
            load = self.loads.pop(self.rng.randrange(len(self.loads)))
            self.pool.end_flight(load)
            self.naive.flying.difference_update(load)
            self.forget_free(load)

    def release(self) -> None:
        if self.sequences:
            table = self.sequences.pop(self.rng.randrange(len(self.sequences)))
            self.drop(table)

    def drop(self, table: list[BlockId]) -> None:
        self.pool.release(table)
        for block_id in reversed(table):
            self.naive.refs[block_id] -= 1
            if not self.naive.refs[block_id]:
                self.naive.touch(block_id)
        self.forget_free(table)

    def forget_free(self, block_ids: list[BlockId]) -> None:
        kept = self.naive.flying | set(self.naive.sealed.values())
        for block_id in block_ids:
            if not self.naive.refs.get(block_id) and block_id not in kept:
                self.naive.owners.pop(block_id, None)

    def pin(self) -> None:
        chain = self.chain(self.tenant())
        found = self.pool.pin(chain)
        assert found == tuple(self.naive.sealed.get(block_hash) for block_hash in chain)
        held = [block_id for block_id in found if block_id is not None]
        for block_id in held:
            self.naive.pins[block_id] = self.naive.pins.get(block_id, 0) + 1
        for block_hash in chain:
            if block_hash in self.naive.merits:
                self.naive.merits[block_hash].uses += 1
        self.pinned.append(held)

    def unpin(self) -> None:
        if self.pinned:
            held = self.pinned.pop(self.rng.randrange(len(self.pinned)))
            self.pool.unpin(held)
            for block_id in reversed(held):
                self.naive.pins[block_id] -= 1
                if not self.naive.refs.get(block_id):
                    self.naive.touch(block_id)

    def hint(self) -> None:
        """News about copies elsewhere, of held and unknown blocks."""
        chain = self.chain(self.tenant())
        spare = {block_hash for block_hash in chain if self.rng.random() < 0.5}
        self.pool.set_spare(chain, spare)
        for block_hash in chain:
            if block_hash in self.naive.merits:
                self.naive.merits[block_hash].spare = block_hash in spare

    def want(self) -> None:
        """An administrator wants other blocks to stay."""
        self.naive.wanted = set(self.chain(self.tenant())) if self.rng.random() < 0.7 else set()
        self.pool.set_wanted(self.naive.wanted)
        for block_hash, merit in self.naive.merits.items():
            merit.keep = block_hash in self.naive.wanted

    def purge(self) -> None:
        """Some blocks shall be gone; what is needed stays, and is counted."""
        wish = {block_hash for block_hash in self.chain(self.tenant()) if self.rng.random() < 0.7}
        able = {item for item in wish & self.naive.evictable() if not self.naive.merits[item].keep}
        while blocked := {item for item in able if any(child not in able for child in self.children(item))}:
            able -= blocked
        in_use = sum(item in self.naive.sealed and item not in self.naive.evictable() for item in wish)
        kept = sum(item in self.naive.evictable() and self.naive.merits[item].keep for item in wish)
        held = sum(item in self.naive.sealed for item in wish)
        purge = self.pool.purge(wish)
        gone = [victim.block_hash for victim in purge.victims]
        assert set(gone) == able
        assert (purge.in_use, purge.kept, purge.needed) == (in_use, kept, held - in_use - kept - len(able))
        for item in gone:
            assert not self.children(item)
            self.leave(item)

    def throw_out(self) -> None:
        """Some blocks must be gone, whatever continues them; a needed one is refused before anything of it changed."""
        wish = [item for item in self.chain(self.tenant()) if self.rng.random() < 0.7]
        needed = [item for item in wish if item in self.naive.sealed and item not in self.naive.evictable()]
        if needed:
            with pytest.raises(InvariantViolation, match="still needed"):
                self.pool.drop(needed)
            return
        gone = [victim.block_hash for victim in self.pool.drop(wish)]
        assert gone == [item for item in wish if item in self.naive.sealed]
        for item in gone:
            self.leave(item)

    def step(self) -> None:
        actions = (
            *(self.compute, self.compute, self.load, self.land, self.release, self.release, self.pin, self.unpin),
            *(self.hint, self.want, self.purge, self.throw_out),
        )
        self.rng.choice(actions)()
        self.pool.check()
        assert set(self.pool.hashes()) == set(self.naive.sealed)
        assert self.pool.tenants() == {t: self.naive.held(t) for t in set(self.naive.owners.values())}
        near = self.pool.candidates(self.rng.randrange(1, 9))
        assert len(near) == len(set(near))
        assert set(near) <= self.naive.evictable()
        leaves = [item for item in self.naive.evictable() if not self.children(item)]
        assert near[:1] == sorted(leaves, key=self.naive.order)[:1]


@pytest.mark.parametrize("seed", range(40))
def test_the_pool_agrees_with_a_naive_model_after_every_operation(seed: int) -> None:
    run = Run(seed)
    for _ in range(150):
        run.step()
    while run.loads:
        run.land()
    while run.sequences:
        run.release()
    while run.pinned:
        run.unpin()
    run.pool.check()
    counts = run.pool.counts()
    assert (counts.referenced, counts.in_flight, counts.pinned) == (0, 0, 0)
    assert counts.free + counts.cached == run.total


@pytest.mark.parametrize("seed", range(20))
def test_free_ranges_agree_with_a_set(seed: int) -> None:
    rng = Random(seed)
    free, naive = FreeRanges(40), set(range(40))
    for _ in range(200):
        if naive and rng.random() < 0.5:
            count = rng.randrange(1, len(naive) + 1)
            taken = free.take(count, rng.choice([None, rng.randrange(40)]))
            assert len(set(taken)) == count
            assert set(taken) <= naive
            naive -= set(taken)
        elif len(naive) < 40:
            block_id = rng.choice(sorted(set(range(40)) - naive))
            free.give(block_id)
            naive.add(block_id)
        assert {block_id for start, stop in free.runs() for block_id in range(start, stop)} == naive
        assert len(free) == len(naive)
        assert all(stop < start for (_, stop), (start, _) in zip(free.runs(), free.runs()[1:], strict=False))
