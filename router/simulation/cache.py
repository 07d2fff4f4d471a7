"""One node's block cache: reference counts, and least-recently-used eviction of leaves first.  (pure)

A block is evictable when nothing uses it and no cached block of its tier continues it, so a chain loses its tail
before its head and what is left is always a prefix. Blocks in use are never evicted; they may push a tier over its
capacity.

With a host tier, what leaves the device goes there, and what leaves the host is gone. A block is in one tier at a
time; the device holds a prefix of every chain, and device and host together hold a prefix too.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvpool.types import Tier


@dataclass(slots=True)
class _Entry:
    parent: int | None
    used: int
    used_ns: int
    users: int = 0
    children: int = 0  # in the device
    below: int = 0  # children in the host
    tier: Tier = Tier.DEVICE


class Change(NamedTuple):
    """What a call changed: blocks that are new in the device, that went to the host, that are gone."""

    new: list[int]
    demoted: list[int]
    gone: list[int]


class NodeCache:
    """Blocks of one node.

    Args:
        capacity_blocks: blocks the device keeps; None keeps all.
        clock_ns: simulated time.
        host_blocks: blocks the host keeps of those that left the device.
    """

    def __init__(
        self, capacity_blocks: int | None, clock_ns: Callable[[], int] = lambda: 0, host_blocks: int = 0
    ) -> None:
        self._capacity = capacity_blocks
        self._host_capacity = host_blocks
        self._clock_ns = clock_ns
        self._entries: dict[int, _Entry] = {}
        self._evictable: list[tuple[int, int]] = []
        self._host_evictable: list[tuple[int, int]] = []
        self.in_host = 0
        self._serial = 0
        self.pinned = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def in_device(self) -> int:
        """Blocks in the device."""
        return len(self._entries) - self.in_host

    def tier(self, block: int) -> Tier | None:
        """Where a block is; None when it is not here."""
        entry = self._entries.get(block)
        return None if entry is None else entry.tier

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    @property
    def empty_blocks(self) -> int:
        """Blocks that could come without any leaving the device; with unbounded capacity always more than enough."""
        return sys.maxsize if self._capacity is None else max(0, self._capacity - self.in_device)

    def idle_ns(self) -> int:
        """How long the block that would leave the device next has not been used; 0 when none would."""
        if self.empty_blocks:
            return 0
        while self._evictable:
            used, block = self._evictable[0]
            if self._may_leave(used, block):
                return max(1, self._clock_ns() - self._entries[block].used_ns)
            heapq.heappop(self._evictable)
        return 0

    def prefix(self, chain: Sequence[int]) -> int:
        """Leading blocks of the chain that are here, in either tier."""
        entries = self._entries
        for i, block in enumerate(chain):
            if block not in entries:
                return i
        return len(chain)

    def device_prefix(self, chain: Sequence[int]) -> int:
        """Leading blocks of the chain in the device."""
        for i, block in enumerate(chain):
            entry = self._entries.get(block)
            if entry is None or entry.tier is not Tier.DEVICE:
                return i
        return len(chain)

    def insert(self, chain: Sequence[int], start: int = 0, *, pin: bool = False) -> Change:
        """Make ``chain`` whole in the device from ``start`` (earlier blocks must be there) and the most recently used.

        Args:
            pin: use the blocks from ``start`` on, until `unpin`.
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
            elif entry.tier is not Tier.DEVICE:
                self._promote(entry)
                new.append(block)
        if pin:
            self.pin(chain[start:])
        self._touch(chain)
        return self._shrink(new)

    def pin(self, blocks: Sequence[int]) -> None:
        """Use blocks that are here; they stay until `unpin`."""
        for block in blocks:
            entry = self._entries[block]
            if entry.users == 0:
                self.pinned += 1
            entry.users += 1
        self._serial += 1
        self._touch(blocks)

    def unpin(self, blocks: Sequence[int]) -> Change:
        """End the use of blocks; some leave their tier when it was over its capacity."""
        for block in blocks:
            entry = self._entries[block]
            entry.users -= 1
            if entry.users == 0:
                self.pinned -= 1
                self._offer(block, entry)
        return self._shrink([])

    def clear(self) -> list[int]:
        """Lose everything, as a node that died; returns what was lost."""
        lost = list(self._entries)
        self._entries.clear()
        self._evictable.clear()
        self._host_evictable.clear()
        self.pinned = self.in_host = 0
        return lost

    def _touch(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            entry = self._entries[block]
            entry.used, entry.used_ns = self._serial, self._clock_ns()
            self._offer(block, entry)

    def _offer(self, block: int, entry: _Entry) -> None:
        if entry.users or entry.children:
            return
        if entry.tier is Tier.DEVICE:
            heapq.heappush(self._evictable, (entry.used, block))
        elif not entry.below:
            heapq.heappush(self._host_evictable, (entry.used, block))

    def _may_leave(self, used: int, block: int, tier: Tier = Tier.DEVICE) -> bool:
        """Whether an entry of a tier's heap is still true."""
        entry = self._entries.get(block)
        if entry is None or entry.users or entry.children or entry.used != used or entry.tier is not tier:
            return False
        return tier is Tier.DEVICE or not entry.below

    def _promote(self, entry: _Entry) -> None:
        """A block of the host is in the device now; its parent is there already."""
        entry.tier = Tier.DEVICE
        self.in_host -= 1
        if entry.parent is not None:
            parent = self._entries[entry.parent]
            parent.below -= 1
            parent.children += 1

    def _shrink(self, new: list[int]) -> Change:
        demoted: list[int] = []
        gone: list[int] = []
        if self._capacity is None:
            return Change(new, demoted, gone)
        while self.in_device > self._capacity and self._evictable:
            used, block = heapq.heappop(self._evictable)
            if self._may_leave(used, block):
                self._leave_device(block, demoted if self._host_capacity else gone)
        while self.in_host > self._host_capacity and self._host_evictable:
            used, block = heapq.heappop(self._host_evictable)
            if self._may_leave(used, block, Tier.HOST):
                self._leave_host(block, gone)
        self.evicted += len(gone)
        if demoted and gone:
            lost = set(gone)
            demoted = [block for block in demoted if block not in lost]
        return Change(new, demoted, gone)

    def _leave_device(self, block: int, left: list[int]) -> None:
        left.append(block)
        entry = self._entries[block]
        if self._host_capacity:
            entry.tier = Tier.HOST
            self.in_host += 1
            self._offer(block, entry)
        else:
            del self._entries[block]
        if entry.parent is not None:
            parent = self._entries[entry.parent]
            parent.children -= 1
            parent.below += bool(self._host_capacity)
            self._offer(entry.parent, parent)

    def _leave_host(self, block: int, left: list[int]) -> None:
        left.append(block)
        entry = self._entries.pop(block)
        self.in_host -= 1
        if entry.parent is not None:
            parent = self._entries[entry.parent]
            parent.below -= 1
            self._offer(entry.parent, parent)
