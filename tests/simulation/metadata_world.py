"""A whole metadata deployment on one heap of integer-time events, reproducible from one seed.

The pure cores are the real ones: `DirectoryState` in every replica, an `Outbox` per (worker, replica), a
`DirectoryView` in every router. What is modelled is the rest: the network (drop, delay, duplicate, reorder), processes
(crash, pause past a lease, restart, a zombie beside its successor), clocks that jump. The workers' protocol follows
`kvpool.metadata.link`, the routers' `kvpool.metadata.watcher`.

`World.run` has three phases: faults while the workers' blocks change; healing; quiet until everything must agree.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvpool.errors import StaleError
from kvpool.metadata.events import (
    BlockAction,
    BlockEvent,
    Delta,
    EventBatch,
    Heartbeat,
    Placement,
    SnapshotHeader,
    Welcome,
)
from kvpool.metadata.index import PrefixIndex
from kvpool.metadata.membership import DirectoryLimits
from kvpool.metadata.outbox import Outbox
from kvpool.metadata.state import DirectoryState, StaleReason
from kvpool.metadata.view import DirectoryView
from kvpool.types import BlockHash, MemberInfo, MemberState, Tier, WorkerKey
from tests.contract.metadata_support import member

MS = 1_000_000
LEASE_NS = 300 * MS
BEAT_NS = 60 * MS
STALL_NS = 200 * MS
SNAPSHOT_PAUSE_NS = 40 * MS
SNAPSHOT_NS = 60 * MS
LIMITS = DirectoryLimits(
    lease_ns=LEASE_NS, probe_backoff_ns=50 * MS, max_probe_backoff_ns=400 * MS, suspicion_memory_ns=500 * MS
)
FAULT_TIME_NS = 1_200 * MS
QUIET_TIME_NS = 2_000 * MS
CHECK_NS = 100 * MS
CHAINS, CHAIN_BLOCKS = 4, 16


def placements(index: PrefixIndex) -> list[Placement]:
    """The whole content of an index."""
    return [placement for part in index.dump() for placement in part]


@dataclass(slots=True)
class Feed:
    """One watch stream as the replica sees it; changes wait until the snapshot was sent."""

    stream: int
    waiting: list[Delta] | None


@dataclass(frozen=True, slots=True)
class Faults:
    """Chances per message, and mean times between process faults."""

    drop: float = 0.05
    duplicate: float = 0.05
    slow: float = 0.1
    crash_ns: int = 700 * MS
    pause_ns: int = 700 * MS
    jump_ns: int = 1_500 * MS


NO_FAULTS = Faults(0, 0, 0, 0, 0, 0)


class Process:
    """Something that can crash and pause. Messages wait while it is paused and are lost while it is down."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.up = True
        self.paused_until_ns = 0
        self.incarnation = 0
        self.clock_offset_ns = 0

    @property
    def now_ns(self) -> int:
        """This process's monotonic clock."""
        return self.world.now_ns + self.clock_offset_ns

    def every(self, period_ns: int, action: Callable[[], None]) -> None:
        """Repeat while this incarnation lives; a pause delays, it does not skip."""
        incarnation = self.incarnation

        def fire() -> None:
            if self.incarnation != incarnation or not self.up:
                return
            if self.world.now_ns < self.paused_until_ns:
                self.world.at(self.paused_until_ns, fire)
                return
            action()
            self.world.after(period_ns, fire)

        self.world.after(self.world.rng.randrange(period_ns), fire)

    def deliver(self, handler: Callable[[], None]) -> None:
        """Run a message's handler now, after the pause, or never."""
        if self.up and self.world.now_ns < self.paused_until_ns:
            incarnation = self.incarnation
            self.world.at(
                self.paused_until_ns, lambda: self.deliver(handler) if self.incarnation == incarnation else None
            )
        elif self.up:
            handler()


