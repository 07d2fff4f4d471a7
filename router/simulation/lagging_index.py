"""The index as a router of a simulated cluster sees it: right, but late."""

from __future__ import annotations

from collections.abc import Sequence as Chain

from kvpool.types import BlockHash, Tier, WorkerKey


class LaggingIndex:
    """Block → bitmask of nodes in each tier, as the router sees it some time after the caches changed."""

    def __init__(self, keys: list[WorkerKey]) -> None:
        self._masks: dict[int, int] = {}  # in the device
        self._host: dict[int, int] = {}
        self.keys = keys

    def add(self, node: int, blocks: Chain[int]) -> None:
        """A node stored blocks in its device."""
        _set(self._masks, 1 << node, blocks)
        if self._host:
            _clear(self._host, 1 << node, blocks)

    def demote(self, node: int, blocks: Chain[int]) -> None:
        """Blocks of a node went from its device to its host."""
        _set(self._host, 1 << node, blocks)
        _clear(self._masks, 1 << node, blocks)

    def drop(self, node: int, blocks: Chain[int]) -> None:
        """A node removed blocks, wherever they were."""
        _clear(self._masks, 1 << node, blocks)
        if self._host:
            _clear(self._host, 1 << node, blocks)

    def prefixes(self, chain: Chain[BlockHash]) -> dict[WorkerKey, dict[Tier, int]]:
        """See `router.core.Directory`; ids of simulated blocks are plain integers."""
        found: dict[WorkerKey, dict[Tier, int]] = {}
        self._descend(chain, (self._masks,), Tier.DEVICE, found)
        if self._host:
            self._descend(chain, (self._masks, self._host), Tier.HOST, found)
        return found

    def _descend(
        self,
        chain: Chain[BlockHash],
        masks: tuple[dict[int, int], ...],
        tier: Tier,
        found: dict[WorkerKey, dict[Tier, int]],
    ) -> None:
        """Note how long a prefix of the chain every node holds in any of ``masks``."""
        alive = -1
        length = 0
        for block in chain:
            mask = 0
            for part in masks:
                mask |= part.get(block, 0)  # type: ignore[call-overload]
            mask &= alive
            if mask != alive:
                if alive != -1:
                    self._note(found, alive & ~mask, length, tier)
                alive = mask
                if not mask:
                    break
            length += 1
        if alive > 0:
            self._note(found, alive, length, tier)

    def _note(self, found: dict[WorkerKey, dict[Tier, int]], mask: int, length: int, tier: Tier) -> None:
        """A tier that adds nothing to a faster one is left out, as in `kvpool.metadata.prefixes.Prefixes`."""
        while mask:
            low = mask & -mask
            known = found.setdefault(self.keys[low.bit_length() - 1], {})
            if length > known.get(Tier.DEVICE, 0):
                known[tier] = length
            mask ^= low


def _set(masks: dict[int, int], bit: int, blocks: Chain[int]) -> None:
    for block in blocks:
        masks[block] = masks.get(block, 0) | bit


def _clear(masks: dict[int, int], bit: int, blocks: Chain[int]) -> None:
    for block in blocks:
        left = masks.get(block, 0) & ~bit
        if left:
            masks[block] = left
        else:
            masks.pop(block, None)
