"""The thread-safe segment of one worker: a block pool over real memory, served to peers and announced.

The worker's engine thread allocates, seals and releases, pulls and administrators evict too, all under the core's lock;
transport threads pin and unpin. Every public method takes the one lock here and is short; checksums are computed
outside it. The publisher is told inside it, so that ``stored`` and ``removed`` of a block reach the directory in the
order in which they happened.

A read lease is short and bounded in number; the transport renews it while its read goes on and ends it. One that runs
out only lets the block be evicted: a reader that is still busy then sees a checksum that differs and redoes the block.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

import xxhash

from kvpool.store.answers import Allocation, PoolCounts, Purge, Victim
from kvpool.store.device import DeviceTier
from kvpool.store.pool import BlockPool
from kvpool.store.selection import HotChain, Selection, hot_chains, hot_hashes, select
from kvpool.store.worth import WORK_UNIT, Block
from kvpool.transport.base import HeldBlock
from kvpool.types import BlockHash, BlockId, Tier, WorkerKey

DEFAULT_LEASE_NS = 8_000_000_000  # stall bounds of reads are 1 to 5 s, renewals come every second
MAX_LEASES = 4096
TOTALS = ("leases", "evictions", "evicted_idle_ms", "evicted_kept", "leases_expired", "leases_refused")


Spill = Callable[[Victim, int, memoryview], None]
"""Takes a block that leaves memory: what it was, its checksum, and its bytes, which are valid during the call only."""


class StorePublisher(Protocol):
    """Whom a segment tells; must be thread-safe and must not block."""

    def stored(self, tier: Tier, hashes: Sequence[BlockHash], *, linked: bool = False) -> None:
        """These blocks can be read from now on; ``linked`` when each is the child of the one before it."""

    def removed(self, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """These blocks are gone."""


@dataclass(frozen=True, slots=True)
class SegmentConfig:
    """What a segment is.

    Attributes:
        block_bytes: bytes of one block.
        num_blocks: blocks of the segment.
        tier: where its memory lies.
        lease_ns: how long a read lease lasts from its beginning or its last renewal.
        max_leases: read leases at once; a reader beyond it is told that nothing is held, which is always safe.
        quotas: see `kvpool.store.pool.BlockPool`.
        device_blocks: blocks of the device tier, see `kvpool.store.device`; 0 for none.
    """

    block_bytes: int
    num_blocks: int
    tier: Tier = Tier.HOST
    lease_ns: int = DEFAULT_LEASE_NS
    max_leases: int = MAX_LEASES
    quotas: Mapping[str, int] = field(default_factory=dict)
    device_blocks: int = 0


@dataclass(frozen=True, slots=True)
class SealRequest:
    """A complete block and the identity it gets; ``parent`` is the hash of the chain before it, ``work`` what computing
    it again would cost, in `kvpool.store.worth.WORK_UNIT`."""

    block_id: BlockId
    block_hash: BlockHash
    parent: BlockHash
    work: int = WORK_UNIT


@dataclass(frozen=True, slots=True)
class _Lease:
    reader: WorkerKey
    block_ids: tuple[BlockId, ...]
    expires_ns: int


class Segment:
    """Blocks in ``memory``; a `kvpool.transport.base.BlockSource` for transports.

    Args:
        config: what it is.
        memory: ``num_blocks * block_bytes`` writable bytes; the caller keeps owning them.
        publisher: who is told about stored and removed blocks.
        clock_ns: monotonic clock.
    """

    def __init__(
        self, config: SegmentConfig, memory: memoryview, publisher: StorePublisher, clock_ns: Callable[[], int]
    ) -> None:
        self.config = config
        self._memory = memory
        self._publisher = publisher
        self._clock_ns = clock_ns
        self._lock = threading.RLock()
        self._pool = BlockPool(config.num_blocks, config.quotas)
        self._checksums = [0] * config.num_blocks
        self._leases: dict[int, _Lease] = {}
        self._next_lease = 0
        self._on_room: Callable[[], None] | None = None
        self._spill: Spill | None = None
        self._on_miss: Callable[[Sequence[BlockHash]], None] | None = None
        self._totals: Counter[str] = Counter()
        self.device: DeviceTier | None = None
        """Which of these blocks lie in device memory too; None without a device tier."""
        if config.device_blocks:
            self.device = DeviceTier(config.device_blocks, self._lock, self._pool.lookup, publisher, clock_ns)

    # -- for the scheduler

    @property
    def total_blocks(self) -> int:
        """Size of the segment in blocks."""
        return self.config.num_blocks

    @property
    def available_blocks(self) -> int:
        """Free and evictable blocks now; peers may pin some the moment after."""
        with self._lock:
            self._expire()  # whoever waits for room only asks: nothing else may happen here before it is given
            return self._pool.available_blocks

    def allocate(self, count: int, after: BlockId | None = None, tenant: str = "") -> Allocation:
        """As `BlockPool.allocate`; what had to leave is withdrawn from the directory first."""
        with self._lock:
            self._expire()
            allocation = self._pool.allocate(count, after, tenant)
            self._gone(allocation.victims)
            return allocation

    def lookup(self, block_hash: BlockHash) -> BlockId | None:
        """As `BlockPool.lookup`. Only acquired blocks stay: take the core's lock, under which blocks are evicted."""
        with self._lock:
            return self._pool.lookup(block_hash)

    def match(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """As `BlockPool.match`."""
        with self._lock:
            return self._pool.match(hashes)

    def acquire(self, block_ids: Iterable[BlockId]) -> None:
        """As `BlockPool.acquire`."""
        with self._lock:
            self._pool.acquire(block_ids)

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """As `BlockPool.release`."""
        with self._lock:
            self._pool.release(block_ids, self._clock_ns())

    def begin_flight(self, block_ids: Iterable[BlockId]) -> None:
        """As `BlockPool.begin_flight`."""
        with self._lock:
            self._pool.begin_flight(block_ids)

    def end_flight(self, block_ids: Iterable[BlockId]) -> None:
        """As `BlockPool.end_flight`."""
        with self._lock:
            self._pool.end_flight(block_ids)

    def clear(self) -> int:
        """Withdraw and evict everything that nobody references or reads; returns how many blocks that were."""
        with self._lock:
            self._expire()
            allocation = self._pool.allocate(self._pool.available_blocks)
            self._pool.release(allocation.block_ids)
            self._gone(allocation.victims)
            return len(allocation.victims)

    # -- hints

    def candidates(self, count: int) -> list[BlockHash]:
        """As `BlockPool.candidates`."""
        with self._lock:
            return self._pool.candidates(count)

    def set_spare(self, hashes: Iterable[BlockHash], spare: Collection[BlockHash]) -> None:
        """As `BlockPool.set_spare`."""
        with self._lock:
            self._pool.set_spare(hashes, spare)

    def set_wanted(self, wanted: Collection[BlockHash]) -> None:
        """As `BlockPool.set_wanted`, in every tier here."""
        with self._lock:
            self._pool.set_wanted(wanted)
            if self.device is not None:
                self.device.set_wanted(wanted)

    def hot_chains(self, others_of: Callable[[Sequence[BlockHash]], Sequence[int]]) -> list[HotChain]:
        """Chains that were asked for more than once and live nowhere else, the most valuable first.

        Args:
            others_of: how many other workers hold each of these blocks; asked without the lock.
        """
        with self._lock:
            blocks = [replace(block) for block in self._pool.blocks()]
        hot = hot_hashes(blocks)
        sole = [item for item, others in zip(hot, others_of(hot), strict=True) if not others]
        return hot_chains(blocks, sole, hot)

    def evict(self, selection: Selection, others: Sequence[Block] = ()) -> tuple[Purge, list[BlockHash]]:
        """Evict what is selected and not needed now. Only the thread that allocates may call it, or under its lock.

        Args:
            selection: which blocks.
            others: blocks that are held in another tier, to select from as well.

        Returns:
            What became of those in memory, and every hash that was selected and is not kept by an administrator; of
            ``others``, ``purge.kept`` counts those that are, and are not in memory too.
        """
        with self._lock:
            self._expire()
            chosen = select([*others, *self._pool.blocks()], selection, self._clock_ns())
            kept = self._pool.wanted.intersection(chosen)
            only_there = sum(self._pool.lookup(item) is None for item in kept)
            purge = self._pool.purge(chosen)
            self._gone(purge.victims, spill=False)
            return replace(purge, kept=purge.kept + only_there), [item for item in chosen if item not in kept]

    # -- content

    def offset(self, block_id: BlockId) -> int:
        """Byte offset of a block in the segment."""
        return block_id * self.config.block_bytes

    def seal(self, blocks: Sequence[SealRequest]) -> list[BlockId]:
        """Checksum complete blocks, give them their identities and announce them.

        Args:
            blocks: in chain order.

        Returns:
            For each the block to use from now on, as `BlockPool.seal`.
        """
        checksums = [self._checksum(block.block_id) for block in blocks]
        with self._lock:
            kept: list[BlockId] = []
            fresh: list[SealRequest] = []
            for block, checksum in zip(blocks, checksums, strict=True):
                kept.append(self._pool.seal(block.block_id, block.block_hash, block.parent, block.work))
                if kept[-1] == block.block_id:
                    self._checksums[block.block_id] = checksum
                    fresh.append(block)
            if fresh:
                linked = all(child.parent == before.block_hash for before, child in pairwise(fresh))
                self._publisher.stored(self.config.tier, [block.block_hash for block in fresh], linked=linked)
            return kept

    def held_hashes(self) -> list[BlockHash]:
        """Every hash that can be read now, for a full snapshot to the directory."""
        with self._lock:
            return self._pool.hashes()

    # -- BlockSource

    def pin(self, reader: WorkerKey, hashes: Sequence[BlockHash]) -> tuple[int, tuple[HeldBlock | None, ...]]:
        """Take a read lease on what is held; see `kvpool.transport.base.BlockSource`."""
        with self._lock:
            self._expire()
            self._next_lease += 1
            if len(self._leases) >= self.config.max_leases:
                self._totals["leases_refused"] += 1
                return self._next_lease, (None,) * len(hashes)
            found = self._pool.pin(hashes)
            if self._on_miss is not None and None in found:
                self._on_miss([item for item, block_id in zip(hashes, found, strict=True) if block_id is None])
            held = tuple(block_id for block_id in found if block_id is not None)
            if held:
                self._totals["leases"] += 1
                self._leases[self._next_lease] = _Lease(reader, held, self._clock_ns() + self.config.lease_ns)
            return self._next_lease, tuple(self._held(block_id) for block_id in found)

    def renew(self, lease_id: int) -> None:
        """Let a read lease begin again. One that ran out stays over."""
        with self._lock:
            self._expire()
            lease = self._leases.pop(lease_id, None)
            if lease is not None:  # goes to the end: see `_expire`
                self._leases[lease_id] = replace(lease, expires_ns=self._clock_ns() + self.config.lease_ns)

    def unpin(self, lease_id: int) -> None:
        """Release a read lease. Idempotent."""
        with self._lock:
            lease = self._leases.pop(lease_id, None)
            if lease is not None:
                self._pool.unpin(lease.block_ids, self._clock_ns())
            notify = self._on_room if lease is not None else None
        if notify is not None:
            notify()

    def on_evict(self, spill: Spill) -> None:
        """From now on give every block that is evicted to make room to ``spill``, under the lock; it must not block."""
        self._spill = spill

    def on_miss(self, missed: Callable[[Sequence[BlockHash]], None]) -> None:
        """From now on tell ``missed``, under the lock, what a reader asked for in vain; it must not block."""
        self._on_miss = missed

    def on_room(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, from any thread, whenever a read lease ends; it must not block."""
        self._on_room = callback

    # -- state

    @property
    def leases(self) -> int:
        """Read leases held by peers now."""
        with self._lock:
            return len(self._leases)

    def idle_ns(self) -> int:
        """How long the block that would leave next has not been used; 0 when none would."""
        with self._lock:
            used_ns = self._pool.next_used_ns()
            return 0 if used_ns is None else max(1, self._clock_ns() - used_ns)

    def counts(self) -> PoolCounts:
        """Blocks by state."""
        with self._lock:
            return self._pool.counts()

    def tenants(self) -> dict[str, int]:
        """As `BlockPool.tenants`."""
        with self._lock:
            return self._pool.tenants()

    def totals(self) -> dict[str, int]:
        """Running totals: ``leases`` taken, ``leases_expired``, ``leases_refused``; ``evictions``; ``evicted_idle_ms``,
        how long victims had not been used, in sum; ``evicted_kept``, those that an administrator wanted to stay."""
        with self._lock:
            return {name: self._totals[name] for name in TOTALS}

    def check(self) -> None:
        """As `BlockPool.check`, and as `DeviceTier.check`."""
        with self._lock:
            self._pool.check()
            if self.device is not None:
                self.device.check()

    def _gone(self, victims: Sequence[Victim], *, spill: bool = True) -> None:
        """Blocks left the pool and nobody has written over them yet: count and withdraw them, spill their bytes."""
        if not victims:
            return
        now_ns = self._clock_ns()
        self._totals["evictions"] += len(victims)
        self._totals["evicted_kept"] += sum(victim.kept for victim in victims)
        self._totals["evicted_idle_ms"] += sum(now_ns - victim.used_ns for victim in victims) // 1_000_000
        gone = [victim.block_hash for victim in victims]
        if self.device is not None:
            self.device.drop(gone)  # first: nothing may say that a block is there which is not here
        self._publisher.removed(self.config.tier, gone)
        if self._spill is not None and spill:
            for victim in victims:
                start = self.offset(victim.block_id)
                payload = self._memory[start : start + self.config.block_bytes]
                self._spill(victim, self._checksums[victim.block_id], payload)

    def _checksum(self, block_id: BlockId) -> int:
        start = self.offset(block_id)
        return xxhash.xxh3_64_intdigest(self._memory[start : start + self.config.block_bytes])

    def _held(self, block_id: BlockId | None) -> HeldBlock | None:
        return None if block_id is None else HeldBlock(self.offset(block_id), self._checksums[block_id])

    def _expire(self) -> None:
        now_ns = self._clock_ns()
        while self._leases:
            lease_id = next(iter(self._leases))  # all last equally long from their last renewal: the first ends first
            if self._leases[lease_id].expires_ns > now_ns:
                return
            self._pool.unpin(self._leases.pop(lease_id).block_ids, now_ns)
            self._totals["leases_expired"] += 1