class Replica(Process):
    """One metadata server."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.watchers: dict[Router, Feed] = {}
        self.start()

    def start(self) -> None:
        self.incarnation += 1
        self.world.epochs += 1
        self.up = True
        self.watchers = {}
        self.state = self.world.make_state(self.world.epochs, LIMITS, self.now_ns)
        self.every(20 * MS, lambda: self.relay(self.state.tick(self.now_ns)))
        self.every(50 * MS, self.say_alive)

    def crash(self) -> None:
        self.up = False
        self.incarnation += 1
        self.watchers = {}

    def relay(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            for router, feed in self.watchers.items():
                if feed.waiting is None:
                    self.send_delta(router, feed.stream, delta)
                else:
                    feed.waiting.append(delta)

    def send_delta(self, router: Router, stream: int, delta: Delta) -> None:
        self.world.send(self, router, lambda: router.on_delta(stream, delta))

    def say_alive(self) -> None:
        epoch, sequence = self.state.directory_epoch, self.state.sequence
        for router, feed in self.watchers.items():
            if feed.waiting is None:
                self.send_alive(router, feed.stream, epoch, sequence)

    def send_alive(self, router: Router, stream: int, epoch: int, sequence: int) -> None:
        self.world.send(self, router, lambda: router.on_alive(stream, epoch, sequence))

    def on_watch(self, router: Router, stream: int) -> None:
        """Send a snapshot, read in parts while the state goes on changing."""
        feed = self.watchers[router] = Feed(stream, [])
        header, parts, taken = self.state.header(), self.state.index.dump(part_blocks=20), list[Placement]()
        incarnation = self.incarnation

        def read() -> None:
            if self.incarnation != incarnation or self.watchers.get(router) is not feed:
                return
            part = next(parts, None)
            if part is not None:
                taken.extend(part)
                self.world.after(self.world.rng.randrange(3 * MS), lambda: self.deliver(read))
                return
            self.world.send(self, router, lambda: router.on_snapshot(stream, header, taken))
            waiting, feed.waiting = feed.waiting or [], None
            for delta in waiting:
                self.send_delta(router, stream, delta)

        read()

    def call(self, worker: Worker, reply: Callable[[Any], None], action: Callable[[], tuple[Any, Any]]) -> None:
        """One call with one answer: a value or a `StaleError`."""
        try:
            value, deltas = action()
        except StaleError as error:
            value, deltas = error, ()
        self.relay(deltas)
        self.world.send(self, worker, lambda: reply(value))


class Link:
    """A worker's side towards one replica, after `kvpool.metadata.link`."""

    def __init__(self, worker: Worker, replica: Replica) -> None:
        self.worker, self.replica = worker, replica
        self.outbox = Outbox(worker.info.key, max_queued_blocks=60)
        self.welcome: Welcome | None = None
        self.rejoin = False
        self.probe: int | None = None
        self.call_number = 0
        self.unanswered = 0
        self.sent: list[tuple[int, int]] = []
        self.next_snapshot_ns = 0

    def beat(self) -> None:
        worker, replica, key = self.worker, self.replica, self.worker.info.key
        self.unanswered += 1
        if self.unanswered > 2:
            self.welcome = None
        self.call_number += 1
        number = self.call_number
        welcome = self.welcome
        if welcome is None or self.rejoin:
            self._ask(
                lambda value: self.on_welcome(number, value), lambda: replica.state.join(worker.info, replica.now_ns)
            )
        else:
            epoch, probe = welcome.directory_epoch, self.probe
            self._ask(
                lambda value: self.on_pulse(number, value),
                lambda: replica.state.heartbeat(Heartbeat(key, epoch, probe), replica.now_ns),
            )
        self.pump()

    def _ask(self, reply: Callable[[Any], None], action: Callable[[], tuple[Any, Any]]) -> None:
        self.worker.world.send(self.worker, self.replica, lambda: self.replica.call(self.worker, reply, action))

    def on_welcome(self, number: int, value: Any) -> None:
        if number != self.call_number:
            return  # the answer to an older call
        self.unanswered = 0
        if isinstance(value, StaleError):
            self.refused(value)
            return
        self.outbox.joined(value)
        self.sent = []
        self.welcome, self.rejoin = value, False
        self.pump()

    def on_pulse(self, number: int, value: Any) -> None:
        if number != self.call_number:
            return
        self.unanswered = 0
        if isinstance(value, StaleError):
            self.refused(value)
        else:
            self.probe = value.probe

    def refused(self, error: StaleError) -> None:
        if error.details.get("reason") == StaleReason.FENCED.value:
            self.worker.fenced()
        else:
            self.welcome = None

    def pump(self) -> None:
        """Send what may be sent."""
        worker = self.worker
        if self.welcome is None or self.rejoin:
            return
        if self.sent and worker.now_ns - self.sent[0][1] > STALL_NS:
            self.rejoin = True
            return
        if self.outbox.snapshot_due:
            if worker.now_ns < self.next_snapshot_ns:
                return  # a later beat
            self.next_snapshot_ns = worker.now_ns + SNAPSHOT_PAUSE_NS
            self.take_snapshot(self.outbox.begin_snapshot())
            return
        while (batch := self.outbox.next_batch()) is not None:
            self.sent.append((batch.sequence, worker.now_ns))
            self._send(batch)

    def take_snapshot(self, ticket: int) -> None:
        """Read the truth a little later, and hand it over later still."""
        worker, rng = self.worker, self.worker.world.rng
        incarnation = worker.incarnation

        def take() -> None:
            if worker.incarnation == incarnation:
                blocks = worker.snapshot()
                worker.world.after(rng.randrange(SNAPSHOT_NS), lambda: worker.deliver(lambda: load(blocks)))

        def load(blocks: list[tuple[Tier, BlockHash]]) -> None:
            if worker.incarnation == incarnation:
                self.outbox.load_snapshot(ticket, blocks)
                self.pump()

        worker.world.after(rng.randrange(SNAPSHOT_NS), lambda: worker.deliver(take))

    def _send(self, batch: EventBatch) -> None:
        self._ask(self.on_ack, lambda: self.replica.state.publish(batch))

    def on_ack(self, value: Any) -> None:
        if isinstance(value, StaleError):
            self.refused(value)
            return
        self.outbox.acked(value)
        self.sent = [item for item in self.sent if item[0] > value.received]
        self.pump()


