"""What a scheduler needs and what it says: the page protocol, and the values of one step.  (pure)

No behaviour here. `workers.scheduler` produces these, `workers.core` carries them out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from kvpool.store.answers import Allocation
from kvpool.types import BlockHash, BlockId
from workers.sequence import Sequence


class Blocks(Protocol):
    """What a scheduler needs of a block pool or a segment; see `kvpool.store.pool.BlockPool`."""

    @property
    def total_blocks(self) -> int:
        """Size in blocks."""

    @property
    def available_blocks(self) -> int:
        """Free and evictable blocks."""

    def allocate(self, count: int, after: BlockId | None = None, tenant: str = "") -> Allocation:
        """Hand out blank blocks or raise `CapacityError`."""

    def lookup(self, block_hash: BlockHash) -> BlockId | None:
        """The sealed block that holds ``block_hash``."""

    def acquire(self, block_ids: Iterable[BlockId]) -> None:
        """Add a reference."""

    def release(self, block_ids: Seq[BlockId]) -> None:
        """Drop a reference."""

    def begin_flight(self, block_ids: Iterable[BlockId]) -> None:
        """A load may write these."""

    def end_flight(self, block_ids: Iterable[BlockId]) -> None:
        """It no longer does."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """A load to start now: ``pages`` are reserved and in flight until `Scheduler.land`."""

    flight: int
    sequence: Sequence
    pages: Mapping[int, BlockId]


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part of a step: fill ``fill`` pages from block ``first_block`` on, then compute tokens
    ``[start, start + count)``. ``count`` may be 0 (fill only). ``samples``: the next token is wanted."""

    sequence: Sequence
    first_block: int
    fill: tuple[BlockId, ...]
    start: int
    count: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Step:
    """What the shell does now, in this order.

    Attributes:
        closed_slots: views to drop.
        cancelled_flights: loads to give up; `Scheduler.land` follows once each is terminal.
        loads: loads to start that found no room at arrival.
        expired: sequences past their deadline, removed already.
        work: the batch; empty when nothing can run now.
        owed: sequences to `Scheduler.rescue` and seal after the step: another one waits for what their views hold.
        wake_ns: when something may change without an event, None for never.
    """

    closed_slots: tuple[int, ...] = ()
    cancelled_flights: tuple[int, ...] = ()
    loads: tuple[LoadOrder, ...] = ()
    expired: tuple[Sequence, ...] = ()
    work: tuple[Work, ...] = ()
    owed: tuple[Sequence, ...] = ()
    wake_ns: int | None = None
