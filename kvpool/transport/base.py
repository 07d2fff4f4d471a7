"""The transport contract: move blocks from a holder's segment into a reader's segment.

A transport is one process's end of the data plane. It owns its connections and its progress thread, never the
memory: segments belong to the worker's store, which must keep a page out of use from the moment it is named in a
`ReadRequest` until that read is *terminal* (`ReadHandle.done`). That is the fence: a terminal read never writes
another byte.

Reads are two-sided pulls. The reader names block hashes and destination offsets; the holder's `BlockSource` pins
what it has, answers for each block (status, checksum), sends the bytes of those present, and unpins. The reader
verifies identity and xxh3 of every block before it counts as arrived. A block that is missing is a result
(`BlockStatus.MISSING`), not an error; an error ends the read and keeps the blocks that were verified before it.
A read with a corrupt block goes on to its end and then fails with `IntegrityError`; its other blocks are good.

Every method may be called from any thread and returns without waiting for the network, except `close`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol

from kvpool.errors import KVPoolError
from kvpool.types import BlockHash, WorkerKey

LEASE_RENEW_NS = 1_000_000_000


class BlockStatus(IntEnum):
    """What became of one block of a read. The number is the wire value."""

    PENDING = 0
    ARRIVED = 1  # bytes in place, checksum and identity verified
    MISSING = 2  # the holder does not have it (any more)
    CORRUPT = 3  # bytes came but did not verify; the destination must not be used
    FAILED = 4  # the read ended before this block came


class ReadState(Enum):
    """States of a read; the last three are terminal."""

    POSTED = "posted"
    IN_FLIGHT = "in_flight"
    CANCELLING = "cancelling"  # given up, but bytes may still land: the pages are not free
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """No byte of this read lands after this."""
        return self in (ReadState.DONE, ReadState.FAILED, ReadState.CANCELLED)


@dataclass(frozen=True, slots=True)
class Peer:
    """A holder as its reader addresses it: identity plus opaque address."""

    key: WorkerKey
    address: bytes


@dataclass(frozen=True, slots=True)
class BlockWant:
    """One block to read: its identity and the byte offset in the reader's segment where it goes."""

    block_hash: BlockHash
    dest_offset: int


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A batch of blocks to read from one peer, front first.

    Attributes:
        peer: whom to ask; a peer of another epoch refuses with `StaleError`.
        blocks: what to read and where to put it; offsets are multiples of nothing in particular, ranges disjoint.
        deadline_ns: budget from the call.
        stall_ns: longest time without progress.
        urgency_ns: lower goes first when the link is full (predicted time to the request's first token).
    """

    peer: Peer
    blocks: tuple[BlockWant, ...]
    deadline_ns: int
    stall_ns: int
    urgency_ns: int = 0


@dataclass(frozen=True, slots=True)
class ReadProgress:
    """A snapshot of one read.

    Attributes:
        state: where it is.
        statuses: one per block of the request, in order.
        bytes_arrived: verified bytes.
        elapsed_ns: since the call, frozen once terminal.
        error: why it failed, set exactly in state FAILED or CANCELLED.
    """

    state: ReadState
    statuses: tuple[BlockStatus, ...]
    bytes_arrived: int
    elapsed_ns: int
    error: KVPoolError | None = None


class ReadHandle(Protocol):
    """One read in progress. Owned by the caller; holding it keeps nothing pinned once terminal."""

    def progress(self) -> ReadProgress:
        """Current snapshot."""

    def cancel(self) -> None:
        """Give the read up. Idempotent. The pages stay in use until `done`."""

    def done(self) -> bool:
        """True once terminal."""

    def wait(self, timeout_ns: int) -> ReadProgress:
        """Block until terminal or until the timeout; returns the snapshot either way. Tests and tools only."""

    def on_progress(self, callback: Callable[[ReadProgress], None]) -> None:
        """Call ``callback`` from the transport's thread after every run of blocks and once terminal. It must not
        block. Called at once when already terminal."""


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """A block the holder pinned for a read: where it lies in the holder's segment, and its checksum.

    Attributes:
        offset: byte offset in the segment.
        checksum: xxh3_64 of its bytes, computed when it was sealed.
    """

    offset: int
    checksum: int


class BlockSource(Protocol):
    """The holder's side: what a transport needs of the store to serve reads."""

    def pin(self, reader: WorkerKey, hashes: Sequence[BlockHash]) -> tuple[int, tuple[HeldBlock | None, ...]]:
        """Take a read lease on every block that is held; None where it is missing. Returns (lease id, blocks)."""

    def renew(self, lease_id: int) -> None:
        """Keep a read lease for longer. A transport calls it about every `LEASE_RENEW_NS` while the read goes on, and
        not after its deadline; a source lets a lease run out that is neither renewed nor released."""

    def unpin(self, lease_id: int) -> None:
        """Release a read lease. Idempotent; called on every path, also when the reader dies."""


@dataclass(frozen=True, slots=True)
class TransportStats:
    """Counters of one transport since it started; gauges last.

    Compression: ``bytes_saved`` on the wire by ``frames_read`` frames, of which ``bad_frames`` did not unpack;
    ``decode_ns`` here as a reader, ``encode_ns`` here as a holder, on helper threads.
    """

    reads: int = 0
    reads_failed: int = 0
    blocks_read: int = 0
    bytes_read: int = 0
    blocks_served: int = 0
    bytes_served: int = 0
    corrupt_blocks: int = 0
    protocol_errors: int = 0
    frames_read: int = 0
    bad_frames: int = 0
    bytes_saved: int = 0
    decode_ns: int = 0
    encode_ns: int = 0
    compressed_links: int = 0
    staging_bytes: int = 0
    endpoints: int = 0
    in_flight_bytes: int = 0
    quarantined_reads: int = 0


class Transport(Protocol):
    """One process's end of the data plane."""

    @property
    def name(self) -> str:
        """Name members announce, for example ``ucx``."""

    @property
    def address(self) -> bytes:
        """Opaque address by which peers reach this end."""

    def start(self, key: WorkerKey, segment: memoryview, block_bytes: int, source: BlockSource) -> None:
        """Register the segment once and begin to serve reads as ``key``."""

    def read(self, request: ReadRequest) -> ReadHandle:
        """Start reading. Never fails because a batch is large: it is split or waits its turn.

        Raises:
            RequestError: a destination lies outside the segment or ranges overlap.
        """

    def forget(self, peer: WorkerKey) -> None:
        """Close what connects to this incarnation; reads from it end with `PeerGoneError`."""

    def stats(self) -> TransportStats:
        """Current counters."""

    def close(self) -> None:
        """Fail every read with `TransferCancelledError`, fence them, release everything. Waits at most 5 s. May be
        repeated."""
