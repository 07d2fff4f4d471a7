"""What is told of the loads of one request, over a loader that does as the test says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvpool.config import SchedulerConfig
from kvpool.errors import KVPoolError, UnavailableError
from kvpool.plan import REDO, LoadSlice, Plan, PlanKind
from kvpool.store.pool import BlockPool
from kvpool.transfer.loader import LoadProgress
from kvpool.types import BlockHash, RequestId, Tier, WorkerEpoch, WorkerId, WorkerKey
from tests.worker_support import RecordingPublisher, make_request, namespace
from workers import ports
from workers.block_table import BlockTable
from workers.flights import Flights
from workers.gate import Gate
from workers.reporter import Reporter
from workers.scheduler import Scheduler
from workers.sequence import Sequence as Request

KEY = WorkerKey(WorkerId("w"), WorkerEpoch(1))


@dataclass
class ScriptedLoad:
    """A load that moves when the test moves it."""

    state: LoadProgress

    def progress(self) -> LoadProgress:
        return self.state

    def cancel(self) -> None:
        """The test ends it."""

    def on_change(self, callback: Callable[[ports.LoadProgress], None]) -> None:
        """The test looks by itself."""

    def end(self, arrived: frozenset[int], now_ns: int) -> None:
        self.state = replace(self.state, arrived=arrived, terminal=True, finished_ns=now_ns)


class ScriptedLoader:
    """Starts loads at ``now_ns``, or raises ``error``."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.error: KVPoolError | None = None
        self.loads: list[ScriptedLoad] = []

    def start(
        self, request_id: RequestId, plan: Plan, chain: Sequence[BlockHash], pages: Mapping[int, int]
    ) -> ScriptedLoad:
        if self.error is not None:
            raise self.error
        self.loads.append(ScriptedLoad(LoadProgress(frozenset(), 0, False, (), 0, self.now_ns, None)))
        return self.loads[-1]


class Bench:
    """Everything around one scheduler but an engine."""

    def __init__(self) -> None:
        self.pool, self.loader = BlockPool(40), ScriptedLoader()
        self.reporter = Reporter(KEY, RecordingPublisher())
        self.scheduler = Scheduler(SchedulerConfig(), self.pool, Gate(4))
        self.woken = 0
        self.flights = Flights(self.scheduler, self.reporter, self.loader, 64, self.wake)

    def wake(self) -> None:
        self.woken += 1

    def submit(self, name: str, tokens: int) -> Request:
        part = LoadSlice(0, tokens // 4, KEY, "memory", b"", Tier.HOST)
        plan = Plan(PlanKind.LOAD, (part,), load_deadline_ns=10**6, stall_ns=10**6)
        table = BlockTable(namespace(block_tokens=4).root(), 4)
        request = Request(make_request(name, range(tokens)), plan, "d", table, self.loader.now_ns, 10**9)
        order = self.scheduler.add(request, self.loader.now_ns)
        assert order is not None
        self.flights.start(order)
        return request


def test_a_load_that_cannot_start_wakes_who_planned_to_wait_for_it() -> None:
    bench = Bench()
    bench.loader.error = UnavailableError("the disk tier is closed")
    request = bench.submit("late", 40)
    assert bench.woken == 1
    assert (bench.flights.count, request.table.flying()) == (0, [])
    assert request.tally.load_failures == ("unavailable",)
    assert bench.reporter.counters["load_failures.unavailable"] == 1


def test_the_load_time_of_a_request_is_from_its_first_load_to_its_last() -> None:
    bench = Bench()
    loader, flights, scheduler = bench.loader, bench.flights, bench.scheduler
    front = bench.submit("front", 20)
    loader.now_ns = 100
    whole = bench.submit("whole", 40)
    loader.loads[1].end(frozenset(range(5, 10)), 300)
    assert flights.follow() == [whole]
    assert whole.tally.load_ns == 200
    loader.loads[0].end(frozenset(), 400)  # that was to bring the first five blocks
    assert flights.follow() == [front]
    loader.now_ns = 500
    for order in scheduler.plan_step(loader.now_ns).loads:
        flights.start(order)
    loader.loads[2].end(frozenset(range(5)), 600)
    assert flights.follow() == [whole]
    assert whole.tally.load_ns == 500, "100 to 600"


def test_the_load_of_a_request_that_went_counts_for_the_twin_that_inherits_it() -> None:
    bench = Bench()
    first = bench.submit("first", 20)
    bench.loader.now_ns = 100
    table = BlockTable(namespace(block_tokens=4).root(), 4)
    twin = Request(make_request("twin", range(22)), REDO, "d", table, 100, 10**9)
    assert bench.scheduler.add(twin, 100) is None
    bench.scheduler.remove(first)
    bench.loader.loads[0].end(frozenset(range(5)), 300)
    assert bench.flights.follow() == [twin]
    assert (twin.tally.load_ns, first.tally.load_ns) == (200, 0)
    assert twin.loaded == set(range(5))
