"""What a block pool says: states, counts, and what it handed out and evicted.  (pure)"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvpool.types import BlockHash, BlockId


class BlockState(Enum):
    """Where a block is in its life."""

    FREE = "free"
    CACHED = "cached"
    REFERENCED = "referenced"
    IN_FLIGHT = "in_flight"


@dataclass(frozen=True, slots=True)
class Victim:
    """A block that was evicted; its bytes are intact until the block is written again."""

    block_id: BlockId
    block_hash: BlockHash
    parent: BlockHash | None
    tenant: str
    work: int
    used_ns: int
    kept: bool


@dataclass(frozen=True, slots=True)
class Allocation:
    """Blocks handed out, each with one reference, and those that had to leave for them, in this order."""

    block_ids: tuple[BlockId, ...]
    victims: tuple[Victim, ...] = ()

    @property
    def evicted(self) -> tuple[BlockHash, ...]:
        """Hashes of the victims."""
        return tuple(victim.block_hash for victim in self.victims)


@dataclass(frozen=True, slots=True)
class Purge:
    """What became of blocks that somebody wanted to be gone.

    Attributes:
        victims: those that left, children before parents.
        in_use: referenced or read by a peer.
        kept: wanted to stay by an administrator.
        needed: a block that continues them stays.
    """

    victims: tuple[Victim, ...] = ()
    in_use: int = 0
    kept: int = 0
    needed: int = 0


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Blocks by state; the first four sum to ``total``. ``pinned`` blocks (under a read lease), ``kept`` ones (an
    administrator wants them) and ``spare`` ones (another worker has a copy too) are cached or referenced ones."""

    free: int
    cached: int
    referenced: int
    in_flight: int
    pinned: int
    total: int
    kept: int = 0
    spare: int = 0
