"""Which worker holds which blocks, and how long a prefix of a chain each of them holds.  (pure)

`PrefixIndex` gives every worker a *slot* and every tier a *lane*, in the order of first use, and keeps, per attention
group, a table of block → bitmask of (lane, slot) pairs (`kvpool.metadata.masks`). One lookup finds the prefix of every
worker at once: it follows the chain and drops workers from a mask of those still alive.

- A worker's prefix ends at its first missing block, wherever the hole came from.
- Events may come twice, in any order, children before parents; storing is idempotent and removing the unknown is not
  an error.
- A worker leaves, or is replaced by a snapshot, by retiring its slot: one step, whatever the number of blocks. Retired
  bits are invisible and swept later, at most `sweep`'s argument at a time.
- At most ``max_entries`` (block, worker, tier) entries are kept, retired ones included. What does not fit is refused
  and counted: a missing entry costs a hit, never a wrong token.

It knows no leases, clocks or network, and is not thread-safe.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvpool.errors import CapacityError, InvariantViolation, StaleError
from kvpool.metadata.events import Placement
from kvpool.metadata.masks import MaskTable, block_hash, block_key
from kvpool.metadata.prefixes import Prefixes, by_tiers, joined
from kvpool.types import BlockHash, Tier, WorkerKey

DEFAULT_MAX_ENTRIES = 10_000_000
DEFAULT_MAX_WORKERS = 1024
MAX_DECODED_MASKS = 4096
DUMP_PART_BLOCKS = 8_192
FRUITLESS_PAUSE = 64
"""After an attempt to join pieces that gained nothing, this many chances are let go: an attempt costs many lookups."""

_TIERS = len(Tier)


@dataclass(frozen=True, slots=True)
class StoreResult:
    """What became of stored blocks: new entries, entries that were there, entries refused at the bound."""

    added: int
    known: int
    refused: int


@dataclass(slots=True)
class _Slot:
    number: int
    counts: list[int] = field(default_factory=lambda: [0] * _TIERS)


@dataclass(slots=True)
class _Holder:
    slot: _Slot
    incoming: _Slot | None = None
    visible: bool = True


@dataclass(slots=True)
class _Sweep:
    """A pass that clears the bits of ``slots`` from the blocks still in ``work``."""

    slots: list[_Slot]
    bits: int
    work: list[tuple[MaskTable, list[int]]]


class PrefixIndex:
    """The index of one pool, or a router's copy of it.

    Args:
        max_entries: bound on entries.
        max_workers: bound on workers.
    """

    def __init__(self, *, max_entries: int = DEFAULT_MAX_ENTRIES, max_workers: int = DEFAULT_MAX_WORKERS) -> None:
        self._max_entries = max_entries
        self._max_workers = max_workers
        self._width = max_workers + max(8, max_workers // 8)  # spare slots for incoming snapshots and retired slots
        self._free = list(range(self._width))
        self._keys: list[WorkerKey | None] = [None] * self._width
        self._holders: dict[WorkerKey, _Holder] = {}
        self._tables: dict[int, MaskTable] = {}
        self._visible = 0
        self._entries = 0
        self._tier_entries = [0] * _TIERS
        self._lanes: dict[Tier, int] = {}
        self._tiers: tuple[Tier, ...] = ()  # those with entries, fastest first
        self._retired: list[_Slot] = []
        self._sweep: _Sweep | None = None
        self._decoded: dict[int, tuple[WorkerKey, ...]] = {}
        self._learn_pause = 0
        self.refused_blocks = 0
        self.unknown_removals = 0

    # -- size ---------------------------------------------------------------------------------------------------

    @property
    def entries(self) -> int:
        """(block, worker, tier) entries, those of retired slots included until they are swept."""
        return self._entries

    @property
    def blocks(self) -> int:
        """Different (block, group) pairs."""
        return sum(len(table) for table in self._tables.values())

    @property
    def workers(self) -> tuple[WorkerKey, ...]:
        """Workers that may hold blocks, in the order they were added."""
        return tuple(self._holders)

    def counts(self, key: WorkerKey) -> tuple[int, ...]:
        """Blocks of a worker by tier; of its incoming snapshot while there is one."""
        holder = self._holder(key)
        return tuple((holder.incoming or holder.slot).counts)

    # -- workers ------------------------------------------------------------------------------------------------

    def add_worker(self, key: WorkerKey) -> None:
        """Make room for a worker; again for a known one does nothing.

        Raises:
            CapacityError: ``max_workers`` are known.
        """
        if key in self._holders:
            return
        slot = self._take_slot(key) if len(self._holders) < self._max_workers else None
        if slot is None:
            raise CapacityError(
                f"the index already tracks {len(self._holders)} workers; raise max_workers", worker=str(key)
            )
        self._holders[key] = _Holder(slot)
        self._visible |= 1 << slot.number

    def remove_worker(self, key: WorkerKey) -> None:
        """Forget a worker and all its blocks, in one step. Unknown workers are passed over."""
        holder = self._holders.pop(key, None)
        if holder is not None:
            self._retire(holder.slot)
            if holder.incoming is not None:
                self._retire(holder.incoming)

    def set_visible(self, key: WorkerKey, visible: bool) -> None:
        """Hide a worker from lookups, or show it again. Its blocks stay and go on changing."""
        holder = self._holder(key)
        holder.visible = visible
        bit = 1 << holder.slot.number
        self._visible = self._visible | bit if visible else self._visible & ~bit

    def visible(self, key: WorkerKey) -> bool:
        """Whether lookups see the worker."""
        return bool(self._visible >> self._holder(key).slot.number & 1)

    def loading(self, key: WorkerKey) -> bool:
        """Whether an unfinished snapshot stands ready to replace what the worker is known to hold."""
        return self._holder(key).incoming is not None

    def empty(self, key: WorkerKey) -> bool:
        """Whether lookups find no block of the worker, visible or not."""
        return not any(self._holder(key).slot.counts)

    def begin_snapshot(self, key: WorkerKey, direct: bool | None = None) -> None:
        """From now on the worker's events describe a new state from nothing; lookups still see the old one, or if that
        is empty the new one at once. ``direct`` says which to a copy, which must do as the original did."""
        holder = self._holder(key)
        if holder.incoming is not None:
            self._retire(holder.incoming)
            holder.incoming = None
        if not (self.empty(key) if direct is None else direct):
            holder.incoming = self._take_slot(key)
            if holder.incoming is None:
                self._empty(holder, key)

    def end_snapshot(self, key: WorkerKey) -> None:
        """The snapshot is whole: it replaces the old state in one step."""
        holder = self._holder(key)
        if holder.incoming is not None:
            old, holder.slot, holder.incoming = holder.slot, holder.incoming, None
            self._retire(old)
            self.set_visible(key, holder.visible)

    # -- blocks -------------------------------------------------------------------------------------------------

    def stored(
        self, key: WorkerKey, tier: Tier, hashes: Sequence[BlockHash], *, group: int = 0, linked: bool = False
    ) -> StoreResult:
        """A worker holds these blocks.

        Args:
            key, tier: whose, and where they lie.
            hashes, group: the blocks, in any order, and their attention group.
            linked: the caller knows that each block is the child of the one before it. Lookups get faster; a wrong
                claim makes them wrong.

        Raises:
            StaleError: the worker is not known.
        """
        holder = self._holder(key)
        if self._max_entries - self._entries < len(hashes):
            self._make_room(holder, key, len(hashes))
        slot = holder.incoming or holder.slot
        table = self._tables.get(group)
        if table is None:
            table = self._tables[group] = MaskTable()
        keys = [block_key(item) for item in hashes]
        free = self._max_entries - self._entries
        added, refused = table.add(self._bit(slot, tier), keys, linked=linked, limit=free)
        self._count(slot, tier, added)
        self.refused_blocks += refused
        return StoreResult(added, len(hashes) - added - refused, refused)

    def removed(self, key: WorkerKey, tier: Tier, hashes: Sequence[BlockHash], *, group: int = 0) -> int:
        """A worker no longer holds these blocks; returns how many entries went.

        Raises:
            StaleError: the worker is not known.
        """
        holder = self._holder(key)
        slot = holder.incoming or holder.slot
        table = self._tables.get(group)
        gone = 0
        if table is not None:
            gone = table.discard(self._bit(slot, tier), [block_key(item) for item in hashes])
        self._count(slot, tier, -gone)
        self.unknown_removals += len(hashes) - gone
        return gone

    def sweep(self, max_blocks: int) -> bool:
        """Clear entries of retired slots from at most about ``max_blocks`` blocks. True when nothing is left to do."""
        if self._sweep is None:
            if not self._retired:
                return True
            bits = 0
            for slot in self._retired:
                for tier in self._lanes:
                    bits |= self._bit(slot, tier)
            work = [(table, table.keys()) for table in self._tables.values()]
            self._sweep, self._retired = _Sweep(self._retired, bits, work), []
        work, left = self._sweep.work, max_blocks
        while work and left > 0:
            table, keys = work[-1]
            part = keys[-left:]
            del keys[-left:]
            table.clear(self._sweep.bits, part)
            left -= len(part)
            if not keys:
                work.pop()
        if work:
            return False
        for slot in self._sweep.slots:
            self._release(slot)
        self._sweep = None
        self._tables = {group: table for group, table in self._tables.items() if len(table)}
        return not self._retired

    # -- lookups ------------------------------------------------------------------------------------------------

    def prefixes(self, chain: Sequence[BlockHash], *, group: int = 0, learn: bool = False) -> Prefixes:
        """How long a prefix of ``chain`` every visible worker holds, by tier.

        Args:
            chain: block hashes from the first block of a prompt on.
            group: attention group.
            learn: the chain was hashed from tokens here, so its order may be trusted to speed up later lookups.
        """
        table = self._tables.get(group)
        if table is None or not chain:
            return {}
        tiers = self._tiers
        if len(tiers) == 1:
            tier = tiers[0]
            shift = self._lanes[tier] * self._width
            steps, pieces = table.descend(chain, self._visible << shift)
            runs, known = [], self._decoded.get
            for blocks, bits in steps:
                slots = bits >> shift
                runs.append(({tier: blocks}, known(slots) or self._keys_of(slots)))
            result = joined(runs)
        else:
            result, pieces = self._descend_tiers(table, chain, tiers)
        if learn and pieces:
            self._learn(table, chain)
        return result

    def holders(self, item: BlockHash, *, group: int = 0) -> dict[WorkerKey, tuple[Tier, ...]]:
        """Visible workers that hold one block, and in which tiers."""
        table = self._tables.get(group)
        mask = 0 if table is None else table.mask(block_key(item))
        found: dict[WorkerKey, tuple[Tier, ...]] = {}
        for tier, lane in sorted(self._lanes.items()):
            for key in self._keys_of((mask >> lane * self._width) & self._visible):
                found[key] = (*found.get(key, ()), tier)
        return found

    def copies(self, key: WorkerKey, hashes: Sequence[BlockHash], *, group: int = 0) -> list[tuple[int, bool]]:
        """For every block: how many visible workers beside ``key`` hold it in any tier, and whether one of those is
        its keeper. Every block with visible holders has one keeper, the same for everybody who asks."""
        table, holder = self._tables.get(group), self._holders.get(key)
        own = 0 if holder is None else 1 << holder.slot.number
        found: list[tuple[int, bool]] = []
        last, others, slots = -1, 0, list[int]()  # neighbours in a chain mostly have the same holders
        for number in map(block_key, hashes):
            mask = 0 if table is None else table.mask(number)
            if mask != last:
                last, reach = mask, 0
                for lane in self._lanes.values():
                    reach |= mask >> lane * self._width
                reach &= self._visible
                others, slots = reach & ~own, list(_bits(reach))
            keeper = 1 << slots[number % len(slots)] if others else 0
            found.append((others.bit_count(), bool(keeper & others)))
        return found

    def dump(self, part_blocks: int = DUMP_PART_BLOCKS) -> Iterator[tuple[Placement, ...]]:
        """Everything, in parts, while the index goes on changing between them.

        Each part shows its blocks as they are when it is taken. A copy is exact when it applies all parts and then
        every change since this call, in order: whatever changed meanwhile is changed again to the same, and what did
        not change was shown as it is. Workers and snapshots that appear after the call come with the changes alone.
        """
        roles = [
            (key, slot, slot is holder.incoming)
            for key, holder in self._holders.items()
            for slot in (holder.slot, holder.incoming)
            if slot is not None
        ]
        work = [(group, table, table.keys()) for group, table in self._tables.items()]
        return self._dump_parts(roles, work, part_blocks)

    def check(self) -> None:
        """Compare counts with the tables.

        Raises:
            InvariantViolation: they differ, or a table is malformed.
        """
        bits = 0
        for table in self._tables.values():
            table.check()
            bits += sum(mask.bit_count() * len(keys) for mask, keys, _ in table.stretches(table.keys()))
        swept = self._sweep.slots if self._sweep else []
        unswept = sum(sum(slot.counts) for slot in swept)
        if not bits <= self._entries <= bits + unswept:
            raise InvariantViolation(f"the index counts {self._entries} entries and holds {bits}")
        live = [slot for holder in self._holders.values() for slot in (holder.slot, holder.incoming) if slot]
        if len(live) + len(self._retired) + len(swept) + len(self._free) != self._width:
            raise InvariantViolation("a slot of the index was lost")

    # -- private ------------------------------------------------------------------------------------------------

    def _dump_parts(
        self,
        roles: list[tuple[WorkerKey, _Slot, bool]],
        work: list[tuple[int, MaskTable, list[int]]],
        part_blocks: int,
    ) -> Iterator[tuple[Placement, ...]]:
        for group, table, keys in work:
            for start in range(0, len(keys), part_blocks):
                owners = self._owners(roles)
                yield tuple(
                    Placement(holders, group, tuple(map(block_hash, blocks)), linked)
                    for mask, blocks, linked in table.stretches(keys[start : start + part_blocks])
                    if (holders := tuple(owners[bit] for bit in _bits(mask) if bit in owners))
                )

    def _owners(self, roles: list[tuple[WorkerKey, _Slot, bool]]) -> dict[int, tuple[WorkerKey, Tier, bool]]:
        """Bit → worker, tier and role, for those slots that are still in use: a number may have a new owner."""
        owners: dict[int, tuple[WorkerKey, Tier, bool]] = {}
        for key, slot, incoming in roles:
            holder = self._holders.get(key)
            if holder is not None and (holder.slot is slot or holder.incoming is slot):
                for tier, lane in self._lanes.items():
                    owners[lane * self._width + slot.number] = (key, tier, incoming)
        return owners

    def _holder(self, key: WorkerKey) -> _Holder:
        try:
            return self._holders[key]
        except KeyError:
            raise StaleError("the index does not know this worker; it has to join first", worker=str(key)) from None

    def _bit(self, slot: _Slot, tier: Tier) -> int:
        lane = self._lanes.setdefault(tier, len(self._lanes))
        return 1 << (lane * self._width + slot.number)

    def _count(self, slot: _Slot, tier: Tier, change: int) -> None:
        slot.counts[tier] += change
        self._entries += change
        before = self._tier_entries[tier]
        self._tier_entries[tier] = before + change
        if not before or not before + change:
            self._tiers = tuple(tier for tier in Tier if self._tier_entries[tier])

    def _take_slot(self, key: WorkerKey) -> _Slot | None:
        if not self._free:
            self._sweep_all()
        if not self._free:
            return None
        number = heapq.heappop(self._free)
        self._keys[number] = key
        self._decoded.clear()
        return _Slot(number)

    def _retire(self, slot: _Slot) -> None:
        self._visible &= ~(1 << slot.number)
        if any(slot.counts):
            self._retired.append(slot)
        else:
            self._release(slot)

    def _release(self, slot: _Slot) -> None:
        for tier in Tier:
            self._count(slot, tier, -slot.counts[tier])
        self._keys[slot.number] = None
        self._decoded.clear()
        heapq.heappush(self._free, slot.number)

    def _sweep_all(self) -> None:
        while not self.sweep(1 << 62):
            pass

    def _make_room(self, holder: _Holder, key: WorkerKey, blocks: int) -> None:
        """Drop what nobody can see; then the state that a snapshot is about to replace."""
        self._sweep_all()
        if self._max_entries - self._entries < blocks and holder.incoming is not None:
            self.end_snapshot(key)
            self._sweep_all()

    def _empty(self, holder: _Holder, key: WorkerKey) -> None:
        """Clear a worker's blocks without a second slot."""
        self._retire(holder.slot)
        self._sweep_all()
        slot = self._take_slot(key)
        if slot is None:
            raise InvariantViolation("retiring and sweeping a slot freed none")
        holder.slot = slot
        self.set_visible(key, holder.visible)

    def _learn(self, table: MaskTable, chain: Sequence[BlockHash]) -> None:
        if self._learn_pause:
            self._learn_pause -= 1
        elif not table.learn(chain):
            self._learn_pause = FRUITLESS_PAUSE

    def _descend_tiers(
        self, table: MaskTable, chain: Sequence[BlockHash], tiers: tuple[Tier, ...]
    ) -> tuple[Prefixes, int]:
        """`MaskTable.descend` for "in this tier or a faster one", all tiers in one walk."""
        shifts = [self._lanes[tier] * self._width for tier in tiers]
        alive = [self._visible] * len(tiers)
        steps: list[list[tuple[int, int]]] = [[] for _ in tiers]
        last = pieces = before = 0
        for stop, mask in table.walk(chain):
            pieces += mask == before
            before = mask
            reach = 0
            for number, shift in enumerate(shifts):
                reach |= mask >> shift
                keep = alive[number] & reach
                if last and keep != alive[number]:
                    steps[number].append((last, alive[number] ^ keep))
                alive[number] = keep
            last = stop
            if not alive[-1]:
                break
        ends = [(*those, (last, kept)) for those, kept in zip(steps, alive, strict=True)] if last else []
        return by_tiers(list(zip(tiers, ends, strict=False)), self._keys_of), pieces

    def _keys_of(self, mask: int) -> tuple[WorkerKey, ...]:
        """The workers of a mask of slots."""
        found = self._decoded.get(mask)
        if found is None:
            if len(self._decoded) >= MAX_DECODED_MASKS:
                self._decoded.clear()
            keys = (self._keys[number] for number in _bits(mask))
            found = self._decoded[mask] = tuple(key for key in keys if key is not None)
        return found


def _bits(mask: int) -> Iterator[int]:
    """Numbers of the set bits, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
