"""What a worker core needs of the pool around it, as protocols: the loader and the publisher.

The implementations live in `kvpool.transfer.loader` and `kvpool.metadata.publisher`; tests use smaller ones. All
methods are thread-safe and return without waiting for the network.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from kvpool.plan import Plan
from kvpool.reports import WorkerReport
from kvpool.types import BlockHash, RequestId, Tier


class LoadProgress(Protocol):
    """A snapshot of one load."""

    @property
    def arrived(self) -> Collection[int]:
        """Chain indices that are in place and verified; only grows."""

    @property
    def terminal(self) -> bool:
        """No byte of this load lands after this."""

    @property
    def failures(self) -> Sequence[str]:
        """`KVPoolError.code` of every read that failed, and why the load was given up, in order."""

    @property
    def bytes_arrived(self) -> int:
        """Verified bytes."""

    @property
    def started_ns(self) -> int:
        """When it began."""

    @property
    def finished_ns(self) -> int | None:
        """When it became terminal."""


class Load(Protocol):
    """One load in progress, owned by the core until it is terminal."""

    def progress(self) -> LoadProgress:
        """Current snapshot."""

    def cancel(self) -> None:
        """Give it up; its pages stay in use until it is terminal. Idempotent."""

    def on_change(self, callback: Callable[[LoadProgress], None]) -> None:
        """Call ``callback`` from any thread after every arrival and once terminal; it must not block."""


class Loader(Protocol):
    """Starts loads."""

    def start(self, request_id: RequestId, plan: Plan, chain: Sequence[BlockHash], pages: Mapping[int, int]) -> Load:
        """Load the blocks named in ``pages`` (chain index → byte offset in the segment) by the plan's slices."""


class Publisher(Protocol):
    """Tells the directory; loses accuracy when it must, never blocks."""

    def stored(self, tier: Tier, hashes: Sequence[BlockHash], *, linked: bool = False) -> None:
        """These blocks can be read from now on; ``linked`` when each is the child of the one before it."""

    def removed(self, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """These blocks are gone."""

    def report(self, report: WorkerReport) -> None:
        """What this worker has to say about itself."""
