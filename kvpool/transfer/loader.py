"""Carries loads out: feeds `LoadMachine` with what the transport reports, and does what it says.

Thread-safe. Events are handled one at a time per load, on whichever thread brings them: the caller's (start, cancel)
or the transport's (progress). Callbacks run on that thread, outside the load's lock, and must not block.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvpool.errors import (
    IncompatibleError,
    IntegrityError,
    KVPoolError,
    PeerGoneError,
    RequestError,
    StaleError,
    StallError,
)
from kvpool.plan import LoadSlice, Plan
from kvpool.reports import LoadSample
from kvpool.transfer.machine import (
    Begin,
    Cancel,
    CancelRead,
    Ended,
    Event,
    Finish,
    Instruction,
    LoadMachine,
    Outcome,
    Settled,
    Slice,
    Source,
    StartRead,
    Suspect,
    Tick,
)
from kvpool.transport.base import BlockStatus, BlockWant, Peer, ReadHandle, ReadProgress, ReadRequest, Transport
from kvpool.types import BlockHash, RequestId, WorkerKey

_OUTCOMES = {
    BlockStatus.ARRIVED: Outcome.ARRIVED,
    BlockStatus.MISSING: Outcome.MISSING,
    BlockStatus.CORRUPT: Outcome.CORRUPT,
    BlockStatus.FAILED: Outcome.FAILED,
}

DEADLINE_GRACE_NS = 100_000_000
"""The transport ends reads at their deadline and knows why better than we do; only after this we insist."""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """A snapshot of one load.

    Attributes:
        arrived: chain indices whose bytes are in place and verified.
        front: wanted blocks that arrived without a gap, counted from the first wanted one.
        terminal: nothing lands any more; pages of wanted indices that did not arrive are free.
        failures: `KVPoolError.code` of every read that failed, and why the load was given up, in order.
        bytes_arrived: verified bytes.
        started_ns, finished_ns: on the loader's clock; finished is None until terminal.
    """

    arrived: frozenset[int]
    front: int
    terminal: bool
    failures: tuple[str, ...]
    bytes_arrived: int
    started_ns: int
    finished_ns: int | None


class Load:
    """One load in progress. Made by `Loader.start`."""

    def __init__(
        self, loader: Loader, request_id: RequestId, machine: LoadMachine, plan: Plan, wants: Mapping[int, BlockWant]
    ) -> None:
        self.request_id = request_id
        self._loader = loader
        self._machine = machine
        self._plan = plan
        self._wants = wants
        self._started_ns = loader.clock_ns()
        self._urgency_ns = self._started_ns + plan.predicted_ttft_ns
        self._finished_ns: int | None = None
        self._bytes_by_read: dict[int, int] = {}
        self._reads: dict[int, _Reading] = {}
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._draining = False
        self._changed = threading.Event()
        self._callbacks: list[Callable[[LoadProgress], None]] = []

    @property
    def terminal(self) -> bool:
        """Nothing lands any more."""
        return self._machine.state.terminal and self._finished_ns is not None

    def progress(self) -> LoadProgress:
        """Current snapshot. Also gives the load up when its deadline has passed."""
        if not self.terminal and self._loader.clock_ns() >= self._machine.deadline_ns + DEADLINE_GRACE_NS:
            self._take(Tick())
        with self._lock:
            return self._snapshot()

    def cancel(self) -> None:
        """Give the load up. Idempotent. Pages stay in use until `terminal`."""
        self._take(Cancel())

    def wait(self, timeout_ns: int) -> LoadProgress:
        """Block until terminal or until the timeout. Tests and tools only."""
        self._changed.wait(timeout_ns / 1e9)
        return self.progress()

    def on_change(self, callback: Callable[[LoadProgress], None]) -> None:
        """Call after every change and once terminal; called at once when already terminal."""
        with self._lock:
            if not self.terminal:
                self._callbacks.append(callback)
                return
            snapshot = self._snapshot()
        callback(snapshot)

    def _snapshot(self) -> LoadProgress:
        return LoadProgress(
            arrived=frozenset(self._machine.usable),
            front=self._machine.front_blocks,
            terminal=self.terminal,
            failures=tuple(self._machine.failures),
            bytes_arrived=sum(self._bytes_by_read.values()),
            started_ns=self._started_ns,
            finished_ns=self._finished_ns,
        )

    def _take(self, event: Event) -> None:
        """Queue an event; one thread at a time drains the queue, so instructions never nest."""
        with self._lock:
            self._events.append(event)
            if self._draining:
                return
            self._draining = True
        while True:
            with self._lock:
                if not self._events:
                    self._draining = False
                    return
                instructions = self._machine.handle(self._events.popleft(), self._loader.clock_ns())
                if any(isinstance(instruction, Finish) for instruction in instructions):
                    self._finished_ns = self._loader.clock_ns()
                callbacks = tuple(self._callbacks) if instructions else ()
                snapshot = self._snapshot() if callbacks else None
                if self.terminal:
                    self._callbacks.clear()
            for instruction in instructions:
                self._obey(instruction)
            for callback in callbacks:
                assert snapshot is not None
                callback(snapshot)
            if self.terminal:
                self._changed.set()

    def _obey(self, instruction: Instruction) -> None:
        match instruction:
            case StartRead():
                self._start_read(instruction)
            case CancelRead(read_id):
                reading = self._reads.get(read_id)
                if reading is not None and reading.handle is not None:
                    reading.handle.cancel()
            case Suspect(holder, failure):
                self._loader.on_suspect(holder, failure)
            case _:
                pass  # pages are told by the snapshot

    def _start_read(self, start: StartRead) -> None:
        reading = _Reading(start)
        self._reads[start.read_id] = reading
        try:
            handle = self._loader.read(start, self._wants, self._plan.stall_ns, self._urgency_ns)
        except KVPoolError as error:
            del self._reads[start.read_id]
            self._loader.on_sample(LoadSample(start.source.holder, 0, 0, 0, error.code, start.source.tier))
            self._take(Ended(start.read_id, {}, error.code))
            return
        reading.handle = handle
        handle.on_progress(lambda progress: self._on_read(start.read_id, progress))

    def _on_read(self, read_id: int, progress: ReadProgress) -> None:
        reading = self._reads.get(read_id)
        if reading is None:
            return
        self._bytes_by_read[read_id] = progress.bytes_arrived
        fresh = reading.fresh(progress)
        if not progress.state.terminal:
            if fresh:
                self._take(Settled(read_id, fresh))
            return
        del self._reads[read_id]
        failure = None if progress.error is None else progress.error.code
        self._loader.sample(reading.start, progress, failure, patient=self._plan.patient)
        self._take(Ended(read_id, fresh, failure, blames_holder(progress.error)))


class _Reading:
    """A read of a load, and what of it was reported to the machine."""

    def __init__(self, start: StartRead) -> None:
        self.start = start
        self.handle: ReadHandle | None = None
        self._open = dict(enumerate(start.indices))

    def fresh(self, progress: ReadProgress) -> dict[int, Outcome]:
        """Blocks that this snapshot settles: verified ones at once, the others when the read is over."""
        settled: dict[int, Outcome] = {}
        for position, index in list(self._open.items()):
            status = progress.statuses[position]
            if status is BlockStatus.ARRIVED or (progress.state.terminal and status is not BlockStatus.PENDING):
                settled[index] = _OUTCOMES[status]
                del self._open[position]
        return settled


class Loader:
    """Starts loads over one transport. Thread-safe.

    Args:
        transport: started.
        clock_ns: monotonic clock.
        on_suspect: told that a holder failed, with the `KVPoolError.code`; must not block.
        on_sample: told how each read went; must not block. Cancelled reads are not told.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        on_suspect: Callable[[WorkerKey, str], None],
        on_sample: Callable[[LoadSample], None],
    ) -> None:
        self._transport = transport
        self.clock_ns = clock_ns
        self.on_suspect = on_suspect
        self.on_sample = on_sample

    def start(self, request_id: RequestId, plan: Plan, chain: Sequence[BlockHash], pages: Mapping[int, int]) -> Load:
        """Start to load.

        Args:
            request_id: for whom.
            plan: its slices name the holders; its deadline and stall bound hold.
            chain: block hashes of the prompt.
            pages: chain index → destination byte offset in the local segment. Only these are loaded. The caller keeps
                the pages out of other use until the load is terminal.

        Raises:
            RequestError: a page lies beyond the chain, or the plan has no deadline.
        """
        if pages and (plan.load_deadline_ns <= 0 or plan.stall_ns <= 0):
            raise RequestError("a plan with loads needs a deadline and a stall bound", field="load_deadline_ns")
        beyond = [index for index in pages if not 0 <= index < len(chain)]
        if beyond:
            raise RequestError(f"pages name block {beyond[0]} of a chain of {len(chain)}", field="pages")
        wants = {index: BlockWant(chain[index], offset) for index, offset in pages.items()}
        machine = LoadMachine(wants, slices_of(plan.loads, len(chain)), self.clock_ns() + plan.load_deadline_ns)
        load = Load(self, request_id, machine, plan, wants)
        load._take(Begin())
        return load

    def read(self, start: StartRead, wants: Mapping[int, BlockWant], stall_ns: int, urgency_ns: int) -> ReadHandle:
        """Start one read of a load."""
        source = start.source
        if source.transport != self._transport.name:
            raise IncompatibleError(
                f"{source.holder} speaks {source.transport!r}, this worker {self._transport.name!r}",
                peer=str(source.holder),
            )
        blocks = tuple(wants[index] for index in start.indices)
        peer = Peer(source.holder, source.address)
        return self._transport.read(ReadRequest(peer, blocks, start.deadline_ns, stall_ns, urgency_ns))

    def sample(self, start: StartRead, progress: ReadProgress, failure: str | None, *, patient: bool) -> None:
        """Report how a read went. One that we gave up ourselves is reported too, as cancelled: a link whose loads are
        overtaken again and again must be seen. That blocks are not there yet is nothing to report of a patient load."""
        arrived = progress.statuses.count(BlockStatus.ARRIVED)
        if failure is None and arrived < len(start.indices):
            if patient and not arrived:
                return
            failure = None if patient else StaleError.code
        source = start.source
        self.on_sample(
            LoadSample(source.holder, progress.bytes_arrived, arrived, progress.elapsed_ns, failure, source.tier)
        )


def blames_holder(error: KVPoolError | None) -> bool:
    """Whether others should be told: the holder is gone, silent or sends wrong bytes. A link that was merely too slow
    for the deadline (``details["slow"]``) blames nobody."""
    return isinstance(error, PeerGoneError | StallError | IntegrityError) and not error.details.get("slow", False)


def slices_of(loads: Sequence[LoadSlice], blocks: int) -> tuple[Slice, ...]:
    """The machine's view of a plan's slices, as far as they name one of ``blocks`` blocks. Alternates speak the slice's
    transport."""
    return tuple(
        Slice(
            tuple(range(max(0, item.start), min(item.stop, blocks))),
            (
                Source(item.holder, item.data_address, item.transport, item.stop, item.tier),
                *(Source(ref.holder, ref.data_address, item.transport, ref.stop, ref.tier) for ref in item.alternates),
            ),
        )
        for item in loads
    )
