"""How large the workers' segments are, and which of them a request would never fit into.  (pure)"""

from __future__ import annotations

from kvpool.types import MemberInfo, Tier, WorkerKey


class Sizes:
    """Blocks of the members' segments. Not thread-safe."""

    def __init__(self) -> None:
        self._blocks: dict[WorkerKey, int] = {}
        self._least = 0

    def put(self, info: MemberInfo) -> None:
        """A member says how large its segment is; 0 when it does not."""
        self._blocks[info.key] = max(info.capacity_blocks[: Tier.DISK], default=0)
        self._least = min((blocks for blocks in self._blocks.values() if blocks), default=0)

    def forget(self, key: WorkerKey) -> None:
        """It is no member any more."""
        self._blocks.pop(key, None)

    def too_small(self, needed_blocks: int) -> frozenset[WorkerKey]:
        """Workers whose segment could never hold so much; none when that is all of them, since a worker says best what
        it lacks."""
        if needed_blocks <= self._least:
            return frozenset()
        small = frozenset(key for key, blocks in self._blocks.items() if 0 < blocks < needed_blocks)
        return small if len(small) < len(self._blocks) else frozenset()
