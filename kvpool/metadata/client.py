"""Unary calls to the metadata service, with a deadline and failover over its replicas.

Synchronous; safe to share between threads. Every call is idempotent, so a replica that is down or late costs its share
of the deadline and the next is asked. The replica that answered last is asked first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import grpc

from kvpool.errors import KVPoolError, RequestError, UnavailableError
from kvpool.metadata import wire
from kvpool.metadata.pins import Pin, PinView, Tending
from kvpool.metadata.pins_wire import pin_to_wire, tending_from_wire, view_from_wire
from kvpool.metadata.prefixes import Prefixes
from kvpool.metadata.rpc import CHANNEL_OPTIONS, error_from_rpc
from kvpool.metadata.security import Security
from kvpool.metadata.v1 import metadata_pb2 as pb
from kvpool.metadata.v1.metadata_pb2_grpc import MetadataServiceStub
from kvpool.types import BlockHash, Tier, WorkerId, WorkerKey

DEFAULT_TIMEOUT_S = 2.0
MIN_SHARE_S = 0.05
ROUND_PAUSE_S = 0.05


class Endpoint:
    """One replica: a channel of its own, secured as the environment says, and the stub over it. `close` when done."""

    def __init__(self, address: str) -> None:
        security = Security.from_environment()
        self.address = address
        self.metadata = security.call_metadata
        self.channel = security.channel(address, CHANNEL_OPTIONS)
        self.stub: Any = MetadataServiceStub(self.channel)  # type: ignore[no-untyped-call]

    def call(self, method: str, request: Any, timeout_s: float) -> Any:
        """One unary call.

        Raises:
            KVPoolError: what the service raised, or `UnavailableError` and `DeadlineError` when it did not answer.
        """
        try:
            return getattr(self.stub, method)(request, timeout=timeout_s, metadata=self.metadata)
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.address) from error
        except ValueError as error:  # the channel was closed by another thread
            raise UnavailableError(f"the channel to {self.address} is closed", address=self.address) from error

    def close(self) -> None:
        """End the channel and all its calls. May be repeated."""
        self.channel.close()


def check_endpoints(endpoints: Sequence[str]) -> tuple[str, ...]:
    """Refuse a missing or malformed list of ``HOST:PORT``.

    Raises:
        RequestError: names the entry.
    """
    if isinstance(endpoints, str) or not endpoints:
        raise RequestError("give a list of metadata addresses, for example ['127.0.0.1:7000']", field="endpoints")
    for address in endpoints:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise RequestError(f"metadata address {address!r} is not HOST:PORT", field="endpoints")
    return tuple(endpoints)


class MetadataClient:
    """Unary calls.

    Args:
        endpoints: addresses of the replicas.
        timeout_s: deadline of one call over all replicas.
    """

    def __init__(self, endpoints: Sequence[str], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._endpoints = [Endpoint(address) for address in check_endpoints(endpoints)]
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._first = 0
        self.failovers = 0

    def __enter__(self) -> MetadataClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def lookup(self, chain: Sequence[BlockHash], *, group: int = 0) -> Prefixes:
        """How long a prefix of ``chain`` every live worker holds, by tier. Pins nothing.

        Raises:
            UnavailableError: no replica answered.
        """
        reply = self._any("Lookup", pb.LookupRequest(hashes=wire.pack_hashes(chain), group=group))
        return wire.prefixes_from_wire(reply.workers)

    def describe(self) -> dict[str, Any]:
        """Members, sizes and counters of one replica, as JSON-able data.

        Returns:
            ``{"address", "directory_epoch", "uptime_ns", "lease_ns", "entries", "max_entries", "blocks", "watchers",
            "members": [{"worker_id", "worker_epoch", "role", "state", "transport", "blocks": {tier: n},
            "capacity_blocks": {tier: n}, "block_bytes", "layout_fingerprint", …}], "counters": {name: n}}``

        Raises:
            UnavailableError: no replica answered.
        """
        return dict(self._one_of(_describe))

    def suspect(self, key: WorkerKey, reason: str, *, reporter: WorkerKey | None = None) -> bool:
        """Report a holder whose load failed to every replica; True when one of them started a suspicion.

        Raises:
            StaleError: the holder or the reporter is not a member.
            UnavailableError: no replica answered.
        """
        request = pb.SuspectRequest(key=wire.key_to_wire(key), reason=reason)
        if reporter is not None:
            request.reporter.CopyFrom(wire.key_to_wire(reporter))
        return any(reply.started for reply in self._all("Suspect", request))

    def drain(self, worker_id: WorkerId) -> WorkerKey:
        """Stop offering a worker, at every replica; returns its key. May be repeated.

        Raises:
            RequestError: no such member.
            UnavailableError: no replica answered.
        """
        return wire.key_from_wire(self._all("Drain", pb.DrainRequest(worker_id=worker_id))[0].key)

    def tend(self, key: WorkerKey, hashes: Sequence[BlockHash], pins_digest: int, pins: Sequence[Pin] = ()) -> Tending:
        """A worker's housekeeping; see `kvpool.metadata.state.DirectoryState.tend`.

        Raises:
            StaleError: not a member.
            UnavailableError: no replica answered.
        """
        request = pb.TendRequest(
            key=wire.key_to_wire(key),
            hashes=wire.pack_hashes(hashes),
            pins_digest=pins_digest,
            pins=[pin_to_wire(pin) for pin in pins],
        )
        return tending_from_wire(self._any("Tend", request))

    def pins(self, pins: Sequence[Pin] = ()) -> tuple[PinView, ...]:
        """Add, change or take back pins at every replica; returns all that one of them knows. May be repeated.

        Raises:
            RequestError: one is malformed.
            CapacityError: there are too many.
            UnavailableError: no replica answered.
        """
        request = pb.PinsRequest(pins=[pin_to_wire(pin) for pin in pins])
        reply = self._all("Pins", request)[0] if pins else self._any("Pins", request)
        return tuple(view_from_wire(item) for item in reply.pins)

    def leave(self, key: WorkerKey) -> None:
        """Remove a worker epoch for good, at every replica. May be repeated.

        Raises:
            StaleError: a newer epoch is a member.
            UnavailableError: no replica answered.
        """
        self._all("Leave", pb.LeaveRequest(key=wire.key_to_wire(key)))

    def close(self) -> None:
        """End all channels. May be repeated."""
        for endpoint in self._endpoints:
            endpoint.close()

    # -- private ------------------------------------------------------------------------------------------------

    def _any(self, method: str, request: Any) -> Any:
        return self._one_of(lambda endpoint, timeout_s: endpoint.call(method, request, timeout_s))

    def _one_of(self, call: Callable[[Endpoint, float], Any]) -> Any:
        """Ask the replicas in turn, round after round, until one answers or the deadline is over.

        A round gives each replica an equal share of the time that is left, so that one that hangs cannot use it up.
        """
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            first = self._first
            for tried in range(len(self._endpoints)):
                number = (first + tried) % len(self._endpoints)
                share_s = max(MIN_SHARE_S, deadline_s - time.monotonic()) / (len(self._endpoints) - tried)
                try:
                    reply = call(self._endpoints[number], share_s)
                except UnavailableError as error:
                    last = error
                    with self._lock:
                        self.failovers += 1
                    continue
                with self._lock:
                    self._first = number
                return reply
            if time.monotonic() + ROUND_PAUSE_S >= deadline_s:
                raise last
            time.sleep(ROUND_PAUSE_S)

    def _all(self, method: str, request: Any) -> list[Any]:
        """Tell every replica; an answer from one is enough. A replica's refusal is raised when none accepted."""
        replies, failures = [], list[KVPoolError]()
        share_s = self._timeout_s / len(self._endpoints)
        for endpoint in self._endpoints:
            try:
                replies.append(endpoint.call(method, request, share_s))
            except KVPoolError as error:
                failures.append(error)
        if not replies:
            refusals = [error for error in failures if not isinstance(error, UnavailableError)]
            raise (refusals or failures)[0]
        return replies


