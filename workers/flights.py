"""Loads in progress: from the scheduler's order to the terminal state, and what is learned from it.

Binds the scheduler's flights to the loader's loads. Never decides. Guarded by the core's lock, like the scheduler; a
load's callback only wakes the engine thread. Invariant: a flight is reported landed exactly once, and only when its
load is terminal, so that no page returns to the pool while bytes may still fall on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvpool.errors import DeadlineError, KVPoolError, TransferCancelledError
from kvpool.plan import LoadSlice, Plan, PlanKind
from workers.ports import Load, Loader, LoadProgress
from workers.reporter import Reporter
from workers.scheduler import Scheduler
from workers.sequence import Sequence
from workers.step import LoadOrder

MIN_PIECE_BLOCKS = 2
PIECE_DIVISOR = 3
"""A piece of a tail-first load is at most this part of its distance from the expected meeting point."""


@dataclass(slots=True)
class _Flight:
    order: LoadOrder
    load: Load
    bytes_arrived: int = 0


class Flights:
    """Every load that is not terminal.

    Args:
        scheduler: whose orders these are.
        reporter: counts loads and failures.
        loader: starts loads; None when there is no data plane.
        block_bytes: bytes of one block.
        wake: called, from any thread, when a load changed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        reporter: Reporter,
        loader: Loader | None,
        block_bytes: int,
        wake: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._reporter = reporter
        self._loader = loader
        self._block_bytes = block_bytes
        self._wake = wake
        self._flights: dict[int, _Flight] = {}

    @property
    def can_load(self) -> bool:
        """Whether there is a data plane at all."""
        return self._loader is not None

    @property
    def count(self) -> int:
        """Loads that are not terminal."""
        return len(self._flights)

    @property
    def in_flight_bytes(self) -> int:
        """Bytes ordered and not arrived."""
        return sum(
            len(flight.order.pages) * self._block_bytes - flight.bytes_arrived for flight in self._flights.values()
        )

    def start(self, order: LoadOrder) -> None:
        """Carry out an order; one that cannot even start lands at once and is redone."""
        if self._loader is None:
            self._scheduler.land(order.flight)
            return
        sequence = order.sequence
        offsets = {index: page * self._block_bytes for index, page in order.pages.items()}
        plan = tail_first(sequence.plan) if sequence.plan.kind is PlanKind.SPLIT else sequence.plan
        try:
            load = self._loader.start(sequence.request_id, plan, tuple(sequence.table.chain), offsets)
        except KVPoolError as error:
            self._reporter.counters[f"load_failures.{error.code}"] += 1
            sequence.tally.load_failures += (error.code,)
            self._scheduler.land(order.flight)
            self._wake()  # the step at hand was planned as if something came
            return
        self._flights[order.flight] = _Flight(order, load)
        load.on_change(lambda _: self._wake())

    def cancel(self, flights: Iterable[int]) -> None:
        """Give loads up; they stay here until they are terminal."""
        for number in flights:
            flight = self._flights.get(number)
            if flight is not None:
                flight.load.cancel()

    def cancel_all(self) -> None:
        """Give every load up."""
        self.cancel(tuple(self._flights))

    def follow(self) -> list[Sequence]:
        """Tell the scheduler what arrived and what ended; returns live sequences whose load ended."""
        landed: list[Sequence] = []
        for number, flight in list(self._flights.items()):
            progress = flight.load.progress()
            flight.bytes_arrived = progress.bytes_arrived
            self._scheduler.progress(number, progress.arrived)
            if not progress.terminal:
                continue
            del self._flights[number]
            self._account(flight.order.sequence.plan, self._scheduler.owner(number) or flight.order.sequence, progress)
            sequence = self._scheduler.land(number)
            if sequence is not None:
                landed.append(sequence)
        return landed

    def _account(self, plan: Plan, sequence: Sequence, progress: LoadProgress) -> None:
        counters, tally = self._reporter.counters, sequence.tally
        ended_ns = max(progress.started_ns, progress.finished_ns or progress.started_ns)
        elapsed_ns = ended_ns - progress.started_ns
        failures = [code for code in progress.failures if code != TransferCancelledError.code]
        if len(failures) < len(progress.failures):  # given up by ourselves: a failure only when it was too late
            counters["loads_given_up"] += 1
            if elapsed_ns >= plan.load_deadline_ns:
                failures.append(DeadlineError.code)
        for code in failures:
            counters[f"load_failures.{code}"] += 1
        counters["loads"] += 1
        counters["bytes_loaded"] += progress.bytes_arrived
        tally.load_failures += tuple(failures)
        if tally.load_started_ns is None:
            tally.load_started_ns = max(progress.started_ns, min(ended_ns, sequence.arrival_ns))  # it may be inherited
        tally.load_ns = ended_ns - tally.load_started_ns


def open_ended(plan: Plan) -> Plan:
    """A split with one more slice, from the front of the chain to where its loads begin; any other plan unchanged.

    The load comes from the end and stops where it meets the computed front. Where they meet is then decided by how fast
    both really are, not by what the router expected: a link ten times faster is used, and nothing is lost on a slower
    one. A holder has a prefix, so who is asked for the middle can be asked for the front as well.
    """
    if plan.kind is not PlanKind.SPLIT or not plan.loads:
        return plan
    first = min(plan.loads, key=lambda part: part.start)
    if not first.start:
        return plan
    planned_blocks = sum(part.stop - part.start for part in plan.loads)
    expected_ns = plan.predicted_load_ns * (planned_blocks + first.start) // max(1, planned_blocks)
    front = first._replace(start=0, stop=first.start)
    return plan._replace(loads=(front, *plan.loads), predicted_load_ns=expected_ns)


def tail_first(plan: Plan) -> Plan:
    """The same loads in pieces from the end of the chain to its front, so that they meet the computed front.

    Reads of one link take turns in the order in which they start, so the pieces arrive in this order; inside a piece
    blocks stay ascending and neighbours travel as one message. Where both ends are expected to meet, at the end of the
    first slice, pieces are fine, because the last one is waited for whole; away from there they are coarse.
    """
    slices = sorted(plan.loads, key=lambda part: -part.start)
    meeting = slices[-1].stop
    pieces: list[LoadSlice] = []
    for part in slices:
        stop = part.stop
        while stop > part.start:
            size = max(MIN_PIECE_BLOCKS, abs(stop - meeting) // PIECE_DIVISOR)
            start = max(part.start, stop - size)
            pieces.append(part._replace(start=start, stop=stop))
            stop = start
    return plan._replace(loads=tuple(pieces))
