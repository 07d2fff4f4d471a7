"""A decorator that makes any transport's links slow, late, lossy, silent or corrupt; for tests, demos and fault runs.

A read is cut into pieces. Each piece is handed to the inner transport when the shaped link would have delivered it, so
bytes land in the pace of the shape, verified by the inner transport. Shapes belong to the worker at the other end:

* towards a holder: ``rate``, ``delay``, ``loss`` (a lost piece is never asked for, so the read ends at its stall
  bound), ``truncation`` (only the front of a piece comes), ``duplication`` (a piece comes twice), ``reordering``
  (pieces come in any order) and ``stalled`` (nothing moves until the shape changes);
* towards a reader: ``corruption`` (blocks are offered with a wrong checksum, so the reader's own check refuses them).

One thread owns all state but the shapes. A read is terminal only when every inner read it started is.
"""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from kvpool.errors import KVPoolError, PeerGoneError, StallError, TransferCancelledError
from kvpool.transport.base import (
    BlockSource,
    BlockStatus,
    HeldBlock,
    ReadHandle,
    ReadProgress,
    ReadRequest,
    Transport,
    TransportStats,
)
from kvpool.transport.handle import ReadTask, SegmentShape
from kvpool.types import BlockHash, WorkerId, WorkerKey

PIECE_BYTES = 1 << 20
REORDERED_BLOCKS = 2
PIECE_NS = 20_000_000  # a piece of a slow link is no longer than this, so that bytes trickle as they would
TICK_S = 0.005
CLOSE_LIMIT_S = 5.0
NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class LinkShape:
    """How a link behaves.

    Attributes:
        rate_bytes_per_s: infinity for as fast as the inner transport.
        delay_ns: added to every piece.
        loss: chance in [0, 1] that a piece never comes.
        truncation: chance in [0, 1] that a piece of several blocks is cut short.
        duplication: chance in [0, 1] that a piece comes twice.
        reordering: pieces are small and come in any order.
        corruption: chance in [0, 1] that a block is offered with a wrong checksum.
        stalled: nothing moves.
    """

    rate_bytes_per_s: float = math.inf
    delay_ns: int = 0
    loss: float = 0.0
    truncation: float = 0.0
    duplication: float = 0.0
    reordering: bool = False
    corruption: float = 0.0
    stalled: bool = False


CLEAR = LinkShape()


@dataclass(slots=True, eq=False)
class _Piece:
    read: _ShapedRead
    first: int  # index of its first block in the read
    blocks: int
    due_ns: int | None = None  # None until it has a place on the link


@dataclass(slots=True, eq=False)
class _ShapedRead:
    task: ReadTask
    waiting: deque[_Piece] = field(default_factory=deque)
    open: dict[int, tuple[_Piece, ReadHandle]] = field(default_factory=dict)
    lost: int = 0
    settled: set[int] = field(default_factory=set)
    last_progress_ns: int = 0


