"""The scheduler's book of loads that are not terminal: whose they are, what they write, which are given up.  (pure)

A flight outlives its sequence: pages a load may still write stay in flight until `land`, whoever let go of them. The
book also knows which block hashes are on their way, so that a second request for the same prefix, a *twin*, does not
order them again. What arrived is lent to twins at once, page and all, long before the load is terminal; when the
request goes, a twin that counts on its load inherits it. Moves page states, references of lent pages and in-flight
marks; never allocates and never decides.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from kvpool.errors import InvariantViolation
from kvpool.types import BlockHash, BlockId
from workers.block_table import READABLE, PageState
from workers.gate import LoadView, Rest
from workers.sequence import Phase, Sequence
from workers.step import Blocks


@dataclass(slots=True)
class Flight:
    """One load. ``sequence`` is None once its request let go of it and nobody inherited it.

    Attributes:
        missing: blocks that did not arrive yet, in order.
        borrowers: others that read pages of it.
        lent: blocks whose pages they have.
    """

    number: int
    sequence: Sequence | None
    pages: Mapping[int, BlockId]
    hashes: Mapping[int, BlockHash]
    view: LoadView
    missing: list[int]
    borrowers: list[Sequence] = field(default_factory=list)
    lent: set[int] = field(default_factory=set)
    cancelled: bool = False


class LoadBook:
    """Every load that is not terminal.

    Args:
        blocks: where in-flight marks are kept.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._flights: dict[int, Flight] = {}
        self._coming: dict[BlockHash, Flight] = {}
        self._arrived: dict[BlockHash, Flight] = {}
        self._landed: list[Flight] = []  # terminal, and their sequences are still here
        self._to_cancel: list[int] = []
        self._next = 0

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights.values())

    def owner(self, number: int) -> Sequence | None:
        """Whose load it is now."""
        return self._flights[number].sequence

    def of(self, sequence: Sequence) -> Flight | None:
        """The load that may still write pages of ``sequence``."""
        return None if sequence.flight is None else self._flights[sequence.flight]

    def coming(self, block_hash: BlockHash) -> Flight | None:
        """The live load that will bring a block, for whichever request."""
        return self._coming.get(block_hash)

    def bringer(self, sequence: Sequence, block: int) -> Flight | None:
        """The load that brings a block the sequence cannot read yet: its own, or another request's."""
        state = sequence.table.state(block)
        if state is PageState.FLYING:
            return self.of(sequence)
        if block >= sequence.full_blocks or state in READABLE:
            return None
        return self.coming(sequence.table.chain[block])

    def next_flying(self, sequence: Sequence, start: int) -> int:
        """First block from ``start`` on that a load brings; the number of full blocks when there is none."""
        if not self._flights:
            return sequence.full_blocks
        blocks = range(start, sequence.full_blocks)
        return next((block for block in blocks if self.bringer(sequence, block)), sequence.full_blocks)

    def rest(self, sequence: Sequence, block: int, flight: Flight) -> Rest:
        """What a load still has to do for a sequence that lacks ``block``; the load is not cancelled."""
        if flight.sequence is sequence:
            wanted = sequence.table.flying()
            missing, stop = len(wanted) - bisect_left(wanted, block), (wanted[-1] + 1) if wanted else block
        else:
            stop = _shared_blocks(sequence, flight)
            missing = bisect_left(flight.missing, stop) - bisect_left(flight.missing, block)
        if flight.view.tail_first:
            return Rest(missing, len(flight.missing) - bisect_left(flight.missing, block))
        return Rest(missing, bisect_left(flight.missing, stop))

    def returning_blocks(self) -> int:
        """Pages that come back to the pool as soon as abandoned loads are terminal."""
        return sum(len(flight.pages) - len(flight.lent) for flight in self if flight.sequence is None)

    def wanted(self, flight: Flight) -> bool:
        """Its sequence still reads or awaits a page that the load may write."""
        table = None if flight.sequence is None else flight.sequence.table
        return table is not None and any(
            table.page(index) == page and table.state(index) in (PageState.FLYING, PageState.ARRIVED)
            for index, page in flight.pages.items()
        )

    def begin(self, sequence: Sequence, indices: Collection[int], view: LoadView) -> Flight:
        """A load of these blocks, whose blank pages ``sequence`` has, starts now."""
        table = sequence.table
        pages = {index: page for index in indices if (page := table.page(index)) is not None}
        self._blocks.begin_flight(pages.values())
        for index in pages:
            table.move(index, PageState.FLYING)
        self._next += 1
        hashes = {index: table.chain[index] for index in pages}
        flight = Flight(self._next, sequence, pages, hashes, view, sorted(pages))
        sequence.flight = flight.number
        self._flights[flight.number] = flight
        self._coming.update(
            dict.fromkeys(hashes.values(), flight)
        )  # a second load of a block is ordered when it is sooner
        return flight

    def progress(self, number: int, arrived: Collection[int]) -> None:
        """These blocks are in place and verified; naming them again changes nothing."""
        flight = self._flights[number]
        if flight.sequence is None or len(arrived) == flight.view.arrived_blocks:
            return
        flight.view = flight.view.with_arrived(len(arrived))
        fresh = set(flight.missing).intersection(arrived)
        flight.missing = [index for index in flight.missing if index not in fresh]
        table = flight.sequence.table
        for index in fresh:
            self._coming.pop(flight.hashes[index], None)
            self._arrived.setdefault(flight.hashes[index], flight)
            if table.state(index) is PageState.FLYING and table.page(index) == flight.pages[index]:
                table.move(index, PageState.ARRIVED)
                flight.sequence.loaded.add(index)

    def land(self, number: int) -> Sequence | None:
        """The load is terminal: its pages return to their sequence, or to the pool when that is gone.

        Returns:
            Who has pages of it and is to seal them: its sequence, else one that borrowed; None when all are gone.
        """
        flight = self._flights.pop(number)
        self._blocks.end_flight(flight.pages.values())
        self._to_cancel = [other for other in self._to_cancel if other != number]
        self._forget(flight)
        if flight.sequence is None:
            self._lend_no_more(flight)
        else:  # behind a gap nothing can be sealed yet
            flight.sequence.flight = None
            self._landed.append(flight)
        readers = [*flight.borrowers] if flight.sequence is None else [flight.sequence, *flight.borrowers]
        for reader in readers:
            _settle(reader, flight)
        return next((reader for reader in readers if reader.phase is not Phase.GONE), None)

    def give_up(self, flight: Flight) -> None:
        """Ask for the end of a load. Its pages stay in flight until it is terminal; others no longer count on it."""
        if not flight.cancelled:
            flight.cancelled = True
            self._to_cancel.append(flight.number)
            self._forget(flight)

    def abandon(self, sequence: Sequence) -> None:
        """The sequence let go of its pages: give its load up and forget whose it was."""
        flight = self.of(sequence)
        if flight is not None:
            self.give_up(flight)
            flight.sequence = None
            sequence.flight = None
        for landed in self._landed:
            if landed.sequence is sequence:
                self._lend_no_more(landed)
        self._landed = [landed for landed in self._landed if landed.sequence is not sequence]

    # -- twins

    def lend(self, sequence: Sequence, index: int) -> bool:
        """Let a sequence read a block that arrived for another one, in the page where it lies."""
        flight = self._arrived.get(sequence.table.chain[index]) if self._arrived else None
        owner = None if flight is None else flight.sequence
        if flight is None or owner is None or owner is sequence:
            return False
        page = flight.pages[index]
        if owner.table.page(index) != page or owner.table.state(index) not in (PageState.ARRIVED, PageState.FILLED):
            return False  # sealed in another page meanwhile
        self._share(flight, sequence, index)
        if not any(other is sequence for other in flight.borrowers):
            flight.borrowers.append(sequence)
        flight.lent.add(index)
        return True

    def holder(self, sequence: Sequence, block: int) -> Sequence | None:
        """Whose view holds a block whose page its load may still write, other than ``sequence``."""
        for flight in self:
            owner = flight.sequence
            if owner is None or owner is sequence or flight.hashes.get(block) != sequence.table.chain[block]:
                continue
            table = owner.table
            if block < owner.computed_tokens // table.block_tokens and table.page(block) == flight.pages[block]:
                return owner
        return None

    def borrows(self, sequence: Sequence) -> bool:
        """It may have pages of another one's load."""
        return any(other is sequence for flight in self for other in flight.borrowers)

    def inherit(self, heir: Sequence, flight: Flight) -> None:
        """``heir`` has no load and counts on one whose request goes: from now on the load is its own."""
        owner, first = flight.sequence, heir.computed_tokens // heir.table.block_tokens
        assert owner is not None
        shared = _shared_blocks(heir, flight)
        for index, page in flight.pages.items():
            if first <= index < shared and owner.table.page(index) == page and heir.table.state(index) not in READABLE:
                self._share(flight, heir, index)
        flight.sequence, owner.flight, heir.flight = heir, None, flight.number

    def _share(self, flight: Flight, sequence: Sequence, index: int) -> None:
        """A page of a load serves ``sequence`` too, in the state that it has with the owner."""
        assert flight.sequence is not None
        state, page = flight.sequence.table.state(index), flight.pages[index]
        assert state is not None
        self._blocks.acquire((page,))
        replaced = sequence.table.share(index, page, state)
        if replaced is not None:
            self._blocks.release((replaced,))

    def take_cancelled(self) -> tuple[int, ...]:
        """Loads to give up since the last call."""
        taken, self._to_cancel = tuple(self._to_cancel), []
        return taken

    def check(self) -> None:
        """Invariants.

        Raises:
            InvariantViolation: a flight and its sequence, or the book of coming blocks, disagree.
        """
        for number, flight in self._flights.items():
            if flight.sequence is not None and flight.sequence.flight != number:
                raise InvariantViolation(f"flight {number} is not known to its sequence")
        for flight in self._coming.values():
            if flight.cancelled or flight.number not in self._flights:
                raise InvariantViolation(f"flight {flight.number} is counted on and will bring nothing")

    def _lend_no_more(self, flight: Flight) -> None:
        for block_hash in flight.hashes.values():
            if self._arrived.get(block_hash) is flight:
                del self._arrived[block_hash]

    def _forget(self, flight: Flight) -> None:
        for block_hash in flight.hashes.values():
            if self._coming.get(block_hash) is flight:
                del self._coming[block_hash]


def _shared_blocks(sequence: Sequence, flight: Flight) -> int:
    """How many leading blocks a sequence has in common with the one that a load is for. Equal hashes mean equal
    prefixes."""
    assert flight.sequence is not None
    one, other = sequence.table.chain, flight.sequence.table.chain
    return bisect_left(range(min(len(one), len(other))), True, key=lambda index: one[index] != other[index])


def _settle(reader: Sequence, flight: Flight) -> None:
    """A load is terminal: what arrived of it in pages of ``reader`` may be sealed, the rest is blank."""
    table = reader.table
    for index, block_id in flight.pages.items():
        if table.page(index) != block_id:
            continue
        if table.state(index) is PageState.ARRIVED:
            table.move(index, PageState.FILLED)
        elif table.state(index) is PageState.FLYING:
            table.move(index, PageState.BLANK)
