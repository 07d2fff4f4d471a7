"""One scheduler in virtual time: steps cost what tokens cost, blocks arrive over links of a given speed.  (no engine)

For questions of time and of work: when does each request get its first token, and which whole blocks were computed
although they had been computed, or had arrived, on this worker already? One heap of integer-time events, no threads.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvpool.config import SchedulerConfig
from kvpool.plan import REDO, LoadSlice, Plan, PlanKind
from kvpool.store.pool import BlockPool
from kvpool.types import BlockHash, Tier, WorkerEpoch, WorkerId, WorkerKey
from tests.worker_support import make_request, namespace
from workers.block_table import READABLE, BlockTable
from workers.flights import open_ended, tail_first
from workers.gate import Gate
from workers.scheduler import Scheduler
from workers.sequence import Phase, Sequence
from workers.step import LoadOrder, Step

SIZE = 4
US = 1_000
MS = 1_000_000
START_NS = 200 * US
"""A step costs this much and something a token, as far as it prefills; a decode costs nothing more."""

MIN_STEP_NS = 100 * US
CANCEL_NS = 500 * US
"""From giving a load up to its terminal state."""


@dataclass
class Link:
    """Blocks of one holder, one after the other.

    Attributes:
        block_ns: what a block takes.
        fault_after: how many blocks come before the fault; None for no fault.
        crawl: a block takes so many times longer after the fault; None for nothing more comes. A load whose next block
            takes longer than its plan's stall time is over after that.
    """

    block_ns: int
    fault_after: int | None = None
    crawl: int | None = None
    sent: int = 0
    busy: bool = False
    queue: deque[tuple[_Load, int]] = field(default_factory=deque)

    def broken(self) -> bool:
        """The fault is there."""
        return self.fault_after is not None and self.sent >= self.fault_after


@dataclass
class _Load:
    order: LoadOrder
    arrived: set[int] = field(default_factory=set)
    left: int = 0
    over: bool = False


@dataclass
class Work:
    """Whole blocks that were computed although they lay here: ``again`` in the view of another one (or twice in one
    step), ``arrived`` in the pool or in the pages of another one's load. One block may count in both."""

    again: int = 0
    arrived: int = 0


