"""One load as a state machine.  (pure)

A load brings chosen blocks of a prompt's chain into pages of the local segment, from one or several holders. Events
go in, instructions come out; the shell (`kvpool.transfer.loader`) carries them out and knows clock and transport.

    planned ──▶ leased ──▶ in flight ──▶ verified   every wanted block arrived
                   │            │    └──▶ failed     some did not; what arrived is kept
                   └────────────┴──▶ cancelling ──▶ failed

Invariants:
    * a page becomes free only when the read that names it is terminal, and is named by one read at a time;
    * every wanted block ends either usable or free, exactly once, and then the load is terminal;
    * a block is asked of each source at most once, so there are at most (sources × slices) reads;
    * once cancelled or past the deadline no read is started.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from kvpool.errors import DeadlineError, InvariantViolation, StaleError, TransferCancelledError
from kvpool.types import Tier, WorkerKey


class LoadState(Enum):
    """Where a load is; the last two are terminal."""

    PLANNED = "planned"
    LEASED = "leased"  # holders were asked to pin
    IN_FLIGHT = "in_flight"  # the first answer came
    CANCELLING = "cancelling"  # given up, pages still named by reads
    VERIFIED = "verified"
    FAILED = "failed"

    @property
    def terminal(self) -> bool:
        """Every page is settled."""
        return self in (LoadState.VERIFIED, LoadState.FAILED)


class Outcome(Enum):
    """What a read says about one block."""

    ARRIVED = "arrived"
    MISSING = "missing"
    CORRUPT = "corrupt"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Source:
    """A holder that claims to have the blocks below ``stop`` of the chain."""

    holder: WorkerKey
    address: bytes
    transport: str
    stop: int
    tier: Tier = Tier.HOST


@dataclass(frozen=True, slots=True)
class Slice:
    """Blocks to load, ascending, and where from, best source first."""

    indices: tuple[int, ...]
    sources: tuple[Source, ...]


# ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Begin:
    """Start the load; once."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A read that goes on has settled these blocks."""

    read_id: int
    outcomes: Mapping[int, Outcome]


@dataclass(frozen=True, slots=True)
class Ended:
    """A read is terminal: no byte lands any more.

    Attributes:
        read_id: which.
        outcomes: of blocks not settled before; a block that is not named did not come.
        failure: `KVPoolError.code`, None when the read did what it could.
        blames_holder: the failure says something about the holder, not about the directory, the link or the reader.
    """

    read_id: int
    outcomes: Mapping[int, Outcome]
    failure: str | None
    blames_holder: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """The load is not wanted any more."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = Begin | Settled | Ended | Cancel | Tick


# ── instructions ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class StartRead:
    """Ask a source for blocks; answer with `Settled` and one `Ended`, also when starting fails."""

    read_id: int
    source: Source
    indices: tuple[int, ...]
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class CancelRead:
    """Give a read up; its `Ended` still comes."""

    read_id: int


@dataclass(frozen=True, slots=True)
class PagesUsable:
    """These blocks are in place and verified."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PagesFree:
    """These blocks will not come; nothing names their pages any more."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Suspect:
    """A holder failed in a way that others should know about."""

    holder: WorkerKey
    failure: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The load is terminal; last instruction."""

    state: LoadState


Instruction = StartRead | CancelRead | PagesUsable | PagesFree | Suspect | Finish


@dataclass(frozen=True, slots=True)
class _Read:
    source: Source
    fallbacks: tuple[Source, ...]
    open: frozenset[int]  # blocks not settled for good: still landing, or waiting for the read's end to be retried


