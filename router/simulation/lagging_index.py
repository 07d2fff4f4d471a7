"""The index as a router of a simulated cluster sees it: right, but late."""

from __future__ import annotations

from collections.abc import Sequence as Chain

from kvpool.types import BlockHash, Tier, WorkerKey


class LaggingIndex:
    """Block → bitmask of nodes, as the router sees it some time after the caches changed."""

    def __init__(self, keys: list[WorkerKey]) -> None:
        self._masks: dict[int, int] = {}
        self.keys = keys

    def add(self, node: int, blocks: Chain[int]) -> None:
        """A node stored blocks."""
        bit = 1 << node
        for block in blocks:
            self._masks[block] = self._masks.get(block, 0) | bit

    def drop(self, node: int, blocks: Chain[int]) -> None:
        """A node removed blocks."""
        bit = 1 << node
        for block in blocks:
            left = self._masks.get(block, 0) & ~bit
            if left:
                self._masks[block] = left
            else:
                self._masks.pop(block, None)

    def prefixes(self, chain: Chain[BlockHash]) -> dict[WorkerKey, dict[Tier, int]]:
        """See `router.core.Directory`; ids of simulated blocks are plain integers."""
        found: dict[WorkerKey, dict[Tier, int]] = {}
        alive = -1
        length = 0
        for block in chain:
            mask = self._masks.get(block, 0) & alive  # type: ignore[call-overload]
            if mask != alive:
                if alive != -1:
                    self._note(found, alive & ~mask, length)
                alive = mask
                if not mask:
                    break
            length += 1
        if alive > 0:
            self._note(found, alive, length)
        return found

    def _note(self, found: dict[WorkerKey, dict[Tier, int]], mask: int, length: int) -> None:
        while mask:
            low = mask & -mask
            found[self.keys[low.bit_length() - 1]] = {Tier.DEVICE: length}
            mask ^= low
