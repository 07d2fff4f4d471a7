"""The fault matrix of the data plane: every fault at random points of a batch, between real processes.

Each case must end with a typed error (or, where the fault spares the read, with every block right) inside its bound,
with no wrong byte accepted and none landing after hand-back: pages are poisoned when a read is terminal and looked at
once the faulty side had its chance to go on. Another peer is read all along and must never fail, and the same peer,
recovered, must serve within two seconds. A row is the slowest time to the end of the read against its bound, and says
how many of the reads ended early; a broken promise shows as infinity and names itself.

The third fabric is a veth pair into a network namespace; it needs root and iproute2 and is skipped without.
"""

from __future__ import annotations

import contextlib
import math
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvpool.bench import namespace
from kvpool.bench.peer import POISON, GeneratedStore, PeerOptions, PeerProcess, fill_block, read_request
from kvpool.bench.report import Row, skipped, spread
from kvpool.errors import KVPoolError
from kvpool.transport.base import BlockStatus, Peer, ReadHandle, ReadProgress, ReadState
from kvpool.transport.ucx import UcxTransport
from kvpool.transport.ucx.settings import Compression
from kvpool.types import WorkerEpoch, WorkerKey

BLOCK_BYTES = 256 << 10
BLOCKS = 512  # 128 MiB: many milliseconds, so a fault lands inside it
BESIDE_BLOCKS = 8  # read from the bystander again and again, into pages of their own
BESIDE_PAUSE_S = 0.01
MS, S = 1_000_000, 1_000_000_000
STALL_NS = 300 * MS
DEADLINE_NS = 1500 * MS
LIMIT_NS = 20 * S
KILL_BOUND_S = 1.0
SILENCE_BOUND_S = 1.0
RECOVERY_BOUND_S = 2.0
LOOPBACK = {"NET_DEVICES": "lo"}  # other interfaces may come and go meanwhile
SLOW_BOUND_S = DEADLINE_NS / S + 1.0  # deadline, and the drain of one window


def run(*, quick: bool, peers: bool) -> list[Row]:
    """Run the matrix: 20 times each, about 8 minutes; with ``quick`` 3 times, about 80 s."""
    del peers
    runs = 3 if quick else 20
    rows: list[Row] = []
    # UCX reads the routes once per process: the new one first.
    for fabric in (_namespace, _shared_memory, _tcp, _frames):
        if fabric is _namespace and not namespace.available():
            rows.append(skipped("faults across two network namespaces", "bound", namespace.WHY_NOT))
            continue
        with fabric() as world:
            rows += [_measure(world, fault, runs) for fault in FAULTS if fault.needs_link <= world.has_link]
    return rows


