"""A whole worker on the heap: the real engine loop, scheduler, segment, loader and load machine, without threads.

A beat of the loop is one event. Computing takes time: the worker's clock runs ahead during a beat, and the next beat
comes when the world has caught up. Its wake-up flag sets an event instead of a thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvpool.config import SchedulerConfig
from kvpool.errors import KVPoolError, UnavailableError
from kvpool.metadata.events import BlockAction, BlockEvent
from kvpool.plan import Route
from kvpool.reports import LoadSample, PrefillSample, WorkerLoad, WorkerReport
from kvpool.request import GenerateRequest, TokenChunk
from kvpool.store.segment import Segment, SegmentConfig
from kvpool.transfer.loader import Loader
from kvpool.types import BlockHash, MemberInfo, Tier, WorkerKey
from tests.contract.metadata_support import member
from tests.simulation.metadata_processes import Worker
from tests.simulation.pool_transport import SimTransport
from tests.worker_support import WatchedFake, namespace
from workers.block_table import BlockTable
from workers.bridge import Bridge
from workers.device_copies import DeviceCopies
from workers.engine.base import SequenceSlice
from workers.engine_loop import EngineLoop, LoopParts
from workers.flights import Flights, open_ended
from workers.gate import Gate
from workers.queue_load import queue_load
from workers.reporter import Reporter
from workers.scheduler import Scheduler
from workers.sequence import Sequence as Served

if TYPE_CHECKING:
    from tests.simulation.pool_world import PoolWorld

MS = 1_000_000
BLOCK_TOKENS = 4
PASS_NS, TOKEN_NS = 1 * MS, MS
CALIBRATION = tuple(PrefillSample(tokens, 0, PASS_NS + tokens * TOKEN_NS) for tokens in (4, 16, 48))

Sink = Callable[[TokenChunk | KVPoolError], None]


class TimedEngine(WatchedFake):
    """Computing takes simulated time."""

    def __init__(self, spend: Callable[[int], None]) -> None:
        super().__init__(block_tokens=BLOCK_TOKENS)
        self._spend = spend

    def step(self, batch: Sequence[SequenceSlice]) -> list[Any]:
        self._spend(PASS_NS + TOKEN_NS * sum(len(part.tokens) for part in batch))
        return super().step(batch)


class Wake:
    """Stands in for the loop's `threading.Event`."""

    def __init__(self, worker: PoolWorker) -> None:
        self._worker = worker
        self.asleep_s: float | None = None

    def set(self) -> None:
        self._worker.beat_at(self._worker.world.now_ns)

    def clear(self) -> None:
        self.asleep_s = None

    def wait(self, timeout_s: float) -> None:
        self.asleep_s = timeout_s


