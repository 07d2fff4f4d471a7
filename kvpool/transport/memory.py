"""The transport inside one process: tests, the simulation's safety runs and single-worker clusters.

Bytes move by copy on the reader's own thread, block by block, with the same pins, identity, checksums, deadlines,
cancellation and epoch checks as over a network. It never leaves a byte in flight, so its fence is immediate.

Ends find each other in a `MemoryHub`; the default hub is the process's.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import xxhash

from kvpool.errors import (
    CapacityError,
    KVPoolError,
    PeerGoneError,
    RequestError,
    StaleError,
    StallError,
    TransferCancelledError,
    TransferError,
)
from kvpool.transport.base import BlockSource, BlockStatus, HeldBlock, Peer, ReadRequest, TransportStats
from kvpool.transport.handle import ReadTask, SegmentShape, flat_bytes
from kvpool.types import WorkerKey

RUN_BLOCKS = 16  # blocks copied between two looks at cancellation and deadline
CLOSE_LIMIT_S = 5.0
MAX_WAITING_READS = 65_536


class MemoryHub:
    """Where the ends of one process find each other. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[bytes, MemoryTransport] = {}
        self._numbers = itertools.count()

    def attach(self, end: MemoryTransport) -> bytes:
        """Register an end; returns its address."""
        with self._lock:
            address = f"memory-{next(self._numbers)}".encode()
            self._ends[address] = end
            return address

    def detach(self, address: bytes) -> None:
        """Remove an end. Idempotent."""
        with self._lock:
            self._ends.pop(address, None)

    def find(self, address: bytes) -> MemoryTransport | None:
        """The end at an address, None when it is gone."""
        with self._lock:
            return self._ends.get(address)


DEFAULT_HUB = MemoryHub()


