"""A reader and a holder of the UCX transport over a fake fabric: one thread, one seed, simulated time.

The fabric keeps UCX's promises and no more: control messages may be lost, doubled, cut short or late; data lands in two
steps; a connection may die; a forced close completes unmatched receives at once but lets a landing one take its time,
or for ever.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from kvpool.errors import IntegrityError, PeerGoneError
from kvpool.transport.base import BlockStatus, BlockWant, HeldBlock, Peer, ReadRequest, ReadState
from kvpool.transport.handle import LocalEnd, ReadTask
from kvpool.transport.ucx.direct import Fetched
from kvpool.transport.ucx.reader import ReaderHalf
from kvpool.transport.ucx.server import ServerHalf
from kvpool.transport.ucx.settings import Compression, UcxOptions
from kvpool.transport.wire import Window, decode, is_data_tag
from kvpool.types import BlockHash, WorkerEpoch, WorkerId, WorkerKey

MS = 1_000_000
BLOCK = 64
BLOCKS = 48
HOLDER = WorkerKey(WorkerId("holder"), WorkerEpoch(3))
READER = WorkerKey(WorkerId("reader"), WorkerEpoch(1))
LONGEST_NS = 2000 * MS  # deadline of a read
LEASE_NS, STEP_NS = 3000 * MS, 250 * MS  # of the slow world
OPTIONS = UcxOptions(
    max_run_bytes=4 * BLOCK,
    pull_bytes=20 * BLOCK,
    max_fetch_bytes=3 * BLOCK,
    link_window_bytes=12 * BLOCK,
    fetch_window_bytes=20 * BLOCK,
    link_window_runs=6,
    open_pulls_per_link=2,
    lease_slack_ns=50 * MS,
)


class Operation:
    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.completed = False
        self.failure: PeerGoneError | None = None

    def error(self) -> PeerGoneError | None:
        return self.failure

    def end(self, failure: PeerGoneError | None = None) -> None:
        if not self.completed:
            self.completed, self.failure = True, failure


class Faults:
    """Chances of each fault, drawn once per run."""

    def __init__(self, rng: random.Random) -> None:
        self.drop, self.double, self.cut, self.flip, self.die = (rng.choice([0, 0, 0.02, 0.1]) for _ in range(5))
        self.stuck = rng.choice([0, 0, 0.5])  # a landing receive outlives its connection


class Net:
    def __init__(self, rng: random.Random, faults: Faults) -> None:
        self.rng = rng
        self.faults = faults
        self.ports: dict[bytes, Port] = {}
        self.flying: list[tuple[Connection, Port, int, Any, Operation]] = []
        self.landing: list[tuple[Connection | None, Any, Any, Operation, Operation]] = []
        self.connections: list[Connection] = []
        self.healed = False
        self.stopped = False
        self.landed: list[Any] = []

    def step(self) -> None:
        """Move one thing."""
        if self.stopped:
            return
        if self.landing and self.rng.random() < 0.5:
            self._land(self.rng.randrange(len(self.landing)))
        elif self.flying:
            # Messages of one connection stay in order; which connection moves is random.
            first: dict[int, int] = {}
            for index, item in enumerate(self.flying):
                first.setdefault(id(item[0]), index)
            self._arrive(*self.flying.pop(self.rng.choice(sorted(first.values()))))
        if not self.healed and self.connections and self.rng.random() < self.faults.die / 10:
            self.rng.choice(self.connections).fail()

    def _arrive(self, connection: Connection, port: Port, tag: int, data: Any, sent: Operation) -> None:
        if not connection.alive:
            sent.end(PeerGoneError("closed"))
            return
        if is_data_tag(tag):
            posted = port.posted.pop(tag, None)
            if posted is None:
                sent.end()  # a stray: the fabric fetches and drops it
                return
            owner, operation = posted
            self.landing.append((owner, operation.buffer, data, operation, sent))
            return
        sent.end()
        raw = bytearray(data)
        chance = self.rng.random
        if not self.healed:
            if chance() < self.faults.drop:
                return
            if chance() < self.faults.cut:
                del raw[self.rng.randrange(len(raw)) :]
            if chance() < self.faults.double:
                port.inbox.append(bytes(raw))
        port.inbox.append(bytes(raw))

    def _land(self, index: int) -> None:
        owner, into, data, received, sent = self.landing[index]
        if owner is None and not self.healed:
            return  # stuck: its connection is closed and it neither lands nor completes until the end of the faults
        self.landing.pop(index)
        into[: len(data)] = data  # a receive may be longer than what comes
        if not self.healed and self.rng.random() < self.faults.flip:
            into[self.rng.randrange(len(data))] ^= 0x10
        self.landed.append(into)
        received.end()
        sent.end()

    def close(self, connection: Connection) -> None:
        for item in [item for item in self.flying if item[0] is connection]:
            self.flying.remove(item)
            item[4].end(PeerGoneError("closed"))
        for tag, (owner, operation) in list(connection.port.posted.items()):
            if owner is connection:
                del connection.port.posted[tag]
                operation.end(PeerGoneError("closed"))
        for index, (owner, into, data, received, sent) in reversed(list(enumerate(self.landing))):
            if owner is connection:
                if not self.healed and self.rng.random() < self.faults.stuck:
                    self.landing[index] = (None, into, data, received, sent)
                else:
                    del self.landing[index]
                    received.end(PeerGoneError("closed"))
                    sent.end(PeerGoneError("closed"))


class Port:
    def __init__(self, net: Net, name: str) -> None:
        self.net = net
        self.address = name.encode()
        self.inbox: list[bytes] = []
        self.posted: dict[int, tuple[Connection, Operation]] = {}
        net.ports[self.address] = self

    def connect(self, address: bytes, peer: str) -> Connection:
        connection = Connection(self, self.net.ports[address])
        self.net.connections.append(connection)
        return connection

    def messages(self) -> list[bytes]:
        arrived, self.inbox = self.inbox, []
        return arrived

    def release(self, connection: Connection) -> None:
        assert not connection.alive
        assert not any(item[0] is connection for item in self.net.landing), "released while a receive is open"

    def progress_all(self) -> None:
        pass


class Connection:
    def __init__(self, port: Port, other: Port) -> None:
        self.port, self.other = port, other
        self.alive = True
        self.closed = True

    def send(self, data: Any, tag: int) -> Operation:
        operation = Operation(data)
        if self.alive:
            self.port.net.flying.append((self, self.other, tag, data, operation))
        else:
            operation.end(PeerGoneError("dead"))
        return operation

    def receive(self, into: Any, tag: int) -> Operation:
        operation = Operation(into)
        self.port.posted[tag] = (self, operation)
        return operation

    def failure(self) -> None:
        return None

    def drop(self) -> None:
        assert not self.alive

    def fail(self) -> None:
        self.alive = False

    def close(self) -> None:
        self.alive = False
        self.port.net.close(self)


class InlineHelpers:
    def __init__(self) -> None:
        self.jobs: deque[Any] = deque()

    def submit(self, job: Any, then: Any) -> None:
        self.jobs.append((job, then))

    def run_one(self, now_ns: int) -> None:
        if self.jobs:
            job, then = self.jobs.popleft()
            then(job(), now_ns)


class Memory:
    """Both processes' memory, where the reader may fetch from the holder; ``host`` 0 where it may not."""

    def __init__(self, world: World, host: int) -> None:
        self.world = world
        self.host = host

    def window(self, reader_host: int, offsets: Any) -> Window | None:
        return Window(1, 2, 3, tuple(offsets)) if self.host and self.host == reader_host else None

    def reaches(self, window: Window) -> bool:
        return True

    def fetch(self, window: Window, fragments: Any, wanted: Any) -> Fetched:
        """Dies and errs as the network's faults say."""
        world, verdicts, error = self.world, [], None
        for fragment in fragments:
            if not wanted():
                break
            if not world.net.healed and world.rng.random() < world.faults.die:
                error = PeerGoneError("the process is gone")
                break
            size = fragment.size_bytes
            fragment.check.data[:] = world.source.data[fragment.address : fragment.address + size]
            pinned = any(fragment.address in blocks for blocks in world.store.leases.values())
            if not pinned or (not world.net.healed and world.rng.random() < world.faults.flip):
                fragment.check.data[world.rng.randrange(size)] ^= 0x10  # what is not pinned may be another block
            world.net.landed.append(fragment.check.data)
            world.check_landing()
            verdicts.append(fragment.check.run())
        verdicts += [()] * (len(fragments) - len(verdicts))
        return Fetched(tuple(verdicts), error)

    def close(self) -> None:
        pass


