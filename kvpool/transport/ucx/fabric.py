"""The only calls into ucxx: context, ports (UCX workers), connections and requests, with our errors instead of UCX's.

One process end has a *server* port (receives pulls, connects back to peers' readers, sends) and *reader* ports
(connect to peers' servers, receive offers and data). So a connection belongs to one direction, and closing it by force
when a holder stalls never touches what that holder reads from us.

Nothing here is thread-safe: after construction every call belongs to the progress thread.

A request must be kept until `Operation.completed`: ucxx cancels a request that is dropped, and UCX may still write
into its buffer. `Operation` therefore owns the buffer, and its owner keeps the operation.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from ucxx._lib import libucxx
from ucxx._lib.arr import Array

from kvpool.errors import KVPoolError
from kvpool.transport.ucx.address import from_seal, seal
from kvpool.transport.ucx.errors import FOREIGN, from_ucx
from kvpool.transport.ucx.native import FailedEndpointClose, forget_cancelled_requests
from kvpool.transport.wire import MAX_MESSAGE_BYTES, is_data_tag

log = logging.getLogger(__name__)

PROBES_PER_STEP = 64
RETIRED_NS = 5_000_000_000
MAX_PORTS = 8
MAX_ADDRESSES = 4096  # of incarnations a reader remembers to have met
_ANY_TAG = libucxx.UCXXTag(0)
_ANY_MASK = libucxx.UCXXTagMask(0)


class Operation:
    """One send or receive in flight, and the buffer it may touch until it completed."""

    __slots__ = ("_request", "buffer", "peer")

    def __init__(self, request: Any, buffer: object, peer: str) -> None:
        self._request = request
        self.buffer = buffer
        self.peer = peer

    @property
    def completed(self) -> bool:
        """Terminal: UCX neither reads nor writes the buffer any more."""
        return bool(self._request.completed)

    def error(self) -> KVPoolError | None:
        """Why a completed operation failed, None when it succeeded."""
        try:
            self._request.check_error()
        except FOREIGN as error:
            return from_ucx(error, "moving data", self.peer)
        return None


class Connection:
    """One endpoint to one UCX worker of a peer, with error handling on."""

    def __init__(self, endpoint: Any, peer: str, port: Port) -> None:
        self._endpoint = endpoint
        self.port = port
        self._closing = False
        self._failed_close: FailedEndpointClose | None = None
        self.peer = peer

    @property
    def alive(self) -> bool:
        """False once UCX reported the peer gone or the connection was closed."""
        return not self._closing and bool(self._endpoint.alive)

    def send(self, data: bytes | memoryview, tag: int) -> Operation:
        """Start sending. The bytes must stay unchanged until the operation completed."""
        try:
            return Operation(self._endpoint.tag_send(Array(data), libucxx.UCXXTag(tag)), data, self.peer)
        except FOREIGN as error:
            raise from_ucx(error, "sending", self.peer) from error

    def receive(self, into: memoryview, tag: int) -> Operation:
        """Post a receive. Bytes may land until the operation completed."""
        try:
            return Operation(self._endpoint.tag_recv(Array(into), libucxx.UCXXTag(tag)), into, self.peer)
        except FOREIGN as error:
            raise from_ucx(error, "receiving", self.peer) from error

    def failure(self) -> KVPoolError | None:
        """What UCX reported about the peer, if anything."""
        try:
            self._endpoint.raise_on_error()
        except FOREIGN as error:
            return from_ucx(error, "the connection", self.peer)
        return None

    def close(self) -> None:
        """Close by force: aborts what is in flight and cancels unmatched receives. Idempotent.

        Operations complete in later progress, and only then are their buffers free; see `closed`.
        """
        if self._closing:
            return
        self._closing = True
        try:
            if self._endpoint.alive:
                self._endpoint.close_blocking()
            else:
                self._failed_close = FailedEndpointClose(int(self._endpoint.handle))
        except FOREIGN as error:
            raise from_ucx(error, "closing", self.peer) from error

    @property
    def closed(self) -> bool:
        """Whether UCX is done with a connection that `close` was called on."""
        return self._closing and (self._failed_close is None or self._failed_close.completed)

    def drop(self) -> None:
        """Let go of a closed endpoint none of whose operations is open; otherwise ucxx would keep it for ever."""
        forget_cancelled_requests(int(self._endpoint.ucxx_ptr))
        self._endpoint = None


class Port:
    """One UCX worker: an address, progress, connections, and the messages that arrive."""

    def __init__(self, context: Any) -> None:
        self._worker = libucxx.UCXWorker(context)
        self._worker.init_blocking_progress_mode()
        self.address = seal(bytes(self._worker.address.tobytes()))
        self.event_fd = int(self._worker.epoll_file_descriptor)
        self._fetching: deque[Operation] = deque()
        self._strays: list[Operation] = []

    def connect(self, address: bytes, peer: str) -> Connection:
        """Make a connection to a peer's sealed address. Returns at once; failures show as a dead connection.

        Raises:
            KVPoolError: the address is malformed or cannot be reached by any transport both ends have.
        """
        try:
            target = libucxx.UCXAddress.create_from_buffer(from_seal(address, peer))
            return Connection(self._worker.create_endpoint_from_worker_address(target, True), peer, self)
        except FOREIGN as error:
            raise from_ucx(error, "connecting", peer) from error

    def progress(self) -> bool:
        """Move UCX forward by one step; True when something happened."""
        return bool(self._worker.progress_once())

    def progress_all(self) -> None:
        """Move UCX forward until nothing happens, cancelling requests of failed connections."""
        self._worker.progress()

    @property
    def fetching(self) -> bool:
        """Whether a message is arriving."""
        return bool(self._fetching or self._strays)

    def messages(self) -> list[memoryview | None]:
        """Control messages that arrived, in the order in which they completed; None for one that did not survive.

        Data that no posted receive matched belongs to a read that ended; it is fetched and dropped, or it would pile
        up in UCX.
        """
        self._probe()
        if not self._fetching and not self._strays:
            return []
        self._strays = [stray for stray in self._strays if not stray.completed]
        done: list[memoryview | None] = []
        for _ in range(len(self._fetching)):
            operation = self._fetching.popleft()
            if operation.completed:
                done.append(_control_bytes(operation))
            else:
                self._fetching.append(operation)
        return done

    def arm(self) -> bool:
        """Prepare to block on `event_fd`; False when there is something to do first."""
        return bool(self._worker.arm())

    def close(self) -> None:
        """Destroy the worker. Its connections must be closed and dropped, and their operations over, before."""
        buffers = [operation.buffer for operation in (*self._fetching, *self._strays)]
        self._fetching.clear()
        self._strays.clear()
        self._worker = None  # destroying it may still move bytes into what was arriving
        del buffers

    def _probe(self) -> None:
        for _ in range(PROBES_PER_STEP):
            probe = self._worker.tag_probe(_ANY_TAG, _ANY_MASK, True)
            if not probe.matched:
                return
            # A fresh buffer per message: it may be written until the operation completes, whatever happens meanwhile.
            buffer = np.empty(max(1, probe.length), dtype=np.uint8)
            request = self._worker.tag_recv_with_handle(Array(buffer), probe)
            operation = Operation(request, buffer.data[: probe.length], "unknown")
            if is_data_tag(int(probe.sender_tag.value)):
                self._strays.append(operation)
            else:
                self._fetching.append(operation)


class PortSet:
    """Ports for outgoing connections, so that a port rarely connects to one address twice.

    UCX pairs the two endpoints of a connection by counting the connections between two workers on both sides. When one
    side closes by force before the other has connected back, the counts differ from then on; answers then use hidden
    endpoints that nobody can close, and a fence waits until the peer goes on or dies. A fresh pair of workers cannot
    get there. In a healthy cluster there is one port; a reconnection to a living incarnation takes another one, up to
    `MAX_PORTS` (a dozen descriptors and 4 MiB each), then the one that met the address longest ago.

    UCX makes no further worker once a network interface that it met at the start is gone, and every try leaks
    descriptors. The set then stays as it is.

    Ports live as long as the set: a peer that still connects to a worker when it vanishes may crash inside UCX.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self.ports: list[Port] = [Port(context)]
        self._complete = False
        self._met: dict[bytes, list[Port]] = {}  # by address, longest ago first

    def connect(self, address: bytes, peer: str) -> Connection:
        """Connect through the port that is best for this address.

        Raises:
            KVPoolError: as `Port.connect`.
        """
        from_seal(address, peer)  # before a port is spent on what leads nowhere
        met = self._met.setdefault(address, [])
        port = next((port for port in self.ports if port not in met), None)
        if port is None:
            port = self._add() or met.pop(0)
        met.append(port)
        while len(self._met) > MAX_ADDRESSES:
            del self._met[next(iter(self._met))]
        return port.connect(address, peer)

    def progress_all(self) -> None:
        """`Port.progress_all` of every port."""
        for port in self.ports:
            port.progress_all()

    def _add(self) -> Port | None:
        if self._complete:
            return None
        try:
            self.ports.append(Port(self._context))
        except FOREIGN as error:
            log.warning("UCX makes no further worker, %d must do: %s", len(self.ports), error)
            self._complete = True
            return None
        self._complete = len(self.ports) == MAX_PORTS
        return self.ports[-1]


