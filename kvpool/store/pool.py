"""The block pool: which block of one segment holds what, who needs it, and which one leaves first.  (pure)

A block is in exactly one state:

    FREE ── allocate ──► REFERENCED ── seal, release ──► CACHED ── evicted by allocate ──► FREE
                          │      ▲
               begin_flight      end_flight              IN_FLIGHT: a load may still write it. Never offered, never
                          ▼      │                       freed, whoever lets go of it, until end_flight.
                          IN_FLIGHT

Only sealed blocks have a hash; only they are found, pinned and kept after their last reference. Pins are read
leases of peers: a pinned block stays, in whatever state it is. Eviction is least recently used among unreferenced
unpinned blocks, leaves first: a block goes before its parent, so that what stays is a usable prefix.

Not here: bytes, checksums, locks, who to tell. One thread at a time may call a pool; `kvpool.store.segment` is the
thread-safe shell. Invariant: free + cached + referenced + in flight = total, checked by `check`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvpool.errors import CapacityError, InvariantViolation
from kvpool.store.ranges import FreeRanges
from kvpool.types import BlockHash, BlockId


class BlockState(Enum):
    """Where a block is in its life."""

    FREE = "free"
    CACHED = "cached"
    REFERENCED = "referenced"
    IN_FLIGHT = "in_flight"


@dataclass(frozen=True, slots=True)
class Allocation:
    """Blocks handed out, each with one reference, and the hashes that had to leave for them."""

    block_ids: tuple[BlockId, ...]
    evicted: tuple[BlockHash, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Blocks by state; the first four sum to ``total``. ``pinned`` blocks are cached or referenced ones."""

    free: int
    cached: int
    referenced: int
    in_flight: int
    pinned: int
    total: int


@dataclass(slots=True)
class _Block:
    refs: int = 0
    pins: int = 0
    in_flight: bool = False
    block_hash: BlockHash | None = None
    parent: BlockHash | None = None
    last_used: int = 0


