"""Which sequences run in the next step, and with which pages.  (pure, torch-free)

One call of `plan_step` is one beat: expire → decode tokens → chunks of prefills in progress → admissions. It changes
sequences, block tables and page references, and returns what the shell must do (`Step`); it touches no byte, no
clock and no network. The rules:

- Redo is always possible: a load is never needed, only used. What arrived is filled in, what is in flight is waited
  for only while `workers.gate` says that this is sooner, the rest is computed.
- No chunk computes a block that can be read already, here or from a twin that runs in the same step.
- Pages of a prompt are taken at admission (those a load writes: at arrival); decoding takes one at a time. When
  there are none, waiting requests give theirs back, the youngest first; then the youngest running request is
  preempted. The oldest is never made to wait for a younger one, so somebody always gets on.
- A page a load may still write stays out of use until that load is terminal (`land`), whatever became of its request.

Not thread-safe: callers share one lock.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from kvpool.config import SchedulerConfig
from kvpool.errors import CapacityError, InvariantViolation
from kvpool.types import BlockHash, BlockId
from workers.block_table import READABLE
from workers.gate import Gate, LoadView, Verdict
from workers.load_book import LoadBook
from workers.reuse import Reuse
from workers.sequence import Phase, Sequence
from workers.step import Blocks, LoadOrder, Step, Work
from workers.waits import Waits

MAX_REFUSED = 4
"""Waiting requests without room for their loads that are looked at in one step; behind them there is hardly more."""


@dataclass(slots=True)
class _Beat:
    """Scratch of one `plan_step`."""

    now_ns: int
    budget: int
    work: list[Work] = field(default_factory=list)
    prefills: int = 0
    decodes: bool = False
    claimed: dict[BlockHash, Sequence] = field(default_factory=dict)
    owed: list[Sequence] = field(default_factory=list)
    preempted: bool = False


class Scheduler:
    """Chooses batches.

    Args:
        config: limits.
        blocks: the pages.
        gate: whether to wait for a load in flight.
    """

    def __init__(self, config: SchedulerConfig, blocks: Blocks, gate: Gate) -> None:
        self._config = config
        self._blocks = blocks
        self._gate = gate
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._book = LoadBook(blocks)
        self._waits = Waits(self._book, gate)
        self._reuse = Reuse(blocks, self._book)
        self._closed_slots: list[int] = []
        self._landed: dict[BlockHash, Sequence] = {}  # sealed after the next step
        self._views_full = False
        self.preemptions = 0

    # -- requests

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Admitted and not running, oldest first."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """In prefill or decode, oldest first."""
        return tuple(self._running)

    @property
    def flights(self) -> int:
        """Loads that are not terminal."""
        return len(self._book)

    def add(self, sequence: Sequence, now_ns: int) -> LoadOrder | None:
        """Queue a request that fits the segment; take references on what is here, reserve the pages of its loads.

        Returns:
            The load to start, None when the plan has none, everything is here already, or there is no room to load
            into now.

        Raises:
            CapacityError: the waiting queue is full.
        """
        if len(self._waiting) >= self._config.max_waiting:
            raise CapacityError(
                f"{len(self._waiting)} requests wait already and scheduler.max_waiting is {self._config.max_waiting}; "
                "retry later or on another worker",
                waiting_requests=len(self._waiting),
            )
        insort(self._waiting, sequence, key=_age)
        self._reuse.adopt(sequence, 0)
        return self._reserve(sequence, now_ns)

    def remove(self, sequence: Sequence) -> int | None:
        """Take a request out, finished or not; returns the slot to close, None without one."""
        if sequence.phase is Phase.GONE:
            return None
        (self._running if sequence.phase is Phase.RUNNING else self._waiting).remove(sequence)
        self._reuse.bequeath(sequence, self._running + self._waiting)
        self._let_go(sequence)
        sequence.phase = Phase.GONE
        self._views_full = False
        return sequence.leave_view()

    def rescue(self, sequence: Sequence) -> None:
        """The sequence ends, or somebody counts on what it computes: what its view holds of blocks whose pages a load
        may still write gets other pages, as far as there is room, so that it can be sealed now."""
        late = self._rescuable(sequence)
        self._blocks.release(sequence.table.detach(late))
        self._assign(sequence, late)

    def _rescuable(self, sequence: Sequence) -> list[int]:
        room = max(0, self._blocks.available_blocks - len(self._running))
        return sequence.table.late(sequence.computed_tokens)[:room]

    def awaited(self, sequence: Sequence) -> bool:
        """Another one lacks what `rescue` would free."""
        if sequence.flight is None and not self._book.borrows(sequence):
            return False
        table = sequence.table
        late, last = table.late(sequence.computed_tokens), sequence.computed_tokens // table.block_tokens - 1
        twins = [other.table for other in self._running + self._waiting if other is not sequence]
        freed = {late[0], last} if late else set()
        return any(twin.lacks(index, table.chain[index]) for index in freed for twin in twins)

    def defer(self, sequence: Sequence) -> bool:
        """The engine has no memory for this sequence's view: it waits, with its pages, until another one ends.

        Returns:
            False when no other view is open, so that waiting would never help.
        """
        self._running.remove(sequence)
        sequence.phase = Phase.WAITING
        insort(self._waiting, sequence, key=_age)
        self._views_full = True
        return any(other.slot is not None for other in self._running)

    # -- loads

    def progress(self, flight: int, arrived: Collection[int]) -> None:
        """These blocks of a load are in place and verified; naming them again changes nothing."""
        self._book.progress(flight, arrived)

    def owner(self, flight: int) -> Sequence | None:
        """Whose load it is: of who ordered it, or of a twin that inherited it."""
        return self._book.owner(flight)

    def land(self, flight: int) -> Sequence | None:
        """A load is terminal: its pages return to their sequence, or to the pool when that is gone. The shell seals the
        result, the sequence or a twin, after the next step; until then nobody else computes or orders these blocks."""
        sequence = self._book.land(flight)
        if sequence is not None:
            table = sequence.table
            ready = table.sealable(sequence.computed_tokens // table.block_tokens)
            self._landed.update((table.chain[index], sequence) for index in ready)
        return sequence

    # -- the beat

    def plan_step(self, now_ns: int) -> Step:
        """Choose the next batch. See the module's docstring for the order."""
        expired = self._expire(now_ns)
        beat = _Beat(now_ns, self._config.max_step_tokens, claimed=self._landed)
        self._landed = {}
        loads = self._late_loads(beat)
        for sequence in [entry for entry in self._running if entry.decoding]:
            self._decode(sequence, beat)
        beat.decodes = bool(beat.work)
        if beat.decodes:
            beat.budget = min(beat.budget, self._config.mixed_prefill_tokens)
        for sequence in [entry for entry in self._running if not entry.decoding]:
            self._continue(sequence, beat, idle=False)
        self._admit(beat, idle=False)
        if not beat.prefills:
            self._use_idle(beat)
        closed, self._closed_slots = tuple(self._closed_slots), []
        given_up, owed, work = self._book.take_cancelled(), tuple(beat.owed), tuple(beat.work)
        return Step(closed, given_up, loads, expired, work, owed, self._wake_ns())

    def ran(self, work: Work) -> None:
        """The engine filled and computed this part of the step."""
        work.sequence.computed_tokens = work.start + work.count

    def check(self) -> None:
        """Invariants between steps.

        Raises:
            InvariantViolation: one does not hold.
        """
        _require(len(self._running) <= self._config.max_running, "more sequences run than max_running")
        _require(self._running == sorted(self._running, key=_age), "the running sequences are out of order")
        _require(self._waiting == sorted(self._waiting, key=_age), "the waiting sequences are out of order")
        for sequence in self._running + self._waiting:
            who = sequence.request_id
            waits = sequence.phase is Phase.WAITING
            _require(waits == (sequence in self._waiting), f"{who} is in the wrong list")
            _require(not waits or sequence.slot is None, f"{who} waits with a view")
            _require(not waits or not sequence.computed_tokens, f"{who} waits with computed tokens")
            _require(0 <= sequence.computed_tokens <= len(sequence.tokens), f"{who} computed more than it has")
            flying = bool(sequence.table.flying())
            _require(not flying or sequence.flight is not None, f"{who} has pages in flight without a load")
        self._book.check()

    # -- parts of the beat

    def _expire(self, now_ns: int) -> tuple[Sequence, ...]:
        late = [entry for entry in self._running + self._waiting if entry.deadline_ns <= now_ns]
        for sequence in late:
            slot = self.remove(sequence)
            if slot is not None:
                self._closed_slots.append(slot)
        return tuple(late)

    def _decode(self, sequence: Sequence, beat: _Beat) -> None:
        if sequence.phase is not Phase.RUNNING or beat.budget < 1:
            return
        needed = (sequence.computed_tokens + 1) // sequence.table.block_tokens
        if needed and sequence.table.page(needed - 1) is None and not self._grow(sequence, needed, beat):
            return
        beat.work.append(Work(sequence, 0, (), sequence.computed_tokens, 1, samples=True))
        beat.budget -= 1

    def _continue(self, sequence: Sequence, beat: _Beat, *, idle: bool) -> None:
        """Give a running prefill its next chunk."""
        if sequence.phase is not Phase.RUNNING or beat.budget < 1:
            return
        self._reuse.adopt(sequence, sequence.computed_tokens // sequence.table.block_tokens)
        if sequence.table.missing(sequence.full_blocks) and not self._grow(sequence, sequence.full_blocks, beat):
            return
        self._chunk(sequence, beat, idle=idle)

    def _admit(self, beat: _Beat, *, idle: bool) -> None:
        """Let waiting requests in, oldest first. Who waits for its load or for a twin that computes the same blocks
        in this step is passed over; who lacks pages is not."""
        for sequence in list(self._waiting):
            if beat.preempted or self._views_full or beat.budget < 1 or len(self._running) >= self._config.max_running:
                return
            if not self._ready(sequence, beat, idle=idle):
                continue
            if not self._take_prompt_pages(sequence):
                return
            self._waiting.remove(sequence)
            insort(self._running, sequence, key=_age)
            sequence.phase = Phase.RUNNING
            if sequence.tally.first_scheduled_ns is None:
                sequence.tally.first_scheduled_ns = beat.now_ns
            self._chunk(sequence, beat, idle=idle)
            if idle and beat.prefills:
                return

    def _ready(self, sequence: Sequence, beat: _Beat, *, idle: bool) -> bool:
        run = self._reuse.advance(sequence)
        if self._claimed(sequence, run, beat):
            return False
        if self._book.bringer(sequence, run) is not None:
            # Filling in early hides the copy behind the load, but must not take the last place from who can compute.
            may_fill = idle and run > 0 and len(self._running) + 1 < self._config.max_running
            if self._waits.rule(sequence, run, beat.now_ns, idle=idle).verdict is Verdict.WAIT and not may_fill:
                return False
        self._reuse.adopt(sequence, run)
        return True

    def _use_idle(self, beat: _Beat) -> None:
        """No prefill is ready, so the GPU would idle: who waits for its load fills in what came, or computes."""
        for sequence in [entry for entry in self._running if not entry.decoding]:
            self._continue(sequence, beat, idle=True)
            if beat.prefills:
                return
        self._admit(beat, idle=True)

    def _chunk(self, sequence: Sequence, beat: _Beat, *, idle: bool) -> None:
        """Plan the next part of a prefill: fill in what is readable, beside decodes in parts, then compute up to the
        next readable block."""
        size, table, budget = sequence.table.block_tokens, sequence.table, beat.budget
        first, rest = divmod(sequence.computed_tokens, size)
        readable = run = 0 if rest else table.readable_run(first, sequence.full_blocks)
        if beat.decodes and run:  # they wait for the copy as for a computation, so it has the same budget
            run = min(run, self._gate.fill_blocks(budget))
            beat.budget = max(0, budget - self._gate.fill_tokens(run, budget))
        filled = run == readable and beat.budget > 0
        start = sequence.computed_tokens
        if run:
            start = min(start + run * size, len(sequence.tokens) - 1)  # one token must be computed to sample from
        count = 0
        if filled and (not self._claimed(sequence, start // size, beat) or start % size):
            count = self._count(sequence, start, beat, idle=idle)
        if not count and filled and not (run and idle):
            beat.budget = budget
            return
        fill = tuple(page for page in map(table.page, range(first, first + run)) if page is not None)
        samples = count > 0 and start + count == len(sequence.tokens)
        beat.work.append(Work(sequence, first, fill, start, count, samples))
        beat.prefills += 1
        beat.budget -= count
        beat.claimed.update(dict.fromkeys(table.chain[first : (start + count) // size], sequence))

    def _count(self, sequence: Sequence, start: int, beat: _Beat, *, idle: bool) -> int:
        """Tokens to compute from ``start`` on; 0 to wait for a load."""
        size, table, blocks = sequence.table.block_tokens, sequence.table, sequence.full_blocks
        limit = beat.budget
        next_block = -(-start // size)
        barrier = table.next_in(start // size + 1, blocks, READABLE)  # that at ``start`` is computed now
        flying = self._book.next_flying(sequence, next_block)
        self._give_up_before(sequence, next_block)
        if flying < blocks and flying * size == start:
            ruling = self._waits.rule(sequence, flying, beat.now_ns, idle=idle)
            if ruling.verdict is Verdict.WAIT:
                return 0
            limit = min(limit, ruling.tokens or limit)
        else:
            barrier = min(barrier, flying)  # the front of a split: its load brings the rest meanwhile
        stop = min(len(sequence.tokens), start + limit)
        if barrier < blocks:
            stop = min(stop, barrier * size)
        if stop < len(sequence.tokens) and stop // size * size > start:
            stop = stop // size * size  # whole blocks, so that what arrives can be filled in at every boundary
        self._give_up_before(sequence, stop // size)
        return stop - start

    def _give_up_before(self, sequence: Sequence, block: int) -> None:
        """Both ends of a load met when all that it still brings is computed by now, or in this step."""
        own, missing = self._book.of(sequence), sequence.table.flying()
        if own is not None and missing and missing[-1] < block:
            self._book.give_up(own)

    def _claimed(self, sequence: Sequence, block: int, beat: _Beat) -> bool:
        """A twin computes this block in this step already, its load brought it just now, or its view holds it, which
        the shell can offer after the step."""
        chain = sequence.table.chain
        if block >= len(chain):
            return False
        twin = beat.claimed.get(chain[block])
        if twin is None:
            twin = self._book.holder(sequence, block)
            if twin is None or not self._rescuable(twin):
                return False
            beat.owed.append(twin)
            beat.claimed.update((twin.table.chain[index], twin) for index in self._rescuable(twin))
        return twin is not sequence

    def _wake_ns(self) -> int | None:
        moments = [entry.deadline_ns for entry in self._running + self._waiting]
        late_ns = self._waits.take_wake_ns()
        return min(moments if late_ns is None else [*moments, late_ns], default=None)

    # -- loads

    def _reserve(self, sequence: Sequence, now_ns: int) -> LoadOrder | None:
        """Take the pages that the plan's loads will write, leaving one for every running sequence. What another
        request's load brings already is not ordered again."""
        table = sequence.table
        parts = [range(max(0, part.start), min(part.stop, sequence.full_blocks)) for part in sequence.plan.loads]
        named = sorted({index for part in parts for index in part})  # a router that is wrong may name a block twice
        lacking = [index for index in named if table.page(index) is None]
        wanted = [index for index in lacking if not self._waits.counts_on(sequence, index, now_ns)]
        sequence.load_due = bool(lacking)
        if not wanted or len(wanted) + len(self._running) > self._blocks.available_blocks:
            return None
        if sequence.flight is not None or not self._assign(sequence, wanted):
            return None
        sequence.load_due = len(wanted) < len(lacking)
        flight = self._book.begin(sequence, wanted, LoadView.starting(sequence.plan, now_ns, len(wanted)))
        return LoadOrder(flight.number, sequence, flight.pages)

    def _late_loads(self, beat: _Beat) -> tuple[LoadOrder, ...]:
        """Loads that found no room at arrival, or counted on another request's, oldest first."""
        orders: list[LoadOrder] = []
        refused = 0
        for sequence in self._waiting:
            if refused == MAX_REFUSED:
                break
            if not sequence.load_due or sequence.flight is not None:
                continue
            run = self._reuse.advance(sequence)
            if self._waits.counts_on(sequence, run, beat.now_ns) or self._claimed(sequence, run, beat):
                continue  # still on its way for another, or here in a moment
            self._reuse.adopt(sequence, run)
            order = self._reserve(sequence, beat.now_ns)
            if order is not None:
                orders.append(order)
            refused += order is None and sequence.load_due
        return tuple(orders)

    # -- pages

    def _take_prompt_pages(self, sequence: Sequence) -> bool:
        """Pages for every full block of a sequence about to run; the waiting ones behind it give theirs back."""
        missing = sequence.table.missing(sequence.full_blocks)
        needed = len(missing)
        if self._running:  # one more for each that may grow soon, or admission would cause preemption
            needed += len(self._running)
        behind = self._waiting[self._waiting.index(sequence) + 1 :]
        held = sum(len(other.table.pages()) for other in behind)
        if self._blocks.available_blocks + self._book.returning_blocks() + held >= needed:
            self._reclaim(reversed(behind), needed)
        return self._blocks.available_blocks >= needed and self._assign(sequence, missing)

    def _grow(self, sequence: Sequence, blocks: int, beat: _Beat) -> bool:
        """Pages up to block ``blocks`` for a running sequence, at the expense of waiting, then of younger ones.

        Returns:
            False when the sequence cannot run in this step: it was preempted itself, or pages are about to return.
        """
        missing = sequence.table.missing(blocks)
        self._reclaim(reversed(self._waiting), len(missing))
        while not self._assign(sequence, missing):
            if self._book.returning_blocks() >= len(missing) or len(self._running) == 1:
                return False
            victim = self._running[-1]
            self._preempt(victim, beat)
            if victim is sequence:
                return False
        return True

    def _reclaim(self, waiting: Iterable[Sequence], needed: int) -> None:
        """Waiting requests give their pages back until ``needed`` are available, or will be: those in flight return
        later, and nobody else has to give any meanwhile."""
        for other in waiting:
            if self._blocks.available_blocks + self._book.returning_blocks() >= needed:
                return
            self._let_go(other)

    def _assign(self, sequence: Sequence, missing: Seq[int]) -> bool:
        if not missing:
            return True
        try:
            neighbour = self._neighbour(sequence, missing[0])
            allocation = self._blocks.allocate(len(missing), neighbour, sequence.request.tenant)
        except CapacityError:
            return False
        sequence.table.assign(missing, allocation.block_ids)
        return True

    def _neighbour(self, sequence: Sequence, index: int) -> BlockId | None:
        return sequence.table.page(index - 1) if index else None

    def _preempt(self, victim: Sequence, beat: _Beat) -> None:
        self._running.remove(victim)
        if victim.slot is not None:
            self._closed_slots.append(victim.slot)
        self._let_go(victim)
        victim.restart()
        insort(self._waiting, victim, key=_age)
        beat.work = [work for work in beat.work if work.sequence is not victim]
        beat.preempted = True
        self._views_full = False
        self.preemptions += 1

    def _let_go(self, sequence: Sequence) -> None:
        """Give every page back; those a load may still write return to the pool when it is terminal."""
        self._blocks.release(sequence.table.clear())
        sequence.loaded.clear()
        sequence.load_due = False
        self._book.abandon(sequence)


def _age(sequence: Sequence) -> tuple[int, int, str]:
    """Order of service: a request of higher priority counts as older than any of lower."""
    return (-sequence.request.limits.priority, sequence.arrival_ns, sequence.request_id)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantViolation(f"scheduler: {message}")