class MemoryTransport:
    """One end; implements `kvpool.transport.base.Transport`."""

    name = "memory"

    def __init__(self, hub: MemoryHub = DEFAULT_HUB, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._hub = hub
        self._clock_ns = clock_ns
        self._address = hub.attach(self)
        self._work = threading.Condition()
        self._waiting: list[ReadTask] = []
        self._running: ReadTask | None = None
        self._given_up: dict[int, KVPoolError] = {}
        self._closed = False
        self._key: WorkerKey | None = None
        self._segment = memoryview(b"")
        self._shape = SegmentShape(0, 1)
        self._source: BlockSource | None = None
        self._stats = TransportStats()
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> bytes:
        """Opaque address by which peers reach this end."""
        return self._address

    def start(self, key: WorkerKey, segment: memoryview, block_bytes: int, source: BlockSource) -> None:
        """Register the segment and begin to serve."""
        if self._thread is not None:
            raise RequestError("this transport was started before; make a new one", field="transport")
        self._segment = flat_bytes(segment)
        self._shape = SegmentShape(len(self._segment), block_bytes)
        self._key, self._source = key, source
        self._thread = threading.Thread(target=self._loop, name=f"kvpool-memory-{key}", daemon=True)
        self._thread.start()

    def read(self, request: ReadRequest) -> ReadTask:
        """Queue a read; it is carried out in order of urgency."""
        self._shape.check(request)
        task = ReadTask(request, self._shape.block_bytes, self._clock_ns, self._cancel)
        with self._work:
            if self._closed or self._thread is None:
                raise TransferCancelledError("the transport is not running; start it first or make a new one")
            if len(self._waiting) >= MAX_WAITING_READS:
                raise CapacityError(f"{MAX_WAITING_READS} reads wait already; redo the prefill")
            self._waiting.append(task)
            self._waiting.sort(key=lambda item: item.request.urgency_ns)
            self._work.notify_all()
        return task

    def forget(self, peer: WorkerKey) -> None:
        """End reads from this incarnation with `PeerGoneError`."""
        with self._work:
            for task in self._open_tasks():
                if task.request.peer.key == peer:
                    self._given_up.setdefault(id(task), PeerGoneError(f"worker {peer} was forgotten", peer=str(peer)))
            self._work.notify_all()

    def stats(self) -> TransportStats:
        """Current counters."""
        with self._work:
            in_flight = sum(len(task.request.blocks) for task in self._open_tasks()) * self._shape.block_bytes
            return replace(self._stats, in_flight_bytes=in_flight)

    def close(self) -> None:
        """Cancel every read, stop serving, end the thread. May be repeated."""
        self._hub.detach(self._address)
        with self._work:
            self._closed = True
            for task in self._open_tasks():
                self._given_up.setdefault(id(task), TransferCancelledError("the transport was closed"))
            self._work.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_LIMIT_S)

    def _open_tasks(self) -> list[ReadTask]:
        return [*self._waiting, *([self._running] if self._running is not None else [])]

    def _cancel(self, task: ReadTask) -> None:
        with self._work:
            if any(item is task for item in self._open_tasks()):
                self._given_up.setdefault(id(task), TransferCancelledError("the reader gave the read up"))
                self._work.notify_all()

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────

    def _loop(self) -> None:
        while True:
            with self._work:
                while not self._waiting:
                    if self._closed:
                        return
                    self._work.wait()
                task = self._running = self._waiting.pop(0)
            try:
                task.begin()
                self._copy_blocks(task)
            except KVPoolError as error:
                task.give_up(error)
            self._settle(task)

    def _settle(self, task: ReadTask) -> None:
        with self._work:
            self._running = None
            self._given_up.pop(id(task), None)
            self._stats = replace(
                self._stats,
                reads=self._stats.reads + 1,
                reads_failed=self._stats.reads_failed + (task.error is not None),
            )
        task.finish()

    def _copy_blocks(self, task: ReadTask) -> None:
        self._check(task)
        end = self._find(task.request.peer)
        assert end._source is not None
        assert self._key is not None
        lease_id, held = end._source.pin(self._key, [want.block_hash for want in task.request.blocks])
        try:
            missing = [index for index, block in enumerate(held) if block is None]
            task.mark(missing, BlockStatus.MISSING)
            present = [(index, block) for index, block in enumerate(held) if block is not None]
            for start in range(0, len(present), RUN_BLOCKS):
                self._check(task)
                if end._closed:
                    raise PeerGoneError(f"worker {task.request.peer.key} closed", peer=str(task.request.peer.key))
                end._source.renew(lease_id)
                self._copy_run(task, end, present[start : start + RUN_BLOCKS])
                task.publish()
        finally:
            end._source.unpin(lease_id)

    def _find(self, peer: Peer) -> MemoryTransport:
        end = self._hub.find(peer.address)
        if end is None or end._key is None or end._closed:
            raise PeerGoneError(f"worker {peer.key} is not in this process", peer=str(peer.key))
        if end._key != peer.key:
            raise StaleError(f"asked for {peer.key}, found {end._key}", peer=str(peer.key))
        if end._shape.block_bytes != self._shape.block_bytes:
            raise TransferError("block sizes of reader and holder differ", peer=str(peer.key))
        return end

    def _check(self, task: ReadTask) -> None:
        with self._work:
            error = self._given_up.get(id(task))
        if error is not None:
            raise error
        if self._clock_ns() >= task.deadline_at_ns:
            raise StallError("the read passed its deadline", peer=str(task.request.peer.key))

    def _copy_run(self, task: ReadTask, end: MemoryTransport, run: list[tuple[int, HeldBlock]]) -> None:
        size = self._shape.block_bytes
        corrupt = 0
        for index, block in run:
            at = task.request.blocks[index].dest_offset
            target = self._segment[at : at + size]
            target[:] = end._segment[block.offset : block.offset + size]
            intact = xxhash.xxh3_64_intdigest(target) == block.checksum
            corrupt += not intact
            task.mark([index], BlockStatus.ARRIVED if intact else BlockStatus.CORRUPT)
        arrived = len(run) - corrupt
        with self._work:
            self._stats = replace(
                self._stats,
                blocks_read=self._stats.blocks_read + arrived,
                bytes_read=self._stats.bytes_read + arrived * size,
                corrupt_blocks=self._stats.corrupt_blocks + corrupt,
            )
        with end._work:
            end._stats = replace(
                end._stats,
                blocks_served=end._stats.blocks_served + len(run),
                bytes_served=end._stats.bytes_served + len(run) * size,
            )