class ShapingTransport:
    """Shapes ``inner``; implements `kvpool.transport.base.Transport`.

    Args:
        inner: not started yet.
        seed: of loss and corruption.
        clock_ns: monotonic clock.
    """

    def __init__(self, inner: Transport, *, seed: int = 0, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._inner = inner
        self._clock_ns = clock_ns
        self._rng = random.Random(seed)
        self._shapes: dict[WorkerId, LinkShape] = {}
        self._free_at_ns: dict[WorkerId, int] = {}
        self._reads: list[_ShapedRead] = []
        self._commands: deque[Callable[[int], None]] = deque()
        self._wake = threading.Condition()
        self._piece_ids = itertools.count()
        self._block_bytes = 1
        self._shape_of_segment = SegmentShape(0, 1)
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        """The inner transport's name: members need not know about shaping."""
        return self._inner.name

    @property
    def address(self) -> bytes:
        """The inner transport's address."""
        return self._inner.address

    def shape(self, worker_id: WorkerId, shape: LinkShape) -> None:
        """Give the link to and from a worker a shape: whatever is asked for after this call has it."""
        self._shapes[worker_id] = shape  # at once: the other end does not wait for our thread
        self._post(lambda _: None)

    def start(self, key: WorkerKey, segment: memoryview, block_bytes: int, source: BlockSource) -> None:
        """Start the inner transport and the pacing thread."""
        self._inner.start(key, segment, block_bytes, _CorruptingSource(self, source))
        self._block_bytes = block_bytes
        self._shape_of_segment = SegmentShape(segment.nbytes, block_bytes)
        self._thread = threading.Thread(target=self._run, name=f"kvpool-shaping-{key}", daemon=True)
        self._thread.start()

    def read(self, request: ReadRequest) -> ReadTask:
        """Start a shaped read.

        Raises:
            RequestError: a destination lies outside the segment or ranges overlap.
            TransferCancelledError: the transport is not running.
        """
        if self._thread is None or self._closing:
            raise TransferCancelledError("the transport is not running; start it first or make a new one")
        self._shape_of_segment.check(request)
        task = ReadTask(request, self._block_bytes, self._clock_ns, self._cancel)
        self._post(lambda now_ns: self._submit(task, now_ns))
        return task

    def forget(self, peer: WorkerKey) -> None:
        """Forget in the inner transport, and end shaped reads from this incarnation."""
        self._inner.forget(peer)

        def end(_: int) -> None:
            for read in self._reads:
                if read.task.request.peer.key == peer:
                    self._give_up(read, PeerGoneError(f"worker {peer} was forgotten", peer=str(peer)))

        self._post(end)

    def stats(self) -> TransportStats:
        """The inner transport's counters; its reads are pieces of ours."""
        return self._inner.stats()

    def close(self) -> None:
        """End every read, then close the inner transport. May be repeated."""
        self._closing = True

        def end(_: int) -> None:
            for read in self._reads:
                self._give_up(read, TransferCancelledError("the transport was closed"))

        self._post(end)
        if self._thread is not None:
            self._thread.join(CLOSE_LIMIT_S)
        self._inner.close()

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────

    def _post(self, command: Callable[[int], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify_all()

    def _cancel(self, task: ReadTask) -> None:
        def end(_: int) -> None:
            for read in self._reads:
                if read.task is task:
                    self._give_up(read, TransferCancelledError("the reader gave the read up"))

        self._post(end)

    def _run(self) -> None:
        while True:
            with self._wake:
                if not self._commands:
                    self._wake.wait(self._pause_s())
                commands, self._commands = self._commands, deque()
            now_ns = self._clock_ns()
            for command in commands:
                command(now_ns)
            busy: set[WorkerId] = set()  # a link carries one read at a time, the most urgent first, as UCX grants them
            for read in self._reads:
                worker_id = read.task.request.peer.key.worker_id
                self._advance(read, now_ns, may_move=worker_id not in busy)
                if read.waiting:
                    busy.add(worker_id)
            self._settle()
            if self._closing and not self._reads and not self._commands:
                return

    def _pause_s(self) -> float | None:
        """How long nothing is due: until the next piece, at most a tick while a read is open, for ever when idle."""
        if not self._reads:
            return None
        now_ns = self._clock_ns()
        due = [read.waiting[0].due_ns for read in self._reads if read.waiting and read.waiting[0].due_ns is not None]
        soonest_s = min((at_ns - now_ns for at_ns in due), default=NS_PER_S) / NS_PER_S
        return max(0.0, min(TICK_S, soonest_s))

    def _submit(self, task: ReadTask, now_ns: int) -> None:
        read = _ShapedRead(task, last_progress_ns=now_ns)
        self._reads.append(read)
        self._reads.sort(key=lambda item: item.task.request.urgency_ns)
        shape = self._shapes.get(task.request.peer.key.worker_id, CLEAR)
        size_bytes = min(PIECE_BYTES, shape.rate_bytes_per_s * PIECE_NS / NS_PER_S)
        step = max(1, int(size_bytes) // self._block_bytes)
        if shape.reordering:
            step = min(step, REORDERED_BLOCKS)
        total = len(task.request.blocks)
        pieces = [_Piece(read, first, min(step, total - first)) for first in range(0, total, step)]
        if shape.reordering:
            self._rng.shuffle(pieces)
        read.waiting.extend(pieces)

    def _advance(self, read: _ShapedRead, now_ns: int, *, may_move: bool) -> None:
        """Give pieces a place on the link if it is free, hand out those that are due, and look at the timers."""
        request = read.task.request
        worker_id = request.peer.key.worker_id
        shape = self._shapes.get(worker_id, CLEAR)
        while may_move and read.waiting and not shape.stalled and read.task.error is None:
            piece = read.waiting[0]
            if piece.due_ns is None:
                took_ns = int(piece.blocks * self._block_bytes / shape.rate_bytes_per_s * NS_PER_S)
                free_at_ns = max(now_ns, self._free_at_ns.get(worker_id, 0)) + took_ns
                self._free_at_ns[worker_id] = free_at_ns
                piece.due_ns = free_at_ns + shape.delay_ns
            if piece.due_ns > now_ns:
                break
            read.waiting.popleft()
            if self._rng.random() < shape.loss:
                read.lost += 1
                continue
            if piece.blocks > 1 and self._rng.random() < shape.truncation:
                piece.blocks = self._rng.randrange(1, piece.blocks)
                read.lost += 1
            for _ in range(2 if self._rng.random() < shape.duplication else 1):
                self._hand_out(read, piece, now_ns)
        peer = str(request.peer.key)
        if now_ns > read.task.deadline_at_ns:
            self._give_up(read, StallError("the read passed its deadline", peer=peer, slow=not read.lost))
        elif (read.lost or shape.stalled) and now_ns - read.last_progress_ns > request.stall_ns:
            self._give_up(read, StallError(f"{peer} sent nothing for {request.stall_ns} ns", peer=peer))

    def _hand_out(self, read: _ShapedRead, piece: _Piece, now_ns: int) -> None:
        request = read.task.request
        left_ns = max(1, read.task.deadline_at_ns - now_ns)
        blocks = request.blocks[piece.first : piece.first + piece.blocks]
        read.task.begin()
        try:
            handle = self._inner.read(replace(request, blocks=blocks, deadline_ns=left_ns))
        except KVPoolError as error:
            self._give_up(read, error)
            return
        piece_id = next(self._piece_ids)
        read.open[piece_id] = (piece, handle)

        def note(progress: ReadProgress) -> None:
            if progress.state.terminal:
                self._post(lambda then_ns: self._end_piece(read, piece_id, progress, then_ns))

        handle.on_progress(note)

    def _end_piece(self, read: _ShapedRead, piece_id: int, progress: ReadProgress, now_ns: int) -> None:
        piece, _ = read.open.pop(piece_id)
        for status in (BlockStatus.ARRIVED, BlockStatus.MISSING, BlockStatus.CORRUPT):
            indices = [piece.first + at for at, got in enumerate(progress.statuses) if got is status]
            indices = [index for index in indices if index not in read.settled]  # a second copy settles nothing
            read.settled.update(indices)
            if indices:
                read.task.mark(indices, status)
        read.last_progress_ns = now_ns
        if BlockStatus.FAILED in progress.statuses and progress.error is not None:
            self._give_up(read, progress.error)
        if read.open or read.waiting:
            read.task.publish()

    def _give_up(self, read: _ShapedRead, error: KVPoolError) -> None:
        read.task.give_up(error)
        read.waiting.clear()
        for _, handle in read.open.values():
            handle.cancel()

    def _settle(self) -> None:
        """Finish reads that wait for nothing more."""
        over = [read for read in self._reads if not read.open and not read.waiting]
        over = [read for read in over if read.task.error is not None or not read.lost]
        self._reads = [read for read in self._reads if read not in over]
        for read in over:
            read.task.finish()

    def wrong_checksums(self, reader: WorkerKey) -> Iterator[bool]:
        """For each block offered to a reader, whether its checksum is to be wrong. Called on the inner's thread."""
        chance = self._shapes.get(reader.worker_id, CLEAR).corruption
        while True:
            yield chance > 0 and self._rng.random() < chance


class _CorruptingSource:
    """The holder's store, with some checksums wrong."""

    def __init__(self, owner: ShapingTransport, inner: BlockSource) -> None:
        self._owner = owner
        self._inner = inner

    def pin(self, reader: WorkerKey, hashes: Sequence[BlockHash]) -> tuple[int, tuple[HeldBlock | None, ...]]:
        """Pin in the store; change checksums by chance."""
        lease_id, held = self._inner.pin(reader, hashes)
        wrong = self._owner.wrong_checksums(reader)
        return lease_id, tuple(
            replace(block, checksum=block.checksum ^ 1) if block is not None and next(wrong) else block
            for block in held
        )

    def renew(self, lease_id: int) -> None:
        """Renew in the store."""
        self._inner.renew(lease_id)

    def unpin(self, lease_id: int) -> None:
        """Release in the store."""
        self._inner.unpin(lease_id)
