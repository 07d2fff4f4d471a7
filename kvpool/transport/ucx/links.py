"""What the reader's half keeps: links to peers, reads, pulls and posted runs. State without behaviour."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvpool.errors import KVPoolError
from kvpool.transport.base import Peer
from kvpool.transport.handle import ReadTask
from kvpool.transport.ucx.fabric import Connection, Operation
from kvpool.transport.wire import Run, Window


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


@dataclass(slots=True, eq=False)
class OpenPull:
    """A slice of a read: waiting, asked for, or under way."""

    sequence: int
    reading: Reading
    base: int  # index of its first block in the read
    blocks: int
    runs: tuple[Run, ...] | None = None  # None until the offer came
    checksums: tuple[int | None, ...] = ()
    window: Window | None = None  # where this half fetches the runs itself; None: they are granted
    granted: int = 0
    open_runs: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A run in flight: granted, or given to a helper to fetch."""

    pull: OpenPull
    run: Run
    run_bytes: int
    offset: int  # where it goes in the segment


@dataclass(frozen=True, slots=True, eq=False)
class PostedRun:
    """A run whose receive is posted."""

    operation: Operation
    flight: Flight


@dataclass(slots=True, eq=False)
class Link:
    """The connection to one peer incarnation and everything that goes over it."""

    peer: Peer
    link_id: int
    connection: Connection
    last_progress_ns: int
    waiting: list[tuple[int, int, OpenPull]] = field(default_factory=list)
    asked: dict[int, OpenPull] = field(default_factory=dict)
    posted: deque[PostedRun] = field(default_factory=deque)
    readings: set[Reading] = field(default_factory=set)
    in_flight_bytes: int = 0
    fetches: bool | None = None  # whether the peer's memory can be read from here; None until that was tried
    broken_ns: int | None = None
