"""The reader's handle of one read, shared by every transport.

`ReadTask` is the only place where a read's state lives. The transport's thread moves it; any thread may look at it,
wait for it or ask to cancel. States only move forward, and nothing changes after a terminal one: a late call of the
transport is an `InvariantViolation`, because it would break the promise that a terminal read writes no byte.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvpool.errors import IntegrityError, InvariantViolation, KVPoolError, RequestError, TransferCancelledError
from kvpool.transport.base import BlockStatus, ReadProgress, ReadRequest, ReadState
from kvpool.types import WorkerKey

MAX_BUDGET_NS = (1 << 63) - 1
"""More does not fit into a message."""

Callback = Callable[[ReadProgress], None]


class ReadTask:
    """One read in progress; implements `kvpool.transport.base.ReadHandle`.

    Args:
        request: what is read.
        block_bytes: bytes per block.
        clock_ns: monotonic clock.
        on_cancel: asks the owning transport, from any thread, to give this read up.
    """

    def __init__(
        self,
        request: ReadRequest,
        block_bytes: int,
        clock_ns: Callable[[], int],
        on_cancel: Callable[[ReadTask], None],
    ) -> None:
        self.request = request
        self.block_bytes = block_bytes
        self.started_ns = clock_ns()
        self.deadline_at_ns = self.started_ns + request.deadline_ns
        self._clock_ns = clock_ns
        self._on_cancel = on_cancel
        self._changed = threading.Condition()
        self._state = ReadState.POSTED
        self._statuses = [BlockStatus.PENDING] * len(request.blocks)
        self._bytes_arrived = 0
        self._finished_ns: int | None = None
        self._error: KVPoolError | None = None
        self._callbacks: list[Callback] = []

    @property
    def state(self) -> ReadState:
        """Where the read is."""
        return self._state

    @property
    def error(self) -> KVPoolError | None:
        """Why it was given up; set from CANCELLING on."""
        return self._error

    def progress(self) -> ReadProgress:
        """Current snapshot."""
        with self._changed:
            return self._snapshot()

    def done(self) -> bool:
        """True once terminal."""
        return self._state.terminal

    def cancel(self) -> None:
        """Give the read up. Idempotent."""
        if not self._state.terminal:
            self._on_cancel(self)

    def wait(self, timeout_ns: int) -> ReadProgress:
        """Block until terminal or until the timeout."""
        limit = time.monotonic() + timeout_ns / 1e9
        with self._changed:
            while not self._state.terminal:
                left = limit - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return self._snapshot()

    def on_progress(self, callback: Callback) -> None:
        """Register a callback; called at once when already terminal."""
        with self._changed:
            if not self._state.terminal:
                self._callbacks.append(callback)
                return
            snapshot = self._snapshot()
        callback(snapshot)

    # ── the transport's side ─────────────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        """The first request left for the holder."""
        with self._changed:
            if self._state is ReadState.POSTED:
                self._state = ReadState.IN_FLIGHT

    def mark(self, indices: Iterable[int], status: BlockStatus) -> None:
        """Settle blocks. Does not call back; `publish` does, once per batch."""
        with self._changed:
            self._refuse_terminal("mark")
            for index in indices:
                if self._statuses[index] is not BlockStatus.PENDING:
                    raise InvariantViolation(f"block {index} of a read was settled twice")
                self._statuses[index] = status
                if status is BlockStatus.ARRIVED:
                    self._bytes_arrived += self.block_bytes

    def publish(self) -> None:
        """Tell callbacks and waiters what changed."""
        with self._changed:
            callbacks = tuple(self._callbacks)
            if self._state.terminal:
                self._callbacks.clear()
                self._changed.notify_all()
            if not callbacks:
                return
            snapshot = self._snapshot()
        for callback in callbacks:
            callback(snapshot)

    def give_up(self, error: KVPoolError) -> None:
        """Enter CANCELLING: bytes may still land. The first reason stays."""
        with self._changed:
            if self._state.terminal or self._state is ReadState.CANCELLING:
                return
            self._state = ReadState.CANCELLING
            self._error = error.with_traceback(None)  # frames would keep what the transport wants to release alive

    def finish(self) -> None:
        """Enter the terminal state and call back. The caller knows that no byte of this read can land any more."""
        with self._changed:
            self._refuse_terminal("finish")
            pending = [i for i, status in enumerate(self._statuses) if status is BlockStatus.PENDING]
            if pending and self._error is None:
                raise InvariantViolation(f"a read finished with {len(pending)} blocks unsettled and no error")
            for index in pending:
                self._statuses[index] = BlockStatus.FAILED
            corrupt = self._statuses.count(BlockStatus.CORRUPT)
            if corrupt and self._error is None:
                peer = str(self.request.peer.key)
                self._error = IntegrityError(f"{corrupt} blocks did not verify; report the replica", peer=peer)
            if self._error is None:
                self._state = ReadState.DONE
            elif isinstance(self._error, TransferCancelledError):
                self._state = ReadState.CANCELLED
            else:
                self._state = ReadState.FAILED
            self._finished_ns = self._clock_ns()
            self._on_cancel = _ignore  # a handle that is kept must not keep its transport
        self.publish()

    def _refuse_terminal(self, what: str) -> None:
        if self._state.terminal:
            raise InvariantViolation(f"{what} on a read that is already {self._state.value}")

    def _snapshot(self) -> ReadProgress:
        end = self._clock_ns() if self._finished_ns is None else self._finished_ns
        return ReadProgress(
            state=self._state,
            statuses=tuple(self._statuses),
            bytes_arrived=self._bytes_arrived,
            elapsed_ns=end - self.started_ns,
            error=self._error,
        )


def _ignore(_: ReadTask) -> None:
    """Cancelling a read that is over changes nothing."""


@dataclass(frozen=True, slots=True)
class LocalEnd:
    """Who a transport serves as, and the flat, writable segment of blocks it registered."""

    key: WorkerKey
    segment: memoryview
    block_bytes: int


@dataclass(frozen=True, slots=True)
class SegmentShape:
    """Size of a registered segment and of its blocks, in bytes."""

    segment_bytes: int
    block_bytes: int

    def check(self, request: ReadRequest) -> None:
        """Refuse a read that would write outside the segment or twice to one place.

        Raises:
            RequestError: names the block and the way out.
        """
        if not (0 < request.deadline_ns <= MAX_BUDGET_NS and 0 < request.stall_ns <= MAX_BUDGET_NS):
            raise RequestError("deadline_ns and stall_ns of a read must be in [1, 2**63)", field="deadline_ns")
        previous_end = 0
        for want in sorted(request.blocks, key=lambda item: item.dest_offset):
            if want.dest_offset < 0 or want.dest_offset + self.block_bytes > self.segment_bytes:
                raise RequestError(
                    f"block destination {want.dest_offset} lies outside the segment of {self.segment_bytes} bytes",
                    field="dest_offset",
                )
            if want.dest_offset < previous_end:
                raise RequestError(
                    f"destinations overlap at byte {want.dest_offset}; every block needs pages of its own",
                    field="dest_offset",
                )
            previous_end = want.dest_offset + self.block_bytes


def flat_bytes(segment: memoryview) -> memoryview:
    """The segment as a flat, writable byte view.

    Raises:
        RequestError: it is read-only or not contiguous.
    """
    if segment.readonly or not segment.c_contiguous:
        raise RequestError("a segment must be writable and contiguous", field="segment")
    return segment.cast("B") if segment.format != "B" or segment.ndim != 1 else segment
