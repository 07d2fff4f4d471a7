"""The holder's half of the NIXL transport: pins blocks and says where they lie; the READs themselves pass it by.

One thread, one selector. A read lease is taken by `BlockSource.pin` when a pull comes and released exactly once: when
the reader stops the pull, when its stream ends, or when its time is over. The store's own, shorter bound is renewed
when the reader asks for that. A reader that still reads after its lease sees bytes that do not verify.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvpool.errors import CapacityError, IncompatibleError, IntegrityError, KVPoolError, StaleError
from kvpool.transport.base import BlockSource
from kvpool.transport.handle import LocalEnd
from kvpool.transport.nixl.control import HELLO, MessageBuffer, framed
from kvpool.transport.wire import (
    Grant,
    Message,
    Offer,
    Pull,
    Refuse,
    Stop,
    Window,
    decode,
    encode,
    identity_digest,
    merge_runs,
)

log = logging.getLogger(__name__)

MAX_READERS = 1024
MAX_LEASES_PER_READER = 64
MAX_UNSENT_BYTES = 4 << 20
MAX_RUN_BYTES = 8 << 20
LEASE_SLACK_NS = 1_000_000_000
MAX_LEASE_NS = 120_000_000_000
TICK_S = 0.25
RECEIVE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Leased:
    """A pull that was answered: its read lease, its end, and the blocks of its runs."""

    lease_id: int
    ends_at_ns: int
    run_blocks: tuple[int, ...]


@dataclass(slots=True, eq=False)
class ReaderStream:
    """One reader's connection."""

    stream: socket.socket
    incoming: MessageBuffer = field(default_factory=MessageBuffer)
    unsent: bytearray = field(default_factory=bytearray)
    leases: dict[int, Leased] = field(default_factory=dict)
    greeted: bool = False


