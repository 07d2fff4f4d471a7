"""The gRPC service over `DirectoryState`: reads requests, calls the state, relays its deltas to watchers.

One event loop owns the state, so no lock is needed; long work (snapshots for watchers, sweeping) is cut into parts.
A delta is serialised once for all watchers. A watcher that falls behind by `MAX_WATCH_EVENTS` or `MAX_WATCH_BYTES`
loses its deltas and is given a new snapshot: its queue is bounded, and nothing waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from typing import Any

import grpc
import grpc.aio

from kvpool.errors import CapacityError, InvariantViolation, KVPoolError, RequestError
from kvpool.metadata import wire
from kvpool.metadata.events import Delta, MemberChanged, MemberGone
from kvpool.metadata.pins import MAX_PIN_BLOCKS, MAX_PINS, MAX_TRACES, Pin
from kvpool.metadata.pins_wire import pins_from_wire, tending_to_wire, view_to_wire
from kvpool.metadata.rpc import MAX_STATUS_CHARS, error_metadata, status_of
from kvpool.metadata.state import DirectoryState
from kvpool.metadata.v1 import metadata_pb2 as pb
from kvpool.types import BLOCK_HASH_BYTES, BlockHash, WorkerId

SERVICE_NAME = "kvpool.v1.MetadataService"
MAX_WATCHERS = 256
MAX_WATCH_EVENTS = 65_536
MAX_WATCH_BYTES = 64 * 1024 * 1024
MAX_LOOKUP_BLOCKS = 262_144
SIGN_OF_LIFE_S = 1.0
"""An idle watch stream says this often that it lives."""

TICK_S = 0.05
SWEEP_BLOCKS = 8_192

log = logging.getLogger(__name__)
Context = Any  # grpc.aio.ServicerContext, generic over messages that have no types here


class _Watcher:
    """One watch stream's queue of serialised events."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lost = False
        self._events: deque[bytes] = deque()
        self._bytes = 0
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._events)

    def push(self, event: bytes) -> None:
        """Queue an event; when it does not fit, everything queued is worthless and goes."""
        if self.lost:
            return
        self._events.append(event)
        self._bytes += len(event)
        if len(self._events) > MAX_WATCH_EVENTS or self._bytes > MAX_WATCH_BYTES:
            self.drop()
            self.lost = True
        self._news.set()

    def drop(self) -> None:
        """Forget everything queued."""
        self._events.clear()
        self._bytes = 0
        self.lost = False

    def pop(self) -> bytes | None:
        """The next event, None when there is none."""
        if not self._events:
            self._news.clear()
            return None
        event = self._events.popleft()
        self._bytes -= len(event)
        return event

    async def wait(self, timeout_s: float) -> None:
        """Wait for an event or for the time."""
        try:
            await asyncio.wait_for(self._news.wait(), timeout_s)
        except TimeoutError:
            return

    def wake(self) -> None:
        """End a `wait`."""
        self._news.set()