def _describe(endpoint: Endpoint, timeout_s: float) -> dict[str, Any]:
    reply = endpoint.call("Describe", pb.DescribeRequest(), timeout_s)
    return {
        "address": endpoint.address,
        "directory_epoch": reply.directory_epoch,
        "uptime_ns": reply.uptime_ns,
        "lease_ns": reply.lease_ns,
        "entries": reply.entries,
        "max_entries": reply.max_entries,
        "blocks": reply.blocks,
        "watchers": reply.watchers,
        "members": [_member_description(member) for member in reply.members],
        "counters": {counter.name: counter.value for counter in reply.counters},
    }


def _member_description(message: Any) -> dict[str, Any]:
    """A member of a DescribeResponse as JSON-able data."""
    info = wire.info_from_wire(message.info)
    load = wire.load_from_wire(message.load) if message.HasField("load") else None
    return {
        "worker_id": info.key.worker_id,
        "worker_epoch": info.key.worker_epoch,
        "role": info.role.value,
        "state": wire.state_from_wire(message.state).value,
        "suspicion": message.suspicion,
        "event_lag_ns": message.event_lag_ns,
        "transport": info.transport,
        "control_address": info.control_address,
        "layout_fingerprint": info.layout_fingerprint,
        "hash_scheme": info.hash_scheme,
        "block_tokens": info.block_tokens,
        "block_bytes": info.block_bytes,
        "blocks": {tier.name.lower(): blocks for tier, blocks in zip(Tier, message.blocks, strict=False)},
        "capacity_blocks": {
            tier.name.lower(): blocks for tier, blocks in zip(Tier, info.capacity_blocks, strict=False)
        },
        "load": None if load is None else {name: getattr(load, name) for name in wire.LOAD_FIELDS},
    }