class ControlServer:
    """Answers readers until `close`.

    Args:
        listener: listening, not blocking; owned from here on.
        local: whose blocks.
        base: address of the segment in this process.
        metadata: of the agent that registered it.
        source: the store.
        clock_ns: monotonic clock.
        on_failure: told once, on the thread, when a bug of ours ended it.
    """

    def __init__(
        self,
        listener: socket.socket,
        local: LocalEnd,
        *,
        base: int,
        metadata: bytes,
        source: BlockSource,
        clock_ns: Callable[[], int],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._on_failure = on_failure
        self._listener = listener
        self._local = local
        self._base = base
        self._metadata = metadata
        self._source = source
        self._clock_ns = clock_ns
        self._readers: set[ReaderStream] = set()
        self._closing = False
        self.blocks_served = self.bytes_served = self.protocol_errors = self.refused = self.leases_expired = 0
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"kvpool-nixl-{local.key}", daemon=True)
        self._thread.start()

    @property
    def readers(self) -> int:
        """Connected readers."""
        return len(self._readers)

    def close(self, timeout_s: float) -> bool:
        """End every stream and lease; True when it did in time. May be repeated."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        failure: BaseException | None = None
        with selectors.DefaultSelector() as selector:
            try:
                self._serve(selector)
            except BaseException as error:
                log.exception("the NIXL control path failed; nothing is served any more")
                failure = error
            for reader in list(self._readers):
                self._drop(selector, reader)
        for end in (self._listener, self._woken, self._wake):
            end.close()
        if failure is not None:
            self._on_failure(failure)

    def _serve(self, selector: selectors.BaseSelector) -> None:
        selector.register(self._listener, selectors.EVENT_READ)
        selector.register(self._woken, selectors.EVENT_READ)
        while not self._closing:
            leased = any(reader.leases for reader in self._readers)
            for key, events in selector.select(TICK_S if leased else None):
                self._handle(selector, key, events)
            self._expire()

    def _handle(self, selector: selectors.BaseSelector, key: selectors.SelectorKey, events: int) -> None:
        reader = key.data
        if reader is None:
            if key.fileobj is self._listener:
                self._accept(selector)
            return
        try:
            if events & selectors.EVENT_READ:
                data = reader.stream.recv(RECEIVE_BYTES)
                if not data:
                    self._drop(selector, reader)
                    return
                for raw in reader.incoming.feed(data):
                    self._answer(reader, raw)
            self._flush(selector, reader)
        except BlockingIOError:
            return
        except (OSError, IntegrityError) as error:
            self.protocol_errors += isinstance(error, IntegrityError)
            self._drop(selector, reader)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            stream, _ = self._listener.accept()
        except OSError:
            return  # it went away again
        if len(self._readers) >= MAX_READERS:
            self.refused += 1
            stream.close()
            return
        stream.setblocking(False)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader = ReaderStream(stream)
        self._readers.add(reader)
        selector.register(stream, selectors.EVENT_READ, reader)

    def _flush(self, selector: selectors.BaseSelector, reader: ReaderStream) -> None:
        if reader.unsent:
            with contextlib.suppress(BlockingIOError):
                del reader.unsent[: reader.stream.send(reader.unsent)]
        if len(reader.unsent) > MAX_UNSENT_BYTES:
            raise IntegrityError("a reader asks and does not listen")
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if reader.unsent else 0)
        selector.modify(reader.stream, events, reader)

    def _drop(self, selector: selectors.BaseSelector, reader: ReaderStream) -> None:
        selector.unregister(reader.stream)
        reader.stream.close()
        self._readers.discard(reader)
        for leased in reader.leases.values():
            self._source.unpin(leased.lease_id)
        reader.leases.clear()

    def _expire(self) -> None:
        now_ns = self._clock_ns()
        for reader in self._readers:
            for sequence, leased in list(reader.leases.items()):
                if now_ns > leased.ends_at_ns:
                    self.leases_expired += 1
                    del reader.leases[sequence]
                    self._source.unpin(leased.lease_id)

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _answer(self, reader: ReaderStream, raw: bytes) -> None:
        if not reader.greeted:
            if raw != HELLO:
                raise IntegrityError("a stranger spoke to the control path")
            reader.greeted = True
            reader.unsent += framed(self._metadata)
            return
        match decode(raw):
            case Pull() as pull:
                reader.unsent += framed(encode(self._on_pull(reader, pull)))
            case Grant(sequence=sequence):
                leased = reader.leases.get(sequence)
                if leased is not None and self._clock_ns() <= leased.ends_at_ns:
                    self._source.renew(leased.lease_id)
            case Stop(sequence=sequence, fetched=fetched):
                self._on_stop(reader, sequence, fetched)
            case _:
                self.protocol_errors += 1

    def _on_pull(self, reader: ReaderStream, pull: Pull) -> Message:
        key = self._local.key
        try:
            if pull.holder != key:
                raise StaleError(f"asked for {pull.holder}, this is {key}; look up again", peer=str(key))
            if len(reader.leases) >= MAX_LEASES_PER_READER:
                raise CapacityError(f"{key} serves {MAX_LEASES_PER_READER} pulls of this reader", peer=str(key))
            if pull.sequence in reader.leases:
                raise IncompatibleError("a pull with this sequence number is under way", peer=str(key))
            lease_id, held = self._source.pin(pull.reader, pull.hashes)
        except KVPoolError as error:
            self.refused += 1
            return Refuse(pull.sequence, error.code, str(error))
        sources = [None if block is None else block.offset for block in held]
        runs = merge_runs(sources, pull.offsets, self._local.block_bytes, MAX_RUN_BYTES)
        starts = tuple(self._base + block.offset for run in runs if (block := held[run.first]) is not None)
        offer = Offer(
            sequence=pull.sequence,
            identity=identity_digest(pull.hashes),
            checksums=tuple(None if block is None else block.checksum for block in held),
            run_blocks=tuple(run.blocks for run in runs),
            window=Window(os.getpid(), 0, 0, starts),
        )
        if runs:
            ends_at_ns = self._clock_ns() + min(pull.deadline_ns + LEASE_SLACK_NS, MAX_LEASE_NS)
            reader.leases[pull.sequence] = Leased(lease_id, ends_at_ns, offer.run_blocks)
        else:
            self._source.unpin(lease_id)
        return offer

    def _on_stop(self, reader: ReaderStream, sequence: int, fetched: int) -> None:
        leased = reader.leases.pop(sequence, None)
        if leased is None:
            return
        blocks = sum(leased.run_blocks[:fetched])
        self.blocks_served += blocks
        self.bytes_served += blocks * self._local.block_bytes
        self._source.unpin(leased.lease_id)