class TwinWorld:
    """A worker whose requests and links a test scripts, and then `run`.

    Args:
        links: holder's name → its link.
        token_ns: what computing a token takes.
    """

    def __init__(self, links: dict[str, Link], token_ns: int, num_blocks: int = 4000, **limits: int) -> None:
        self.links = links
        self.token_ns = token_ns
        self.pool = BlockPool(num_blocks)
        self.gate = Gate(SIZE)
        for tokens in (1, 512):
            self.gate.observe(tokens, START_NS + tokens * token_ns)
        self.scheduler = Scheduler(SchedulerConfig(**limits), self.pool, self.gate)
        self.now_ns = 0
        self.ttft_ns: dict[str, int] = {}
        self.wasted = Work()
        self.loads_ordered: Counter[str] = Counter()
        self.steps: list[Step] = []
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._number = 0
        self._live: dict[str, Sequence] = {}
        self._loads: dict[int, _Load] = {}
        self._landed: list[Sequence] = []
        self._leaving: list[str] = []

    # -- the script

    def submit_at(self, at_ns: int, name: str, prompt: list[int], plan: Plan, max_tokens: int = 1) -> None:
        """A request arrives."""
        self._at(at_ns, lambda: self._submit(name, prompt, plan, max_tokens))

    def cancel_at(self, at_ns: int, name: str) -> None:
        """Its user gives up: it leaves before the next step."""
        self._at(at_ns, lambda: self._leaving.append(name))

    def run(self, until_ns: int = 10**12) -> None:
        """Until every request is over and every load terminal."""
        while self._events or self._live or self._loads:
            assert self.now_ns < until_ns, f"requests hang: {sorted(self._live)}"
            self._take_events(self.now_ns)
            for number, load in list(self._loads.items()):
                self.scheduler.progress(number, load.arrived)
                if load.over:
                    del self._loads[number]
                    landed = self.scheduler.land(number)
                    if landed is not None:
                        self._landed.append(landed)
            while self._leaving:
                self._remove(self._leaving.pop())
            self._beat()

    # -- parts

    def _at(self, at_ns: int, event: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (at_ns, self._number, event))

    def _take_events(self, until_ns: int) -> None:
        while self._events and self._events[0][0] <= until_ns:
            at_ns, _, event = heapq.heappop(self._events)
            self.now_ns = max(self.now_ns, at_ns)
            event()

    def _submit(self, name: str, prompt: list[int], plan: Plan, max_tokens: int) -> None:
        table = BlockTable(namespace(block_tokens=SIZE).root(), SIZE)
        request = make_request(name, prompt, max_tokens)
        sequence = Sequence(request, open_ended(plan), "d", table, self.now_ns, self.now_ns + 10**12)
        self._live[name] = sequence
        order = self.scheduler.add(sequence, self.now_ns)
        if order is not None:
            self._start(order)

    def _remove(self, name: str) -> None:
        sequence = self._live.pop(name, None)
        if sequence is not None:
            self.scheduler.remove(sequence)

    def _start(self, order: LoadOrder) -> None:
        load = self._loads[order.flight] = _Load(order)
        plan = order.sequence.plan
        self.loads_ordered[order.sequence.request_id] += 1
        plan = tail_first(plan) if plan.kind is PlanKind.SPLIT else plan
        for part in plan.loads:
            blocks = [index for index in range(part.start, part.stop) if index in order.pages]
            load.left += len(blocks)
            link = self.links[part.holder.worker_id]
            link.queue.extend((load, index) for index in blocks)
            self._pump(link)

    def _pump(self, link: Link) -> None:
        """Send the next block that somebody still wants."""
        while link.queue and not link.busy:
            load, index = link.queue.popleft()
            if not load.over:
                link.busy = True
                self._send(link, load, index)

    def _send(self, link: Link, load: _Load, index: int) -> None:
        stall_ns, block_ns = load.order.sequence.plan.stall_ns, link.block_ns
        if link.broken():
            block_ns = stall_ns + 1 if link.crawl is None else block_ns * link.crawl
        if block_ns > stall_ns:
            self._at(self.now_ns + stall_ns, lambda: self._stall(link, load))
            return
        link.sent += 1
        self._at(self.now_ns + block_ns, lambda: self._arrive(link, load, index))

    def _arrive(self, link: Link, load: _Load, index: int) -> None:
        link.busy = False
        load.left -= 1
        if not load.over:
            load.arrived.add(index)
            load.over = not load.left
        self._pump(link)

    def _stall(self, link: Link, load: _Load) -> None:
        link.busy = False
        self._over(load)
        self._pump(link)

    def _over(self, load: _Load) -> None:
        load.over = True

    def _beat(self) -> None:
        step = self.scheduler.plan_step(self.now_ns)
        self.steps.append(step)
        for order in step.loads:
            self._start(order)
        for number in step.cancelled_flights:
            self._at(self.now_ns + CANCEL_NS, lambda load=self._loads[number]: self._over(load))  # type: ignore[misc]
        self._judge(step)
        if step.work:
            self._run(step)
        owed = [sequence for sequence in step.owed if sequence.phase is not Phase.GONE]
        for sequence in owed:
            self.scheduler.rescue(sequence)
        landed, self._landed = [*self._landed, *owed], []
        for sequence in landed:
            if sequence.phase is not Phase.GONE:
                self._seal(sequence)
        if not step.work and not landed:
            moments = [moment for moment in (step.wake_ns,) if moment is not None]
            moments += [event[0] for event in self._events[:1]]
            if moments:
                self.now_ns = max(self.now_ns + 1, min(moments))

    def _judge(self, step: Step) -> None:
        """Count what the step computes although it lies here, where a plan could have known it, or twice itself."""
        fresh: set[BlockHash] = set()
        for work in step.work:
            chain = work.sequence.table.chain
            for index in range(-(-work.start // SIZE), (work.start + work.count) // SIZE):
                self.wasted.again += chain[index] in fresh or self._in_a_view(work.sequence, index)
                self.wasted.arrived += self._readable(work.sequence, index)
                fresh.add(chain[index])

    def _in_a_view(self, sequence: Sequence, index: int) -> bool:
        """Another one computed this block, or filled it in."""
        block_hash = sequence.table.chain[index]
        return any(
            index < other.computed_tokens // SIZE and other.table.chain[index] == block_hash
            for other in self._live.values()
            if other is not sequence
        )

    def _readable(self, sequence: Sequence, index: int) -> bool:
        """The pool has this block, or a load brought it for another one that is still there."""
        block_hash = sequence.table.chain[index]
        return self.pool.lookup(block_hash) is not None or any(
            index < len(other.table.chain)
            and other.table.chain[index] == block_hash
            and other.table.state(index) in READABLE
            for other in self._live.values()
            if other is not sequence
        )

    def _run(self, step: Step) -> None:
        """As the engine loop: what arrives or is submitted meanwhile is seen after the step."""
        tokens = sum(work.count for work in step.work if not work.sequence.decoding)
        ends_ns = self.now_ns + max(MIN_STEP_NS, (START_NS + tokens * self.token_ns) if tokens else 0)
        for work in step.work:
            work.sequence.slot = work.sequence.slot or 1
        self._take_events(ends_ns)
        self.now_ns = ends_ns
        works = [work for work in step.work if work.sequence.phase is not Phase.GONE]
        for work in works:
            self.scheduler.ran(work)
            if work.samples:
                self._sample(work.sequence)
        ended = [work.sequence for work in works if _over(work.sequence)]
        for work in works:
            if work.sequence in ended or self.scheduler.awaited(work.sequence):
                self.scheduler.rescue(work.sequence)
        for work in works:
            self._seal(work.sequence)
        for sequence in ended:
            self._remove(sequence.request_id)
        self.pool.check()
        self.scheduler.check()

    def _sample(self, sequence: Sequence) -> None:
        if sequence.tally.first_token_ns is None:
            sequence.tally.first_token_ns = self.now_ns
            self.ttft_ns[sequence.request_id] = self.now_ns - sequence.arrival_ns
        sequence.append(1)

    def _seal(self, sequence: Sequence) -> None:
        table = sequence.table
        for index in table.sealable(sequence.computed_tokens // SIZE):
            page = table.page(index)
            assert page is not None
            if self.pool.lookup(table.chain[index]) != page:
                page = self.pool.seal(page, table.chain[index], table.parent_of(index))
            table.seal(index, page)


def _over(sequence: Sequence) -> bool:
    return sequence.generated_tokens >= sequence.request.sampling.max_tokens


def plan_of(
    kind: PlanKind, start: int, stop: int, links: dict[str, Link], *, holder: str = "peer", deadline_ns: int = 0
) -> Plan:
    """As a router would: it expects the link to hold its speed, gives a load three times that, and drops a source that
    sends nothing for a tenth of it."""
    if kind is PlanKind.REDO:
        return REDO
    expected_ns = (stop - start) * links[holder].block_ns
    key = WorkerKey(WorkerId(holder), WorkerEpoch(1))
    return Plan(
        kind,
        (LoadSlice(start, stop, key, "memory", b"", Tier.HOST),),
        load_deadline_ns=deadline_ns or 3 * expected_ns,
        stall_ns=max(expected_ns // 10, 2 * links[holder].block_ns, MS),
        predicted_load_ns=expected_ns,
        predicted_ttft_ns=expected_ns,
    )
