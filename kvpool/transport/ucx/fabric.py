"""The only calls into ucxx: context, workers, connections and requests, with our errors instead of UCX's.

One process end has two UCX workers: *reader* (connects to peers' servers, receives offers and data) and *server*
(receives pulls, connects back to peers' readers, sends). So a connection belongs to one direction, and closing it by
force when a holder stalls never touches what that holder reads from us.

Nothing here is thread-safe: after construction every call belongs to the progress thread.

A request must be kept until `Operation.completed`: ucxx cancels a request that is dropped, and UCX may still write
into its buffer. `Operation` therefore owns the buffer, and its owner keeps the operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from ucxx._lib import libucxx
from ucxx._lib.arr import Array

from kvpool.errors import KVPoolError
from kvpool.transport.ucx.errors import FOREIGN, from_ucx
from kvpool.transport.ucx.ucp import FailedEndpointClose, close_failed_endpoint
from kvpool.transport.wire import MAX_MESSAGE_BYTES

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


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message that arrived without a posted receive: its tag, and the operation that fetches it."""

    tag: int
    operation: Operation


class Connection:
    """One endpoint to one UCX worker of a peer, with error handling on."""

    def __init__(self, endpoint: Any, peer: str) -> None:
        self._endpoint = endpoint
        self._closed = False
        self._failed_close: FailedEndpointClose | None = None
        self.peer = peer

    @property
    def alive(self) -> bool:
        """False once UCX reported the peer gone or the connection was closed."""
        return not self._closed and bool(self._endpoint.alive)

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
        """Close by force: cancels unmatched receives and aborts what is in flight. Idempotent.

        Operations complete during this call or in later progress; only then are their buffers free.
        """
        if self._closed:
            return
        self._closed = True
        if not self._endpoint.alive:  # ucxx ignores a close after a failure
            self._failed_close = close_failed_endpoint(int(self._endpoint.handle))
            return
        try:
            self._endpoint.close_blocking()
        except FOREIGN as error:
            raise from_ucx(error, "closing", self.peer) from error

    @property
    def closed(self) -> bool:
        """Whether UCX is done with a connection that `close` was called on."""
        return self._failed_close is None or self._failed_close.completed()


class Port:
    """One UCX worker: an address, progress, and arrivals."""

    def __init__(self, context: Any) -> None:
        self._worker = libucxx.UCXWorker(context)
        self._worker.init_blocking_progress_mode()
        self.address = bytes(self._worker.address.tobytes())
        self.event_fd = int(self._worker.epoll_file_descriptor)

    def connect(self, address: bytes, peer: str) -> Connection:
        """Make a connection. Returns at once; failures show as a dead connection.

        Raises:
            KVPoolError: the address is malformed or cannot be reached by any transport both ends have.
        """
        try:
            target = libucxx.UCXAddress.create_from_buffer(address)
            return Connection(self._worker.create_endpoint_from_worker_address(target, True), peer)
        except FOREIGN as error:
            raise from_ucx(error, "connecting", peer) from error

    def progress(self) -> bool:
        """Move UCX forward by one step; True when something happened."""
        return bool(self._worker.progress_once())

    def progress_all(self) -> None:
        """Move UCX forward until nothing happens, cancelling requests of failed connections."""
        self._worker.progress()

    def arrival(self) -> Arrival | None:
        """Take the next message that no posted receive matched."""
        probe = self._worker.tag_probe(_ANY_TAG, _ANY_MASK, True)
        if not probe.matched:
            return None
        # A fresh buffer per message: it may be written until the operation completes, whatever happens meanwhile.
        buffer = np.empty(max(1, probe.length), dtype=np.uint8)
        view = buffer.data[: probe.length]
        tag = int(probe.sender_tag.value)
        return Arrival(tag, Operation(self._worker.tag_recv_with_handle(Array(buffer), probe), view, "unknown"))

    def arm(self) -> bool:
        """Prepare to block on `event_fd`; False when there is something to do first."""
        return bool(self._worker.arm())

    @property
    def info(self) -> str:
        """UCX's own description of the worker."""
        return str(self._worker.info)


class Fabric:
    """Context and the two ports of one process end."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        try:
            features = (libucxx.Feature.TAG, libucxx.Feature.WAKEUP)
            self._context = libucxx.UCXContext(dict(settings), features)
            self.reader = Port(self._context)
            self.server = Port(self._context)
        except FOREIGN as error:
            raise from_ucx(error, "creating the UCX context", "self") from error

    @property
    def info(self) -> str:
        """UCX's description of the context: devices and memory domains."""
        return str(self._context.info)


def message_of(operation: Operation) -> memoryview | None:
    """Bytes of a completed control arrival, None when it failed or is longer than any message of ours."""
    view = operation.buffer
    if operation.error() is not None or not isinstance(view, memoryview) or len(view) > MAX_MESSAGE_BYTES:
        return None
    return view
