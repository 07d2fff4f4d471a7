"""What a sequence uses of what lies here: blocks of the pool, and pages that the load of a twin wrote.  (pure)

Moves references and page states of one sequence; allocates nothing and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from workers.block_table import READABLE
from workers.load_book import LoadBook
from workers.sequence import Sequence
from workers.step import Blocks


class Reuse:
    """Finds and takes what is here.

    Args:
        blocks: the pool.
        book: the loads.
    """

    def __init__(self, blocks: Blocks, book: LoadBook) -> None:
        self._blocks = blocks
        self._book = book

    def advance(self, sequence: Sequence) -> int:
        """Use what continues the readable front of a waiting sequence and is here by now; returns how far that goes."""
        run = sequence.table.readable_run(0, sequence.full_blocks)
        while run < sequence.full_blocks and self._use(sequence, run):
            run += 1
        return run

    def adopt(self, sequence: Sequence, start: int) -> None:
        """Use every block from ``start`` on that is here by now in place of what the sequence lacks."""
        for index in range(start, len(sequence.table.chain)):
            self._use(sequence, index)
        flight = self._book.of(sequence)
        if flight is not None and not self._book.wanted(flight):
            self._book.give_up(flight)  # everything it would bring is here

    def bequeath(self, sequence: Sequence, others: Iterable[Sequence]) -> None:
        """A sequence with a load goes. The first of the others that counts on the load has it from now on; what arrived
        of one that nobody counts on stays with those that need it."""
        flight, left = self._book.of(sequence), list(others)
        if flight is None:
            return
        for other in left:
            block = self._book.next_flying(other, other.computed_tokens // other.table.block_tokens)
            if other.flight is None and block < other.full_blocks and self._book.bringer(other, block) is flight:
                self._book.inherit(other, flight)
                return
        for other in left:
            self.adopt(other, other.computed_tokens // other.table.block_tokens)

    def _use(self, sequence: Sequence, index: int) -> bool:
        """A block can be read: already, from the pool, or where a twin's load put it."""
        table = sequence.table
        if table.state(index) in READABLE:
            return True
        block_id = self._blocks.lookup(table.chain[index])
        if block_id is None:
            return self._book.lend(sequence, index)
        self._blocks.acquire((block_id,))
        replaced = table.adopt(index, block_id)
        if replaced is not None:
            self._blocks.release((replaced,))
        return True
