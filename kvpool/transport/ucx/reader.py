"""The reader's half of the UCX transport: links, pulls, windows, give-up and fence.

Owned by the progress thread; nothing here is thread-safe and nothing blocks, except that closing a connection by
force takes a few milliseconds.

One connection per peer incarnation carries all reads from it. Most give-ups (a cancelled request, a deadline on a
slow but living link) therefore only *drain*: no further run is granted, and the granted ones, at most one window,
finish. A peer that delivers nothing for a stall bound is closed by force; every read on that link then fails with a
typed error, which is right because none of them was getting bytes either. Connections of their own per read would
isolate no better and cost a wire-up each.

A holder on the same host offers its memory, and helper threads fetch the runs from it. Windows, order and give-up are
the same; what was not fetched when a read is given up is not fetched any more.

Invariants:
    * a page is named by at most one posted receive or fetch, and a read is finished only when none of them is open;
    * bytes in flight never exceed the link's and the process's window (a single run may exceed an empty window);
    * a link that failed is never used again; the next read makes a new one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import deque
from collections.abc import Sequence

from kvpool.errors import (
    CapacityError,
    IntegrityError,
    KVPoolError,
    PeerGoneError,
    StallError,
    TransferCancelledError,
)
from kvpool.transport.base import LEASE_RENEW_NS, BlockStatus, Peer
from kvpool.transport.fair import pick
from kvpool.transport.handle import LocalEnd, ReadTask
from kvpool.transport.ucx.direct import DirectMemory, Fetched
from kvpool.transport.ucx.fabric import Operation, PortSet
from kvpool.transport.ucx.frames import FRAME_RUN_BYTES, FrameReader
from kvpool.transport.ucx.grants import Granter
from kvpool.transport.ucx.links import Flight, Link, OpenPull, PostedRun, Reading
from kvpool.transport.ucx.settings import UcxOptions
from kvpool.transport.verify import Helpers
from kvpool.transport.wire import (
    CONTROL_TAG,
    MAX_PULL_BLOCKS,
    Bye,
    Grant,
    Message,
    Offer,
    Pull,
    Refuse,
    Stop,
    encode,
    error_of,
)
from kvpool.types import WorkerKey

TICK_NS = 5_000_000
Verdicts = Sequence[Sequence[bool]]


class ReaderHalf:
    """Reads blocks from peers into ``segment``."""

    def __init__(
        self, ports: PortSet, local: LocalEnd, options: UcxOptions, helpers: Helpers, memory: DirectMemory
    ) -> None:
        self._ports = ports
        self._helpers = helpers
        self._memory = memory
        self._key = local.key
        self._segment = local.segment
        self._block_bytes = local.block_bytes
        self._options = options
        self._links: dict[WorkerKey, Link] = {}
        self._fencing: list[Link] = []
        self._sends: list[Operation] = []
        self._sequences = itertools.count(1)
        self._grant_due = False
        slack = FRAME_RUN_BYTES * options.link_window_runs  # arrived and not unpacked yet
        self.frames = FrameReader(options.compression, options.process_window_bytes + slack)
        self._granter = Granter(local, options, helpers, memory, self.frames)
        self._next_tick_ns = 0
        self.reads = self.reads_failed = self.blocks_read = self.bytes_read = self.corrupt_blocks = 0
        self.open_reads = self.protocol_errors = 0
        self._closed: KVPoolError | None = None
        self.quarantined_reads = 0

    # ── what the transport asks for ──────────────────────────────────────────────────────────────────────────────

    def submit(self, task: ReadTask, now_ns: int) -> None:
        """Take a read over. Never raises for reasons of the peer: the read fails instead."""
        self.open_reads += 1
        if self._closed is not None:
            task.give_up(self._closed)
        if self._closed is not None or not task.request.blocks:
            self._count(task)
            return
        try:
            link = self._link_to(task.request.peer, now_ns)
        except KVPoolError as error:
            task.give_up(error)
            self._count(task)
            return
        reading = Reading(task, link, last_progress_ns=now_ns)
        link.readings.add(reading)
        step = min(MAX_PULL_BLOCKS, max(1, self._options.pull_bytes // self._block_bytes))
        for base in range(0, len(task.request.blocks), step):
            sequence = next(self._sequences)
            pull = OpenPull(sequence, reading, base, min(step, len(task.request.blocks) - base))
            link.waiting.append(pull)
            reading.pulls_left += 1
        self._ask(link, now_ns)

    def cancel(self, task: ReadTask, now_ns: int) -> None:
        """Give one read up; it drains, or is fenced when it does not."""
        for reading in self._all_readings():
            if reading.task is task:
                self._give_up(reading, TransferCancelledError("the reader gave the read up"), now_ns)

    def forget(self, peer: WorkerKey, now_ns: int) -> None:
        """Close the link to an incarnation that is known to be over."""
        link = self._links.get(peer)
        if link is not None:
            self._break(link, PeerGoneError(f"worker {peer} was forgotten", peer=str(peer)), now_ns)

    def close(self, now_ns: int) -> None:
        """Give everything up; `active` turns False when the fence confirmed."""
        self._closed = TransferCancelledError("the transport was closed")
        for link in list(self._links.values()):
            if link.connection.alive:
                self._send(link, Bye(0, link.link_id))
            self._ports.progress_all()
            self._break(link, self._closed, now_ns)

    def fail_all(self, error: KVPoolError, now_ns: int) -> None:
        """Give every read up for one reason, after a bug of ours."""
        self._closed = error
        for link in list(self._links.values()):
            self._break(link, error, now_ns)

    # ── what the progress thread calls ───────────────────────────────────────────────────────────────────────────

    @property
    def active(self) -> bool:
        """Whether any read is not terminal or any message is still leaving."""
        return bool(self._fencing or self._sends) or any(link.readings for link in self._links.values())

    @property
    def endpoints(self) -> int:
        """Connections that exist, failed ones until they are fenced."""
        return len(self._links) + len(self._fencing)

    @property
    def in_flight_bytes(self) -> int:
        """Granted and not yet arrived, quarantined bytes included."""
        return sum(link.in_flight_bytes for link in (*self._links.values(), *self._fencing))

    def step(self, now_ns: int) -> bool:
        """Collect what arrived, grant what fits, look at the timers. True when something happened."""
        moved = False
        for link in (*self._links.values(), *self._fencing):
            moved |= bool(link.posted) and self._collect(link, now_ns)
        if self._sends:
            self._sends = [send for send in self._sends if not send.completed]
        if self._grant_due:
            self._grant(now_ns)
        if now_ns >= self._next_tick_ns:
            self._next_tick_ns = now_ns + TICK_NS
            self._look_at_timers(now_ns)
        return moved

    def on_message(self, message: Message, now_ns: int) -> None:
        """Handle an answer of a holder."""
        link, pull = self._find(message.sequence)
        if link is None or pull is None:
            return  # a late answer to a pull that was given up
        if pull.runs is not None or not isinstance(message, Offer | Refuse):
            self.protocol_errors += 1  # a duplicate; the first answer stands
            return
        link.last_progress_ns = pull.reading.last_progress_ns = now_ns
        if isinstance(message, Offer):
            self._take_offer(link, pull, message, now_ns)
        else:
            self._give_up(pull.reading, error_of(message, str(link.peer.key)), now_ns)

    def on_malformed(self, error: IntegrityError, now_ns: int) -> None:
        """An answer did not parse; when it names a pull, that read fails at once, otherwise its stall timer ends it."""
        self.protocol_errors += 1
        _, pull = self._find(error.details.get("sequence") or 0)
        if pull is not None:
            self._give_up(pull.reading, error, now_ns)

    # ── asking and granting ──────────────────────────────────────────────────────────────────────────────────────

    def _link_to(self, peer: Peer, now_ns: int) -> Link:
        link = self._links.get(peer.key)
        if link is not None and link.connection.alive and link.peer.address == peer.address:
            return link
        if link is not None:
            self._break(link, link.reason(), now_ns)
        self._make_room(now_ns)
        connection = self._ports.connect(peer.address, str(peer.key))
        link_id = int.from_bytes(os.urandom(8), "little")
        link = self._links[peer.key] = Link(peer, link_id, connection, now_ns)
        return link

    def _make_room(self, now_ns: int) -> None:
        if len(self._links) < self._options.max_links:
            return
        idle = [link for link in self._links.values() if not link.readings]
        if not idle:
            raise CapacityError(f"{len(self._links)} links are busy already; redo the prefill")
        self._retire(min(idle, key=lambda link: link.last_progress_ns), now_ns)

    def _retire(self, link: Link, now_ns: int) -> None:
        self._send(link, Bye(0, link.link_id))
        self._ports.progress_all()
        self._break(link, TransferCancelledError("the link was idle"), now_ns)

    def _ask(self, link: Link, now_ns: int) -> None:
        while link.waiting and len(link.asked) < self._options.open_pulls_per_link and link.broken_ns is None:
            pull = link.waiting.pop(pick(link.waiting, link.asks))
            link.asks += 1
            if not link.fetches:
                pull.wanted = self.frames.wanted(link.peer.key, now_ns)
            message = Pull(
                sequence=pull.sequence,
                link_id=link.link_id,
                deadline_ns=max(1, pull.reading.task.deadline_at_ns - now_ns),
                reader=self._key,
                reader_address=link.connection.port.address,
                holder=link.peer.key,
                hashes=tuple(want.block_hash for want in pull.wants),
                offsets=tuple(want.dest_offset for want in pull.wants),
                host=self._memory.host,
                codecs=pull.wanted,
            )
            if not link.asked:
                link.last_progress_ns = now_ns
            link.asked[pull.sequence] = pull
            pull.reading.last_progress_ns = now_ns
            pull.reading.task.begin()
            self._send(link, message)

    def _take_offer(self, link: Link, pull: OpenPull, offer: Offer, now_ns: int) -> None:
        try:
            pull.take_offer(offer, self._block_bytes)
        except IntegrityError as error:
            self.protocol_errors += 1
            self._give_up(pull.reading, error, now_ns)
            return
        if offer.window is not None and link.fetches is None:
            link.fetches = self._memory.reaches(offer.window)
        pull.window = offer.window if link.fetches else None
        missing = [pull.base + index for index, total in enumerate(offer.checksums) if total is None]
        if missing:
            pull.reading.task.mark(missing, BlockStatus.MISSING)
        self._grant_due = True
        if not pull.runs:
            self._end_pull(link, pull, now_ns)
        elif missing:
            pull.reading.task.publish()

    def _grant(self, now_ns: int) -> None:
        """Let move what has its turn and fits the windows."""
        self._grant_due = False
        granted, failed = self._granter.give(self._links.values(), self._take_fetched, now_ns)
        for pull in granted:
            self._send(pull.reading.link, Grant(pull.sequence, pull.reading.link.link_id, pull.granted))
        for link, error in failed:
            self._break(link, error, now_ns)

    def _renew(self, link: Link, now_ns: int) -> None:
        """Ask the holder to keep the blocks of every pull that goes on; one that stalls is given up by its timer."""
        link.renewed_ns = now_ns
        for pull in link.asked.values():
            if pull.open_runs or pull.reading.gave_up_ns is None:
                self._send(link, Grant(pull.sequence, link.link_id, 0 if pull.window is not None else pull.granted))

    def _send(self, link: Link, message: Message) -> None:
        try:
            self._sends.append(link.connection.send(encode(message), CONTROL_TAG))
        except KVPoolError:
            # The connection is dead; `_look_at_timers` sees that within a tick and fails the reads on it.
            self._next_tick_ns = 0

    # ── arriving ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _collect(self, link: Link, now_ns: int, *, everything: bool = False) -> bool:
        """Take receives that completed, from the front; they complete nearly in order, and looking at each costs."""
        finished: list[PostedRun] = []
        while link.posted and link.posted[0].operation.completed:
            finished.append(link.posted.popleft())
        if everything:
            finished += [posted for posted in link.posted if posted.operation.completed]
            link.posted = deque(posted for posted in link.posted if posted not in finished)
        if not finished:
            return False
        good: list[PostedRun] = []
        failed: list[tuple[Flight, KVPoolError]] = []
        for posted in finished:
            link.in_flight_bytes -= posted.flight.run_bytes
            error = posted.operation.error()
            if error is not None:
                failed.append((posted.flight, error))
                self.frames.release(posted.staging)
                continue
            posted.flight.pull.reading.last_progress_ns = link.last_progress_ns = now_ns
            good.append(posted)
        if good:
            self.frames.arrived(link, good, now_ns)
            self._verify(link, good, now_ns)
        if failed:  # the link first: it gives the reads a reason to end with
            self._break(link, link.reason(failed[0][1]), now_ns)
        for flight, _ in failed:
            self._end_run(link, flight.pull, now_ns)
        self._grant_due = True
        return True

    def _verify(self, link: Link, arrived: list[PostedRun], now_ns: int) -> None:
        """Unpack frames and check every block of runs that landed, here or on a helper's thread."""
        exam = self.frames.exam_of(link, arrived, self._segment, self._block_bytes)

        def settle(verdicts: Verdicts, then_ns: int) -> None:
            self.frames.settle(arrived, exam)
            self._grant_due = True
            self._judge(link, [posted.flight for posted in arrived], verdicts, then_ns)

        if exam.inline:
            settle(exam.run(), now_ns)
        else:
            self._helpers.submit(exam.run, settle)

    def _take_fetched(self, link: Link, flights: list[Flight], fetched: Fetched, now_ns: int) -> None:
        """Settle runs that a helper fetched; those it did not fetch belong to a read or a link that is given up."""
        link.in_flight_bytes -= sum(flight.run_bytes for flight in flights)
        self._grant_due = True
        if fetched.error is not None:
            self._break(link, fetched.error, now_ns)
        reading = flights[0].pull.reading
        quiet_ns = reading.quiet_ns(now_ns)
        if fetched.verdicts[0]:
            reading.last_progress_ns = link.last_progress_ns = now_ns
        # The holder keeps blocks only a little longer than the deadline, or than it hears of this end: what differs
        # later may be another block.
        past = now_ns > reading.task.deadline_at_ns
        late = past or quiet_ns > reading.task.request.stall_ns or reading.gave_up_ns is not None
        if late and not all(map(all, fetched.verdicts)):
            stalled = StallError(f"nothing came for {quiet_ns} ns", peer=str(link.peer.key))
            self._give_up(reading, reading.past_deadline(self._options.drain_ns, now_ns) if past else stalled, now_ns)
        self._judge(link, flights, fetched.verdicts, now_ns, blame=not late)

    def _judge(
        self, link: Link, arrived: Sequence[Flight], verdicts: Verdicts, now_ns: int, *, blame: bool = True
    ) -> None:
        """Settle the blocks of verified runs. A read that was given up keeps what still arrived intact."""
        touched: dict[Reading, None] = {}
        for flight, verdict in zip(arrived, verdicts, strict=True):
            first = flight.pull.base + flight.run.first
            task = flight.pull.reading.task
            task.mark((first + step for step, good in enumerate(verdict) if good), BlockStatus.ARRIVED)
            bad = [first + step for step, good in enumerate(verdict) if not good]
            if bad and blame:
                task.mark(bad, BlockStatus.CORRUPT)
                self.corrupt_blocks += len(bad)
            self.blocks_read += sum(verdict)
            self.bytes_read += sum(verdict) * self._block_bytes
            touched[flight.pull.reading] = None
        for reading in touched:
            reading.task.publish()
        for flight in arrived:
            self._end_run(link, flight.pull, now_ns)

    def _end_run(self, link: Link, pull: OpenPull, now_ns: int) -> None:
        pull.open_runs -= 1
        self._maybe_end_pull(link, pull, now_ns)

    def _maybe_end_pull(self, link: Link, pull: OpenPull, now_ns: int) -> None:
        if pull.open_runs or pull.sequence not in link.asked:
            return
        over = pull.reading.gave_up_ns is not None or pull.runs is None or pull.granted == len(pull.runs)
        if over:
            self._end_pull(link, pull, now_ns)

    def _end_pull(self, link: Link, pull: OpenPull, now_ns: int) -> None:
        del link.asked[pull.sequence]
        if pull.window is not None and link.broken_ns is None:  # not before: the holder unpins when it hears this
            self._send(link, Stop(pull.sequence, link.link_id, pull.granted))
        pull.reading.pulls_left -= 1
        if pull.reading.pulls_left == 0:
            link.readings.discard(pull.reading)
            self._count(pull.reading.task)
        self._ask(link, now_ns)

    def _count(self, task: ReadTask) -> None:
        task.finish()
        self.open_reads -= 1
        self.reads += 1
        self.reads_failed += task.error is not None

    # ── giving up ────────────────────────────────────────────────────────────────────────────────────────────────

    def _give_up(self, reading: Reading, error: KVPoolError, now_ns: int) -> None:
        """Stop one read: drop what was not granted, let the rest drain."""
        link = reading.link
        reading.note_give_up(error, now_ns)
        dropped = [pull for pull in link.waiting if pull.reading is reading]
        link.waiting = [pull for pull in link.waiting if pull.reading is not reading]
        reading.pulls_left -= len(dropped)
        mine = [pull for pull in link.asked.values() if pull.reading is reading]
        for pull in mine:
            if link.broken_ns is None and pull.window is None:
                self._send(link, Stop(pull.sequence, link.link_id))
            self._maybe_end_pull(link, pull, now_ns)
        if not mine and reading in link.readings:  # nothing was asked for yet
            link.readings.discard(reading)
            self._count(reading.task)

    def _break(self, link: Link, error: KVPoolError, now_ns: int) -> None:
        """Close a link by force and give up every read on it; they end as the fence confirms."""
        if link.broken_ns is not None:
            return
        link.broken_ns = now_ns
        self._links.pop(link.peer.key, None)
        self._fencing.append(link)
        self._grant_due = True
        for reading in link.readings:  # before anything completes: what ends from here on ends with this reason
            reading.note_give_up(error, now_ns)
        with contextlib.suppress(KVPoolError):  # then its receives stay open, and its reads quarantined
            link.connection.close()
        self._settle(link, now_ns)
        link.meter.forget()
        for posted in link.posted:
            self.frames.write_off(posted.staging)
        for reading in list(link.readings):
            self._give_up(reading, error, now_ns)
        self._next_tick_ns = 0

    def _settle(self, link: Link, now_ns: int) -> bool:
        """Move the close of a broken link on and take what ended by it. True when the connection is closed."""
        self._ports.progress_all()
        closed = link.connection.closed
        self._ports.progress_all()
        self._collect(link, now_ns, everything=True)
        return closed

    def _look_at_timers(self, now_ns: int) -> None:
        for link in list(self._links.values()):
            if not link.connection.alive:
                self._break(link, link.reason(), now_ns)
                continue
            self._collect(link, now_ns, everything=True)
            for reading in list(link.readings):
                if link.broken_ns is None:
                    self._look_at(link, reading, now_ns)
            if link.broken_ns is None and now_ns - link.renewed_ns >= LEASE_RENEW_NS:
                self._renew(link, now_ns)
            if not link.readings and now_ns - link.last_progress_ns > self._options.idle_link_ns:
                self._retire(link, now_ns)
        still = []
        for link in self._fencing:
            if not self._settle(link, now_ns) or link.posted or link.readings:
                still.append(link)
            else:
                link.connection.drop()
        self._fencing = still
        late = [link for link in still if link.posted and now_ns - (link.broken_ns or 0) > self._options.fence_ns]
        self.quarantined_reads = sum(len(link.readings) for link in late)

    def _look_at(self, link: Link, reading: Reading, now_ns: int) -> None:
        request, peer = reading.task.request, str(link.peer.key)
        quiet_ns = reading.quiet_ns(now_ns)
        if reading.gave_up_ns is not None:
            alone = len(link.readings) == 1
            patience_ns = min(request.stall_ns, self._options.drain_ns) if alone else request.stall_ns
            if quiet_ns > patience_ns or now_ns - reading.gave_up_ns > 4 * self._options.drain_ns:
                self._break(link, StallError(f"the link to {peer} was closed to fence a read", peer=peer), now_ns)
            return
        expecting = any(pull.reading is reading for pull in link.asked.values())
        if expecting and quiet_ns > request.stall_ns:
            self._break(link, StallError(f"{peer} sent nothing for {quiet_ns} ns", peer=peer), now_ns)
        elif now_ns > reading.task.deadline_at_ns:
            self._give_up(reading, reading.past_deadline(self._options.drain_ns, now_ns), now_ns)

    def _find(self, sequence: int) -> tuple[Link | None, OpenPull | None]:
        for link in self._links.values():
            if sequence in link.asked:
                return link, link.asked[sequence]
        return None, None

    def _all_readings(self) -> list[Reading]:
        return [reading for link in (*self._links.values(), *self._fencing) for reading in link.readings]
