"""The scheduler's book of loads that are not terminal: whose they are, what they write, which are given up.  (pure)

A flight outlives its sequence: pages a load may still write stay in flight until `land`, whoever let go of them. The
book also knows which block hashes are on their way, so that a second request for the same prefix does not order them
again. Moves page states and in-flight marks; never allocates and never decides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from kvpool.errors import InvariantViolation
from kvpool.types import BlockHash, BlockId
from workers.block_table import PageState
from workers.gate import LoadView
from workers.sequence import Sequence
from workers.step import Blocks


@dataclass(slots=True)
class Flight:
    """One load. ``sequence`` is None once its request let go of it."""

    number: int
    sequence: Sequence | None
    pages: Mapping[int, BlockId]
    hashes: tuple[BlockHash, ...]
    view: LoadView
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
        self._to_cancel: list[int] = []
        self._next = 0

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights.values())

    def of(self, sequence: Sequence) -> Flight | None:
        """The load that may still write pages of ``sequence``."""
        return None if sequence.flight is None else self._flights[sequence.flight]

    def coming(self, block_hash: BlockHash) -> Flight | None:
        """The live load that brings a block, for whichever request."""
        return self._coming.get(block_hash)

    def returning_blocks(self) -> int:
        """Pages that come back to the pool as soon as abandoned loads are terminal."""
        return sum(len(flight.pages) for flight in self if flight.sequence is None)

    def begin(self, sequence: Sequence, indices: Collection[int], view: LoadView) -> Flight:
        """A load of these blocks, whose blank pages ``sequence`` has, starts now."""
        table = sequence.table
        pages = {index: page for index in indices if (page := table.page(index)) is not None}
        self._blocks.begin_flight(pages.values())
        for index in pages:
            table.move(index, PageState.FLYING)
        self._next += 1
        hashes = tuple(table.chain[index] for index in pages)
        flight = Flight(self._next, sequence, pages, hashes, view)
        sequence.flight = flight.number
        self._flights[flight.number] = flight
        for block_hash in hashes:
            self._coming.setdefault(block_hash, flight)
        return flight

    def progress(self, number: int, arrived: Collection[int]) -> None:
        """These blocks are in place and verified; naming them again changes nothing."""
        flight = self._flights[number]
        flight.view = flight.view.with_arrived(len(arrived))
        if flight.sequence is None:
            return
        table = flight.sequence.table
        for index in arrived:
            if table.state(index) is PageState.FLYING and table.page(index) == flight.pages[index]:
                table.move(index, PageState.ARRIVED)
                flight.sequence.loaded.add(index)

    def land(self, number: int) -> Sequence | None:
        """The load is terminal: its pages return to their sequence (the result), or to the pool when that is gone."""
        flight = self._flights.pop(number)
        self._blocks.end_flight(flight.pages.values())
        self._to_cancel = [other for other in self._to_cancel if other != number]
        self._forget(flight)
        if flight.sequence is None:
            return None
        flight.sequence.flight = None
        table = flight.sequence.table
        for index, block_id in flight.pages.items():
            if table.page(index) != block_id:
                continue
            if table.state(index) is PageState.ARRIVED:
                table.move(index, PageState.FILLED)
            elif table.state(index) is PageState.FLYING:
                table.move(index, PageState.BLANK)
        return flight.sequence

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

    def _forget(self, flight: Flight) -> None:
        for block_hash in flight.hashes:
            if self._coming.get(block_hash) is flight:
                del self._coming[block_hash]
