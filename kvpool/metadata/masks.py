"""Block hash → bitmask of holders, kept as runs of chained blocks so that a lookup touches few of them.  (pure)

A table knows nothing of workers: a bit is whatever its owner (`kvpool.metadata.index`) says it is.

A *run* is a path of consecutive blocks of one chain that all have the same mask. A chained hash names everything
before it, so when a chain contains a block of a run it follows that run until the run ends, the chain ends, or both
part for good: one comparison at the far end, or a binary search, replaces a visit to every block. This stays exact
with holes, because a block that changes alone is cut out of its run at once. Blocks that are not known to be
consecutive lie loose in the table, each with its mask; a lookup by a trusted chain may join them (`MaskTable.learn`).

Keys are the block hashes as integers: 48 bytes against 64 for `bytes` of the same length.

Invariants (`MaskTable.check`): no mask is 0; every member of a run maps to that run and to nothing else; a run has
at least `MIN_RUN_BLOCKS` members.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvpool.errors import InvariantViolation
from kvpool.types import BLOCK_HASH_BYTES, BlockHash

MIN_RUN_BLOCKS = 4
"""Shorter paths lie loose: a run costs about 130 bytes, which only pays when it is shared."""

MAX_RUN_BLOCKS = 512
"""Longer paths become several runs, so that cutting one stays cheap."""

MAX_SHARED_MASKS = 16_384
"""Equal masks of loose blocks are one object while at most this many are known."""

_from_bytes = int.from_bytes


def block_key(block_hash: BlockHash) -> int:
    """The integer under which a block lies in the table."""
    return _from_bytes(block_hash)


def block_hash(key: int) -> BlockHash:
    """The hash that `block_key` made ``key`` from."""
    return BlockHash(key.to_bytes(BLOCK_HASH_BYTES))


class Run:
    """Consecutive blocks with one mask. Mutable, owned by the table; readers must not keep it.

    ``first``, ``last`` and ``size`` repeat what ``members`` says: a lookup in a large table spends its time waiting for
    memory, and these lie beside the mask.
    """

    __slots__ = ("first", "last", "mask", "members", "size")

    def __init__(self, mask: int, members: tuple[int, ...]) -> None:
        self.mask = mask
        self.become(members)

    def become(self, members: tuple[int, ...]) -> None:
        """Consist of these blocks from now on."""
        self.members = members
        self.first, self.last, self.size = members[0], members[-1], len(members)


class MaskTable:
    """Masks of blocks. Not thread-safe: every call, lookups included, needs the caller's lock."""

    __slots__ = ("_blocks", "_shared")

    def __init__(self) -> None:
        self._blocks: dict[int, int | Run] = {}
        self._shared: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def mask(self, key: int) -> int:
        """Mask of one block, 0 when no bit is set."""
        found = self._blocks.get(key)
        return 0 if found is None else found if isinstance(found, int) else found.mask

    def add(self, bits: int, keys: Sequence[int], *, linked: bool, limit: int) -> tuple[int, int]:
        """Set ``bits`` in every block of ``keys``, in order, until ``limit`` blocks have changed.

        Args:
            bits: at least one bit.
            keys: any order, repeats allowed.
            linked: every key is the child of the one before it. Wrong links make later lookups wrong, so say it only
                when it is known.
            limit: blocks that may change; the rest is refused.

        Returns:
            Blocks changed, and blocks left out because of ``limit``.
        """
        if linked and len(keys) > 1 and len(set(keys)) != len(keys):
            linked = False  # a repeat cannot be a path
        changed = at = 0
        while at < len(keys):
            found = self._blocks.get(keys[at])
            stop = self._same_extent(keys, at, found)
            if found is None:
                stop = min(stop, at + limit - changed)
                if stop == at:
                    return changed, self._refused(bits, keys[at:])
                changed += self._insert(bits, keys[at:stop], linked=linked)
            elif (found if isinstance(found, int) else found.mask) & bits != bits:
                if changed == limit:
                    return changed, self._refused(bits, keys[at:])
                stop = min(stop, at + limit - changed)
                if isinstance(found, int):
                    stop = at + 1
                    self._blocks[keys[at]] = self._share(found | bits)
                    changed += 1
                else:
                    stop = self._change(found, keys, at, stop, found.mask | bits)
                    changed += stop - at
            at = stop
        return changed, 0

    def discard(self, bits: int, keys: Sequence[int]) -> int:
        """Clear ``bits`` in every block of ``keys``; unknown blocks are passed over. Returns blocks changed."""
        changed = at = 0
        while at < len(keys):
            found = self._blocks.get(keys[at])
            stop = at + 1
            if isinstance(found, int):
                if found & bits:
                    self._put_loose(keys[at], found & ~bits)
                    changed += 1
            elif found is not None:
                stop = self._same_extent(keys, at, found)
                if found.mask & bits:
                    stop = self._change(found, keys, at, stop, found.mask & ~bits)
                    changed += stop - at
            at = stop
        return changed

    def walk(self, chain: Sequence[BlockHash]) -> Iterator[tuple[int, int]]:
        """Follow ``chain`` from its first block: ``(stop, mask)`` for each stretch with one mask, in order.

        Ends before the first block that nobody holds. Changes nothing.
        """
        position, length = 0, len(chain)
        while position < length:
            key = _from_bytes(chain[position])
            found = self._blocks.get(key)
            if found is None:
                return
            if isinstance(found, int):
                position += 1
                yield position, found
            else:
                position = _follow(chain, position, key, found.members)
                yield position, found.mask

    def descend(self, chain: Sequence[BlockHash], alive: int) -> tuple[list[tuple[int, int]], int]:
        """Where each of the bits ``alive`` first lacks a block of ``chain``.

        The same walk as `walk`, written out without a generator, because every request of every router comes by.

        Returns:
            (blocks, bits) with blocks > 0, ascending: the bits whose prefix is that long. And how many neighbouring
            stretches had one mask, which `learn` could join.
        """
        get = self._blocks.get
        position, length, before, joinable = 0, len(chain), 0, 0
        steps: list[tuple[int, int]] = []
        while position < length:
            key = _from_bytes(chain[position])
            found = get(key)
            if found is None:
                break
            if isinstance(found, int):
                mask, stop = found, position + 1
            else:
                mask, stop = found.mask, position + found.size
                if stop > length or found.first != key or _from_bytes(chain[stop - 1]) != found.last:
                    stop = _follow(chain, position, key, found.members)
            keep = alive & mask
            if keep != alive:
                if position:
                    steps.append((position, alive ^ keep))
                alive = keep
                if not keep:
                    return steps, joinable
            joinable += mask == before
            before, position = mask, stop
        if position:
            steps.append((position, alive))
        return steps, joinable

    def learn(self, chain: Sequence[BlockHash]) -> bool:
        """Join neighbours of ``chain`` that have equal masks into runs; False when there was nothing to gain.

        The chain must come from real tokens: its order is what the runs are made of.
        """
        position, keys, joined = 0, [block_key(item) for item in chain], False
        while position < len(keys) and (mask := self.mask(keys[position])):
            stop = position + 1
            end = min(len(keys), position + MAX_RUN_BLOCKS)
            while stop < end and self.mask(keys[stop]) == mask:
                stop += 1
            joined |= self._join(mask, tuple(keys[position:stop]))
            position = stop
        return joined

    def clear(self, bits: int, keys: Sequence[int]) -> None:
        """Clear ``bits`` wherever they occur in the blocks of ``keys`` and in the runs these belong to."""
        for key in keys:
            found = self._blocks.get(key)
            if isinstance(found, int):
                if found & bits:
                    self._put_loose(key, found & ~bits)
            elif found is not None and found.mask & bits:
                found.mask &= ~bits
                if not found.mask:
                    for member in found.members:
                        del self._blocks[member]

    def keys(self) -> list[int]:
        """All blocks, oldest first: a copy."""
        return list(self._blocks)

    def stretches(self, keys: Sequence[int]) -> list[tuple[int, tuple[int, ...], bool]]:
        """What the table says of ``keys`` and of the runs they belong to, as it is now.

        Returns:
            Mask, blocks, and whether the blocks are known to be consecutive. A run appears whole, once.
        """
        result: list[tuple[int, tuple[int, ...], bool]] = []
        loose: dict[int, list[int]] = {}
        seen: set[int] = set()
        get = self._blocks.get
        for key in keys:
            found = get(key)
            if isinstance(found, int):
                loose.setdefault(found, []).append(key)
            elif found is not None and id(found) not in seen:
                seen.add(id(found))
                result.append((found.mask, found.members, True))
        result += [(mask, tuple(blocks), False) for mask, blocks in loose.items()]
        return result

    def check(self) -> None:
        """Verify the invariants in the module's docstring.

        Raises:
            InvariantViolation: one does not hold.
        """
        for key, found in self._blocks.items():
            if isinstance(found, int):
                if found <= 0:
                    raise InvariantViolation(f"loose block {key:032x} has mask {found}")
                continue
            if found.mask <= 0 or len(found.members) < MIN_RUN_BLOCKS or key not in found.members:
                raise InvariantViolation(f"run of {len(found.members)} blocks is malformed at {key:032x}")
            if (found.first, found.last, found.size) != (found.members[0], found.members[-1], len(found.members)):
                raise InvariantViolation(f"the run at {key:032x} does not say what its blocks are")
            if any(self._blocks.get(member) is not found for member in found.members):
                raise InvariantViolation(f"a member of the run at {key:032x} belongs elsewhere")

    # -- private ------------------------------------------------------------------------------------------------

    def _same_extent(self, keys: Sequence[int], at: int, found: int | Run | None) -> int:
        """End of the stretch of ``keys`` from ``at`` that lies in the same run, or is absent, like the first."""
        stop = at + 1
        if isinstance(found, int):
            return stop
        get = self._blocks.get
        extent = MAX_RUN_BLOCKS if found is None else len(found.members)
        end = min(len(keys), at + extent)
        while stop < end and get(keys[stop]) is found:
            stop += 1
        return stop

    def _refused(self, bits: int, keys: Sequence[int]) -> int:
        return sum(1 for key in set(keys) if self.mask(key) & bits != bits)

    def _insert(self, bits: int, keys: Sequence[int], *, linked: bool) -> int:
        """Add absent ``keys``; returns how many (repeats count once)."""
        before = len(self._blocks)
        if linked and len(keys) >= MIN_RUN_BLOCKS:
            members = tuple(keys)
            self._blocks.update(dict.fromkeys(members, Run(self._share(bits), members)))
        else:
            self._blocks.update(dict.fromkeys(keys, self._share(bits)))
        return len(self._blocks) - before

    def _change(self, run: Run, keys: Sequence[int], at: int, stop: int, mask: int) -> int:
        """Give the blocks ``keys[at:stop]`` of ``run`` another mask. Returns where it stopped, at least ``at + 1``."""
        members = run.members
        low, high = _locate(members, keys, at, stop)
        if high - low == len(members):
            if mask:
                run.mask = self._share(mask)
            else:
                for member in members:
                    del self._blocks[member]
            return at + len(members)
        self._put(mask, members[low:high])
        self._cut(run, low, high)
        return at + high - low

    def _cut(self, run: Run, low: int, high: int) -> None:
        """Take ``[low, high)``, already put elsewhere, out of ``run``; its longer rest keeps the object."""
        head, tail = run.members[:low], run.members[high:]
        keep, other = (head, tail) if len(head) >= len(tail) else (tail, head)
        if other:
            self._put(run.mask, other)
        if len(keep) >= MIN_RUN_BLOCKS:
            run.become(keep)
        elif keep:
            self._put(run.mask, keep)

    def _put(self, mask: int, keys: tuple[int, ...]) -> None:
        """Set the mask of consecutive blocks as a run of their own, or loose ones; 0 removes them."""
        if not mask:
            for key in keys:
                del self._blocks[key]
        elif len(keys) >= MIN_RUN_BLOCKS:
            self._blocks.update(dict.fromkeys(keys, Run(self._share(mask), keys)))
        else:
            self._blocks.update(dict.fromkeys(keys, self._share(mask)))

    def _put_loose(self, key: int, mask: int) -> None:
        if mask:
            self._blocks[key] = self._share(mask)
        else:
            del self._blocks[key]

    def _join(self, mask: int, keys: tuple[int, ...]) -> bool:
        """Make ``keys``, consecutive and of one mask, one run, if that leaves fewer pieces than there were.

        A run that goes on beyond ``keys``, because another branch shares its beginning, leaves its rest behind as a
        piece. Without the condition two branches would take their trunk away from each other for ever.
        """
        if len(keys) < MIN_RUN_BLOCKS:
            return False
        found = [self._blocks[key] for key in keys]
        runs = {id(item): item for item in found if isinstance(item, Run)}
        loose = sum(1 for item in found if isinstance(item, int))
        inside = set(keys)
        rests = sum(1 for run in runs.values() if not inside.issuperset(run.members))
        if len(runs) + loose <= 1 + rests:
            return False
        self._put(mask, keys)
        for run in runs.values():
            self._strip(run, inside)
        return True

    def _strip(self, run: Run, inside: set[int]) -> None:
        """Shrink ``run`` to its members outside ``inside``: at most one stretch before and one after."""
        low = 0
        while low < len(run.members) and run.members[low] not in inside:
            low += 1
        high = len(run.members)
        while high > low and run.members[high - 1] not in inside:
            high -= 1
        self._cut(run, low, high)

    def _share(self, mask: int) -> int:
        """One object for equal masks."""
        if len(self._shared) >= MAX_SHARED_MASKS:
            self._shared.clear()
        return self._shared.setdefault(mask, mask)


