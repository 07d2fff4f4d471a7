"""Loads that no request waits for: copies an administrator wants here, what a draining worker leaves behind, and the
prompts of requests that will come here from a prefill worker.

Pulls run one at a time, followed prompts side by side, on the caller's thread, with a deadline. What arrives verified
and without a gap behind what is held is sealed like any other block; the rest is dropped. Requests come first: a pull
takes only pages that leave room for every running one. The pages of a pull belong to it until its load is terminal,
whatever becomes of the caller.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from kvpool.errors import CapacityError, DeadlineError, KVPoolError, StaleError, TransferError, UnavailableError
from kvpool.plan import HolderRef, LoadSlice, Plan, PlanKind
from kvpool.store.segment import SealRequest, Segment
from kvpool.types import BlockHash, BlockId, RequestId, Tier, WorkerKey
from workers.ports import Load, Loader

PULL_STALL_NS = 2_000_000_000
POLL_S = 0.05
"""A load that waits for nothing but its own deadline must be looked at to notice it."""

CLOSE_S = 5.0
MAX_FOLLOWED = 16
MAX_UNFOLLOWED = 1024
"""Names that are remembered because `Puller.unfollow` came before, or without, a `Puller.follow`."""

FIRST_LOOK_S, LAST_LOOK_S = 0.005, 0.05
"""Between two looks at a holder that computes: short after something came, longer while nothing does."""

MAX_FAILED_LOOKS = 3


@dataclass(frozen=True, slots=True)
class PullSource:
    """A worker that holds the first ``blocks`` blocks of a chain."""

    holder: WorkerKey
    transport: str
    data_address: bytes
    blocks: int


@dataclass(frozen=True, slots=True)
class PullOrder:
    """What to load.

    Attributes:
        tenant: whose chain it is.
        chain: block hashes from the first block on.
        sources: who has it, to be tried in this order.
        deadline_ns: budget from now.
        patient: the first source may still be computing.
        parent: hash of what comes before the chain, when that is not the tenant's root.
    """

    tenant: str
    chain: tuple[BlockHash, ...]
    sources: tuple[PullSource, ...]
    deadline_ns: int
    patient: bool = False
    parent: BlockHash | None = None


@dataclass(frozen=True, slots=True)
class PullResult:
    """What came of it: leading blocks held before and now, of ``blocks`` that were wanted, and why not all."""

    blocks: int
    held_before: int
    held: int
    failures: tuple[str, ...] = ()


@dataclass(slots=True)
class _Pull:
    held: list[BlockId]
    pages: dict[int, BlockId]


class Puller:
    """Carries pulls out.

    Args:
        segment: where blocks go.
        loader: None without a data plane.
        lock: the core's; only under it may blocks be evicted.
        root_of: tenant → hash of the empty chain.
        work_of: place in a chain → what computing that block costs.
        reserve: pages that running requests may want next; called under the lock.
        on_end: called, without the lock, when pages returned.
    """

    def __init__(
        self,
        segment: Segment,
        loader: Loader | None,
        lock: threading.RLock,
        *,
        root_of: Callable[[str], BlockHash],
        work_of: Callable[[int], int],
        reserve: Callable[[], int],
        on_end: Callable[[], None],
    ) -> None:
        self._segment = segment
        self._loader = loader
        self._lock = lock
        self._root_of = root_of
        self._work_of = work_of
        self._reserve = reserve
        self._on_end = on_end
        self._turn = threading.Lock()
        self._closing = threading.Event()
        self._number = itertools.count(1)
        self._in_use = 0
        self._followed: dict[str, threading.Event] = {}
        self._unfollowed: OrderedDict[str, None] = OrderedDict()
        self.counters: Counter[str] = Counter()

    def pull(self, order: PullOrder) -> PullResult:
        """Load what is missing of a chain and wait for it.

        Raises:
            UnavailableError: there is no data plane, or the worker closes.
            DeadlineError: another pull took all the time.
        """
        if self._loader is None or self._closing.is_set():
            raise UnavailableError("this worker cannot load blocks now: it is closing or has no data plane")
        if not self._turn.acquire(timeout=order.deadline_ns / 1e9):
            raise DeadlineError(f"another pull took the {order.deadline_ns / 1e9:.1f} s", blocks=len(order.chain))
        try:
            return self._pull(order, self._loader)
        finally:
            self._turn.release()

    def follow(self, order: PullOrder, name: str) -> PullResult:
        """Load a chain block by block while its holder computes it; until it is whole, `unfollow`, or the deadline.

        Args:
            order: patient; its only source computes.
            name: for `unfollow`.

        Raises:
            UnavailableError: there is no data plane, or the worker closes.
            CapacityError: too many are followed.
        """
        if self._loader is None or self._closing.is_set():
            raise UnavailableError("this worker cannot load blocks now: it is closing or has no data plane")
        enough = threading.Event()
        with self._lock:
            if name in self._unfollowed:  # a call overtook this one, which would go on for nobody
                return PullResult(len(order.chain), 0, 0)
            if len(self._followed) >= MAX_FOLLOWED or name in self._followed:
                raise CapacityError(f"{len(self._followed)} prompts are followed already; the load comes later")
            self._followed[name] = enough
            self.counters["prompts_followed"] += 1
        try:
            return self._follow(order, self._loader, enough)
        finally:
            with self._lock:
                del self._followed[name]

    def unfollow(self, name: str) -> None:
        """The request is here now, or over: what is missing is no longer waited for, and a `follow` that comes late
        does nothing. Unknown names are fine."""
        with self._lock:
            enough = self._followed.get(name)
            self._unfollowed[name] = None
            if len(self._unfollowed) > MAX_UNFOLLOWED:
                self._unfollowed.popitem(last=False)
        if enough is not None:
            enough.set()

    @property
    def busy(self) -> bool:
        """Pages are in use by a pull. Read under the lock."""
        return self._in_use > 0

    def close(self) -> None:
        """Give up what runs and wait for it, bounded. No pull starts after this."""
        self._closing.set()
        with self._lock:
            for enough in self._followed.values():
                enough.set()
        deadline_s = time.monotonic() + CLOSE_S
        if self._turn.acquire(timeout=CLOSE_S):
            self._turn.release()
        while self._followed and time.monotonic() < deadline_s:
            time.sleep(POLL_S)

    # -- private

    def _follow(self, order: PullOrder, loader: Loader, enough: threading.Event) -> PullResult:
        end_s = time.monotonic() + order.deadline_ns / 1e9
        look_s, failed = FIRST_LOOK_S, 0
        held_before: int | None = None
        while True:
            left_ns = max(1, int((end_s - time.monotonic()) * 1e9))
            result = self._pull(replace(order, deadline_ns=left_ns), loader, enough)
            held_before = result.held_before if held_before is None else held_before
            look_s = FIRST_LOOK_S if result.held > result.held_before else min(2 * look_s, LAST_LOOK_S)
            failed = failed + 1 if result.failures else 0
            over = enough.is_set() or self._closing.is_set() or time.monotonic() >= end_s
            if result.held == result.blocks or over or failed == MAX_FAILED_LOOKS:
                return replace(result, held_before=held_before)
            enough.wait(look_s)

    def _pull(self, order: PullOrder, loader: Loader, enough: threading.Event | None = None) -> PullResult:
        wanted = min(len(order.chain), max((source.blocks for source in order.sources), default=0))
        pull = self._reserve_pages(order, wanted)
        if not pull.pages:
            self._finish(pull, order, frozenset())
            no_room = (CapacityError.code,) if len(pull.held) < wanted else ()
            return PullResult(wanted, len(pull.held), len(pull.held), no_room)
        self.counters["pulls"] += 1
        offsets = {index: self._segment.offset(page) for index, page in pull.pages.items()}
        try:
            load = loader.start(RequestId(f"pull-{next(self._number)}"), _plan(order, pull.pages), order.chain, offsets)
        except KVPoolError as error:
            self.counters[f"pull_failures.{error.code}"] += 1
            self._finish(pull, order, frozenset())
            return PullResult(wanted, len(pull.held), len(pull.held), (error.code,))
        self._outlast(load, enough)
        progress = load.progress()
        failures = tuple(code for code in progress.failures if not (order.patient and code == StaleError.code))
        for code in failures:
            self.counters[f"pull_failures.{code}"] += 1
        fresh = self._finish(pull, order, frozenset(progress.arrived))
        self.counters["pulled_blocks"] += fresh
        if not failures and not order.patient and fresh < len(pull.pages):
            failures = (TransferError.code,)
        return PullResult(wanted, len(pull.held), len(pull.held) + fresh, failures)

    def _reserve_pages(self, order: PullOrder, wanted: int) -> _Pull:
        with self._lock:
            held = self._segment.match(order.chain[:wanted])
            self._segment.acquire(held)
            room = max(0, self._segment.available_blocks - self._reserve())
            count = min(wanted - len(held), room)
            after = held[-1] if held else None
            try:
                pages = self._segment.allocate(count, after, order.tenant).block_ids if count > 0 else ()
            except CapacityError:  # a peer pinned what could be had the moment before
                pages = ()
            self._segment.begin_flight(pages)
            self._in_use += 1
            return _Pull(held, dict(enumerate(pages, len(held))))

    def _outlast(self, load: Load, enough: threading.Event | None) -> None:
        """Wait until nothing lands any more. The load's own deadline and the transport's fence bound it."""
        changed = threading.Event()
        load.on_change(lambda _: changed.set())
        while not load.progress().terminal:
            if self._closing.is_set() or (enough is not None and enough.is_set()):
                load.cancel()
            changed.wait(POLL_S)
            changed.clear()

    def _finish(self, pull: _Pull, order: PullOrder, arrived: frozenset[int]) -> int:
        """Seal the leading run of what arrived and let go of everything; returns how many blocks that were."""
        segment = self._segment
        segment.end_flight(pull.pages.values())
        run: list[SealRequest] = []
        before = order.parent or self._root_of(order.tenant)
        for index, page in pull.pages.items():
            if index not in arrived:
                break
            parent = order.chain[index - 1] if index else before
            run.append(SealRequest(page, order.chain[index], parent, self._work_of(index)))
        kept = segment.seal(run)
        with self._lock:
            segment.release([*pull.held, *kept, *list(pull.pages.values())[len(run) :]])
            self._in_use -= 1
        self._on_end()
        return len(run)


def _plan(order: PullOrder, indices: Collection[int]) -> Plan:
    first, last = min(indices), max(indices)
    able = [source for source in order.sources if source.blocks > first]
    best = able[0]
    piece = LoadSlice(
        first,
        last + 1,
        best.holder,
        best.transport,
        best.data_address,
        Tier.HOST,
        tuple(
            HolderRef(other.holder, other.data_address, Tier.HOST, other.blocks)
            for other in able[1:]
            if other.transport == best.transport
        ),
    )
    return Plan(
        PlanKind.LOAD, (piece,), load_deadline_ns=order.deadline_ns, stall_ns=PULL_STALL_NS, patient=order.patient
    )