class BlockPool:
    """Bookkeeping of ``total_blocks`` blocks.

    Args:
        total_blocks: size of the segment, at least 1.
    """

    def __init__(self, total_blocks: int) -> None:
        self.total_blocks = total_blocks
        self._blocks = [_Block() for _ in range(total_blocks)]
        self._free = FreeRanges(total_blocks)
        self._by_hash: dict[BlockHash, BlockId] = {}
        self._children: dict[BlockHash, int] = {}
        self._leaves: list[tuple[int, int]] = []  # heap of (last_used, block id); stale entries are skipped
        self._tick = 0
        self._evictable = 0
        self._cached = 0
        self._in_flight = 0
        self._pinned = 0

    # -- looking

    @property
    def available_blocks(self) -> int:
        """Blocks `allocate` could hand out now: free ones and those it may evict."""
        return len(self._free) + self._evictable

    def counts(self) -> PoolCounts:
        """Blocks by state."""
        free = len(self._free)
        referenced = self.total_blocks - free - self._cached - self._in_flight
        return PoolCounts(free, self._cached, referenced, self._in_flight, self._pinned, self.total_blocks)

    def lookup(self, block_hash: BlockHash) -> BlockId | None:
        """The block that holds ``block_hash``, sealed; nothing is touched."""
        return self._by_hash.get(block_hash)

    def match(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Blocks of the longest leading run of ``hashes`` that is held; nothing is touched."""
        found: list[BlockId] = []
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def hashes(self) -> list[BlockHash]:
        """Every sealed hash, in no particular order."""
        return list(self._by_hash)

    # -- references of sequences

    def allocate(self, count: int, after: BlockId | None = None) -> Allocation:
        """Hand out ``count`` blocks without content, evicting what was least recently used.

        Args:
            count: how many.
            after: the last block of the chain so far; its neighbours are preferred.

        Raises:
            CapacityError: fewer than ``count`` blocks are free or evictable; nothing changed.
        """
        if count > self.available_blocks:
            raise CapacityError(
                f"{count} blocks are needed and {self.available_blocks} of {self.total_blocks} can be had now; "
                "raise engine.num_blocks or wait for running requests",
                needed_blocks=count,
                available_blocks=self.available_blocks,
                total_blocks=self.total_blocks,
            )
        evicted = tuple(self._evict_one() for _ in range(count - len(self._free)))
        block_ids = tuple(BlockId(block_id) for block_id in self._free.take(count, after))
        for block_id in block_ids:
            self._blocks[block_id].refs = 1
        return Allocation(block_ids, evicted)

    def acquire(self, block_ids: Iterable[BlockId]) -> None:
        """Add one reference to each of these sealed or referenced blocks."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.refs == 0 and block.block_hash is None:
                raise InvariantViolation(f"block {block_id} is acquired without content")
            if block.refs == 0:
                self._cached -= 1
                self._evictable -= block.pins == 0
            block.refs += 1

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Drop one reference from each, given in chain order. Sealed blocks stay cached, the tail older than the
        head; blocks without content are freed, in-flight ones once their flight ends."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            if block.refs < 1:
                raise InvariantViolation(f"block {block_id} is released without a reference")
            block.refs -= 1
            if block.refs:
                continue
            if block.block_hash is not None:
                self._cached += 1
                self._evictable += block.pins == 0
                self._touch(block_id)
            elif not block.in_flight:
                self._free.give(block_id)

    # -- loads

    def begin_flight(self, block_ids: Iterable[BlockId]) -> None:
        """A load is about to write these allocated blocks."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.in_flight or block.block_hash is not None or block.refs != 1:
                raise InvariantViolation(f"block {block_id} cannot be written by a load: {block}")
            block.in_flight = True
            self._in_flight += 1

    def end_flight(self, block_ids: Iterable[BlockId]) -> None:
        """The load is terminal: nothing writes these blocks any more. Abandoned ones are freed."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if not block.in_flight:
                raise InvariantViolation(f"block {block_id} ends a flight it never began")
            block.in_flight = False
            self._in_flight -= 1
            if not block.refs:
                self._free.give(block_id)

    def seal(self, block_id: BlockId, block_hash: BlockHash, parent: BlockHash | None) -> BlockId:
        """Give a complete block its identity, so that it can be found.

        Returns:
            The block to use from now on: ``block_id``, or the one that already holds ``block_hash`` (the reference
            moves to it and ``block_id`` is freed).
        """
        block = self._blocks[block_id]
        if block.in_flight or block.refs != 1 or block.block_hash is not None:
            raise InvariantViolation(f"block {block_id} cannot be sealed: {block}")
        twin = self._by_hash.get(block_hash)
        if twin is not None:
            self.acquire((twin,))
            self.release((block_id,))
            return twin
        block.block_hash, block.parent = block_hash, parent
        self._by_hash[block_hash] = block_id
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        return block_id

    # -- read leases of peers

    def pin(self, hashes: Sequence[BlockHash]) -> tuple[BlockId | None, ...]:
        """Pin every block that is held; None where a hash is not."""
        found = tuple(self._by_hash.get(block_hash) for block_hash in hashes)
        for block_id in found:
            if block_id is not None:
                block = self._blocks[block_id]
                self._pinned += block.pins == 0
                self._evictable -= block.pins == 0 and block.refs == 0
                block.pins += 1
        return found

    def unpin(self, block_ids: Sequence[BlockId]) -> None:
        """Undo one `pin` of these blocks, given in chain order; a read counts as a use."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            if block.pins < 1:
                raise InvariantViolation(f"block {block_id} is unpinned without a pin")
            block.pins -= 1
            if block.pins == 0:
                self._pinned -= 1
                self._evictable += block.refs == 0
            if block.refs == 0:
                self._touch(block_id)

    # -- integrity

    def check(self) -> None:
        """Recount everything from scratch.

        Raises:
            InvariantViolation: a counter, a hash, a child count or a state is wrong; the message says which.
        """
        states = [self._state(BlockId(block_id)) for block_id in range(self.total_blocks)]
        counts = self.counts()
        recount = PoolCounts(
            free=states.count(BlockState.FREE),
            cached=states.count(BlockState.CACHED),
            referenced=states.count(BlockState.REFERENCED),
            in_flight=states.count(BlockState.IN_FLIGHT),
            pinned=sum(block.pins > 0 for block in self._blocks),
            total=self.total_blocks,
        )
        _require(counts == recount, f"counters say {counts}, blocks say {recount}")
        free_ids = {block_id for start, stop in self._free.runs() for block_id in range(start, stop)}
        _require(
            free_ids == {block_id for block_id, state in enumerate(states) if state is BlockState.FREE},
            "the free runs differ from the free blocks",
        )
        evictable = sum(
            state is BlockState.CACHED and block.pins == 0 for state, block in zip(states, self._blocks, strict=True)
        )
        _require(evictable == self._evictable, f"{self._evictable} evictable counted, {evictable} found")
        self._check_hashes()

    def _check_hashes(self) -> None:
        held = {block.block_hash: i for i, block in enumerate(self._blocks) if block.block_hash is not None}
        _require(held == self._by_hash, "the hash map differs from the blocks")
        children: dict[BlockHash, int] = {}
        for block in self._blocks:
            if block.block_hash is not None and block.parent is not None:
                children[block.parent] = children.get(block.parent, 0) + 1
        _require(children == self._children, "the child counts differ from the blocks")

    def _state(self, block_id: BlockId) -> BlockState:
        block = self._blocks[block_id]
        if block.in_flight:
            return BlockState.IN_FLIGHT
        if block.refs:
            return BlockState.REFERENCED
        return BlockState.FREE if block.block_hash is None else BlockState.CACHED

    # -- eviction

    def _touch(self, block_id: BlockId) -> None:
        self._tick += 1
        self._blocks[block_id].last_used = self._tick
        self._offer_leaf(block_id)

    def _offer_leaf(self, block_id: BlockId) -> None:
        if not self._is_leaf(block_id):
            return
        heapq.heappush(self._leaves, (self._blocks[block_id].last_used, block_id))
        if len(self._leaves) > 2 * self.total_blocks + 64:
            live = [BlockId(i) for i in range(self.total_blocks) if self._is_leaf(BlockId(i))]
            self._leaves = [(self._blocks[i].last_used, i) for i in live]
            heapq.heapify(self._leaves)

    def _is_evictable(self, block_id: BlockId) -> bool:
        block = self._blocks[block_id]
        return block.block_hash is not None and not block.refs and not block.pins

    def _is_leaf(self, block_id: BlockId) -> bool:
        block_hash = self._blocks[block_id].block_hash
        return block_hash is not None and self._is_evictable(block_id) and block_hash not in self._children

    def _evict_one(self) -> BlockHash:
        block_id = self._pop_leaf()
        block = self._blocks[block_id]
        if block.block_hash is None:
            raise InvariantViolation(f"block {block_id} is evicted without content")
        gone, parent = block.block_hash, block.parent
        del self._by_hash[gone]
        block.block_hash = block.parent = None
        self._cached -= 1
        self._evictable -= 1
        self._free.give(block_id)
        if parent is not None:
            self._drop_child(parent)
        return gone

    def _pop_leaf(self) -> BlockId:
        while self._leaves:
            last_used, raw_id = heapq.heappop(self._leaves)
            block_id = BlockId(raw_id)
            if self._blocks[block_id].last_used == last_used and self._is_leaf(block_id):
                return block_id
        # Every evictable block has a pinned or referenced descendant. Rare; better a hole than a refused request.
        rest = [BlockId(i) for i in range(self.total_blocks) if self._is_evictable(BlockId(i))]
        return min(rest, key=lambda block_id: self._blocks[block_id].last_used)

    def _drop_child(self, parent: BlockHash) -> None:
        self._children[parent] -= 1
        if self._children[parent]:
            return
        del self._children[parent]
        block_id = self._by_hash.get(parent)
        if block_id is not None:
            self._offer_leaf(block_id)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantViolation(f"block pool: {message}")