def _locate(members: tuple[int, ...], keys: Sequence[int], at: int, stop: int) -> tuple[int, int]:
    """Where in ``members`` the stretch ``keys[at:stop]`` lies, in either direction; else its first block alone."""
    piece = tuple(keys[at:stop])
    if piece == members:
        return 0, len(members)
    size = len(piece)
    first = len(members) - 1 if members[-1] == piece[0] else members.index(piece[0])
    if members[first : first + size] == piece:
        return first, first + size
    low = first - size + 1
    if low >= 0 and members[low : first + 1] == piece[::-1]:
        return low, first + 1
    return first, first + 1


def _follow(chain: Sequence[BlockHash], position: int, key: int, members: tuple[int, ...]) -> int:
    """Where ``chain``, which meets the run at ``position``, leaves it: the first position past their common part."""
    offset = 0 if members[0] == key else members.index(key)
    shift = offset - position
    stop = min(len(chain), len(members) - shift)
    if _from_bytes(chain[stop - 1]) == members[stop - 1 + shift]:
        return stop
    low, high = position + 1, stop - 1  # common before `low`, apart from `high` on
    while low < high:
        middle = (low + high) // 2
        if _from_bytes(chain[middle]) == members[middle + shift]:
            low = middle + 1
        else:
            high = middle
    return low
