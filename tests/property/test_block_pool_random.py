"""The block pool against a naive model: random operations, invariants after every one."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from kvpool.errors import CapacityError
from kvpool.store.pool import BlockPool
from kvpool.store.ranges import FreeRanges
from kvpool.types import BlockHash, BlockId


def name(path: tuple[int, ...]) -> BlockHash:
    """Hash of a chain given by its branch at every level."""
    return BlockHash(bytes(path).ljust(16, b"\xff"))


@dataclass
class Naive:
    """What must be true, kept in the plainest way."""

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


class Run:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.total = self.rng.choice([1, 5, 12, 30])
        self.pool = BlockPool(self.total)
        self.naive = Naive()
        self.sequences: list[list[BlockId]] = []
        self.pinned: list[list[BlockId]] = []
        self.loads: list[list[BlockId]] = []

    def chain(self) -> list[BlockHash]:
        path = tuple(self.rng.randrange(2) for _ in range(self.rng.randrange(1, 7)))
        return [name(path[: i + 1]) for i in range(len(path))]

    def compute(self) -> None:
        """A sequence: reuse the held prefix, compute and seal the rest, keep the references."""
        chain = self.chain()
        held = self.pool.match(chain)
        assert held == [self.naive.sealed[block_hash] for block_hash in chain[: len(held)]]
        assert len(held) == len(chain) or chain[len(held)] not in self.naive.sealed
        self.pool.acquire(held)
        for block_id in held:
            self.naive.refs[block_id] = self.naive.refs.get(block_id, 0) + 1
        fresh = self.allocate(len(chain) - len(held))
        if fresh is None:
            self.sequences.append(held)
            return
        table = list(held)
        for index, block_id in enumerate(fresh, len(held)):
            kept = self.pool.seal(block_id, chain[index], chain[index - 1] if index else None)
            assert kept == self.naive.sealed.get(chain[index], block_id)
            self.naive.refs[block_id] -= 1
            self.naive.refs[kept] = self.naive.refs.get(kept, 0) + 1
            self.naive.sealed[chain[index]] = kept
            table.append(kept)
        self.sequences.append(table)

    def allocate(self, count: int) -> list[BlockId] | None:
        used = {block_id for block_id, refs in self.naive.refs.items() if refs} | self.naive.flying
        free = self.total - len(used | set(self.naive.sealed.values()))
        evictable = self.naive.evictable()
        assert self.pool.available_blocks == free + len(evictable)
        if count > free + len(evictable):
            with pytest.raises(CapacityError):
                self.pool.allocate(count)
            return None
        got = self.pool.allocate(count)
        assert len(got.evicted) == max(0, count - free)
        for gone in got.evicted:
            self.leaves_first(gone, evictable)
            evictable.discard(gone)
            del self.naive.sealed[gone]
        for block_id in got.block_ids:
            assert not self.naive.refs.get(block_id)
            assert block_id not in self.naive.flying
            assert block_id not in self.naive.sealed.values()
            self.naive.refs[block_id] = 1
        return list(got.block_ids)

    def leaves_first(self, gone: BlockHash, evictable: set[BlockHash]) -> None:
        """The victim has no held child, unless everything that could go has one."""
        assert gone in evictable
        if any(self.children(gone)):
            assert all(self.children(other) for other in evictable)

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
            self.pool.release(fresh)
            for block_id in fresh:
                self.naive.refs[block_id] -= 1
        else:
            self.sequences.append(fresh)
        self.loads.append(fresh)

    def land(self) -> None:
        if self.loads:
            load = self.loads.pop(self.rng.randrange(len(self.loads)))
            self.pool.end_flight(load)
            self.naive.flying.difference_update(load)

    def release(self) -> None:
        if self.sequences:
            table = self.sequences.pop(self.rng.randrange(len(self.sequences)))
            self.pool.release(table)
            for block_id in table:
                self.naive.refs[block_id] -= 1

    def pin(self) -> None:
        chain = self.chain()
        found = self.pool.pin(chain)
        assert found == tuple(self.naive.sealed.get(block_hash) for block_hash in chain)
        held = [block_id for block_id in found if block_id is not None]
        for block_id in held:
            self.naive.pins[block_id] = self.naive.pins.get(block_id, 0) + 1
        self.pinned.append(held)

    def unpin(self) -> None:
        if self.pinned:
            held = self.pinned.pop(self.rng.randrange(len(self.pinned)))
            self.pool.unpin(held)
            for block_id in held:
                self.naive.pins[block_id] -= 1

    def step(self) -> None:
        actions = (self.compute, self.compute, self.load, self.land, self.release, self.release, self.pin, self.unpin)
        self.rng.choice(actions)()
        self.pool.check()
        assert set(self.pool.hashes()) == set(self.naive.sealed)


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
