"""What a sequence waits for, and how long: its own load, or that of a *twin*, a request with the same prefix.  (pure)

The gate rules on one load; here is who that is, what it still has to do for this sequence, and when to look again. The
wait for a twin is a plan like any other: it is priced by what the twin's load still has to bring until the sequence has
what it lacks, and it ends no later than the deadline of the own plan, whatever becomes of the twin.
"""

from __future__ import annotations

from dataclasses import replace

from kvpool.errors import InvariantViolation
from workers.gate import BUSY_PATIENCE, Gate, LoadView, Ruling, Verdict
from workers.load_book import LoadBook
from workers.sequence import Sequence


class Waits:
    """Rules on sequences whose next block is in flight.

    Args:
        book: the loads; those past their deadline are given up.
        gate: prices them.
    """

    def __init__(self, book: LoadBook, gate: Gate) -> None:
        self._book = book
        self._gate = gate
        self._review_ns: list[int] = []

    def rule(self, sequence: Sequence, block: int, now_ns: int, *, idle: bool) -> Ruling:
        """Wait for ``block``, which a load brings, or compute it?"""
        flight = self._book.bringer(sequence, block)
        if flight is None:
            raise InvariantViolation(f"{sequence.request_id} waits for a block that nothing brings")
        view, rest = flight.view, self._book.rest(sequence, block, flight)
        if flight.sequence is not sequence and sequence.plan.load_deadline_ns:
            own_ns = sequence.arrival_ns + sequence.plan.load_deadline_ns
            view = replace(view, deadline_ns=min(own_ns, view.deadline_ns))
        ruling = self._gate.rule(view, rest, now_ns, idle=idle)
        if ruling.verdict is Verdict.WAIT:
            self._review_ns.append(self._gate.review_ns(view, rest.coming, now_ns))
        elif now_ns >= flight.view.deadline_ns:
            self._book.give_up(flight)
        return ruling

    def counts_on(self, sequence: Sequence, block: int, now_ns: int) -> bool:
        """A load brings this block already, and the sequence's own would not bring it much sooner from elsewhere."""
        flight = self._book.bringer(sequence, block)
        if flight is None or flight.sequence is None or flight.sequence is sequence:
            return flight is not None
        theirs, plan = flight.sequence.plan, sequence.plan
        holders = {part.holder for part in plan.loads}
        if not holders or holders & {part.holder for part in theirs.loads}:
            return True
        own_ns = LoadView.starting(plan, now_ns, 1).expected_ns
        rest = self._book.rest(sequence, block, flight)
        return flight.view.rest_ns(rest.coming, now_ns) <= BUSY_PATIENCE * own_ns

    def take_wake_ns(self) -> int | None:
        """When to look again, without any event, at those told to wait since the last call and at loads that may be
        late; None for never."""
        waits, self._review_ns = self._review_ns, []
        live = [
            flight.view.deadline_ns for flight in self._book if flight.sequence is not None and not flight.cancelled
        ]
        return min([*live, *waits], default=None)
