"""The UCX transport as the rest of the pool sees it: the contract of `kvpool.transport.base` over a progress thread.

Threads, signals, fork: one daemon thread, no signal handler, no fork; a forked child must not use it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvpool.errors import CapacityError, RequestError, TransferCancelledError, TransferError
from kvpool.transport.base import BlockSource, ReadRequest, TransportStats
from kvpool.transport.handle import LocalEnd, ReadTask, SegmentShape, flat_bytes
from kvpool.transport.ucx.direct import DirectMemory
from kvpool.transport.ucx.fabric import Fabric
from kvpool.transport.ucx.loop import Command, OnFailure, ProgressLoop
from kvpool.transport.ucx.reader import ReaderHalf
from kvpool.transport.ucx.server import ServerHalf
from kvpool.transport.ucx.settings import UcxOptions
from kvpool.transport.verify import Helpers
from kvpool.types import WorkerKey

CLOSE_LIMIT_S = 5.0


class _Running:
    """What exists between `UcxTransport.start` and the end of its thread."""

    def __init__(
        self,
        fabric: Fabric,
        local: LocalEnd,
        source: BlockSource,
        options: UcxOptions,
        clock_ns: Callable[[], int],
        on_failure: OnFailure | None,
    ) -> None:
        self.shape = SegmentShape(len(local.segment), local.block_bytes)
        self.helpers = Helpers(f"kvpool-help-{local.key}", self._deliver)
        memory = DirectMemory(local.segment, options.settings)
        self.reader = ReaderHalf(fabric.readers, local, options, self.helpers, memory)
        self.server = ServerHalf(fabric.server, local, source, options, helpers=self.helpers, memory=memory)
        self.loop = ProgressLoop(
            fabric,
            self.reader,
            self.server,
            spin_ns=options.spin_ns,
            clock_ns=clock_ns,
            name=f"kvpool-ucx-{local.key}",
            on_failure=on_failure,
        )

    def _deliver(self, command: Command) -> None:
        self.loop.post(command)


class UcxTransport:
    """One process's UCX end; implements `kvpool.transport.base.Transport`.

    Args:
        options: bounds and UCX settings.
        clock_ns: monotonic clock.
        on_failure: called once, from the progress thread, when a bug of ours broke it. Nothing is read or served any
            more, so its owner must not go on as a holder.

    Raises:
        KVPoolError: UCX cannot be initialised with these settings.
    """

    name = "ucx"

    def __init__(
        self,
        options: UcxOptions | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        on_failure: OnFailure | None = None,
    ) -> None:
        self._on_failure = on_failure
        self._options = options or UcxOptions()
        self._clock_ns = clock_ns
        self._fabric = Fabric(self._options.context_settings())
        self._address = self._fabric.server.address
        self._running: _Running | None = None
        self._closing = False

    @property
    def address(self) -> bytes:
        """Sealed UCX worker address of the serving side, a few hundred bytes; see `kvpool.transport.ucx.address`."""
        return self._address

    @property
    def info(self) -> str:
        """UCX's description of devices and transports, for ``kvpool doctor``."""
        return self._fabric.info

    def start(self, key: WorkerKey, segment: memoryview, block_bytes: int, source: BlockSource) -> None:
        """Register the segment and begin to serve reads as ``key``."""
        if self._running is not None:
            raise RequestError("this transport was started before; make a new one", field="transport")
        local = LocalEnd(key, flat_bytes(segment), block_bytes)
        self._running = _Running(self._fabric, local, source, self._options, self._clock_ns, self._on_failure)
        self._running.loop.start()

    def read(self, request: ReadRequest) -> ReadTask:
        """Start reading; returns at once.

        Raises:
            RequestError: a destination lies outside the segment or ranges overlap.
            CapacityError: too many reads wait already.
            TransferCancelledError: the transport is not running.
            TransferError: its progress thread broke.
        """
        running = self._running
        if running is not None and running.loop.failure is not None:
            raise TransferError(f"the transport broke: {running.loop.failure!r}; make a new one")
        if running is None or self._closing:
            raise TransferCancelledError("the transport is not running; start it first or make a new one")
        running.shape.check(request)
        if running.reader.open_reads >= self._options.waiting_reads:
            raise CapacityError(f"{self._options.waiting_reads} reads wait already; redo the prefill")

        def cancel(task: ReadTask) -> None:
            running.loop.post(lambda now_ns: running.reader.cancel(task, now_ns))

        task = ReadTask(request, running.shape.block_bytes, self._clock_ns, cancel)
        running.loop.post(lambda now_ns: running.reader.submit(task, now_ns))
        return task

    def forget(self, peer: WorkerKey) -> None:
        """Close what connects to this incarnation; reads from it end with `PeerGoneError`."""
        running = self._running
        if running is not None:
            running.loop.post(lambda now_ns: running.reader.forget(peer, now_ns))

    def stats(self) -> TransportStats:
        """Current counters. Read without a lock: each is exact, together they may be one step apart."""
        if self._running is None:
            return TransportStats()
        reader, server = self._running.reader, self._running.server
        return TransportStats(
            reads=reader.reads,
            reads_failed=reader.reads_failed,
            blocks_read=reader.blocks_read,
            bytes_read=reader.bytes_read,
            blocks_served=server.blocks_served,
            bytes_served=server.bytes_served,
            corrupt_blocks=reader.corrupt_blocks,
            endpoints=reader.endpoints + server.endpoints,
            in_flight_bytes=reader.in_flight_bytes,
            quarantined_reads=reader.quarantined_reads,
            protocol_errors=reader.protocol_errors + server.protocol_errors,
            frames_read=reader.frames.frames,
            bad_frames=reader.frames.faults,
            bytes_saved=reader.frames.bytes_saved,
            decode_ns=reader.frames.decode_ns,
            encode_ns=server.frames.encode_ns,
            compressed_links=reader.frames.links_on,
            staging_bytes=reader.frames.staging_bytes + server.frames.staging_bytes,
        )

    def close(self) -> None:
        """Fail every read, fence, release. Waits at most 5 s; reads that are not fenced by then stay CANCELLING."""
        self._closing = True
        if self._running is not None:
            self._running.loop.stop()
            if self._running.loop.join(CLOSE_LIMIT_S):
                self._running.helpers.stop()