class Worker(Process):
    """One incarnation of a worker and the blocks it really holds."""

    def __init__(self, world: World, worker_id: str, epoch: int) -> None:
        super().__init__(world)
        self.info: MemberInfo = self.describe(worker_id, epoch)
        self.held: dict[BlockHash, Tier] = {}
        self.ever: set[BlockHash] = set()
        self.incarnation = epoch
        self.links = [Link(self, replica) for replica in world.replicas]
        for link in self.links:
            self.every(BEAT_NS, link.beat)
        self.every(12 * MS, self.change)

    def describe(self, worker_id: str, epoch: int) -> MemberInfo:
        return member(worker_id, epoch)

    def die(self) -> None:
        """Killed."""
        self.up = False

    def fenced(self) -> None:
        """A newer incarnation exists: stop."""
        self.die()

    def snapshot(self) -> list[tuple[Tier, BlockHash]]:
        return [(tier, item) for item, tier in self.held.items()]

    def change(self) -> None:
        """Store or remove a few blocks: the truth first, then the events."""
        if self.world.quiet:
            return
        rng = self.world.rng
        chain = rng.choice(self.world.chains)
        start = rng.randrange(CHAIN_BLOCKS)
        piece = chain[start : start + rng.randrange(1, 9)]
        if rng.random() < 0.6:
            fresh = [item for item in piece if item not in self.held]
            tier = rng.choice([Tier.HOST, Tier.DISK])
            self.held.update(dict.fromkeys(fresh, tier))
            self.ever.update(fresh)
            linked = fresh == piece
            self.tell(BlockEvent(BlockAction.STORED, tier, tuple(fresh), linked=linked))
        else:
            for tier in Tier:
                gone = [item for item in reversed(piece) if self.held.get(item) is tier]
                for item in gone:
                    del self.held[item]
                self.tell(BlockEvent(BlockAction.REMOVED, tier, tuple(gone)))

    def tell(self, event: BlockEvent) -> None:
        if event.hashes:
            for link in self.links:
                link.outbox.add(event)
                link.pump()


