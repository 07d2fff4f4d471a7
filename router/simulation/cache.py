"""One node's block cache: reference counts, and least-recently-used eviction of leaves first.  (pure)

A block is evictable when nothing uses it and no cached block continues it, so a chain loses its tail before its head
and what is left is always a prefix. Blocks in use are never evicted; they may push the cache over its capacity.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Entry:
    parent: int | None
    used: int
    used_ns: int
    users: int = 0
    children: int = 0


class NodeCache:
    """Blocks of one node.

    Args:
        capacity_blocks: blocks kept; None keeps all.
        clock_ns: simulated time.
    """

    def __init__(self, capacity_blocks: int | None, clock_ns: Callable[[], int] = lambda: 0) -> None:
        self._capacity = capacity_blocks
        self._clock_ns = clock_ns
        self._entries: dict[int, _Entry] = {}
        self._evictable: list[tuple[int, int]] = []
        self._serial = 0
        self.pinned = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    @property
    def empty_blocks(self) -> int:
        """Blocks that could come without any leaving; with unbounded capacity always more than enough."""
        return sys.maxsize if self._capacity is None else max(0, self._capacity - len(self._entries))

    def idle_ns(self) -> int:
        """How long the block that would leave next has not been used; 0 when none would."""
        if self.empty_blocks:
            return 0
        while self._evictable:
            used, block = self._evictable[0]
            if self._may_leave(used, block):
                return max(1, self._clock_ns() - self._entries[block].used_ns)
            heapq.heappop(self._evictable)
        return 0

    def prefix(self, chain: Sequence[int]) -> int:
        """Leading blocks of the chain that are here."""
        entries = self._entries
        for i, block in enumerate(chain):
            if block not in entries:
                return i
        return len(chain)

    def insert(self, chain: Sequence[int], start: int = 0, *, pin: bool = False) -> tuple[list[int], list[int]]:
        """Make ``chain`` whole from ``start`` (earlier blocks must be here) and the most recently used.

        Args:
            pin: use the blocks from ``start`` on, until `unpin`.

        Returns:
            Blocks that are new, and blocks that were evicted for them.
        """
        new = []
        self._serial += 1
        for i in range(start, len(chain)):
            block = chain[i]
            entry = self._entries.get(block)
            if entry is None:
                parent = chain[i - 1] if i else None
                entry = self._entries[block] = _Entry(parent, self._serial, self._clock_ns())
                if parent is not None:
                    self._entries[parent].children += 1
                new.append(block)
        if pin:
            self.pin(chain[start:])
        self._touch(chain)
        return new, self._shrink()

    def pin(self, blocks: Sequence[int]) -> None:
        """Use blocks that are here; they stay until `unpin`."""
        for block in blocks:
            entry = self._entries[block]
            if entry.users == 0:
                self.pinned += 1
            entry.users += 1
        self._serial += 1
        self._touch(blocks)

    def unpin(self, blocks: Sequence[int]) -> list[int]:
        """End the use of blocks; returns what is evicted, when the cache was over its capacity."""
        for block in blocks:
            entry = self._entries[block]
            entry.users -= 1
            if entry.users == 0:
                self.pinned -= 1
                self._offer(block, entry)
        return self._shrink()

    def clear(self) -> list[int]:
        """Lose everything, as a node that died; returns what was lost."""
        lost = list(self._entries)
        self._entries.clear()
        self._evictable.clear()
        self.pinned = 0
        return lost

    def _touch(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            entry = self._entries[block]
            entry.used, entry.used_ns = self._serial, self._clock_ns()
            self._offer(block, entry)

    def _offer(self, block: int, entry: _Entry) -> None:
        if entry.users == 0 and entry.children == 0:
            heapq.heappush(self._evictable, (entry.used, block))

    def _may_leave(self, used: int, block: int) -> bool:
        """Whether an entry of the heap is still true."""
        entry = self._entries.get(block)
        return entry is not None and not entry.users and not entry.children and entry.used == used

    def _shrink(self) -> list[int]:
        evicted: list[int] = []
        if self._capacity is None:
            return evicted
        while len(self._entries) > self._capacity and self._evictable:
            used, block = heapq.heappop(self._evictable)
            if not self._may_leave(used, block):
                continue
            entry = self._entries.pop(block)
            evicted.append(block)
            if entry.parent is not None:
                parent = self._entries[entry.parent]
                parent.children -= 1
                self._offer(entry.parent, parent)
        self.evicted += len(evicted)
        return evicted