class Store:
    """Leases last ``lease_ns`` from their last renewal; those that ran out are forgotten and counted."""

    def __init__(self, lease_ns: int) -> None:
        self.now_ns = 0
        self.lease_ns = lease_ns
        self.longest_ns = LONGEST_NS  # of a read
        self.ran_out = 0
        self.leases: dict[int, tuple[int, ...]] = {}
        self.ends_ns: dict[int, int] = {}
        self.last_end_ns: dict[int, int] = {}
        self.ids = itertools.count(1)
        self.held: dict[BlockHash, HeldBlock] = {}

    def pin(self, reader: WorkerKey, hashes: Any) -> tuple[int, tuple[HeldBlock | None, ...]]:
        lease = next(self.ids)
        blocks = tuple(self.held.get(item) for item in hashes)
        self.leases[lease] = tuple(block.offset for block in blocks if block is not None)
        self.ends_ns[lease] = self.now_ns + self.lease_ns
        self.last_end_ns[lease] = self.now_ns + self.longest_ns + OPTIONS.lease_slack_ns
        return lease, blocks

    def renew(self, lease_id: int) -> None:
        assert self.now_ns <= self.last_end_ns[lease_id], "a lease was renewed after its read's deadline"
        if lease_id in self.leases:
            self.ends_ns[lease_id] = self.now_ns + self.lease_ns

    def unpin(self, lease_id: int) -> None:
        del self.ends_ns[lease_id]  # twice would be a KeyError: the transport releases exactly once
        self.leases.pop(lease_id, None)

    def expire(self, now_ns: int) -> None:
        self.now_ns = now_ns
        for lease in [lease for lease in self.leases if self.ends_ns[lease] <= now_ns]:
            del self.leases[lease]
            self.ran_out += 1


