"""What a cached block is worth, and the order in which unneeded ones leave.  (pure)

Every block costs the same bytes, so what counts is the work that a copy saves and how often it is asked for:

    value = uses · work · (1/4 when somebody else keeps a copy)        uses ≤ 8
    rank  = floor at the last use + value                              the floor is the rank of the last victim

The least rank leaves first. The floor makes old merits fade: a block that was used eight times outlives eight turnovers
of blocks that were used once, then it goes. With equal values this is exactly least recently used. A copy that lives
elsewhere costs a load instead of a prefill when it is missed, hence the discount and not an absolute order: a prompt
that everybody asks for is held by everybody, and must not give way to a copy that nobody will ask for again.

Source of the rule: Cao and Irani, GreedyDual-Size (1997); Cherkasova, GreedyDual-Size with frequency (1998).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvpool.types import BlockHash, BlockId

WORK_UNIT = 1024
"""Work of a block at the front of a chain; deeper ones attend to more and cost more."""

MAX_USES = 8
SPARE_DIVISOR = 4


@dataclass(slots=True)
class Block:
    """One block of a pool; see `kvpool.store.pool`.

    Attributes:
        refs, pins: sequences and read leases that need it.
        in_flight: a load may still write it.
        block_hash, parent: identity, None before it is sealed.
        tenant: who asked for it.
        keep: an administrator wants it to stay.
        spare: another worker keeps a copy.
        uses: how often it was asked for.
        work: what computing it costs, in `WORK_UNIT`.
        floor: the pool's floor at the last use.
        tick: number of the last use.
        used_ns: time of the last use.
    """

    refs: int = 0
    pins: int = 0
    in_flight: bool = False
    block_hash: BlockHash | None = None
    parent: BlockHash | None = None
    tenant: str = ""
    keep: bool = False
    spare: bool = False
    uses: int = 0
    work: int = WORK_UNIT
    floor: int = 0
    tick: int = 0
    used_ns: int = 0

    @property
    def evictable(self) -> bool:
        """Sealed, and nobody needs it now."""
        return self.block_hash is not None and not self.refs and not self.pins

    @property
    def rank(self) -> int:
        """See the module's docstring."""
        value = min(self.uses, MAX_USES) * self.work
        return self.floor + max(1, value // SPARE_DIVISOR if self.spare else value)

    @property
    def order(self) -> Order:
        """What leaves first has the least: what is to be kept leaves last."""
        return (self.keep, self.rank, self.tick)

    def forget(self) -> None:
        """Back to a block without content."""
        self.block_hash = self.parent = None
        self.keep = self.spare = False
        self.uses, self.work, self.tenant = 0, WORK_UNIT, ""


Order = tuple[bool, int, int]


class LeafHeap:
    """Blocks by order, the least first. Entries are not removed when a block changes; they are skipped.

    Args:
        order: the order of a block now, None when it may not leave as a leaf.
    """

    def __init__(self, order: Callable[[BlockId], Order | None]) -> None:
        self._order = order
        self._heap: list[tuple[Order, BlockId]] = []

    def push(self, block_id: BlockId) -> None:
        """A block became a leaf, or its order changed. O(log n)."""
        order = self._order(block_id)
        if order is not None:
            heapq.heappush(self._heap, (order, block_id))

    def peek(self) -> BlockId | None:
        """The leaf that leaves first, None without one."""
        while self._heap:
            order, block_id = self._heap[0]
            if self._order(block_id) == order:
                return block_id
            heapq.heappop(self._heap)
        return None

    def first(self, count: int) -> list[BlockId]:
        """The ``count`` leaves that leave first, in order. O(count · log n) beside skipped entries."""
        found: dict[BlockId, Order] = {}
        while len(found) < count and self.peek() is not None:
            order, block_id = heapq.heappop(self._heap)
            found[block_id] = order
        for block_id, order in found.items():
            heapq.heappush(self._heap, (order, block_id))
        return list(found)

    def compact(self, limit: int, candidates: Callable[[], Iterable[BlockId]]) -> None:
        """Build the heap again from ``candidates`` when it has grown beyond ``limit`` entries."""
        if len(self._heap) > limit:
            orders = ((self._order(block_id), block_id) for block_id in candidates())
            self._heap = [(order, block_id) for order, block_id in orders if order is not None]
            heapq.heapify(self._heap)
