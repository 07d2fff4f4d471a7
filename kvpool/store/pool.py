"""The block pool: which block of one segment holds what, who needs it, and which one leaves first.  (pure)

A block is in exactly one state:

    FREE ── allocate ──► REFERENCED ── seal, release ──► CACHED ── evicted by allocate ──► FREE
                          │      ▲
               begin_flight      end_flight              IN_FLIGHT: a load may still write it. Never offered, never
                          ▼      │                       freed, whoever lets go of it, until end_flight.
                          IN_FLIGHT

Only sealed blocks have a hash; only they are found, pinned and kept after their last reference. Pins are read
leases of peers: a pinned block stays, in whatever state it is. Unreferenced unpinned blocks are evicted, leaves first:
a block goes before its parent, so that what stays is a usable prefix. Among leaves the one that is worth least goes
(`kvpool.store.worth`); what an administrator wants to keep goes only when nothing else is left, because a request that
waits for ever is worse than a lost pin. A tenant over its quota evicts its own blocks first, and is never refused.

Not here: bytes, checksums, locks, who to tell. One thread at a time may call a pool; `kvpool.store.segment` is the
thread-safe shell. Invariant: free + cached + referenced + in flight = total, checked by `check`. Evicting is
O(log n), except where every leaf is needed and only a hole is left to make.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from kvpool.errors import CapacityError, InvariantViolation
from kvpool.store.answers import Allocation, BlockState, PoolCounts, Purge, Victim
from kvpool.store.ranges import FreeRanges
from kvpool.store.worth import WORK_UNIT, Block, LeafHeap, Order
from kvpool.types import BlockHash, BlockId

EVERY_TENANT = "*"
"""In a mapping of quotas: every tenant that is not named. The shared tenant, "", has a quota only when it is named."""

CHAIN_BLOCKS = 16


class BlockPool:
    """Bookkeeping of ``total_blocks`` blocks.

    Args:
        total_blocks: size of the segment, at least 1.
        quotas: tenant → most blocks it may have while it has others to evict; see `EVERY_TENANT`.
    """

    def __init__(self, total_blocks: int, quotas: Mapping[str, int] | None = None) -> None:
        self.total_blocks = total_blocks
        self._quotas = dict(quotas or {})
        self._blocks = [Block() for _ in range(total_blocks)]
        self._free = FreeRanges(total_blocks)
        self._by_hash: dict[BlockHash, BlockId] = {}
        self._children: dict[BlockHash, int] = {}
        self._leaves = LeafHeap(self._leaf_order)
        self._own_leaves: dict[str, LeafHeap] = {}  # of tenants with a quota
        self._held: Counter[str] = Counter()
        self.wanted: frozenset[BlockHash] = frozenset()
        self._tick = self._floor = 0
        self._evictable = 0
        self._evictable_kept = self._kept = self._spare = 0
        self._cached = 0
        self._in_flight = 0
        self._pinned = 0

    # -- looking

    @property
    def available_blocks(self) -> int:
        """Blocks `allocate` could hand out now: free ones and those it may evict."""
        return len(self._free) + self._evictable

    @property
    def leaf_room(self) -> bool:
        """Whether a block could be handed out now without making a hole: one is free, or a leaf can leave."""
        return len(self._free) > 0 or self._next_leaf() is not None

    def counts(self) -> PoolCounts:
        """Blocks by state."""
        free = len(self._free)
        referenced = self.total_blocks - free - self._cached - self._in_flight
        return PoolCounts(
            free,
            self._cached,
            referenced,
            self._in_flight,
            self._pinned,
            self.total_blocks,
            self._kept,
            self._spare,
        )

    def next_used_ns(self) -> int | None:
        """When the block that would leave next was last used; None while a block is free, or all are needed."""
        leaf = None if len(self._free) else self._leaves.peek()
        return None if leaf is None else self._blocks[leaf].used_ns

    def tenants(self) -> dict[str, int]:
        """Blocks of every tenant that has some, sealed or not."""
        return dict(self._held)

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

    def allocate(self, count: int, after: BlockId | None = None, tenant: str = "") -> Allocation:
        """Hand out ``count`` blocks without content, evicting what is worth least.

        Args:
            count: how many.
            after: the last block of the chain so far; its neighbours are preferred.
            tenant: for whom; one over its quota evicts its own blocks first, even while others are free.

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
        victims = self._keep_to_quota(tenant, count)
        while len(self._free) < count:
            victims.append(self._evict_one())
        block_ids = tuple(BlockId(block_id) for block_id in self._free.take(count, after))
        for block_id in block_ids:
            self._blocks[block_id].refs, self._blocks[block_id].tenant = 1, tenant
        if count:
            self._held[tenant] += count
        return Allocation(block_ids, tuple(victims))

    def acquire(self, block_ids: Iterable[BlockId]) -> None:
        """Add one reference to each of these sealed or referenced blocks. That is a use."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.refs == 0 and block.block_hash is None:
                raise InvariantViolation(f"block {block_id} is acquired without content")
            if block.refs == 0:
                self._cached -= 1
                self._count_evictable(block, -1)
            block.refs += 1
            block.uses += 1

    def release(self, block_ids: Sequence[BlockId], now_ns: int = 0) -> None:
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
                self._count_evictable(block, 1)
                self._touch(block_id, now_ns)
            elif not block.in_flight:
                self._give(block_id)

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
                self._give(block_id)

    def seal(
        self, block_id: BlockId, block_hash: BlockHash, parent: BlockHash | None, work: int = WORK_UNIT
    ) -> BlockId:
        """Give a complete block its identity, so that it can be found. ``work``: what computing it again would cost.

        Returns:
            The block to use from now on: ``block_id``, or the one that already holds ``block_hash`` (the reference
            moves to it and ``block_id`` is freed).
        """
        block = self._blocks[block_id]
        if block.in_flight or block.refs < 1 or block.block_hash is not None:
            raise InvariantViolation(f"block {block_id} cannot be sealed: {block}")
        twin = self._by_hash.get(block_hash)
        if twin is not None:
            self.acquire((twin,))
            self.release((block_id,))
            return twin
        block.block_hash, block.parent, block.work, block.uses = block_hash, parent, max(1, work), 1
        block.keep = block_hash in self.wanted
        self._kept += block.keep
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
                if block.refs == 0:
                    self._count_evictable(block, -1)
                self._pinned += block.pins == 0
                block.pins += 1
                block.uses += 1
        return found

    def unpin(self, block_ids: Sequence[BlockId], now_ns: int = 0) -> None:
        """Undo one `pin` of these blocks, given in chain order; a read counts as a use."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            if block.pins < 1:
                raise InvariantViolation(f"block {block_id} is unpinned without a pin")
            block.pins -= 1
            self._pinned -= block.pins == 0
            if block.refs == 0:
                self._count_evictable(block, 1)
                self._touch(block_id, now_ns)

    # -- hints and administration

    def candidates(self, count: int) -> list[BlockHash]:
        """Up to ``count`` blocks that are near to leave: the first leaves, each with up to `CHAIN_BLOCKS` blocks before
        it. O(count · log n)."""
        found: dict[BlockHash, None] = {}
        for leaf in self._leaves.first(-(-count // CHAIN_BLOCKS)):
            block_id: BlockId | None = leaf
            for _ in range(CHAIN_BLOCKS):
                block = None if block_id is None else self._blocks[block_id]
                if block is None or block.block_hash is None or not block.evictable:
                    break
                found[block.block_hash] = None
                block_id = None if block.parent is None else self._by_hash.get(block.parent)
        return list(found)[:count]

    def set_spare(self, hashes: Iterable[BlockHash], spare: Collection[BlockHash]) -> None:
        """Of these blocks, those in ``spare`` are kept by another worker too, the others nowhere else. A hint."""
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                continue
            block, now = self._blocks[block_id], block_hash in spare
            if block.spare != now:
                block.spare = now
                self._spare += 1 if now else -1
                self._offer_leaf(block_id)

    def set_wanted(self, wanted: Collection[BlockHash]) -> None:
        """From now on exactly these hashes are kept as long as anything else can be evicted, held already or not."""
        for block_hash in self.wanted ^ frozenset(wanted):
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                continue
            block = self._blocks[block_id]
            block.keep = not block.keep
            change = 1 if block.keep else -1
            self._kept += change
            self._evictable_kept += change * block.evictable
            self._offer_leaf(block_id)
        self.wanted = frozenset(wanted)

    def blocks(self) -> list[Block]:
        """Every sealed block, to read. O(n)."""
        return [self._blocks[block_id] for block_id in self._by_hash.values()]

    def purge(self, hashes: Collection[BlockHash]) -> Purge:
        """Evict these blocks now, children before parents; what is in use, kept, or continued by a block that stays,
        stays. Hashes that are not held are passed over."""
        victims: list[Victim] = []
        in_use = kept = 0
        rest: dict[BlockHash, BlockId] = {}
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                continue
            block = self._blocks[block_id]
            in_use += not block.evictable
            kept += block.evictable and block.keep
            if block.evictable and not block.keep:
                rest[block_hash] = block_id
        ready = [block_id for block_hash, block_id in rest.items() if block_hash not in self._children]
        while ready:
            block_id = ready.pop()
            parent = self._blocks[block_id].parent
            victims.append(self._evict(block_id))
            del rest[victims[-1].block_hash]
            if parent in rest and parent not in self._children:
                ready.append(rest[parent])
        return Purge(tuple(victims), in_use, kept, len(rest))

    def drop(self, hashes: Iterable[BlockHash]) -> list[Victim]:
        """Evict these blocks now, whatever continues them; hashes that are not held are passed over. For a tier whose
        blocks must not outlive those of another one.

        Raises:
            InvariantViolation: one is needed.
        """
        victims: list[Victim] = []
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                continue
            if not self._blocks[block_id].evictable:
                raise InvariantViolation(f"block {block_id} is dropped and still needed: {self._blocks[block_id]}")
            victims.append(self._evict(block_id))
        return victims

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
            kept=sum(block.keep for block in self._blocks),
            spare=sum(block.spare for block in self._blocks),
        )
        _require(counts == recount, f"counters say {counts}, blocks say {recount}")
        free_ids = {block_id for start, stop in self._free.runs() for block_id in range(start, stop)}
        _require(
            free_ids == {block_id for block_id, state in enumerate(states) if state is BlockState.FREE},
            "the free runs differ from the free blocks",
        )
        evictable = sum(block.evictable for block in self._blocks)
        _require(evictable == self._evictable, f"{self._evictable} evictable counted, {evictable} found")
        kept = sum(block.evictable and block.keep for block in self._blocks)
        _require(kept == self._evictable_kept, f"{self._evictable_kept} evictable kept ones counted, {kept} found")
        held = Counter(block.tenant for block, state in zip(self._blocks, states, strict=True) if _used(state))
        _require(held == self._held, f"tenants hold {held}, counted {self._held}")
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

    def _touch(self, block_id: BlockId, now_ns: int) -> None:
        self._tick += 1
        block = self._blocks[block_id]
        block.tick, block.floor, block.used_ns = self._tick, self._floor, now_ns
        self._offer_leaf(block_id)

    def _offer_leaf(self, block_id: BlockId) -> None:
        if self._leaf_order(block_id) is None:
            return
        limit = 2 * self.total_blocks + 64
        self._leaves.push(block_id)
        self._leaves.compact(limit, lambda: map(BlockId, range(self.total_blocks)))
        tenant = self._blocks[block_id].tenant
        if self._quota(tenant) is not None:
            own = self._own_leaves.get(tenant)
            if own is None:
                own = self._own_leaves[tenant] = LeafHeap(lambda item: self._own_order(tenant, item))
            own.push(block_id)
            own.compact(limit, lambda: map(BlockId, range(self.total_blocks)))

    def _leaf_order(self, block_id: BlockId) -> Order | None:
        block = self._blocks[block_id]
        return block.order if block.evictable and block.block_hash not in self._children else None

    def _own_order(self, tenant: str, block_id: BlockId) -> Order | None:
        return self._leaf_order(block_id) if self._blocks[block_id].tenant == tenant else None

    def _quota(self, tenant: str) -> int | None:
        return self._quotas.get(tenant, self._quotas.get(EVERY_TENANT) if tenant else None)

    def _keep_to_quota(self, tenant: str, count: int) -> list[Victim]:
        """Evict the tenant's own leaves until ``count`` more blocks fit its quota or none is left."""
        quota, own = self._quota(tenant), self._own_leaves.get(tenant)
        victims: list[Victim] = []
        while quota is not None and own is not None and self._held[tenant] + count > quota:
            block_id = own.peek()
            if block_id is None:
                break
            victims.append(self._evict(block_id))
        return victims

    def _evict_one(self) -> Victim:
        block_id = self._next_leaf()
        if block_id is None:
            # Every block that could go has a needed descendant. Rare; better a hole than a refused request.
            rest = [BlockId(i) for i, block in enumerate(self._blocks) if block.evictable]
            block_id = min(rest, key=lambda item: self._blocks[item].order)
        self._floor = max(self._floor, self._blocks[block_id].rank)
        return self._evict(block_id)

    def _next_leaf(self) -> BlockId | None:
        """The leaf that leaves next; None when only holes are left to make."""
        leaf = self._leaves.peek()
        spared = leaf is not None and self._blocks[leaf].keep and self._evictable > self._evictable_kept
        return None if spared else leaf

    def _evict(self, block_id: BlockId) -> Victim:
        block = self._blocks[block_id]
        if block.block_hash is None:
            raise InvariantViolation(f"block {block_id} is evicted without content")
        victim = Victim(
            block_id, block.block_hash, block.parent, block.tenant, block.work, block.used_ns, kept=block.keep
        )
        self._cached -= 1
        self._count_evictable(block, -1)
        self._kept -= block.keep
        self._spare -= block.spare
        del self._by_hash[victim.block_hash]
        self._give(block_id)
        if victim.parent is not None:
            self._drop_child(victim.parent)
        return victim

    def _count_evictable(self, block: Block, change: int) -> None:
        """A sealed block with neither reference nor pin becomes evictable, or is about to be needed."""
        if not block.pins:
            self._evictable += change
            self._evictable_kept += change * block.keep

    def _give(self, block_id: BlockId) -> None:
        """A block loses content and owner."""
        block = self._blocks[block_id]
        self._held[block.tenant] -= 1
        if not self._held[block.tenant]:
            del self._held[block.tenant]
            self._own_leaves.pop(block.tenant, None)
        block.forget()
        self._free.give(block_id)

    def _drop_child(self, parent: BlockHash) -> None:
        self._children[parent] -= 1
        if self._children[parent]:
            return
        del self._children[parent]
        block_id = self._by_hash.get(parent)
        if block_id is not None:
            self._offer_leaf(block_id)


def _used(state: BlockState) -> bool:
    return state is not BlockState.FREE


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantViolation(f"block pool: {message}")
