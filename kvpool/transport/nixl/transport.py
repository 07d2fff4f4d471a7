"""The NIXL transport as the rest of the pool sees it: the contract of `kvpool.transport.base` over one-sided READs.

For holders on the same host or behind RDMA; between hosts over TCP it refuses (`control.refuse_tcp`). Tested on shared
memory only: nobody has seen its fence on RDMA or on device memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvpool.errors import (
    CapacityError,
    ConfigError,
    PeerGoneError,
    RequestError,
    TransferCancelledError,
    TransferError,
)
from kvpool.transport.base import BlockSource, Peer, ReadRequest, TransportStats
from kvpool.transport.handle import LocalEnd, ReadTask, SegmentShape, flat_bytes
from kvpool.transport.host import host_id
from kvpool.transport.nixl.agent import Agent, installed
from kvpool.transport.nixl.control import Endpoint, listen, own_address
from kvpool.transport.nixl.reader import PeerReader, ReadCounters
from kvpool.transport.nixl.server import ControlServer
from kvpool.types import WorkerKey

CLOSE_LIMIT_S = 5.0
MAX_PEERS = 256
MAX_WAITING_READS = 65_536


@dataclass(frozen=True, slots=True)
class NixlOptions:
    """Bounds of one NIXL end.

    Attributes:
        host: address of the control path; peers on other hosts must reach it. None finds it (`control.own_address`).
    """

    host: str | None = None

    @classmethod
    def from_settings(cls, settings: Mapping[str, str]) -> NixlOptions:
        """From the settings of `create_transport`: ``HOST``.

        Raises:
            ConfigError: another setting.
        """
        unknown = set(settings) - {"HOST"}
        if unknown:
            raise ConfigError(f"the nixl transport knows HOST only, not {sorted(unknown)}", field="settings")
        return cls(settings.get("HOST"))


class NixlTransport:
    """One process's NIXL end; implements `kvpool.transport.base.Transport`.

    Args:
        options: bounds.
        clock_ns: monotonic clock.
        on_failure: called once, from one of its threads, when a bug of ours broke it; see `UcxTransport`.

    Raises:
        ConfigError: NIXL is not installed.
    """

    name = "nixl"

    def __init__(
        self,
        options: NixlOptions | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._on_failure = on_failure
        self.failure: BaseException | None = None
        if not installed():
            raise ConfigError("the nixl transport needs NIXL: pip install 'kvpool[nixl]'", field="transport")
        self._options = options or NixlOptions()
        self._clock_ns = clock_ns
        self._host_id = host_id()
        host = self._options.host or own_address()
        self._listener = listen(host)
        self._address = Endpoint(self._host_id, host, self._listener.getsockname()[1]).encode()
        self._counters = ReadCounters(threading.Lock())
        self._lock = threading.Lock()
        self._peers: dict[WorkerKey, PeerReader] = {}
        self._ending: list[PeerReader] = []
        self._local: LocalEnd | None = None
        self._shape = SegmentShape(0, 1)
        self._agent: Agent | None = None
        self._server: ControlServer | None = None
        self._closing = False

    @property
    def address(self) -> bytes:
        """Where the control path listens, and on which host."""
        return self._address

    def start(self, key: WorkerKey, segment: memoryview, block_bytes: int, source: BlockSource) -> None:
        """Register the segment and begin to serve reads as ``key``."""
        if self._local is not None:
            raise RequestError("this transport was started before; make a new one", field="transport")
        local = LocalEnd(key, flat_bytes(segment), block_bytes)
        self._agent = Agent(f"{key}-{self._listener.getsockname()[1]}-served", local.segment)
        self._shape = SegmentShape(len(local.segment), block_bytes)
        self._server = ControlServer(
            self._listener,
            local,
            base=self._agent.base,
            metadata=self._agent.metadata(),
            source=source,
            clock_ns=self._clock_ns,
            on_failure=self._fail,
        )
        self._local = local

    def read(self, request: ReadRequest) -> ReadTask:
        """Start reading; returns at once.

        Raises:
            RequestError: a destination lies outside the segment or ranges overlap.
            CapacityError: too many reads wait, or too many peers are read from.
            TransferCancelledError: the transport is not running.
            TransferError: one of its threads broke.
        """
        if self._local is None or self._closing:
            raise TransferCancelledError("the transport is not running; start it first or make a new one")
        self._shape.check(request)
        with self._lock:
            if self.failure is not None:
                raise TransferError(f"the transport broke: {self.failure!r}; make a new one")
            reader = self._reader_of(request.peer, self._local)
            if reader.waiting >= MAX_WAITING_READS:
                raise CapacityError(f"{MAX_WAITING_READS} reads wait already; redo the prefill")
            task = ReadTask(request, self._shape.block_bytes, self._clock_ns, reader.cancel)
            if not reader.submit(task):  # its idle time ended just now
                reader = self._make(request.peer, self._local)
                task = ReadTask(request, self._shape.block_bytes, self._clock_ns, reader.cancel)
                reader.submit(task)
        return task

    def forget(self, peer: WorkerKey) -> None:
        """Close what connects to this incarnation; reads from it end with `PeerGoneError`."""
        with self._lock:
            reader = self._peers.get(peer)
            if reader is not None:
                self._end(reader, PeerGoneError(f"worker {peer} was forgotten", peer=str(peer)))

    def stats(self) -> TransportStats:
        """Current counters."""
        counters, server = self._counters, self._server
        return TransportStats(
            reads=counters.reads,
            reads_failed=counters.reads_failed,
            blocks_read=counters.blocks_read,
            bytes_read=counters.bytes_read,
            blocks_served=0 if server is None else server.blocks_served,
            bytes_served=0 if server is None else server.bytes_served,
            corrupt_blocks=counters.corrupt_blocks,
            protocol_errors=counters.protocol_errors + (0 if server is None else server.protocol_errors),
            endpoints=counters.agents + (0 if server is None else server.readers),
            in_flight_bytes=counters.in_flight_bytes,
            quarantined_reads=counters.quarantined_reads,
        )

    def close(self) -> None:
        """Fail every read, fence, release. Waits at most 5 s; reads that are not fenced by then stay CANCELLING."""
        self._closing = True
        until_s = time.monotonic() + CLOSE_LIMIT_S
        with self._lock:
            for reader in list(self._peers.values()):
                self._end(reader, TransferCancelledError("the transport was closed"))
            ending = list(self._ending)
        for reader in ending:
            reader.join(max(0.0, until_s - time.monotonic()))
        if self._server is None:
            self._listener.close()
        elif self._server.close(max(0.1, until_s - time.monotonic())) and self._agent is not None:
            agent, self._agent = self._agent, None
            agent.destroy()

    # ── under the lock ───────────────────────────────────────────────────────────────────────────────────────────

    def _reader_of(self, peer: Peer, local: LocalEnd) -> PeerReader:
        reader = self._peers.get(peer.key)
        if reader is not None and reader.peer.address != peer.address:
            self._end(reader, PeerGoneError(f"{peer.key} has another address now", peer=str(peer.key)))
            reader = None
        return reader or self._make(peer, local)

    def _make(self, peer: Peer, local: LocalEnd) -> PeerReader:
        self._peers = {key: reader for key, reader in self._peers.items() if not reader.ended}
        self._ending = [reader for reader in self._ending if not reader.join(0)]
        if len(self._peers) >= MAX_PEERS:
            raise CapacityError(f"{MAX_PEERS} holders are connected already; redo the prefill")
        reader = PeerReader(peer, local, self._host_id, self._counters, clock_ns=self._clock_ns, on_failure=self._fail)
        self._peers[peer.key] = reader
        return reader

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            first, self.failure = self.failure is None, self.failure or error
        if first and self._on_failure is not None:
            self._on_failure(error)

    def _end(self, reader: PeerReader, error: PeerGoneError | TransferCancelledError) -> None:
        del self._peers[reader.peer.key]
        self._ending.append(reader)
        reader.end(error)