class PoolWorker(Worker):
    """One incarnation of a worker that really serves."""

    world: PoolWorld

    def __init__(self, world: PoolWorld, worker_id: str, epoch: int) -> None:
        self.ahead_ns = 0
        self.engine = TimedEngine(self._spend)
        self.blocks = world.swarm.num_blocks
        super().__init__(world, worker_id, epoch)
        size = self.engine.layout.block_bytes
        self.memory = bytearray(self.blocks * size)
        memory = memoryview(self.memory)
        config = SegmentConfig(
            size,
            self.blocks,
            Tier.HOST,
            lease_ns=world.swarm.read_lease_ns,
            device_blocks=world.swarm.device_blocks,
        )
        self.segment = Segment(config, memory, self, lambda: self.now_ns)
        self.engine.attach_pages(memory, self.blocks)
        self.device: DeviceCopies | None = None
        if self.segment.device is not None:
            self.engine.attach_device_pages(config.device_blocks)
            self.engine.core = self  # type: ignore[assignment]
            self.device = DeviceCopies(self.engine, self.segment.device, lambda: self.now_ns)
        self.transport = SimTransport(self)
        self.gate = Gate(BLOCK_TOKENS)
        self.scheduler = Scheduler(SchedulerConfig(**world.swarm.limits), self.segment, self.gate)
        self.reporter = Reporter(self.info.key, self)
        self.samples: deque[LoadSample] = deque(maxlen=100)
        loader = Loader(
            self.transport,  # type: ignore[arg-type]
            clock_ns=lambda: self.now_ns,
            on_suspect=self.suspect_holder,
            on_sample=self.samples.append,
        )
        self.wake = Wake(self)
        self.flights = Flights(self.scheduler, self.reporter, loader, size, self.wake.set)
        self.loop = EngineLoop(
            LoopParts(
                worker_id=self.info.key.worker_id,
                engine=self.engine,
                scheduler=self.scheduler,
                gate=self.gate,
                bridge=Bridge(self.engine, self.segment, self.device),
                flights=self.flights,
                reporter=self.reporter,
                lock=threading.RLock(),
                wake=self.wake,  # type: ignore[arg-type]
                clock_ns=lambda: self.now_ns,
                decode=None,
                load=self.load,
                counters=lambda: dict(self.reporter.counters),
                samples=self.samples,
                pulling=lambda: False,
            )
        )
        for sample in CALIBRATION:
            self.gate.observe(sample.new_tokens, sample.elapsed_ns)
        self._next_beat_ns: int | None = None
        self.mourners: list[Callable[[], None]] = []
        self.beat_at(world.now_ns)

    def describe(self, worker_id: str, epoch: int) -> MemberInfo:
        return member(
            worker_id,
            epoch,
            transport="sim",
            data_address=worker_id.encode(),
            block_tokens=BLOCK_TOKENS,
            block_bytes=self.engine.layout.block_bytes,
            capacity_blocks=(self.world.swarm.device_blocks, self.blocks, 0),
            calibration=CALIBRATION,
        )

    # -- time

    @property
    def now_ns(self) -> int:
        return max(self.world.now_ns, self.ahead_ns) + self.clock_offset_ns

    def _spend(self, elapsed_ns: int) -> None:
        self.ahead_ns = max(self.world.now_ns, self.ahead_ns) + elapsed_ns

    def beat_at(self, time_ns: int) -> None:
        """Beat then, or when the running step is over; an earlier beat that is planned is enough."""
        time_ns = max(time_ns, self.ahead_ns)
        if self._next_beat_ns is not None and self._next_beat_ns <= time_ns:
            return
        self._next_beat_ns = time_ns

        def fire() -> None:
            if self._next_beat_ns == time_ns:
                self.deliver(self._beat)

        self.world.at(time_ns, fire)

    def _beat(self) -> None:
        self._next_beat_ns = None
        self.wake.clear()
        self.loop._beat()
        asleep_s = self.wake.asleep_s
        self.beat_at(self.world.now_ns + (0 if asleep_s is None else max(1, int(asleep_s * 1e9))))

    # -- the truth, and who is told

    def snapshot(self) -> list[tuple[Tier, BlockHash]]:
        tier = self.segment.device
        in_device = [] if tier is None else [(Tier.DEVICE, item) for item in tier.held()]
        return [(Tier.HOST, item) for item in self.segment.held_hashes()] + in_device

    def change(self) -> None:
        """Blocks change because requests run."""

    def stored(self, tier: Tier, hashes: Sequence[BlockHash], *, linked: bool = False) -> None:
        self.ever.update(hashes)
        self.tell(BlockEvent(BlockAction.STORED, tier, tuple(hashes), linked=linked))

    def removed(self, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        self.tell(BlockEvent(BlockAction.REMOVED, tier, tuple(hashes)))

    def report(self, report: WorkerReport) -> None:
        for link in self.links:
            link._ask(lambda value: None, lambda link=link: (None, link.replica.state.report(report)))

    def suspect_holder(self, key: WorkerKey, failure: str) -> None:
        for replica in self.world.replicas:
            self.world.send(self, replica, lambda replica=replica: self.world.suspect_at(replica, key))

    def load(self) -> WorkerLoad:
        return replace(
            queue_load(self.scheduler.running, self.scheduler.waiting),
            free_blocks=self.segment.available_blocks,
            total_blocks=self.blocks,
            in_flight_bytes=self.flights.in_flight_bytes,
            fill_mib_ns=0 if self.device is None else self.device.speed.mib_ns,
        )

    # -- requests

    def submit(self, request: GenerateRequest, route: Route, sink: Sink) -> None:
        """As `workers.actor` and `workers.core` do; errors go to the sink."""
        if route.worker != self.info.key:
            sink(UnavailableError(f"the route names {route.worker}, but this is {self.info.key}"))
            return
        table = BlockTable(namespace(request.tenant, BLOCK_TOKENS).root(), BLOCK_TOKENS)
        now_ns = self.now_ns
        plan = open_ended(route.plan)
        try:
            self.loop.admit(Served(request, plan, route.decision_id, table, now_ns, now_ns + request.timeout_ns), sink)
        except KVPoolError as error:
            sink(error)

    def empty(self) -> None:
        """Memory pressure: everything that can go goes."""
        self.segment.clear()

    def die(self) -> None:
        super().die()
        for tell in self.mourners:
            tell()
        self.mourners.clear()

    # -- invariants

    def check(self) -> None:
        self.segment.check()
        self.scheduler.check()

    def check_at_rest(self) -> None:
        """Nothing is left over."""
        self.check()
        counts = self.segment.counts()
        left = (counts.referenced, counts.in_flight, counts.pinned, self.segment.leases, self.flights.count)
        assert left == (0, 0, 0, 0, 0), f"{self.info.key}: referenced, in flight, pinned, leases, loads: {left}"
        assert not self.transport.pulls, f"{self.info.key}: reads are left"
        assert not self.transport.leases, f"{self.info.key}: read leases are left"
        assert not self.loop._active, f"{self.info.key}: requests are left"
        assert self.engine.open_views == 0, f"{self.info.key}: views are left"
