"""Which blocks of a segment lie in device memory too: the device tier's book. No bytes and no device here.

The tier is *inclusive*: it holds copies of blocks that the segment holds, never anything else. So peers, who read the
segment, need not know of it, and a block that leaves the tier costs no copy. What leaves the segment leaves the tier
first, in the same critical section: the segment calls `drop` before it says so itself.

Places are given out by a `kvpool.store.pool.BlockPool` of the tier's own: the same rule as in memory, leaves first,
by frequency and recency. Every block weighs the same, since each hit saves the same copy. A block comes in only behind
its parent, so the tier holds prefixes.

The engine thread alone reads and writes places, and alone calls `find` and `admit`; a place that is given out is
written before anything reads it, because that thread writes it next. Other threads only `drop`. Everything takes the
segment's lock, and no other.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpool.errors import InvariantViolation
from kvpool.store.pool import BlockPool
from kvpool.types import BlockHash, BlockId, Tier

FIND_BLOCKS = 512
"""Looked up in one critical section: peers' reads wait for the lock meanwhile."""


class DevicePublisher(Protocol):
    """Whom a tier tells; see `kvpool.store.segment.StorePublisher`."""

    def stored(self, tier: Tier, hashes: Sequence[BlockHash], *, linked: bool = False) -> None:
        """These blocks are in the tier from now on."""

    def removed(self, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """These blocks are gone from it."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A sealed block whose content can be copied into the tier; ``parent`` is None at the front of a chain."""

    block_hash: BlockHash
    parent: BlockHash | None


class DeviceTier:
    """The book of ``num_blocks`` places.

    Args:
        num_blocks: size of the tier.
        lock: the segment's.
        in_segment: the segment's page of a block, None when it holds none.
        publisher: who is told about stored and removed blocks.
        clock_ns: monotonic clock.
    """

    def __init__(
        self,
        num_blocks: int,
        lock: threading.RLock,
        in_segment: Callable[[BlockHash], BlockId | None],
        publisher: DevicePublisher,
        clock_ns: Callable[[], int],
    ) -> None:
        self._lock = lock
        self._in_segment = in_segment
        self._publisher = publisher
        self._clock_ns = clock_ns
        self._pool = BlockPool(num_blocks)
        self._totals: Counter[str] = Counter()

    # -- the engine thread

    def find(self, hashes: Sequence[BlockHash]) -> list[BlockId | None]:
        """The place of each block, None where it has none. That is a use.

        A place stays valid until the next `admit` while a sequence holds a reference on the segment's page.
        """
        places: list[BlockId | None] = []
        now_ns = self._clock_ns()
        for start in range(0, len(hashes), FIND_BLOCKS):
            with self._lock:
                found = [self._pool.lookup(block_hash) for block_hash in hashes[start : start + FIND_BLOCKS]]
                used = [place for place in found if place is not None]
                self._pool.acquire(used)
                self._pool.release(used, now_ns)
            places += found
        return places

    def admit(self, offers: Sequence[Offer]) -> list[tuple[int, BlockId]]:
        """Give places to blocks of one chain, in its order, as far as there is room behind their parents.

        Returns:
            (index in ``offers``, place) of each that the caller must copy now, before it calls anything else here.
        """
        with self._lock:
            admitted: list[tuple[int, BlockId]] = []
            index = 0
            while index < len(offers):
                run = self._run(offers, index)
                admitted += zip(range(index, index + len(run)), self._place(run), strict=False)
                index += max(1, len(run))
            return admitted

    def _run(self, offers: Sequence[Offer], start: int) -> list[Offer]:
        """The offers from ``start`` on that lack a place and continue each other behind what is here."""
        run: list[Offer] = []
        for offer in offers[start:]:
            before = run[-1].block_hash if run else None
            follows = offer.parent is None or (offer.parent == before if run else self._has(offer.parent))
            if not follows or self._has(offer.block_hash) or self._in_segment(offer.block_hash) is None:
                break
            run.append(offer)
        return run

    def _has(self, block_hash: BlockHash) -> bool:
        return self._pool.lookup(block_hash) is not None

    def _place(self, run: list[Offer]) -> list[BlockId]:
        """Places for the front of a run, others evicted for it; its parent is kept from leaving meanwhile."""
        if not run:
            return []
        pool, parent = self._pool, run[0].parent
        behind = None if parent is None else pool.lookup(parent)
        chain = [] if behind is None else [behind]
        pool.acquire(chain)
        fresh: list[BlockId] = []
        gone: list[BlockHash] = []
        for offer in run:
            if not pool.leaf_room:
                break  # all that is left here carries this chain
            allocation = pool.allocate(1, behind)
            behind = allocation.block_ids[0]
            pool.seal(behind, offer.block_hash, offer.parent)
            fresh.append(behind)
            gone += allocation.evicted
        pool.release([*chain, *fresh], self._clock_ns())
        self._gone("device_evictions", gone)
        if fresh:
            self._publisher.stored(Tier.DEVICE, [offer.block_hash for offer in run[: len(fresh)]], linked=True)
        return fresh

    # -- any thread

    def drop(self, hashes: Sequence[BlockHash]) -> None:
        """The segment is about to say that these blocks are gone: so are their copies. Under the segment's lock."""
        with self._lock:
            self._gone("device_drops", [victim.block_hash for victim in self._pool.drop(hashes)])

    def _gone(self, counter: str, hashes: list[BlockHash]) -> None:
        if hashes:
            self._totals[counter] += len(hashes)
            self._publisher.removed(Tier.DEVICE, hashes)

    def set_wanted(self, wanted: Collection[BlockHash]) -> None:
        """As `BlockPool.set_wanted`."""
        with self._lock:
            self._pool.set_wanted(wanted)

    def held(self) -> dict[BlockHash, BlockId]:
        """Every block of the tier and its place."""
        with self._lock:
            places = ((block_hash, self._pool.lookup(block_hash)) for block_hash in self._pool.hashes())
            return {block_hash: place for block_hash, place in places if place is not None}

    def totals(self) -> dict[str, int]:
        """Running totals: ``device_evictions``, to make room in the tier; ``device_drops``, because the segment's copy
        left."""
        with self._lock:
            return {name: self._totals[name] for name in ("device_evictions", "device_drops")}

    def status(self) -> dict[str, int]:
        """Size and use, JSON-serialisable."""
        with self._lock:
            counts = self._pool.counts()
        return {"blocks": counts.total - counts.free, "total_blocks": counts.total}

    def check(self) -> None:
        """Invariants.

        Raises:
            InvariantViolation: a block is here that the segment does not hold, or the pool's own do not hold.
        """
        with self._lock:
            self._pool.check()
            counts = self._pool.counts()
            if counts.referenced or counts.in_flight:
                raise InvariantViolation(f"device tier: places are in use between calls: {counts}")
            stray = [item for item in self._pool.hashes() if self._in_segment(item) is None]
            if stray:
                raise InvariantViolation(
                    f"device tier: {len(stray)} blocks outlived their pages, {stray[0].hex()} first"
                )
