"""What the reader's half keeps: links to peers, reads, pulls, runs in flight. State, and what follows from it alone."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvpool.errors import IntegrityError, KVPoolError, PeerGoneError, StallError, TransferCancelledError
from kvpool.transport.base import BlockWant, Peer
from kvpool.transport.compression import Codec
from kvpool.transport.handle import ReadTask
from kvpool.transport.staging import Staging
from kvpool.transport.switch import BurstMeter
from kvpool.transport.ucx.fabric import Connection, Operation
from kvpool.transport.verify import Check
from kvpool.transport.wire import Offer, Run, Window, identity_digest, runs_of_offer


@dataclass(slots=True, eq=False)
class Reading:
    """One read as this half sees it."""

    task: ReadTask
    link: Link
    pulls_left: int = 0
    last_progress_ns: int = 0
    gave_up_ns: int | None = None

    def note_give_up(self, error: KVPoolError, now_ns: int) -> None:
        """Remember the first reason and since when."""
        if self.gave_up_ns is None:
            self.gave_up_ns = now_ns
            self.task.give_up(error)

    def quiet_ns(self, now_ns: int) -> int:
        """How long nothing came, of it or over its link."""
        return now_ns - max(self.link.last_progress_ns, self.last_progress_ns)

    def past_deadline(self, drain_ns: int, now_ns: int) -> KVPoolError:
        """A holder that was still delivering was merely slow, which blames nobody."""
        slow = self.quiet_ns(now_ns) < min(self.task.request.stall_ns, drain_ns)
        return StallError("the read passed its deadline", peer=str(self.link.peer.key), slow=slow)


@dataclass(slots=True, eq=False)
class OpenPull:
    """A slice of a read: waiting, asked for, or under way."""

    sequence: int
    reading: Reading
    base: int  # index of its first block in the read
    blocks: int
    runs: tuple[Run, ...] | None = None  # None until the offer came
    run_bytes: tuple[int, ...] = ()
    checksums: tuple[int | None, ...] = ()
    window: Window | None = None  # where this half fetches the runs itself; None: they are granted
    wanted: tuple[Codec, ...] = ()  # frames that were asked for
    codec: Codec = Codec.RAW  # what the holder's runs come in
    granted: int = 0
    open_runs: int = 0

    @property
    def urgency_ns(self) -> int:
        """Of its request; lower goes first."""
        return self.reading.task.request.urgency_ns

    @property
    def wants(self) -> tuple[BlockWant, ...]:
        """What it is about, in order."""
        return self.reading.task.request.blocks[self.base : self.base + self.blocks]

    @property
    def to_grant(self) -> bool:
        """Whether it is wanted and has runs that do not move yet."""
        return self.granted < len(self.run_bytes) and self.reading.gave_up_ns is None

    def take_offer(self, offer: Offer, block_bytes: int) -> None:
        """Take the holder's runs over.

        Raises:
            IntegrityError: the offer does not answer this pull.
        """
        peer = str(self.reading.link.peer.key)
        if offer.identity != identity_digest([want.block_hash for want in self.wants]):
            raise IntegrityError("the holder answered for other blocks", peer=peer)
        if len(offer.checksums) != self.blocks:
            raise IntegrityError("the offer has another length than the pull", peer=peer)
        if offer.codec and (offer.codec not in self.wanted or offer.window is not None):
            raise IntegrityError(f"the holder offers codec {offer.codec}, which was not asked for", peer=peer)
        self.codec = Codec(offer.codec)
        self.runs = runs_of_offer(offer, [want.dest_offset for want in self.wants], block_bytes)
        self.run_bytes = tuple(run.blocks * block_bytes for run in self.runs)
        self.checksums = offer.checksums

    def next_flight(self) -> Flight:
        """The next run, as it will fly; `launch` says that it does."""
        assert self.runs is not None
        run = self.runs[self.granted]
        start = self.reading.task.request.blocks[self.base + run.first].dest_offset
        return Flight(self, self.granted, run, self.run_bytes[self.granted], start)

    def launch(self, flight: Flight) -> None:
        """The next run is in flight from here on."""
        self.granted += 1
        self.open_runs += 1
        self.reading.link.in_flight_bytes += flight.run_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A run in flight: granted, or given to a helper to fetch."""

    pull: OpenPull
    index: int  # of the run in the pull
    run: Run
    run_bytes: int
    offset: int  # where it goes in the segment

    def check(self, segment: memoryview, block_bytes: int) -> Check:
        """What its bytes must be once they are there."""
        sums = self.pull.checksums[self.run.first : self.run.first + self.run.blocks]
        expected = tuple(total for total in sums if total is not None)
        return Check(segment[self.offset : self.offset + self.run_bytes], block_bytes, expected)


@dataclass(frozen=True, slots=True, eq=False)
class PostedRun:
    """A run whose receive is posted."""

    operation: Operation
    flight: Flight
    staging: Staging | None = None  # where a frame arrives; None: the run goes to its place


@dataclass(slots=True, eq=False)
class Link:
    """The connection to one peer incarnation and everything that goes over it."""

    peer: Peer
    link_id: int
    connection: Connection
    last_progress_ns: int
    waiting: list[OpenPull] = field(default_factory=list)
    asked: dict[int, OpenPull] = field(default_factory=dict)
    posted: deque[PostedRun] = field(default_factory=deque)
    readings: set[Reading] = field(default_factory=set)
    in_flight_bytes: int = 0
    fetches: bool | None = None  # whether the peer's memory can be read from here; None until that was tried
    asks: int = 0
    turns: int = 0
    renewed_ns: int = 0  # when the peer was last asked to keep what is being read
    meter: BurstMeter = field(default_factory=BurstMeter)
    broken_ns: int | None = None

    def reason(self, failure: KVPoolError | None = None) -> KVPoolError:
        """What to tell reads when it failed: a lost peer, unless UCX says something more specific."""
        cause = self.connection.failure() or failure
        if cause is None or isinstance(cause, TransferCancelledError):
            cause = PeerGoneError(f"the connection to {self.peer.key} is gone", peer=str(self.peer.key))
        return cause

    @property
    def to_grant(self) -> list[OpenPull]:
        """Pulls whose reads are wanted and that have runs to move."""
        return [pull for pull in self.asked.values() if pull.to_grant]
