"""One worker's dealings with one replica of the metadata service: three threads and an `Outbox`.

    pulse    joins, sends heartbeats on a connection of its own, joins again when told to
    events   one Publish stream after another; gRPC's sending thread pulls batches from the outbox
    side     suspicions and reports

A broken stream asks the pulse thread for a new join, whose answer says what the replica has applied; the next stream
goes on from there, or from a snapshot.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from kvpool.errors import KVPoolError, StaleError, UnavailableError
from kvpool.metadata import wire
from kvpool.metadata.client import Endpoint
from kvpool.metadata.disturbance import CALM
from kvpool.metadata.events import BatchAck, BlockEvent, Heartbeat, Welcome
from kvpool.metadata.outbox import Outbox
from kvpool.metadata.rpc import error_from_rpc
from kvpool.metadata.state import StaleReason
from kvpool.metadata.v1 import metadata_pb2 as pb
from kvpool.reports import WorkerReport
from kvpool.types import BlockHash, MemberInfo, MemberState, Tier, WorkerKey

HEARTBEATS_PER_LEASE = 5
MIN_RETRY_S = 0.05
MAX_RETRY_S = 1.0
CALL_TIMEOUT_S = 2.0
STREAM_STALL_NS = 10_000_000_000
"""A stream whose oldest batch is unanswered this long is opened again."""

MIN_SNAPSHOT_PAUSE_NS = 50_000_000
MAX_SNAPSHOT_PAUSE_NS = 5_000_000_000
"""Least time between two snapshots; doubles while they follow each other closely, so that no fault becomes a storm."""

MAX_QUEUED_REPORTS = 256
MAX_QUEUED_SUSPICIONS = 256
REPORTS_PER_CALL = 32
JOIN_THREAD_S = 5.0

log = logging.getLogger(__name__)


class Link:
    """One (worker, replica) pair. ``_lock`` guards what is mutable; the conditions share it, one per waiting thread."""

    def __init__(
        self,
        address: str,
        member: MemberInfo,
        snapshot: Callable[[], Sequence[tuple[Tier, BlockHash]]],
        fence: Callable[[str], None],
        draining: threading.Event,
    ) -> None:
        self.address = address
        self.disturbance = CALM
        self._member = member
        self._take_snapshot = snapshot
        self._fence = fence
        self._draining = draining
        self._data = Endpoint(address)
        self._pulse = Endpoint(address)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._pulse_wake = threading.Condition(self._lock)
        self._events_wake = threading.Condition(self._lock)
        self._side_wake = threading.Condition(self._lock)
        self._flushed = threading.Condition(self._lock)
        self._outbox = Outbox(member.key)
        self._welcome: Welcome | None = None
        self._rejoin = False
        self._reports: deque[WorkerReport] = deque(maxlen=MAX_QUEUED_REPORTS)
        self._suspicions: deque[tuple[WorkerKey, str]] = deque(maxlen=MAX_QUEUED_SUSPICIONS)
        self._sent_ns: deque[tuple[int, int]] = deque()
        self._call: Any = None
        self._stream_number = 0
        self._snapshot_after_ns = 0
        self._snapshot_pause_ns = MIN_SNAPSHOT_PAUSE_NS
        self._state: MemberState | None = None
        self._last_error = ""
        self._counters = dict.fromkeys(
            ("joins", "reconnects", "heartbeat_failures", "dropped_reports", "dropped_suspicions", "stale_suspicions"),
            0,
        )
        self._ack_lag_ns = 0
        self._heard_ns = 0
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=f"kvpool-{name}-{address}", daemon=True)
            for name, work in (("events", self._run_events), ("pulse", self._run_pulse), ("side", self._run_side))
        ]

    def _run(self, work: Callable[[], None]) -> None:
        """A thread's whole life. A bug of ours must not leave a worker that looks alive and tells nobody anything."""
        try:
            work()
        except Exception as error:
            log.exception("a thread that publishes to %s broke", self.address)
            self._fence(f"publishing broke: {error!r}")

    # -- callers' side, never waits -----------------------------------------------------------------------------

    def add(self, event: BlockEvent) -> None:
        """Queue a block event."""
        with self._lock:
            self._outbox.add(event)
            self._events_wake.notify()

    def queue_report(self, report: WorkerReport) -> None:
        """Queue a report; the oldest goes when too many wait."""
        with self._lock:
            self._counters["dropped_reports"] += len(self._reports) == MAX_QUEUED_REPORTS
            self._reports.append(report)
            self._side_wake.notify()

    def queue_suspicion(self, key: WorkerKey, reason: str) -> None:
        """Queue a suspicion; the oldest goes when too many wait."""
        with self._lock:
            self._counters["dropped_suspicions"] += len(self._suspicions) == MAX_QUEUED_SUSPICIONS
            self._suspicions.append((key, reason))
            self._side_wake.notify()

    def resync(self) -> None:
        """Make a snapshot due."""
        with self._lock:
            self._outbox.require_snapshot()
            self._events_wake.notify()

    def flush(self, deadline_s: float) -> bool:
        """Wait until events and reports are delivered; False when the time is over or the link was stopped."""
        with self._lock:
            self._flushed.wait_for(lambda: self._stopping.is_set() or self._idle(), deadline_s - time.monotonic())
            return self._idle() and not self._stopping.is_set()

    def _idle(self) -> bool:
        return self._outbox.idle and not self._reports and not self._suspicions

    def status(self) -> dict[str, Any]:
        with self._lock:
            return {
                "running": all(thread.is_alive() for thread in self._threads),
                "connected": self._welcome is not None,
                "state": None if self._state is None else self._state.value,
                "directory_epoch": None if self._welcome is None else self._welcome.directory_epoch,
                "queued_blocks": self._outbox.queued_blocks,
                "snapshots": self._outbox.snapshots,
                "gaps": self._outbox.resyncs,
                "overflows": self._outbox.overflows,
                "refused_blocks": self._outbox.refused_blocks,
                "ack_lag_ns": self._ack_lag_ns,
                "silent_ns": time.monotonic_ns() - self._heard_ns if self._heard_ns else None,
                "last_error": self._last_error,
                **self._counters,
            }

    # -- life ---------------------------------------------------------------------------------------------------

    def first_join(self, timeout_s: float) -> None:
        """Join once; a replica that is down is no error here.

        Raises:
            IncompatibleError, StaleError, RequestError, CapacityError: the replica refused.
        """
        try:
            self._join(timeout_s)
        except UnavailableError as error:
            self._note(error)

    def start(self) -> None:
        """Start the threads. Once."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Tell the threads to end; does not wait. May be repeated."""
        self._stopping.set()
        with self._lock:
            call = self._call
            for condition in (self._pulse_wake, self._events_wake, self._side_wake, self._flushed):
                condition.notify_all()
        if call is not None:
            call.cancel()

    def finish(self, *, leave: bool) -> None:
        """After `stop`: leave the replica if asked to, close the connections, wait for the threads."""
        if leave and self._welcome is not None:
            try:
                self._pulse.call("Leave", pb.LeaveRequest(key=wire.key_to_wire(self._member.key)), CALL_TIMEOUT_S)
            except KVPoolError as error:
                self._note(error)  # the lease will end it
        self._welcome = None
        self._data.close()
        self._pulse.close()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(JOIN_THREAD_S)

    # -- heartbeats ---------------------------------------------------------------------------------------------

    def _run_pulse(self) -> None:
        """Keep the membership; join again when the replica does not know this worker or a stream broke."""
        retry_s = MIN_RETRY_S
        probe: int | None = None
        while not self._stopping.is_set():
            try:
                welcome = self._welcome
                if welcome is None or self._rejoin:
                    welcome = self._join(CALL_TIMEOUT_S)
                probe = self._beat(welcome, probe)
            except KVPoolError as error:
                self._failed(error)
                self._stopping.wait(retry_s)
                retry_s = min(2 * retry_s, MAX_RETRY_S)
                continue
            retry_s = MIN_RETRY_S
            wait_s = welcome.lease_ns / HEARTBEATS_PER_LEASE / 1e9
            with self._lock:
                self._pulse_wake.wait_for(lambda: self._stopping.is_set() or self._rejoin, wait_s)

    def _beat(self, welcome: Welcome, probe: int | None) -> int | None:
        beat = Heartbeat(
            self._member.key, welcome.directory_epoch, probe, self._draining.is_set(), self._event_lag_ns()
        )
        request = wire.heartbeat_to_wire(beat)
        pulse = wire.pulse_from_wire(self._pulse.call("Heartbeat", request, CALL_TIMEOUT_S))
        if pulse.state is MemberState.DRAINING:
            self._draining.set()  # from now on every replica is told
        with self._lock:
            self._state, self._heard_ns, self._last_error = pulse.state, time.monotonic_ns(), ""
        return pulse.probe

    def _event_lag_ns(self) -> int:
        """Age of the oldest batch in flight, 0 without one."""
        with self._lock:
            return time.monotonic_ns() - self._sent_ns[0][1] if self._sent_ns else 0

    def _join(self, timeout_s: float) -> Welcome:
        request = pb.JoinRequest(info=wire.info_to_wire(self._member), draining=self._draining.is_set())
        reply = self._pulse.call("Join", request, timeout_s)
        welcome = wire.welcome_from_wire(reply)
        with self._lock:
            self._outbox.joined(welcome)
            self._sent_ns.clear()
            self._welcome, self._rejoin = welcome, False
            self._heard_ns = time.monotonic_ns()
            self._counters["joins"] += 1
            self._events_wake.notify_all()
            self._side_wake.notify_all()
        return welcome

    def _failed(self, error: KVPoolError) -> None:
        """A heartbeat or join failed."""
        self._note(error)
        with self._lock:
            self._counters["heartbeat_failures"] += 1
            self._welcome, self._state = None, None
            call = self._call
            self._events_wake.notify_all()
        if call is not None:
            call.cancel()  # it may hang as long as the replica does
        if isinstance(error, StaleError) and error.details.get("reason") == StaleReason.FENCED.value:
            self._fence(str(error))

    # -- events -------------------------------------------------------------------------------------------------

    def _run_events(self) -> None:
        """One stream after another, each from where the replica is, until stopped."""
        retry_s = MIN_RETRY_S
        while not self._stopping.is_set():
            with self._lock:
                if not self._events_wake.wait_for(self._may_stream, MAX_RETRY_S) or self._stopping.is_set():
                    continue
                self._stream_number += 1
                number = self._stream_number
            started_s = time.monotonic()
            try:
                self._stream(number)
            except KVPoolError as error:
                self._stream_failed(error)
            with self._lock:
                self._call = None
                self._stream_number += 1  # whatever still pulls batches for the old stream stops
                self._rejoin = True  # the answer says where to go on
                self._counters["reconnects"] += not self._stopping.is_set()
                self._events_wake.notify_all()
                self._pulse_wake.notify_all()
            retry_s = MIN_RETRY_S if time.monotonic() - started_s > MAX_RETRY_S else min(2 * retry_s, MAX_RETRY_S)
            self._stopping.wait(retry_s)

    def _may_stream(self) -> bool:
        return self._stopping.is_set() or (self._welcome is not None and not self._rejoin)

    def _stream(self, number: int) -> None:
        """Send batches and take answers until the stream breaks.

        Raises:
            KVPoolError: why it broke.
        """
        try:
            call = self._data.stub.Publish(self._batches(number), metadata=self._data.metadata)
        except ValueError as error:
            raise UnavailableError(f"the channel to {self.address} is closed", address=self.address) from error
        with self._lock:
            self._call = call
        if self._stopping.is_set():
            call.cancel()
        try:
            for message in call:
                self._acked(wire.ack_from_wire(message))
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.address) from error

    def _batches(self, number: int) -> Iterator[Any]:
        """Batches for stream ``number`` as messages, pulled by gRPC's sending thread. Ends when the stream should."""
        while True:
            with self._lock:
                if self._stopping.is_set() or self._stream_number != number or self._welcome is None:
                    return
                if self._stalled():
                    if self._call is not None:
                        self._call.cancel()
                    return
                ticket, batch = None, None
                if self._outbox.snapshot_due:
                    if not self._may_snapshot(time.monotonic_ns()):
                        continue
                    ticket = self._outbox.begin_snapshot()
                    self._sent_ns.clear()
                else:
                    batch = self._outbox.next_batch()
                    if batch is None:
                        self._events_wake.wait(MAX_RETRY_S)
                        continue
                    self._sent_ns.append((batch.sequence, time.monotonic_ns()))
            if batch is not None:
                if self.disturbance.delay_s:
                    self._stopping.wait(self.disturbance.delay_s)
                for copy in self.disturbance.copies(batch, random.random):
                    yield wire.batch_to_wire(copy)
            elif ticket is not None:
                blocks = self._take_snapshot()  # without the lock: the owner may be calling `add` under its own
                with self._lock:
                    self._outbox.load_snapshot(ticket, blocks)

    def _may_snapshot(self, now_ns: int) -> bool:
        """Whether the next snapshot may begin; waits a little when it may not."""
        if now_ns < self._snapshot_after_ns:
            self._events_wake.wait((self._snapshot_after_ns - now_ns) / 1e9)
            return False
        hasty = now_ns - self._snapshot_after_ns < self._snapshot_pause_ns
        doubled = min(2 * self._snapshot_pause_ns, MAX_SNAPSHOT_PAUSE_NS)
        self._snapshot_pause_ns = doubled if hasty else MIN_SNAPSHOT_PAUSE_NS
        self._snapshot_after_ns = now_ns + self._snapshot_pause_ns
        return True

    def _stalled(self) -> bool:
        """The oldest batch in flight waits too long for its answer."""
        return bool(self._sent_ns) and time.monotonic_ns() - self._sent_ns[0][1] > STREAM_STALL_NS

    def _acked(self, ack: BatchAck) -> None:
        now_ns = time.monotonic_ns()
        with self._lock:
            self._outbox.acked(ack)
            while self._sent_ns and self._sent_ns[0][0] <= ack.received:
                self._ack_lag_ns = now_ns - self._sent_ns.popleft()[1]
            self._events_wake.notify_all()
            self._flushed.notify_all()

    def _stream_failed(self, error: KVPoolError) -> None:
        if not self._stopping.is_set():
            self._note(error)
            if isinstance(error, StaleError) and error.details.get("reason") == StaleReason.FENCED.value:
                self._fence(str(error))

    # -- reports and suspicions ---------------------------------------------------------------------------------

    def _run_side(self) -> None:
        """Send what waits; suspicions first, since they hide a broken holder."""
        while not self._stopping.is_set():
            with self._lock:
                self._side_wake.wait_for(self._side_work, MAX_RETRY_S)
                if self._stopping.is_set() or not self._side_work():
                    continue
                suspicion = self._suspicions.popleft() if self._suspicions else None
                count = 0 if suspicion else min(REPORTS_PER_CALL, len(self._reports))
                reports = [self._reports.popleft() for _ in range(count)]
            try:
                if suspicion is not None:
                    self._send_suspicion(*suspicion)
                else:
                    request = pb.ReportRequest(reports=[wire.report_to_wire(report) for report in reports])
                    self._data.call("Report", request, CALL_TIMEOUT_S)
            except KVPoolError as error:
                self._note(error)
                with self._lock:
                    self._counters["dropped_reports"] += len(reports)
                    self._counters["dropped_suspicions"] += suspicion is not None
            with self._lock:
                self._flushed.notify_all()

    def _side_work(self) -> bool:
        return self._stopping.is_set() or (self._welcome is not None and bool(self._suspicions or self._reports))

    def _send_suspicion(self, key: WorkerKey, reason: str) -> None:
        request = pb.SuspectRequest(
            key=wire.key_to_wire(key), reporter=wire.key_to_wire(self._member.key), reason=reason
        )
        try:
            self._data.call("Suspect", request, CALL_TIMEOUT_S)
        except StaleError:
            with self._lock:
                self._counters["stale_suspicions"] += 1  # the holder is gone already

    def _note(self, error: KVPoolError) -> None:
        with self._lock:
            if str(error) != self._last_error:
                self._last_error = str(error)
                log.warning("%s: %s", self._member.key, error)