_retired: deque[tuple[int, list[Port]]] = deque()
"""Ports of ended transports of this process, and since when. A process that ends takes them along."""


class Fabric:
    """Context and ports of one process end.

    Ports outlive `retire` by some seconds: destroying a UCX worker while other workers of the process still tear down
    their connections to it crashed in UCX.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        _destroy_retired(time.monotonic_ns() - RETIRED_NS)
        try:
            features = (libucxx.Feature.TAG, libucxx.Feature.WAKEUP)
            self._context = libucxx.UCXContext(dict(settings), features)
            self.readers = PortSet(self._context)
            self.server = Port(self._context)
        except FOREIGN as error:
            raise from_ucx(error, "creating the UCX context", "self") from error

    @property
    def ports(self) -> list[Port]:
        """Every port there is now, the server's last."""
        return [*self.readers.ports, self.server]

    def retire(self) -> None:
        """Nobody uses the ports any more; they are destroyed when a later fabric is made."""
        _retired.append((time.monotonic_ns(), self.ports))

    @property
    def info(self) -> str:
        """UCX's description of the context: devices and memory domains."""
        return str(self._context.info)


def _destroy_retired(before_ns: int) -> None:
    while _retired and _retired[0][0] < before_ns:
        for port in _retired.popleft()[1]:
            port.close()


def _control_bytes(operation: Operation) -> memoryview | None:
    view = operation.buffer
    if operation.error() is not None or not isinstance(view, memoryview) or len(view) > MAX_MESSAGE_BYTES:
        return None
    return view
