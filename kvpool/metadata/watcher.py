"""A router's copy of the directory: watches one replica, fails over to the next, keeps what it knows meanwhile.

One thread reads the stream and changes the copy under a lock; lookups take the lock for microseconds. Callbacks run on
that thread, in order, without the lock, so they may call back into the watcher.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from kvpool.errors import KVPoolError, UnavailableError
from kvpool.hashing import set_digest
from kvpool.metadata import wire
from kvpool.metadata.client import Endpoint, check_endpoints
from kvpool.metadata.events import Delta, MemberChanged, MemberGone, MemberView, Reported
from kvpool.metadata.index import DEFAULT_MAX_ENTRIES, DEFAULT_MAX_WORKERS
from kvpool.metadata.prefixes import Prefixes
from kvpool.metadata.rpc import error_from_rpc
from kvpool.metadata.v1 import metadata_pb2 as pb
from kvpool.metadata.view import DirectoryView, WatchedMember
from kvpool.reports import WorkerReport
from kvpool.types import BlockHash, MemberInfo, MemberState, WorkerKey

SILENCE_S = 3.0
"""A stream that says nothing this long, not even a sign of life, is given up; the service speaks every second."""

MIN_RETRY_S = 0.05
MAX_RETRY_S = 1.0
JOIN_THREAD_S = 5.0

log = logging.getLogger(__name__)

OnMember = Callable[[MemberInfo, MemberState | None], None]
"""A member joined or changed; None instead of a state when it is gone."""

OnReport = Callable[[WorkerReport], None]


class MetadataWatcher:
    """Keeps a copy of the directory. Thread-safe.

    Args:
        endpoints: addresses of the replicas; one is watched at a time.
        on_member: called for every change of a member, and after a resync for every difference.
        on_report: called for every report.
        name: who watches, for the service's log.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        on_member: OnMember | None = None,
        on_report: OnReport | None = None,
        name: str = "",
        max_entries: int = DEFAULT_MAX_ENTRIES,
        max_workers: int = DEFAULT_MAX_WORKERS,
    ) -> None:
        self._addresses = check_endpoints(endpoints)
        self._on_member = on_member
        self._on_report = on_report
        self._name = name
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._view = DirectoryView(max_entries=max_entries, max_workers=max_workers)
        self._header: tuple[MemberView, ...] = ()
        self._told: dict[WorkerKey, tuple[MemberInfo, MemberState]] = {}
        self._connected = False
        self._heard_ns: int | None = None
        self._address = ""
        self._last_error = ""
        self._counters = dict.fromkeys(("snapshots", "deltas", "gaps", "reconnects", "failovers", "callback_errors"), 0)
        self._call: Any = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpool-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch, in the background. Once."""
        self._thread.start()

    def close(self) -> None:
        """Stop watching; the copy stays readable. May be repeated."""
        self._stopping.set()
        with self._lock:
            call = self._call
            self._changed.notify_all()
        if call is not None:
            call.cancel()
        if self._thread.is_alive():
            self._thread.join(JOIN_THREAD_S)

    # -- what is known ------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """A replica is being watched and the copy is complete; False means that the copy is what was known last."""
        with self._lock:
            return self._connected

    @property
    def age_ns(self) -> int | None:
        """Time since a replica was last heard; None before the first snapshot."""
        with self._lock:
            return None if self._heard_ns is None else time.monotonic_ns() - self._heard_ns

    def members(self) -> dict[WorkerKey, WatchedMember]:
        """All members known, with state and newest report."""
        with self._lock:
            return {member.info.key: member for member in self._view.members}

    def prefixes(self, chain: Sequence[BlockHash], *, group: int = 0) -> Prefixes:
        """How long a prefix of ``chain`` every ``ALIVE`` worker holds: `kvpool.metadata.prefixes.Prefixes`.

        The chain must have been hashed from tokens; its order is used to keep later lookups fast.
        """
        with self._lock:
            return self._view.prefixes(chain, group=group)

    def digests(self) -> dict[WorkerKey, str]:
        """For every member, `kvpool.hashing.set_digest` of the blocks the copy says it holds in any tier.

        Holds the lock while it reads the whole copy: for audits at rest, not for every day.
        """
        with self._lock:
            held: dict[WorkerKey, set[BlockHash]] = {member.info.key: set() for member in self._view.members}
            for part in self._view.index.dump():
                for placement in part:
                    for key, _, incoming in placement.holders:
                        if not incoming and key in held:
                            held[key].update(placement.hashes)
        return {key: set_digest(hashes) for key, hashes in held.items()}

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait for the first complete copy; False when the time is over."""
        return self.wait_for(lambda: self._view.complete, timeout_s)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``condition``, called under the lock after every change, holds; False when the time is over."""
        with self._changed:
            return self._changed.wait_for(lambda: condition() or self._stopping.is_set(), timeout_s) and condition()

    @property
    def view(self) -> DirectoryView:
        """The copy itself, for a `wait_for` condition; it is changed by the watcher's thread."""
        return self._view

    def status(self) -> dict[str, Any]:
        """Connection, age and counters, as JSON-able data."""
        with self._lock:
            return {
                "running": self._thread.is_alive(),
                "connected": self._connected,
                "address": self._address,
                "age_ns": None if self._heard_ns is None else time.monotonic_ns() - self._heard_ns,
                "directory_epoch": self._view.directory_epoch,
                "members": len(self._view.members),
                "entries": self._view.index.entries,
                "blocks": self._view.index.blocks,
                "refused_blocks": self._view.index.refused_blocks,
                "last_error": self._last_error,
                **self._counters,
            }

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Watch one replica after the other until closed; whatever ends this thread leaves ``connected`` False."""
        number, retry_s = 0, MIN_RETRY_S
        while not self._stopping.is_set():
            address = self._addresses[number % len(self._addresses)]
            snapshots = self._counters["snapshots"]
            try:
                self._watch(address)
            except KVPoolError as error:
                self._note(error)
            finally:
                with self._lock:
                    self._connected, self._call = False, None
                    self._counters["reconnects"] += 1
                    self._changed.notify_all()
            if len(self._addresses) > 1:
                number += 1
                self._counters["failovers"] += 1
            retry_s = MIN_RETRY_S if self._counters["snapshots"] > snapshots else min(2 * retry_s, MAX_RETRY_S)
            self._stopping.wait(retry_s)

    def _watch(self, address: str) -> None:
        """Read one stream until it breaks, falls silent or shows a gap."""
        endpoint = Endpoint(address)
        silence = _Silence(SILENCE_S)
        try:
            call = endpoint.stub.Watch(pb.WatchRequest(name=self._name), metadata=endpoint.metadata)
            with self._lock:
                self._call, self._address = call, address
            silence.start(call.cancel)
            if self._stopping.is_set():
                call.cancel()
            for message in call:
                silence.heard()
                if not self._take(message):
                    with self._lock:
                        self._counters["gaps"] += 1
                    return
        except grpc.RpcError as error:
            if silence.expired:
                raise UnavailableError(f"{address} fell silent for {SILENCE_S} s", address=address) from error
            raise error_from_rpc(error, address) from error
        finally:
            silence.stop()
            endpoint.close()

    def _take(self, message: Any) -> bool:
        """Take one event; False when a new snapshot is needed.

        A snapshot is built beside the copy, which only this thread does, so no lookup waits for it.
        """
        kind = message.WhichOneof("event")
        if kind == "header":
            header = wire.header_from_wire(message.header)
            self._header = header.members
            self._view.begin(header)
        elif kind == "part":
            self._view.fill(wire.placement_from_wire(item, self._header) for item in message.part.placements)
        delta = wire.delta_from_wire(message.delta) if kind == "delta" else None
        with self._lock:
            self._heard_ns = time.monotonic_ns()
            if not self._apply(kind, message, delta):
                return False
            self._changed.notify_all()
        if kind == "end":
            self._tell_differences()
        elif delta is not None:
            self._tell(delta)
        return True

    def _apply(self, kind: str, message: Any, delta: Delta | None) -> bool:
        """Change the copy; the caller holds the lock."""
        if kind == "end":
            self._view.finish()
            self._connected, self._last_error = True, ""
            self._counters["snapshots"] += 1
        elif kind == "alive":
            return self._view.is_current(message.alive.directory_epoch, message.alive.sequence)
        elif delta is not None:
            self._counters["deltas"] += 1
            return self._view.apply(delta)
        return True

    def _tell(self, delta: Delta) -> None:
        change = delta.change
        if isinstance(change, MemberChanged):
            self._tell_member(change.info, change.state)
        elif isinstance(change, MemberGone) and change.key in self._told:
            self._tell_member(self._told[change.key][0], None)
        elif isinstance(change, Reported) and self._on_report is not None:
            self._callback(self._on_report, change.report)

    def _tell_differences(self) -> None:
        """After a snapshot: what changed against what callers were told."""
        now = self.members()
        for key in list(self._told):
            if key not in now:
                self._tell_member(self._told[key][0], None)
        for member in now.values():
            if self._told.get(member.info.key) != (member.info, member.state):
                self._tell_member(member.info, member.state)
            if member.report is not None and self._on_report is not None:
                self._callback(self._on_report, member.report)

    def _tell_member(self, info: MemberInfo, state: MemberState | None) -> None:
        if state is None:
            self._told.pop(info.key, None)
        else:
            self._told[info.key] = (info, state)
        if self._on_member is not None:
            self._callback(self._on_member, info, state)

    def _callback(self, callback: Callable[..., None], *arguments: Any) -> None:
        try:
            callback(*arguments)
        except KVPoolError:
            self._counters["callback_errors"] += 1
            log.exception("a watcher's callback failed")

    def _note(self, error: KVPoolError) -> None:
        if not self._stopping.is_set():
            with self._lock:
                self._last_error = str(error)
            log.warning("watching the metadata service failed: %s", error)


class _Silence:
    """Cancels a call when nothing was heard for a while: a paused service keeps its connections open."""

    def __init__(self, limit_s: float) -> None:
        self.expired = False
        self._limit_s = limit_s
        self._heard_s = time.monotonic()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, cancel: Callable[[], Any]) -> None:
        self._thread = threading.Thread(target=self._run, args=(cancel,), name="kvpool-silence", daemon=True)
        self._thread.start()

    def heard(self) -> None:
        self._heard_s = time.monotonic()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(JOIN_THREAD_S)

    def _run(self, cancel: Callable[[], Any]) -> None:
        while not self._stopped.wait(self._limit_s / 8):
            if time.monotonic() - self._heard_s > self._limit_s:
                self.expired = True
                cancel()
                return