class LoadMachine:
    """The machine. Not thread-safe; the shell serialises events.

    Args:
        wanted: chain indices to load, each with a page of its own.
        slices: where from, disjoint; wanted indices in no slice are free at once.
        deadline_ns: absolute end of the load, on the clock of ``now_ns``.
    """

    def __init__(self, wanted: Iterable[int], slices: Sequence[Slice], deadline_ns: int) -> None:
        self.wanted = tuple(sorted(set(wanted)))
        self.deadline_ns = deadline_ns
        self.state = LoadState.PLANNED
        self.usable: set[int] = set()
        self.free: set[int] = set()
        self.failures: list[str] = []
        self._slices = tuple(slices)
        self._reads: dict[int, _Read] = {}
        self._next_read = 0

    @property
    def front_blocks(self) -> int:
        """Wanted blocks that are usable without a gap from the first wanted one."""
        for count, index in enumerate(self.wanted):
            if index not in self.usable:
                return count
        return len(self.wanted)

    def handle(self, event: Event, now_ns: int) -> list[Instruction]:
        """Take one event; returns what to do, in order.

        Raises:
            InvariantViolation: the event contradicts what was instructed.
        """
        match event:
            case Begin():
                out = self._begin(now_ns)
            case Settled(read_id, outcomes):
                out = self._settle(read_id, outcomes)
            case Ended():
                out = self._end(event, now_ns)
            case Cancel():
                out = self._give_up(TransferCancelledError.code)
            case Tick():
                out = self._give_up(DeadlineError.code) if now_ns >= self.deadline_ns else []
        return out + self._finish_if_settled()

    def _begin(self, now_ns: int) -> list[Instruction]:
        if self.state is not LoadState.PLANNED:
            raise InvariantViolation(f"a load began twice; it is {self.state.value}")
        self.state = LoadState.LEASED
        out: list[Instruction] = []
        claimed: set[int] = set()
        wanted = set(self.wanted)
        for part in self._slices:
            indices = tuple(index for index in part.indices if index in wanted and index not in claimed)
            claimed.update(indices)
            out += self._ask(indices, part.sources, now_ns)
        return out + self._release(wanted - claimed)

    def _ask(self, indices: Sequence[int], sources: Sequence[Source], now_ns: int) -> list[Instruction]:
        """Ask the best source that can have each block; blocks nobody is left for become free."""
        if not indices:
            return []
        left_ns = self.deadline_ns - now_ns
        if left_ns <= 0 or self.state is LoadState.CANCELLING:
            return self._release(indices)
        for position, source in enumerate(sources):
            reachable = tuple(index for index in indices if index < source.stop)
            if not reachable:
                continue
            fallbacks = tuple(sources[position + 1 :])
            self._next_read += 1
            self._reads[self._next_read] = _Read(source, fallbacks, frozenset(reachable))
            start = StartRead(self._next_read, source, reachable, left_ns)
            rest = [index for index in indices if index >= source.stop]
            return [start, *self._ask(rest, fallbacks, now_ns)]
        return self._release(indices)

    def _settle(self, read_id: int, outcomes: Mapping[int, Outcome]) -> list[Instruction]:
        read = self._known(read_id, outcomes)
        if self.state is LoadState.LEASED:
            self.state = LoadState.IN_FLIGHT
        arrived = tuple(sorted(index for index, what in outcomes.items() if what is Outcome.ARRIVED))
        self._reads[read_id] = _Read(read.source, read.fallbacks, read.open - set(arrived))
        self.usable.update(arrived)
        return [PagesUsable(arrived)] if arrived else []

    def _end(self, event: Ended, now_ns: int) -> list[Instruction]:
        out = self._settle(event.read_id, event.outcomes)
        read = self._reads.pop(event.read_id)
        failure = event.failure
        if failure is None and read.open:
            failure = StaleError.code  # the directory promised blocks that are not there
        echo = self.state is LoadState.CANCELLING and failure == TransferCancelledError.code
        if failure is not None and not echo:
            self.failures.append(failure)
            if event.blames_holder:
                out.append(Suspect(read.source.holder, failure))
        return out + self._ask(sorted(read.open), read.fallbacks, now_ns)

    def _known(self, read_id: int, outcomes: Mapping[int, Outcome]) -> _Read:
        read = self._reads.get(read_id)
        if read is None:
            raise InvariantViolation(f"read {read_id} is not open")
        strangers = set(outcomes) - read.open
        if strangers:
            raise InvariantViolation(f"read {read_id} settled blocks it does not hold: {sorted(strangers)[:8]}")
        return read

    def _give_up(self, reason: str) -> list[Instruction]:
        if self.state.terminal or self.state is LoadState.CANCELLING:
            return []
        if self.state is LoadState.PLANNED:
            self.state = LoadState.CANCELLING
            self.failures.append(reason)
            return self._release(self.wanted)
        self.state = LoadState.CANCELLING
        self.failures.append(reason)
        return [CancelRead(read_id) for read_id in self._reads]

    def _release(self, indices: Iterable[int]) -> list[Instruction]:
        ordered = tuple(sorted(indices))
        self.free.update(ordered)
        return [PagesFree(ordered)] if ordered else []

    def _finish_if_settled(self) -> list[Instruction]:
        if self.state.terminal or self.state is LoadState.PLANNED or self._reads:
            return []
        if len(self.usable) + len(self.free) != len(self.wanted) or self.usable & self.free:
            raise InvariantViolation("a load lost track of a page")
        self.state = LoadState.FAILED if self.free else LoadState.VERIFIED
        return [Finish(self.state)]