def name_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


class World:
    def __init__(self, seed: int, *, one_host: bool = False, framed: bool = False, lease_ns: int = 10_000 * MS) -> None:
        options = replace(OPTIONS, compression=Compression.ALWAYS if framed else Compression.AUTO)
        self.rng = random.Random(seed)
        self.faults = Faults(self.rng)
        self.net = Net(self.rng, self.faults)
        self.now_ns = 0
        self.store = Store(lease_ns)
        source = np.random.default_rng(seed).integers(0, 3 if framed else 256, BLOCKS * BLOCK, dtype=np.uint8)
        self.expected = source.copy()
        self.source = source
        memory = Memory(self, host=7 if one_host else 0)
        for number in range(BLOCKS):
            if self.rng.random() < 0.9:
                data = source[number * BLOCK : (number + 1) * BLOCK]
                self.store.held[name_of(number)] = HeldBlock(number * BLOCK, xxhash.xxh3_64_intdigest(data))
        self.pages = np.zeros(4 * BLOCKS * BLOCK, dtype=np.uint8)
        self.helpers = InlineHelpers()
        self.reader_port, self.server_port = Port(self.net, "reader"), Port(self.net, "server")
        mine = LocalEnd(READER, self.pages.data, BLOCK)
        self.reader = ReaderHalf(self.reader_port, mine, options, self.helpers, memory)  # type: ignore[arg-type]
        theirs = LocalEnd(HOLDER, source.data, BLOCK)
        self.server = ServerHalf(  # type: ignore[arg-type]
            self.server_port, theirs, self.store, options, helpers=self.helpers, memory=memory
        )
        self.tasks: list[ReadTask] = []
        self.free_lanes = list(range(4))
        self.used_lanes: set[int] = set()
        self.lane_of: dict[int, int] = {}

    def start_read(self, stall_ns: int = 60 * MS, deadline_ns: int | None = None) -> None:
        if not self.free_lanes:
            return
        lane = self.free_lanes.pop()
        numbers = self.rng.sample(range(BLOCKS), self.rng.randint(1, BLOCKS))
        if self.rng.random() < 0.7:
            numbers.sort()
        wants = tuple(BlockWant(name_of(n), (lane * BLOCKS + n) * BLOCK) for n in numbers)
        key = HOLDER if self.rng.random() < 0.95 else WorkerKey(HOLDER.worker_id, WorkerEpoch(2))
        request = ReadRequest(
            Peer(key, b"server"),
            wants,
            deadline_ns or self.rng.choice([40 * MS, LONGEST_NS]),
            stall_ns,
            self.rng.randrange(5),
        )
        task = ReadTask(request, BLOCK, lambda: self.now_ns, lambda task: self.reader.cancel(task, self.now_ns))
        self.lane_of[id(task)] = lane
        self.tasks.append(task)
        self.reader.submit(task, self.now_ns)

    def step(self) -> None:
        self.now_ns += self.rng.choice([0, MS // 4, MS, 6 * MS])
        self.store.expire(self.now_ns)
        for _ in range(self.rng.randint(0, 3)):
            self.net.step()
            self.check_landing()
        self._pump(self.reader_port, self.reader)
        self._pump(self.server_port, self.server)
        self.reader.step(self.now_ns)
        self.server.step(self.now_ns)
        for link in (*self.reader._links.values(), *self.reader._fencing):
            window_bytes = OPTIONS.fetch_window_bytes if link.fetches else OPTIONS.link_window_bytes
            assert link.in_flight_bytes <= window_bytes, "the window is exceeded"
        if self.rng.random() < 0.5:
            self.helpers.run_one(self.now_ns)
        for lane in self.used_lanes - set(self.lane_of.values()):
            page = self.pages[lane * BLOCKS * BLOCK : (lane + 1) * BLOCKS * BLOCK]
            assert (page == 0xA5).all(), "something was written into pages that were handed back"
        self._retire()

    def _pump(self, port: Port, half: Any) -> None:
        for raw in port.messages():
            try:
                message = decode(raw)
            except IntegrityError as error:
                half.on_malformed(error, self.now_ns)
            else:
                half.on_message(message, self.now_ns)

    def check_landing(self) -> None:
        for view in self.net.landed:
            address = np.frombuffer(view, dtype=np.uint8).ctypes.data
            offset = address - self.pages.ctypes.data
            if not 0 <= offset < len(self.pages):
                free = [np.frombuffer(kept, dtype=np.uint8) for kept in self.reader.frames._pool._kept]
                assert not any(kept.ctypes.data <= address < kept.ctypes.data + len(kept) for kept in free), (
                    "a byte landed in staging that was handed back"
                )
                continue
            lane = offset // (BLOCKS * BLOCK)
            owners = [task for task in self.tasks if self.lane_of[id(task)] == lane]
            assert owners, "a byte landed in pages that no read names"
            assert not owners[0].done(), "a byte landed after its read was terminal"
        self.net.landed.clear()

    def _retire(self) -> None:
        """Check terminal reads, then hand their pages back and poison them."""
        for task in [task for task in self.tasks if task.done()]:
            lane = self.lane_of.pop(id(task))
            for want, status in zip(task.request.blocks, task.progress().statuses, strict=True):
                if status is BlockStatus.ARRIVED:
                    number = int.from_bytes(want.block_hash, "little")
                    page = self.pages[want.dest_offset : want.dest_offset + BLOCK]
                    assert np.array_equal(page, self.expected[number * BLOCK : (number + 1) * BLOCK]), "a wrong byte"
                if status is BlockStatus.MISSING:
                    assert want.block_hash not in self.store.held
            if not self.faults.stuck:
                limit_ns = task.request.deadline_ns + 4 * OPTIONS.drain_ns + 100 * MS
                assert task.progress().elapsed_ns <= limit_ns, "a read outlived its deadline and its drain"
            if task.state is ReadState.DONE:
                assert BlockStatus.FAILED not in task.progress().statuses
            self.tasks.remove(task)
            self.pages[lane * BLOCKS * BLOCK : (lane + 1) * BLOCKS * BLOCK] = 0xA5
            self.free_lanes.append(lane)
            self.used_lanes.add(lane)


def slow_world(*, one_host: bool, deadline_ns: int = LONGEST_NS * 60) -> World:
    """No faults; one read of everything there is."""
    world = World(1, one_host=one_host, lease_ns=LEASE_NS)
    world.net.healed = True
    world.store.longest_ns = deadline_ns
    while not world.tasks or world.tasks[0].request.peer.key != HOLDER:
        world.tasks.clear()
        world.start_read(stall_ns=6000 * MS, deadline_ns=deadline_ns)
    return world


def crawl(world: World, *, reader: bool = True, helpers: bool = False) -> None:
    """One step of a slow network or of slow helpers."""
    world.now_ns += STEP_NS
    world.store.expire(world.now_ns)
    world.net.step()
    if reader:
        world._pump(world.reader_port, world.reader)
        world.reader.step(world.now_ns)
    world._pump(world.server_port, world.server)
    world.server.step(world.now_ns)
    if helpers and not world.now_ns % (16 * STEP_NS):
        world.helpers.run_one(world.now_ns)
    world._retire()
