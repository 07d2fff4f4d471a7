"""The reader's half of the NIXL transport: one thread, one control stream and one agent per holder incarnation.

A read is a pull over the control stream, READs of its runs in batches, a check of every block, and a stop. Between
batches, and while it waits, the thread looks at cancellation, deadline and stall bound of the read it carries out, and
at those that wait behind it; they go by urgency.

A read that is given up while a READ is open lets it drain for a moment; then, and after every failure of the link, the
agent is destroyed, which is the fence, and the read is terminal only after that. Where destroying fails, the read stays
CANCELLING and counts as quarantined.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpool.errors import (
    IntegrityError,
    KVPoolError,
    PeerGoneError,
    StallError,
    TransferCancelledError,
    TransferError,
)
from kvpool.transport.base import LEASE_RENEW_NS, BlockStatus, Peer
from kvpool.transport.handle import LocalEnd, ReadTask
from kvpool.transport.nixl.agent import Agent, Piece, Transfer
from kvpool.transport.nixl.control import HELLO, Endpoint, MessageBuffer, framed, refuse_tcp
from kvpool.transport.verify import Check
from kvpool.transport.wire import (
    MAX_PULL_BLOCKS,
    Grant,
    Message,
    Offer,
    Pull,
    Refuse,
    Run,
    Stop,
    decode,
    encode,
    error_of,
    identity_digest,
    runs_of_offer,
)

log = logging.getLogger(__name__)

BATCH_BYTES = 8 << 20  # between two looks at the clock; 1 ms at memory speed
BATCH_RUNS = 512
LOOK_S = 0.01
POLL_S = 50e-6  # between two looks at a READ that is not over at once
DRAIN_NS = 250_000_000
IDLE_S = 300.0
RECEIVE_BYTES = 1 << 16


@dataclass(slots=True)
class ReadCounters:
    """What all readers of one transport count. Changed under `lock` only."""

    lock: threading.Lock
    reads: int = 0
    reads_failed: int = 0
    blocks_read: int = 0
    bytes_read: int = 0
    corrupt_blocks: int = 0
    protocol_errors: int = 0
    in_flight_bytes: int = 0
    quarantined_reads: int = 0
    agents: int = 0

    def add(self, **changes: int) -> None:
        """Add to some of them."""
        with self.lock:
            for name, change in changes.items():
                setattr(self, name, getattr(self, name) + change)


@dataclass(frozen=True, slots=True)
class _Batch:
    runs: tuple[Run, ...]
    pieces: tuple[Piece, ...]


class PeerReader:
    """Reads from one holder incarnation, on a thread of its own that ends after `IDLE_S` without work.

    Args:
        peer: the holder.
        local: whose segment.
        host_id: of this process.
        counters: shared with other readers.
        clock_ns: monotonic clock.
        on_failure: told once, on the thread, when a bug of ours ended it.
    """

    def __init__(
        self,
        peer: Peer,
        local: LocalEnd,
        host_id: int,
        counters: ReadCounters,
        *,
        clock_ns: Callable[[], int],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.peer = peer
        self._on_failure = on_failure
        self._name = str(peer.key)
        self._local = local
        self._host_id = host_id
        self._counters = counters
        self._clock_ns = clock_ns
        self._work = threading.Condition()
        self._waiting: list[ReadTask] = []
        self._given_up: dict[int, KVPoolError] = {}
        self._over: KVPoolError | None = None
        self._ended = False
        self._sequences = itertools.count(1)
        self._stream: socket.socket | None = None
        self._incoming = MessageBuffer()
        self._messages: list[bytes] = []
        self._agent: Agent | None = None
        self._unfenced: list[Agent] = []
        self._progress_ns = 0
        self._renewed_ns = 0
        self._thread = threading.Thread(target=self._run, name=f"kvpool-nixl-from-{self._name}", daemon=True)
        self._thread.start()

    # ── any thread ───────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, task: ReadTask) -> bool:
        """Queue a read by urgency; False when this reader ended and another one must take it."""
        with self._work:
            if self._ended or self._over is not None:
                return False
            self._waiting.append(task)
            self._waiting.sort(key=lambda item: item.request.urgency_ns)
            self._work.notify_all()
            return True

    @property
    def ended(self) -> bool:
        """Whether it takes no more reads."""
        return self._ended

    @property
    def waiting(self) -> int:
        """Reads that were not begun."""
        return len(self._waiting)

    def cancel(self, task: ReadTask) -> None:
        """Give one read up."""
        with self._work:
            self._given_up.setdefault(id(task), TransferCancelledError("the reader gave the read up"))
            self._work.notify_all()

    def end(self, error: KVPoolError) -> None:
        """Give every read up, fence, and end the thread."""
        with self._work:
            self._over = self._over or error
            self._work.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; True when it ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        task: ReadTask | None = None
        try:
            while (task := self._next()) is not None:
                self._carry_out(task)
            self._disconnect()
        except BaseException as error:
            log.exception("a NIXL reader failed; its reads are given up")
            self._abandon(task, error)
        self._drop_waiting()

    def _abandon(self, task: ReadTask | None, error: BaseException) -> None:
        """After a bug: fence, give every read up, and tell."""
        self.end(TransferError(f"the transport failed: {error!r}", peer=self._name))
        with self._work:
            self._ended = True
        if self._disconnect() and task is not None and not task.done():
            self._finish(task, self._over)
        self._on_failure(error)

    def _next(self) -> ReadTask | None:
        idle_until_s = time.monotonic() + IDLE_S
        while True:
            self._drop_waiting()
            with self._work:
                if self._waiting:
                    return self._waiting.pop(0)
                if self._over is not None or time.monotonic() > idle_until_s:
                    self._ended = True
                    return None
                self._work.wait(IDLE_S)

    def _drop_waiting(self) -> None:
        """Finish reads that wait and are given up or out of time."""
        now_ns = self._clock_ns()
        dropped: list[tuple[ReadTask, KVPoolError]] = []
        with self._work:
            for task in list(self._waiting):
                error = self._reason(task, now_ns)
                if error is not None:
                    self._waiting.remove(task)
                    dropped.append((task, error))
        for task, error in dropped:
            self._finish(task, error)

    def _reason(self, task: ReadTask, now_ns: int) -> KVPoolError | None:
        """Why a read should not go on."""
        given_up = self._given_up.get(id(task)) or self._over
        if given_up is None and now_ns > task.deadline_at_ns:
            quiet_ns = now_ns - self._progress_ns
            slow = quiet_ns < min(task.request.stall_ns, DRAIN_NS)
            return StallError("the read passed its deadline", peer=self._name, slow=slow)
        return given_up

    def _look(self, task: ReadTask) -> None:
        """Raise when the read should not go on, for its own reasons or because the holder is silent."""
        now_ns = self._clock_ns()
        error = self._reason(task, now_ns)
        if error is not None:
            raise error.with_traceback(None)
        quiet_ns = now_ns - self._progress_ns
        if quiet_ns > task.request.stall_ns:
            raise _LinkError(StallError(f"{self._name} sent nothing for {quiet_ns} ns", peer=self._name))
        self._drop_waiting()

    def _carry_out(self, task: ReadTask) -> None:
        self._progress_ns = self._clock_ns()
        task.begin()
        error: KVPoolError | None = None
        try:
            self._connect(task)
            blocks = task.request.blocks
            for base in range(0, len(blocks), MAX_PULL_BLOCKS):
                self._pull(task, base, min(MAX_PULL_BLOCKS, len(blocks) - base))
        except _LinkError as broken:
            error = broken.reason
            task.give_up(error)
            if not self._disconnect():
                self._counters.add(quarantined_reads=1)
                return  # bytes may still land: the read stays CANCELLING, its pages out of use
        except KVPoolError as gave_up:
            error = gave_up
        self._finish(task, error)

    def _finish(self, task: ReadTask, error: KVPoolError | None) -> None:
        with self._work:
            self._given_up.pop(id(task), None)
        if error is not None:
            task.give_up(error)
        task.finish()
        self._counters.add(reads=1, reads_failed=task.error is not None)

    # ── the link ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _connect(self, task: ReadTask) -> None:
        if self._stream is not None:
            return
        endpoint = Endpoint.decode(self.peer.address)
        refuse_tcp(self._host_id, endpoint.host_id, self._name)
        left_ns = min(task.request.stall_ns, task.deadline_at_ns - self._clock_ns())
        try:
            stream = socket.create_connection((endpoint.address, endpoint.port), timeout=max(left_ns / 1e9, 0.001))
        except OSError as error:
            raise PeerGoneError(f"{self._name} does not answer: {error}", peer=self._name) from error
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.settimeout(LOOK_S)
        self._stream, self._incoming, self._messages = stream, MessageBuffer(), []
        try:
            self._send(HELLO)
            metadata = self._receive(task)
            self._agent = Agent(f"{self._local.key}-{os.urandom(8).hex()}", self._local.segment)
            self._counters.add(agents=1)
            self._agent.connect(metadata, self._name)
        except KVPoolError as error:  # also when this read is given up: half a link is of no use to the next one
            raise _LinkError(error) from error
        self._progress_ns = self._clock_ns()

    def _disconnect(self) -> bool:
        """Close the stream and destroy the agent. True when the fence confirmed."""
        stream, self._stream = self._stream, None
        agent, self._agent = self._agent, None
        fenced = True
        if agent is not None:
            self._counters.add(agents=-1)
            try:
                agent.destroy()
            except KVPoolError:
                self._unfenced.append(agent)
                fenced = False
        if stream is not None:  # last: the holder lets go of the blocks when the stream ends
            stream.close()
        return fenced

    def _send(self, message: bytes) -> None:
        assert self._stream is not None
        try:
            self._stream.sendall(framed(message))
        except OSError as error:
            raise _LinkError(PeerGoneError(f"{self._name} is gone: {error}", peer=self._name)) from error

    def _receive(self, task: ReadTask) -> bytes:
        assert self._stream is not None
        while not self._messages:
            try:
                data = self._stream.recv(RECEIVE_BYTES)
            except TimeoutError:
                self._look(task)
                continue
            except OSError as error:
                raise _LinkError(PeerGoneError(f"{self._name} is gone: {error}", peer=self._name)) from error
            if not data:
                raise _LinkError(PeerGoneError(f"{self._name} closed the connection", peer=self._name))
            try:
                self._messages += self._incoming.feed(data)
            except IntegrityError as error:
                raise self._confused(error) from error
        return self._messages.pop(0)

    def _confused(self, error: IntegrityError) -> _LinkError:
        self._counters.add(protocol_errors=1)
        return _LinkError(error)

    # ── one pull ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _pull(self, task: ReadTask, base: int, count: int) -> None:
        wants = task.request.blocks[base : base + count]
        pull = Pull(
            sequence=next(self._sequences),
            link_id=0,
            deadline_ns=max(1, task.deadline_at_ns - self._clock_ns()),
            reader=self._local.key,
            reader_address=b"",
            holder=self.peer.key,
            hashes=tuple(want.block_hash for want in wants),
            offsets=tuple(want.dest_offset for want in wants),
        )
        self._send(encode(pull))
        self._renewed_ns = self._clock_ns()
        fetched = 0
        try:
            offer, runs = self._offer(task, pull)
            task.mark((base + at for at, total in enumerate(offer.checksums) if total is None), BlockStatus.MISSING)
            task.publish()
            assert offer.window is not None
            for batch in self._batches(runs, offer.window.addresses, pull.offsets):
                self._read(task, batch, pull.sequence)
                fetched += len(batch.runs)
                self._judge(task, base, batch, offer, pull.offsets)
                self._look(task)
        except KVPoolError:  # the read is given up, the link lives; a broken one releases the blocks by its end
            self._send(encode(Stop(pull.sequence, 0, fetched)))
            raise
        self._send(encode(Stop(pull.sequence, 0, fetched)))

    def _offer(self, task: ReadTask, pull: Pull) -> tuple[Offer, tuple[Run, ...]]:
        try:
            while True:
                message: Message = decode(self._receive(task))
                if message.sequence == pull.sequence:
                    break  # others answer pulls that were given up
            self._progress_ns = self._clock_ns()
            if isinstance(message, Refuse):
                raise error_of(message, self._name)
            if not isinstance(message, Offer) or message.window is None:
                raise IntegrityError("the holder answered with something else", peer=self._name)
            if message.identity != identity_digest(pull.hashes) or len(message.checksums) != len(pull.hashes):
                raise IntegrityError("the holder answered for other blocks", peer=self._name)
            return message, runs_of_offer(message, pull.offsets, self._local.block_bytes)
        except IntegrityError as error:
            raise self._confused(error) from error

    def _batches(self, runs: Sequence[Run], addresses: Sequence[int], offsets: Sequence[int]) -> list[_Batch]:
        batches: list[_Batch] = []
        chosen: list[Run] = []
        pieces: list[Piece] = []
        size = 0
        for run, address in zip(runs, addresses, strict=True):
            run_bytes = run.blocks * self._local.block_bytes
            if chosen and (size + run_bytes > BATCH_BYTES or len(chosen) == BATCH_RUNS):
                batches.append(_Batch(tuple(chosen), tuple(pieces)))
                chosen, pieces, size = [], [], 0
            chosen.append(run)
            pieces.append(Piece(address, offsets[run.first], run_bytes))
            size += run_bytes
        if chosen:
            batches.append(_Batch(tuple(chosen), tuple(pieces)))
        return batches

    def _read(self, task: ReadTask, batch: _Batch, sequence: int) -> None:
        """Bring one batch; after any failure but a drained cancellation the link is broken."""
        assert self._agent is not None
        size = sum(piece.size_bytes for piece in batch.pieces)
        self._counters.add(in_flight_bytes=size)
        try:
            transfer = self._agent.read(batch.pieces, self._name)
            self._await(task, transfer, sequence)
            transfer.release()
        except _LinkError:
            raise
        except KVPoolError as error:
            raise _LinkError(error) from error
        finally:
            self._counters.add(in_flight_bytes=-size)
        self._progress_ns = self._clock_ns()

    def _await(self, task: ReadTask, transfer: Transfer, sequence: int) -> None:
        give_up_at_ns: int | None = None
        self._renew(sequence)
        while not transfer.done():
            try:
                self._look(task)
            except _LinkError:
                raise
            except KVPoolError as error:
                now_ns = self._clock_ns()
                give_up_at_ns = give_up_at_ns or now_ns + DRAIN_NS
                task.give_up(error)
                if now_ns > give_up_at_ns:
                    raise
            time.sleep(POLL_S)
            self._renew(sequence)

    def _renew(self, sequence: int) -> None:
        """Ask the holder to keep the blocks, when that was long ago."""
        now_ns = self._clock_ns()
        if now_ns - self._renewed_ns >= LEASE_RENEW_NS:
            self._renewed_ns = now_ns
            self._send(encode(Grant(sequence, 0, 0)))

    def _judge(self, task: ReadTask, base: int, batch: _Batch, offer: Offer, offsets: Sequence[int]) -> None:
        """Check and settle the blocks of a batch that landed."""
        block_bytes = self._local.block_bytes
        good: list[int] = []
        bad: list[int] = []
        for run in batch.runs:
            start = offsets[run.first]
            sums = offer.checksums[run.first : run.first + run.blocks]
            data = self._local.segment[start : start + run.blocks * block_bytes]
            verdict = Check(data, block_bytes, tuple(total for total in sums if total is not None)).run()
            for step, intact in enumerate(verdict):
                (good if intact else bad).append(base + run.first + step)
        task.mark(good, BlockStatus.ARRIVED)
        self._counters.add(blocks_read=len(good), bytes_read=len(good) * block_bytes)
        late = self._clock_ns() > task.deadline_at_ns  # then the holder may have let go: that blames nobody
        if bad and not late:
            task.mark(bad, BlockStatus.CORRUPT)
            self._counters.add(corrupt_blocks=len(bad))
        task.publish()


class _LinkError(Exception):
    """The link is of no use any more: whatever is open on it must be fenced. Never leaves this module."""

    def __init__(self, reason: KVPoolError) -> None:
        super().__init__(str(reason))
        self.reason = reason