class MetadataService:
    """Handlers of ``kvpool.v1.MetadataService``."""

    def __init__(self, state: DirectoryState, *, restarts: int = 0) -> None:
        self.state = state
        self._restarts = restarts
        self._watchers: set[_Watcher] = set()
        self._started_ns = time.monotonic_ns()
        self._closing = asyncio.Event()
        self._failure: InvariantViolation | None = None

    @property
    def watchers(self) -> int:
        """Watch streams being served."""
        return len(self._watchers)

    @property
    def longest_watch_queue(self) -> int:
        """Events that wait for the slowest watcher."""
        return max(map(len, self._watchers), default=0)

    # -- unary --------------------------------------------------------------------------------------------------

    async def join(self, request: Any) -> Any:
        """See `DirectoryState.join`."""
        info = wire.info_from_wire(request.info)
        welcome, deltas = self.state.join(info, time.monotonic_ns(), draining=request.draining)
        self._relay(deltas)
        return wire.welcome_to_wire(welcome)

    async def heartbeat(self, request: Any) -> Any:
        """See `DirectoryState.heartbeat`."""
        pulse, deltas = self.state.heartbeat(wire.heartbeat_from_wire(request), time.monotonic_ns())
        self._relay(deltas)
        return wire.pulse_to_wire(pulse)

    async def report(self, request: Any) -> Any:
        """See `DirectoryState.report`."""
        for message in request.reports:
            self._relay(self.state.report(wire.report_from_wire(message)))
        return pb.ReportResponse()

    async def lookup(self, request: Any) -> Any:
        """See `DirectoryState.lookup`."""
        chain = _bounded_hashes(request.hashes)
        found = self.state.lookup(chain, request.group)
        return pb.LookupResponse(directory_epoch=self.state.directory_epoch, workers=wire.prefixes_to_wire(found))

    async def suspect(self, request: Any) -> Any:
        """See `DirectoryState.suspect`."""
        reporter = wire.key_from_wire(request.reporter) if request.HasField("reporter") else None
        key = wire.key_from_wire(request.key)
        started, deltas = self.state.suspect(
            key, reporter, request.reason, token=secrets.randbits(63), now_ns=time.monotonic_ns()
        )
        if started:
            log.warning("%s is suspected by %s: %s", key, reporter or "a router", request.reason)
        self._relay(deltas)
        return pb.SuspectResponse(started=started)

    async def drain(self, request: Any) -> Any:
        """See `DirectoryState.drain`."""
        key, deltas = self.state.drain(WorkerId(request.worker_id))
        self._relay(deltas)
        return pb.DrainResponse(key=wire.key_to_wire(key))

    async def leave(self, request: Any) -> Any:
        """See `DirectoryState.leave`."""
        self._relay(self.state.leave(wire.key_from_wire(request.key)))
        return pb.LeaveResponse()

    async def tend(self, request: Any) -> Any:
        """See `DirectoryState.tend`."""
        hashes, pins = _bounded_hashes(request.hashes), _bounded_pins(request.pins)
        key = wire.key_from_wire(request.key)
        return tending_to_wire(self.state.tend(key, hashes, request.pins_digest, pins, time.monotonic_ns()))

    async def pins(self, request: Any) -> Any:
        """See `DirectoryState.merge_pins`."""
        views = self.state.merge_pins(_bounded_pins(request.pins))
        return pb.PinsResponse(pins=[view_to_wire(view) for view in views])

    async def describe(self, request: Any) -> Any:
        """Members, sizes, counters."""
        del request
        state, suspicions = self.state, self.state.suspicions()
        return pb.DescribeResponse(
            directory_epoch=state.directory_epoch,
            sequence=state.sequence,
            uptime_ns=time.monotonic_ns() - self._started_ns,
            lease_ns=state.limits.lease_ns,
            entries=state.index.entries,
            max_entries=state.limits.max_entries,
            blocks=state.index.blocks,
            watchers=len(self._watchers),
            members=[
                pb.MemberDescription(
                    info=wire.info_to_wire(member.info),
                    state=wire.state_to_wire(member.state),
                    blocks=state.index.counts(member.info.key),
                    load=wire.load_to_wire(member.report.load) if member.report else None,
                    suspicion=suspicions.get(member.info.key, ""),
                    event_lag_ns=member.event_lag_ns,
                )
                for member in state.members()
            ],
            counters=wire.counters_to_wire({**asdict(state.counters), "restarts": self._restarts}.items()),
        )

    # -- streams ------------------------------------------------------------------------------------------------

    async def publish(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """See `DirectoryState.publish`. Reads one batch at a time: HTTP/2 flow control is the back-pressure."""
        async for message in requests:
            ack, deltas = self.state.publish(wire.batch_from_wire(message))
            self._relay(deltas)
            yield wire.ack_to_wire(ack)

    async def watch(self, request: Any) -> AsyncIterator[bytes]:
        """Snapshot, then deltas, as serialised ``WatchEvent``s; ends when the service closes."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise CapacityError(f"the service already feeds {MAX_WATCHERS} watchers", watchers=MAX_WATCHERS)
        watcher = _Watcher(request.name)
        self._watchers.add(watcher)
        try:
            while not self._closing.is_set():
                watcher.drop()
                async for part in self._snapshot():
                    yield part
                while not watcher.lost and not self._closing.is_set():
                    event = watcher.pop()
                    if event is None:
                        await watcher.wait(SIGN_OF_LIFE_S)
                        event = watcher.pop() or self._sign_of_life(watcher)
                    if not watcher.lost:
                        yield event
                if watcher.lost:
                    self.state.counters.watchers_dropped += 1
                    log.warning("watcher %s was too slow and starts over from a snapshot", watcher.name)
        finally:
            self._watchers.discard(watcher)

    # -- life ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the state's time until `close`.

        Raises:
            InvariantViolation: the state is wrong, here or in a call; the process must end, its history is in the log.
        """
        while not self._closing.is_set():
            if self._failure is not None:
                raise self._failure
            self._relay(self.state.tick(time.monotonic_ns(), SWEEP_BLOCKS))
            try:
                await asyncio.wait_for(self._closing.wait(), TICK_S)
            except TimeoutError:
                continue

    def fail(self, error: InvariantViolation) -> None:
        """A call found our own bug: `run` ends with it."""
        log.critical("the state of the directory is wrong: %s", error)
        self._failure = error

    def close(self) -> None:
        """End `run` and all watch streams."""
        self._closing.set()
        for watcher in self._watchers:
            watcher.wake()

    # -- private ------------------------------------------------------------------------------------------------

    def _relay(self, deltas: tuple[Delta, ...]) -> None:
        for delta in deltas:
            if isinstance(delta.change, MemberChanged):
                log.info("member %s is %s", delta.change.info.key, delta.change.state.value)
            elif isinstance(delta.change, MemberGone):
                log.info("member %s is gone: %s", delta.change.key, delta.change.reason.value)
        if not self._watchers:
            return
        for delta in deltas:
            event = pb.WatchEvent(delta=wire.delta_to_wire(delta)).SerializeToString()
            for watcher in self._watchers:
                watcher.push(event)

    def _sign_of_life(self, watcher: _Watcher) -> bytes:
        """To be sent when nothing is queued: the watcher has been sent everything up to this sequence."""
        assert not len(watcher)
        alive = pb.Alive(directory_epoch=self.state.directory_epoch, sequence=self.state.sequence)
        return _serialise(pb.WatchEvent(alive=alive))

    async def _snapshot(self) -> AsyncIterator[bytes]:
        """A serialised snapshot, in parts; changes from its start on wait in the watcher's queue."""
        header, parts = self.state.header(), self.state.index.dump()
        numbers = {member.info.key: number for number, member in enumerate(header.members)}
        yield pb.WatchEvent(header=wire.header_to_wire(header)).SerializeToString()
        for part in parts:
            placements = [wire.placement_to_wire(placement, numbers) for placement in part]
            yield pb.WatchEvent(part=pb.SnapshotPart(placements=placements)).SerializeToString()
            await asyncio.sleep(0)  # heartbeats first
        yield pb.WatchEvent(end=pb.SnapshotEnd()).SerializeToString()


def _bounded_hashes(packed: bytes) -> tuple[BlockHash, ...]:
    if len(packed) > MAX_LOOKUP_BLOCKS * BLOCK_HASH_BYTES:
        raise RequestError(f"a lookup takes at most {MAX_LOOKUP_BLOCKS} blocks; ask for fewer", field="hashes")
    return wire.unpack_hashes(packed)


def _bounded_pins(messages: Any) -> tuple[Pin, ...]:
    if len(messages) > MAX_PINS + MAX_TRACES:
        raise RequestError(f"at most {MAX_PINS + MAX_TRACES} pins in one call, got {len(messages)}", field="pins")
    if sum(len(item.hashes) for item in messages) > MAX_PIN_BLOCKS * BLOCK_HASH_BYTES:
        raise RequestError(f"pins of one call have at most {MAX_PIN_BLOCKS} blocks in all", field="pins")
    return pins_from_wire(messages)


def handlers(service: MetadataService) -> grpc.GenericRpcHandler[Any, Any]:
    """The service's methods with errors mapped to statuses."""
    unary: dict[str, tuple[Any, Any]] = {
        "Join": (service.join, pb.JoinRequest),
        "Heartbeat": (service.heartbeat, pb.HeartbeatRequest),
        "Report": (service.report, pb.ReportRequest),
        "Lookup": (service.lookup, pb.LookupRequest),
        "Suspect": (service.suspect, pb.SuspectRequest),
        "Drain": (service.drain, pb.DrainRequest),
        "Leave": (service.leave, pb.LeaveRequest),
        "Tend": (service.tend, pb.TendRequest),
        "Pins": (service.pins, pb.PinsRequest),
        "Describe": (service.describe, pb.DescribeRequest),
    }
    methods: dict[str, Any] = {
        name: grpc.unary_unary_rpc_method_handler(
            _unary(service, method), request_deserializer=request.FromString, response_serializer=_serialise
        )
        for name, (method, request) in unary.items()
    }
    methods["Publish"] = grpc.stream_stream_rpc_method_handler(
        _stream(service, service.publish), request_deserializer=pb.EventBatch.FromString, response_serializer=_serialise
    )
    methods["Watch"] = grpc.unary_stream_rpc_method_handler(
        _stream(service, service.watch), request_deserializer=pb.WatchRequest.FromString, response_serializer=bytes
    )
    return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)


def _serialise(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def _unary(
    service: MetadataService, method: Callable[[Any], Awaitable[Any]]
) -> Callable[[Any, Context], Awaitable[Any]]:
    async def handle(request: Any, context: Context) -> Any:
        try:
            return await method(request)
        except KVPoolError as error:
            await context.abort(status_of(error), error.message[:MAX_STATUS_CHARS], error_metadata(error))
        except InvariantViolation as error:
            service.fail(error)
            await context.abort(grpc.StatusCode.INTERNAL, str(error))

    return handle


def _stream(
    service: MetadataService, method: Callable[[Any], AsyncIterator[Any]]
) -> Callable[[Any, Context], AsyncIterator[Any]]:
    async def handle(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            async for response in method(request):
                yield response
        except KVPoolError as error:
            await context.abort(status_of(error), error.message[:MAX_STATUS_CHARS], error_metadata(error))
        except InvariantViolation as error:
            service.fail(error)
            await context.abort(grpc.StatusCode.INTERNAL, str(error))

    return handle
