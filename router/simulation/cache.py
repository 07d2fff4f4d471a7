"""One node's block cache: reference counts, and least-recently-used eviction of leaves first.  (pure)

A block is evictable when nothing uses it and no cached block continues it, so a chain loses its tail before its head
and what is left is always a prefix. Blocks in use are never evicted; they may push the cache over its capacity.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Entry:
    parent: int | None
    used: int
    users: int = 0
    children: int = 0


class NodeCache:
    """Blocks of one node.

    Args:
        capacity_blocks: blocks kept; None keeps all.
    """

    def __init__(self, capacity_blocks: int | None) -> None:
        self._capacity = capacity_blocks
        self._entries: dict[int, _Entry] = {}
        self._evictable: list[tuple[int, int]] = []
        self._serial = 0
        self.pinned = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: int) -> bool:
        return block in self._entries

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
                entry = self._entries[block] = _Entry(parent, self._serial)
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
            entry.used = self._serial
            self._offer(block, entry)

    def _offer(self, block: int, entry: _Entry) -> None:
        if entry.users == 0 and entry.children == 0:
            heapq.heappush(self._evictable, (entry.used, block))

    def _shrink(self) -> list[int]:
        evicted: list[int] = []
        if self._capacity is None:
            return evicted
        while len(self._entries) > self._capacity and self._evictable:
            used, block = heapq.heappop(self._evictable)
            entry = self._entries.get(block)
            if entry is None or entry.users or entry.children or entry.used != used:
                continue
            del self._entries[block]
            evicted.append(block)
            if entry.parent is not None:
                parent = self._entries[entry.parent]
                parent.children -= 1
                self._offer(entry.parent, parent)
        self.evicted += len(evicted)
        return evicted