class Router(Process):
    """A watcher with failover that now and then suspects a holder."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.view = DirectoryView(max_entries=10_000, max_workers=64)
        self.number = world.rng.randrange(len(world.replicas))
        self.stream = 0
        self.heard_ns = -(10**12)
        self.every(60 * MS, self.watch_over)
        self.every(200 * MS, self.suspect)

    def watch_over(self) -> None:
        if self.now_ns - self.heard_ns > 200 * MS:
            self.number += 1
            self.connect()

    def connect(self) -> None:
        self.stream += 1
        self.heard_ns = self.now_ns
        replica, stream = self.world.replicas[self.number % len(self.world.replicas)], self.stream
        self.world.send(self, replica, lambda: replica.on_watch(self, stream))

    def on_snapshot(self, stream: int, header: SnapshotHeader, parts: list[Placement]) -> None:
        if stream == self.stream:
            self.heard_ns = self.now_ns
            self.view.begin(header)
            self.view.fill(parts)
            self.view.finish()
            self.changed()

    def changed(self) -> None:
        """The view is another one."""

    def on_delta(self, stream: int, delta: Any) -> None:
        if stream == self.stream:
            self.heard_ns = self.now_ns
            if self.view.apply(delta):
                self.changed()
            else:
                self.connect()

    def on_alive(self, stream: int, epoch: int, sequence: int) -> None:
        if stream == self.stream:
            self.heard_ns = self.now_ns
            if not self.view.is_current(epoch, sequence):
                self.connect()

    def suspect(self) -> None:
        members = self.view.members
        if self.world.quiet or not members:
            return
        key = self.world.rng.choice(members).info.key
        for replica in self.world.replicas:
            self.world.send(self, replica, lambda replica=replica: self.world.suspect_at(replica, key))


class World:
    """Everything, and the heap. ``make_state`` may be replaced by a broken one, for the canary."""

    def __init__(self, seed: int, faults: Faults, make_state: Callable[..., DirectoryState] = DirectoryState) -> None:
        self.rng = random.Random(seed)
        self.faults = faults
        self.make_state = make_state
        self.now_ns = 0
        self.quiet = False
        self.epochs = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._ties = 0
        self._arrivals: dict[tuple[Process, Process], int] = {}
        raw = random.Random(1)  # the chains are the same in every world
        self.chains = [[BlockHash(raw.randbytes(16)) for _ in range(CHAIN_BLOCKS)] for _ in range(CHAINS)]
        self.replicas = [Replica(self) for _ in range(self.rng.choice([1, 2]))]
        self.incarnations: dict[WorkerKey, Worker] = {}
        self.workers = [self.spawn(f"w{number}") for number in range(3)]
        self.routers = [self.new_router() for _ in range(2)]

    # -- time and messages --------------------------------------------------------------------------------------

    def at(self, time_ns: int, action: Callable[[], None]) -> None:
        self._ties += 1
        heapq.heappush(self._heap, (time_ns, self._ties, action))

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        self.at(self.now_ns + delay_ns, action)

    def send(self, source: Process, target: Process, handler: Callable[[], None]) -> None:
        """Deliver a message: in order, or perhaps late, twice or never; to this incarnation of the target only."""
        if self.rng.random() < self.faults.drop:
            return
        incarnation = target.incarnation
        for _ in range(2 if self.rng.random() < self.faults.duplicate else 1):
            time_ns = self.now_ns + self.rng.randrange(1, 3 * MS)
            if self.rng.random() < self.faults.slow:
                time_ns += self.rng.randrange(300 * MS)  # overtaken by others
            else:
                time_ns = self._arrivals[source, target] = max(time_ns, self._arrivals.get((source, target), 0))
            self.at(time_ns, lambda: target.deliver(handler) if target.incarnation == incarnation else None)

    def run_until(self, end_ns: int) -> None:
        while self._heap and self._heap[0][0] <= end_ns:
            self.now_ns, _, action = heapq.heappop(self._heap)
            action()
        self.now_ns = end_ns

    # -- faults -------------------------------------------------------------------------------------------------

    def new_worker(self, worker_id: str, epoch: int) -> Worker:
        return Worker(self, worker_id, epoch)

    def new_router(self) -> Router:
        return Router(self)

    def spawn(self, worker_id: str) -> Worker:
        worker = self.new_worker(worker_id, 1 + sum(key.worker_id == worker_id for key in self.incarnations))
        self.incarnations[worker.info.key] = worker
        return worker

    def suspect_at(self, replica: Replica, key: WorkerKey) -> None:
        try:
            _, deltas = replica.state.suspect(key, None, "stall", token=self.rng.getrandbits(32), now_ns=replica.now_ns)
        except StaleError:
            return  # gone already
        replica.relay(deltas)

    def plan_faults(self) -> None:
        """Schedule process faults over the fault phase."""
        for mean_ns, fault in (
            (self.faults.crash_ns, self.crash),
            (self.faults.pause_ns, self.pause),
            (self.faults.jump_ns, self.jump),
        ):
            time_ns = 0
            while mean_ns and (time_ns := time_ns + int(self.rng.expovariate(1 / mean_ns))) < FAULT_TIME_NS:
                self.at(time_ns, fault)

    def note(self, text: str) -> None:
        """Something worth a line when a run is replayed."""

    def crash(self) -> None:
        """Kill a replica, or a worker whose successor starts at once, or leave the old one running as a zombie."""
        if self.rng.random() < 0.4:
            replica = self.rng.choice(self.replicas)
            if replica.up:
                self.note(f"replica {self.replicas.index(replica)} crashes")
                replica.crash()
                self.after(self.rng.randrange(1, 400 * MS), lambda: None if replica.up else replica.start())
            return
        number = self.rng.randrange(len(self.workers))
        old = self.workers[number]
        if self.rng.random() < 0.5:
            old.die()
        elif self.rng.random() < 0.5:
            old.paused_until_ns = self.now_ns + self.rng.randrange(600 * MS)
        state = "dies" if not old.up else "becomes a zombie" + (", asleep" if old.paused_until_ns > self.now_ns else "")
        self.note(f"{old.info.key} {state}")
        self.workers[number] = self.spawn(str(old.info.key.worker_id))

    def pause(self) -> None:
        """Freeze a process, often past its lease."""
        process = self.rng.choice([*self.replicas, *self.workers, *self.routers])
        process.paused_until_ns = self.now_ns + self.rng.randrange(2 * LEASE_NS)
        self.note(f"{self.name_of(process)} sleeps for {(process.paused_until_ns - self.now_ns) / MS:.0f} ms")

    def jump(self) -> None:
        """A monotonic clock leaps forward, as after a virtual machine was suspended."""
        process = self.rng.choice([*self.replicas, *self.workers])
        process.clock_offset_ns += self.rng.randrange(2 * LEASE_NS)
        self.note(f"the clock of {self.name_of(process)} is now {process.clock_offset_ns / MS:.0f} ms ahead")

    def name_of(self, process: Process) -> str:
        """For people."""
        return str(process.info.key) if isinstance(process, Worker) else type(process).__name__.lower()

    # -- a run --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Faults, healing, quiet; raises `AssertionError` or `InvariantViolation` when something is wrong."""
        self.plan_faults()
        for end_ns in range(CHECK_NS, FAULT_TIME_NS + 1, CHECK_NS):
            self.run_until(end_ns)
            self.check_safety()
        self.faults = NO_FAULTS
        self.quiet = True
        self.run_until(FAULT_TIME_NS + QUIET_TIME_NS)
        self.check_safety()
        self.check_agreement()

    def check_safety(self) -> None:
        """What must hold at every moment, whatever was lost."""
        for replica in self.replicas:
            if replica.up:
                replica.state.check()
                self.check_index(replica.state)
        for router in self.routers:
            router.view.index.check()

    def check_index(self, state: DirectoryState) -> None:
        """No block is ascribed to an incarnation that never held it."""
        for item in placements(state.index):
            for key, _, _ in item.holders:
                assert self.incarnations[key].ever.issuperset(item.hashes), f"phantom blocks at {key}"

    def check_agreement(self) -> None:
        """After healing: replicas and routers know exactly the truth, and nobody waits for anything."""
        alive = {worker.info.key: worker for worker in self.workers}
        truth = {(key, tier, item) for key, worker in alive.items() for tier, item in worker.snapshot()}
        for worker in self.incarnations.values():
            if worker.info.key not in alive:
                assert not worker.up or not worker.links, f"zombie {worker.info.key} was not fenced"
        for worker in alive.values():
            assert worker.up, f"{worker.info.key} was fenced although it is the newest"
            assert all(link.outbox.idle for link in worker.links), f"{worker.info.key} still has something to say"
        for replica in self.replicas:
            assert self.content(replica.state.index) == truth, "a replica's index differs from the truth"
            assert {view.info.key: view.state for view in replica.state.members()} == dict.fromkeys(
                alive, MemberState.ALIVE
            )
        for router in self.routers:
            assert self.content(router.view.index) == truth, "a router's index differs from the truth"
            assert {item.info.key for item in router.view.members} == set(alive)
            for chain in self.chains:
                assert router.view.prefixes(chain) == self.replicas[0].state.lookup(chain)

    @staticmethod
    def content(index: Any) -> set[tuple[WorkerKey, Tier, BlockHash]]:
        return {
            (key, tier, item)
            for placement in placements(index)
            for key, tier, incoming in placement.holders
            for item in placement.hashes
        }
