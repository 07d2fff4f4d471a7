"""The processes of a simulated metadata deployment: replicas, workers with a link to each, routers.

The workers' protocol follows `kvpool.metadata.link`, the routers' `kvpool.metadata.watcher`; time, network and faults
are `tests.simulation.metadata_world`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from kvpool.metadata.state import StaleReason
from kvpool.metadata.view import DirectoryView
from kvpool.types import BlockHash, MemberInfo, Tier
from tests.contract.metadata_support import member

if TYPE_CHECKING:
    from tests.simulation.metadata_world import World

MS = 1_000_000
LEASE_NS = 300 * MS
BEAT_NS = 60 * MS
STALL_NS = 200 * MS
SNAPSHOT_PAUSE_NS = 40 * MS
SNAPSHOT_NS = 60 * MS
LIMITS = DirectoryLimits(
    lease_ns=LEASE_NS, probe_backoff_ns=50 * MS, max_probe_backoff_ns=400 * MS, suspicion_memory_ns=500 * MS
)
CHAIN_BLOCKS = 16


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