@dataclass(slots=True)
class World:
    """A reader here, a bystander holder, and how to start the holder that the faults hit."""

    name: str
    store: GeneratedStore
    mine: PeerOptions
    theirs: PeerOptions
    prefix: tuple[str, ...]
    has_link: bool
    bystander: PeerProcess
    epochs: int = 0
    ended_early: int = 0
    slowest_beside_ns: int = 0
    complaints: list[str] = field(default_factory=list)
    transport: UcxTransport = field(init=False)
    _lasting: PeerProcess | None = None

    def __post_init__(self) -> None:
        self.transport = self.mine.transport()
        self.transport.start(self.mine.key, self.store.arena.memory, BLOCK_BYTES, self.store)

    def holder(self) -> PeerProcess:
        """A fresh holder of the next epoch."""
        self.epochs += 1
        return PeerProcess(replace(self.theirs, epoch=self.epochs), self.prefix)

    def lasting(self) -> PeerProcess:
        """A holder that goes from case to case; for faults after which it is as before, or dead."""
        if self._lasting is None or not self._lasting.alive:
            self._lasting = self.holder()
        return self._lasting

    def close(self) -> None:
        """End the holder and the reader."""
        if self._lasting is not None:
            self._lasting.kill()
        self.transport.close()

    def read(self, peer: Peer, blocks: int = BLOCKS, *, patient: bool = False) -> ReadHandle:
        """Start a read; a patient one is for recovery, bystanders, and faults that must not end a read."""
        stall_ns, deadline_ns = (LIMIT_NS, LIMIT_NS) if patient else (STALL_NS, DEADLINE_NS)
        return self.transport.read(read_request(peer, range(blocks), BLOCK_BYTES, deadline_ns, stall_ns))

    @property
    def pages(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Those of the reads that faults hit."""
        return self.store.segment[: BLOCKS * BLOCK_BYTES]

    def poison(self) -> None:
        """Hand all pages back."""
        self.pages[:] = POISON

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Read the bystander all along."""
        over = threading.Event()

        def work() -> None:
            numbers, slots = range(BESIDE_BLOCKS), range(BLOCKS, BLOCKS + BESIDE_BLOCKS)
            expected = np.empty(BLOCK_BYTES, dtype=np.uint8)
            while not over.wait(BESIDE_PAUSE_S):
                wanted = read_request(self.bystander.peer, numbers, BLOCK_BYTES, LIMIT_NS, LIMIT_NS, slots)
                progress = self.transport.read(wanted).wait(LIMIT_NS)
                right = progress.state is ReadState.DONE
                for number, slot in zip(numbers, slots, strict=True):
                    fill_block(expected, number)
                    right = right and np.array_equal(self.store.page(slot), expected)
                self.expect(right, "another peer's transfer was disturbed")
                self.slowest_beside_ns = max(self.slowest_beside_ns, progress.elapsed_ns)

        thread = threading.Thread(target=work, name="beside")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def expect(self, holds: bool, what: str) -> None:
        """Note a broken promise."""
        if not holds:
            self.complaints.append(what)

    def check_bytes(self, progress: ReadProgress) -> None:
        """Blocks that count as arrived are right."""
        expected = np.empty(BLOCK_BYTES, dtype=np.uint8)
        for number, status in enumerate(progress.statuses):
            if status is BlockStatus.ARRIVED:
                fill_block(expected, number)
                self.expect(np.array_equal(self.store.page(number), expected), f"block {number} is wrong")

    def check_recovery(self, peer: Peer) -> None:
        """The same peer serves again soon."""
        start = time.monotonic()
        state = self.read(peer, 16, patient=True).wait(LIMIT_NS).state
        took_s = time.monotonic() - start
        self.expect(
            state is ReadState.DONE and took_s <= RECOVERY_BOUND_S, f"recovery: {state.value} in {took_s:.1f} s"
        )


Case = Callable[[World, random.Random], float]
"""Carries one case out and returns the seconds from the fault to the end of the read."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One line of the matrix."""

    name: str
    bound_s: float
    case: Case
    needs_link: bool = False


def _measure(world: World, fault: Fault, runs: int) -> Row:
    world.complaints.clear()
    world.ended_early = world.slowest_beside_ns = 0
    seconds = []
    for number in range(runs):
        # Whatever is on a link that is cut is cut too.
        with contextlib.nullcontext() if fault.needs_link else world.beside():
            seconds.append(fault.case(world, random.Random(f"{world.name}/{fault.name}/{number}")))
    worst_s = max(seconds) if not world.complaints else math.inf
    beside = f"others within {world.slowest_beside_ns / S:.2f} s, " if world.slowest_beside_ns else ""
    fine = f"median {statistics.median(seconds):.2f} s, {world.ended_early} cut short, {beside}0 wrong, 0 late"
    what = "; ".join(sorted(set(world.complaints))[:3]) or fine
    name = f"{world.name}, {fault.name} ({what})"
    width = spread(seconds) if statistics.median(seconds) else 0.0
    return Row(name, worst_s, fault.bound_s, "s, worst", "bound", 1.0, higher_is_better=False, runs=runs, spread=width)


def _into_the_batch(handle: ReadHandle, rng: random.Random) -> None:
    """Wait until a random part of the batch has arrived."""
    goal_bytes = rng.random() * 0.7 * BLOCKS * BLOCK_BYTES
    while handle.progress().bytes_arrived < goal_bytes and not handle.done():
        pass


def _ended(world: World, handle: ReadHandle, since_s: float) -> tuple[ReadProgress, float]:
    """Wait for the end of a read that was hit, check it, and hand its pages back poisoned."""
    progress = handle.wait(LIMIT_NS)
    took_s = time.monotonic() - since_s
    world.expect(progress.state.terminal, "the read did not end")
    world.expect(progress.state is ReadState.DONE or isinstance(progress.error, KVPoolError), "no typed error")
    world.ended_early += progress.state is not ReadState.DONE
    world.check_bytes(progress)
    world.poison()
    return progress, took_s


def _check_late_bytes(world: World) -> None:
    world.expect(bool((world.pages == POISON).all()), "a byte landed after hand-back")


# ── the faults ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _holder_killed(world: World, rng: random.Random) -> float:
    holder = world.lasting()
    world.read(holder.peer, 4, patient=True).wait(LIMIT_NS)
    handle = world.read(holder.peer)
    _into_the_batch(handle, rng)
    since_s = time.monotonic()
    holder.signal(signal.SIGKILL)
    _, took_s = _ended(world, handle, since_s)
    holder.kill()  # and reap
    _check_late_bytes(world)
    world.check_recovery(world.lasting().peer)
    return took_s


def _reader_killed(world: World, rng: random.Random) -> float:
    holder = world.lasting()
    world.epochs += 1
    with PeerProcess(replace(world.mine, worker_id="victim", epoch=world.epochs)) as victim:
        key, numbers = holder.options.key, list(range(BLOCKS))
        victim.ask(
            "read",
            holder=key.worker_id,
            epoch=key.worker_epoch,
            address=holder.address.hex(),
            numbers=numbers,
            wait=False,
        )
        time.sleep(rng.random() * 0.02)
    since_s = time.monotonic()
    progress = world.read(holder.peer, patient=True).wait(LIMIT_NS)
    took_s = time.monotonic() - since_s
    world.expect(progress.state is ReadState.DONE, "the holder does not serve another reader")
    world.check_bytes(progress)
    world.poison()
    return took_s


def _holder_stopped(world: World, rng: random.Random) -> float:
    holder = world.lasting()
    world.read(holder.peer, 4, patient=True).wait(LIMIT_NS)
    handle = world.read(holder.peer)
    _into_the_batch(handle, rng)
    since_s = time.monotonic()
    holder.signal(signal.SIGSTOP)
    _, took_s = _ended(world, handle, since_s)
    holder.signal(signal.SIGCONT)
    holder.ask("stats")
    _check_late_bytes(world)
    world.check_recovery(holder.peer)
    return took_s


def _link_down(world: World, rng: random.Random) -> float:
    holder = world.lasting()
    world.read(holder.peer, 4, patient=True).wait(LIMIT_NS)
    handle = world.read(holder.peer)
    _into_the_batch(handle, rng)
    since_s = time.monotonic()
    namespace.run("ip", "link", "set", namespace.OUR_LINK, "down")
    _, took_s = _ended(world, handle, since_s)
    namespace.run("ip", "link", "set", namespace.OUR_LINK, "up")
    time.sleep(0.1)  # what was buffered may come now
    _check_late_bytes(world)
    world.check_recovery(holder.peer)
    return took_s


def _link_slow(world: World, rng: random.Random) -> float:
    """Cut to about a fiftieth of what it does unshaped."""
    holder = world.lasting()
    world.read(holder.peer, 4, patient=True).wait(LIMIT_NS)
    handle = world.read(holder.peer)
    _into_the_batch(handle, rng)
    since_s = time.monotonic()
    with namespace.slowed(200):
        _, took_s = _ended(world, handle, since_s)
    holder.ask("stats")
    _check_late_bytes(world)
    world.check_recovery(holder.peer)
    return took_s


def _holder_evicts(world: World, rng: random.Random) -> float:
    with world.holder() as holder:
        handle = world.read(holder.peer, patient=True)
        _into_the_batch(handle, rng)
        since_s = time.monotonic()
        holder.ask("evict", numbers=list(range(BLOCKS // 2, BLOCKS)))
        progress, took_s = _ended(world, handle, since_s)
        world.expect(progress.state is ReadState.DONE, "an eviction failed a read")
        again = world.read(holder.peer, patient=True).wait(LIMIT_NS)
        world.expect(again.statuses.count(BlockStatus.MISSING) == BLOCKS // 2, "evicted blocks were not missing")
        world.check_bytes(again)
        world.poison()
    return took_s


def _holder_restarts(world: World, rng: random.Random) -> float:
    with world.holder() as holder:
        handle = world.read(holder.peer)
        _into_the_batch(handle, rng)
        since_s = time.monotonic()
        fresh = holder.ask("restart")
        _, took_s = _ended(world, handle, since_s)
        _check_late_bytes(world)
        address = bytes.fromhex(fresh["address"])
        new = Peer(WorkerKey(holder.options.key.worker_id, WorkerEpoch(fresh["epoch"])), address)
        world.check_recovery(new)
        stale = world.read(Peer(holder.options.key, address), 4).wait(LIMIT_NS)
        world.expect(stale.state is ReadState.FAILED, "an old epoch was served")
        world.epochs = max(world.epochs, int(fresh["epoch"]))
    return took_s


def _corrupted_payload(world: World, rng: random.Random) -> float:
    holder = world.lasting()
    number = rng.randrange(BLOCKS)
    holder.ask("corrupt", number=number)
    since_s = time.monotonic()
    progress, took_s = _ended(world, world.read(holder.peer, patient=True), since_s)
    holder.ask("corrupt", number=number)  # and right again
    world.expect(progress.statuses[number] is BlockStatus.CORRUPT, "a corrupt block was accepted")
    world.expect(progress.statuses.count(BlockStatus.ARRIVED) == BLOCKS - 1, "good blocks were lost")
    return took_s


def _mangled(how: str, survives: bool | None) -> Case:
    """A holder that answers wrongly. With ``survives`` None a read may end either way."""

    def case(world: World, rng: random.Random) -> float:
        holder = world.lasting()
        holder.ask("mangle", how=how)
        since_s = time.monotonic()
        progress, took_s = _ended(
            world, world.read(holder.peer, rng.randint(1, BLOCKS), patient=bool(survives)), since_s
        )
        if survives is not None:
            world.expect((progress.state is ReadState.DONE) == survives, f"a reply {how}: {progress.state.value}")
        holder.ask("mangle", how="none")
        world.check_recovery(holder.peer)
        return took_s

    return case


FAULTS = (
    Fault("holder SIGKILL", KILL_BOUND_S, _holder_killed),
    Fault("reader SIGKILL", RECOVERY_BOUND_S, _reader_killed),
    Fault("holder SIGSTOP", SILENCE_BOUND_S, _holder_stopped),
    Fault("link down without a reset", SILENCE_BOUND_S, _link_down, needs_link=True),
    Fault("link cut to 1/50 of its rate", SLOW_BOUND_S, _link_slow, needs_link=True),
    Fault("holder evicts during the read", SILENCE_BOUND_S, _holder_evicts),
    Fault("holder restarts", KILL_BOUND_S, _holder_restarts),
    Fault("corrupted payload", SILENCE_BOUND_S, _corrupted_payload),
    Fault("truncated reply", SILENCE_BOUND_S, _mangled("cut", survives=False)),
    Fault("truncated data", SILENCE_BOUND_S, _mangled("data cut", survives=None)),  # on one host there is none
    Fault("duplicated reply", SILENCE_BOUND_S, _mangled("twice", survives=True)),
)


# ── the fabrics ──────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _world(
    name: str,
    ours: Mapping[str, str],
    theirs: Mapping[str, str],
    prefix: tuple[str, ...] = (),
    compression: Compression = Compression.OFF,
) -> Iterator[World]:
    mine = PeerOptions(
        "reader",
        1,
        BLOCKS + BESIDE_BLOCKS,
        BLOCK_BYTES,
        filled=False,
        settings=ours,
        compression=compression.value,
    )
    holder = PeerOptions("holder", 1, BLOCKS, BLOCK_BYTES, settings=theirs)
    with PeerProcess(replace(holder, worker_id="bystander"), prefix) as bystander:
        world = World(name, GeneratedStore(mine), mine, holder, prefix, bool(prefix), bystander)
        try:
            yield world
        finally:
            world.close()


@contextlib.contextmanager
def _shared_memory() -> Iterator[World]:
    with _world("shared memory", LOOPBACK, LOOPBACK) as world:
        yield world


@contextlib.contextmanager
def _tcp() -> Iterator[World]:
    settings = {"TLS": "tcp,self", **LOOPBACK}
    with _world("tcp", settings, settings) as world:
        yield world


@contextlib.contextmanager
def _frames() -> Iterator[World]:
    settings = {"TLS": "tcp,self"}
    with _world("tcp, in frames", settings, settings, compression=Compression.ALWAYS) as world:
        yield world


@contextlib.contextmanager
def _namespace() -> Iterator[World]:
    with (
        namespace.second_host(),
        _world("two namespaces", namespace.OURS, namespace.THEIRS, namespace.INSIDE) as world,
    ):
        yield world
