"""The holder's half of the UCX transport: answers pulls, sends granted runs, ends read leases.

Owned by the progress thread; nothing here is thread-safe. A read lease is taken by `BlockSource.pin` when a pull
comes and released exactly once: when its last granted send is terminal after the reader had everything, stopped or
died, or when its time is over. A lease whose sends are open is never released; when a reader holds one too long its
connection is closed by force, which makes the sends terminal. A reader that fetches the runs itself has no sends; its
lease ends when it says so, dies, or is out of time. The store's own, shorter bound is renewed while something
moves on the link, sends are open, or the reader asks for that.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from kvpool.errors import CapacityError, IncompatibleError, IntegrityError, KVPoolError, StaleError
from kvpool.transport.base import LEASE_RENEW_NS, BlockSource, HeldBlock
from kvpool.transport.compression import Codec
from kvpool.transport.handle import LocalEnd
from kvpool.transport.staging import Staging
from kvpool.transport.ucx.direct import DirectMemory
from kvpool.transport.ucx.fabric import Connection, Operation, Port
from kvpool.transport.ucx.frames import FRAME_RUN_BYTES, FrameWriter, Lane
from kvpool.transport.ucx.settings import UcxOptions
from kvpool.transport.verify import Helpers
from kvpool.transport.wire import (
    CONTROL_TAG,
    Bye,
    Grant,
    Message,
    Offer,
    Pull,
    Refuse,
    Run,
    Stop,
    data_tag,
    encode,
    identity_digest,
    merge_runs,
)
from kvpool.types import WorkerKey

TICK_NS = 5_000_000
REMEMBERED_STOPS = 4096
REMEMBERED_LINKS = 4096


@dataclass(slots=True, eq=False)
class Serve:
    """One pull being answered."""

    lease_id: int
    sequence: int
    link: ReaderLink
    runs: tuple[Run, ...]
    held: tuple[HeldBlock | None, ...]
    ends_at_ns: int
    renewed_ns: int
    codec: Codec = Codec.RAW
    wanted: int = 0  # runs the reader granted
    granted: int = 0  # runs that were sent or are being packed
    packing: int = 0
    sends: deque[tuple[Operation, Staging | None]] = field(default_factory=deque)
    over: bool = False  # no further grant counts

    @property
    def ended(self) -> bool:
        """Whether nothing of it will be sent and nothing is being sent or packed."""
        return self.over and not self.sending

    @property
    def sending(self) -> bool:
        """Whether bytes of granted runs are still needed here."""
        return self.granted < self.wanted or bool(self.packing or self.sends)

    def drop(self) -> None:
        """Send no run that is not under way."""
        self.over, self.wanted = True, self.granted


@dataclass(slots=True, eq=False)
class ReaderLink:
    """The connection back to one reader, named by the reader's link id."""

    link_id: int
    reader: WorkerKey
    asked: WorkerKey  # the incarnation the reader takes us for
    connection: Connection
    last_used_ns: int
    broken_ns: int | None = None
    lane: Lane = field(default_factory=Lane)
    serves: dict[int, Serve] = field(default_factory=dict)


class ServerHalf:
    """Serves blocks of ``segment`` to readers."""

    def __init__(
        self,
        port: Port,
        local: LocalEnd,
        source: BlockSource,
        options: UcxOptions,
        *,
        helpers: Helpers,
        memory: DirectMemory,
    ) -> None:
        self._port = port
        self._memory = memory
        self.frames = FrameWriter(options.compression, helpers)
        self._key = local.key
        self._segment = local.segment
        self._block_bytes = local.block_bytes
        self._source = source
        self._options = options
        self._links: dict[int, ReaderLink] = {}
        self._fencing: list[ReaderLink] = []
        self._stopped: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._replies: list[Operation] = []
        self._next_tick_ns = 0
        self.blocks_served = self.bytes_served = self.refused = self.leases_expired = self.protocol_errors = 0

    @property
    def active(self) -> bool:
        """Whether any read lease is out or any reply is still leaving."""
        return bool(self._fencing or self._replies) or any(link.serves for link in self._links.values())

    @property
    def endpoints(self) -> int:
        """Connections that exist, failed ones until they are fenced."""
        return len(self._links) + len(self._fencing)

    @property
    def leases(self) -> int:
        """Read leases that are out."""
        return sum(len(link.serves) for link in (*self._links.values(), *self._fencing))

    def on_message(self, message: Message, now_ns: int) -> None:
        """Handle what a reader sent."""
        match message:
            case Pull():
                self._on_pull(message, now_ns)
            case Grant(sequence, link_id, runs):
                self._on_grant(link_id, sequence, runs, now_ns)
            case Stop():
                self._on_stop(message, now_ns)
            case Bye(_, link_id):
                link = self._links.get(link_id)
                if link is not None:
                    self._break(link, now_ns)
            case _:
                self.protocol_errors += 1

    def on_malformed(self, error: IntegrityError, now_ns: int) -> None:
        """A message did not parse; the reader's timers end the pull it belonged to."""
        self.protocol_errors += 1

    def step(self, now_ns: int) -> bool:
        """Notice finished sends, look at the timers. True when something happened."""
        moved = False
        for link in (*self._links.values(), *self._fencing):
            if link.serves:
                moved |= self._collect(link, now_ns)
        if self._replies:
            self._replies = [reply for reply in self._replies if not reply.completed]
        if now_ns >= self._next_tick_ns:
            self._next_tick_ns = now_ns + TICK_NS
            self._look_at_timers(now_ns)
        return moved

    def close(self, now_ns: int) -> None:
        """Close every connection; `active` turns False when every lease is released."""
        self._memory.close()
        for link in list(self._links.values()):
            self._break(link, now_ns)

    # ── pulls ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_pull(self, pull: Pull, now_ns: int) -> None:
        if self._stopped.pop((pull.link_id, pull.sequence), 0) is None:
            return  # the stop overtook the pull, which is longer and travels slower
        try:
            link = self._link_to(pull, now_ns)
        except KVPoolError:
            self.refused += 1  # the reader cannot be reached; its stall timer ends the read
            return
        try:
            serve = self._pin(pull, link, now_ns)
        except KVPoolError as error:
            self.refused += 1
            self._reply(link, Refuse(pull.sequence, error.code, str(error)))
            return
        sums = tuple(None if block is None else block.checksum for block in serve.held)
        starts = [block.offset for run in serve.runs if (block := serve.held[run.first]) is not None]
        offer = Offer(
            sequence=pull.sequence,
            identity=identity_digest(pull.hashes),
            checksums=sums,
            run_blocks=tuple(run.blocks for run in serve.runs),
            window=self._memory.window(pull.host, starts),
            codec=serve.codec,
        )
        self._reply(link, offer)
        if serve.runs:
            link.serves[pull.sequence] = serve
        else:
            self._source.unpin(serve.lease_id)

    def _pin(self, pull: Pull, link: ReaderLink, now_ns: int) -> Serve:
        if pull.holder != self._key:
            raise StaleError(f"asked for {pull.holder}, this is {self._key}; look up again", peer=str(self._key))
        if self.leases >= self._options.max_serves:
            raise CapacityError(f"{self._key} serves {self._options.max_serves} pulls already", peer=str(self._key))
        if pull.sequence in link.serves:
            raise IncompatibleError("a pull with this sequence number is under way", peer=str(self._key))
        lease_id, held = self._source.pin(pull.reader, pull.hashes)
        sources = [None if block is None else block.offset for block in held]
        cap, codec = self._options.max_run_bytes, Codec.RAW
        if self._memory.window(pull.host, ()) is not None:
            cap = min(cap, self._options.max_fetch_bytes)
        else:
            codec = self.frames.accept(pull.codecs)
            cap = cap if codec is Codec.RAW else min(cap, FRAME_RUN_BYTES)
        runs = merge_runs(sources, pull.offsets, self._block_bytes, cap)
        budget_ns = min(pull.deadline_ns + self._options.lease_slack_ns, self._options.max_lease_ns)
        return Serve(lease_id, pull.sequence, link, runs, held, now_ns + budget_ns, now_ns, codec)

    def _link_to(self, pull: Pull, now_ns: int) -> ReaderLink:
        if pull.link_id in self._ended:
            raise StaleError(f"this link of {pull.reader} is over; it makes a new one", peer=str(pull.reader))
        link = self._links.get(pull.link_id)
        if link is not None and link.connection.alive:
            link.last_used_ns = now_ns
            return link
        for old in list(self._links.values()):
            # A reader has one living link per incarnation it asks: a new one says that the old one failed there.
            if old.link_id == pull.link_id or _replaces(pull, old):
                self._break(old, now_ns)
        if len(self._links) >= self._options.max_links:
            idle = [old for old in self._links.values() if not old.serves]
            if not idle:
                raise CapacityError(f"{len(self._links)} readers are connected already")
            self._break(min(idle, key=lambda old: old.last_used_ns), now_ns, over=False)
        connection = self._port.connect(pull.reader_address, str(pull.reader))
        link = self._links[pull.link_id] = ReaderLink(pull.link_id, pull.reader, pull.holder, connection, now_ns)
        return link

    def _on_grant(self, link_id: int, sequence: int, runs: int, now_ns: int) -> None:
        link = self._links.get(link_id)
        serve = None if link is None else link.serves.get(sequence)
        if link is None or serve is None or serve.over:
            return  # the lease ended before the grant came; the reader's timers handle it
        link.last_used_ns = now_ns
        if now_ns <= serve.ends_at_ns:
            self._renew(serve, now_ns)
        serve.wanted = max(serve.wanted, min(runs, len(serve.runs)))
        serve.over = serve.wanted == len(serve.runs)
        self._move(link, serve, now_ns)

    def _move(self, link: ReaderLink, serve: Serve, now_ns: int) -> None:
        """Send granted runs, or have them packed as far as there is staging."""
        try:
            while serve.granted < serve.wanted:
                index, data = serve.granted, self._run_bytes(serve, serve.granted)
                if serve.codec is Codec.RAW:
                    self._send_run(link, serve, index, data, None)
                elif self.frames.fits(len(data), link.lane):
                    serve.packing += 1
                    then = functools.partial(self._take_packed, link, serve, index)
                    self.frames.pack(data, serve.codec, link.lane, then)
                else:
                    return  # what was packed and sent makes room
                serve.granted = index + 1
        except KVPoolError:
            self._break(link, now_ns)

    def _take_packed(
        self, link: ReaderLink, serve: Serve, index: int, staging: Staging, frame_bytes: int, now_ns: int
    ) -> None:
        """Send a run that a helper packed, unless its link is over."""
        serve.packing -= 1
        if link.broken_ns is not None:
            self.frames.release(staging, link.lane)
            self._collect(link, now_ns)
            return
        try:
            self._send_run(link, serve, index, staging.view[:frame_bytes], staging)
        except KVPoolError:
            self.frames.release(staging, link.lane)
            self._break(link, now_ns)
            return
        self._move(link, serve, now_ns)

    def _send_run(self, link: ReaderLink, serve: Serve, index: int, data: memoryview, staging: Staging | None) -> None:
        serve.sends.append((link.connection.send(data, data_tag(serve.sequence, index)), staging))
        self.blocks_served += serve.runs[index].blocks
        self.bytes_served += serve.runs[index].blocks * self._block_bytes

    def _run_bytes(self, serve: Serve, index: int) -> memoryview:
        run = serve.runs[index]
        first = serve.held[run.first]
        assert first is not None
        return self._segment[first.offset : first.offset + run.blocks * self._block_bytes]

    def _on_stop(self, stop: Stop, now_ns: int) -> None:
        link = self._links.get(stop.link_id)
        serve = None if link is None else link.serves.get(stop.sequence)
        if link is not None and serve is not None:
            blocks = sum(run.blocks for run in serve.runs[: stop.fetched])
            self.blocks_served += blocks
            self.bytes_served += blocks * self._block_bytes
            serve.over = True
            self._collect(link, now_ns)
            return
        self._stopped[(stop.link_id, stop.sequence)] = None
        while len(self._stopped) > REMEMBERED_STOPS:
            self._stopped.popitem(last=False)

    def _reply(self, link: ReaderLink, message: Message) -> None:
        # A dead connection is noticed by the timers; the reader's own timers cover a lost reply.
        with contextlib.suppress(KVPoolError):
            self._replies.append(link.connection.send(encode(message), CONTROL_TAG))

    # ── endings ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _collect(self, link: ReaderLink, now_ns: int) -> bool:
        moved = False
        for serve in list(link.serves.values()):
            while serve.sends and serve.sends[0][0].completed:
                self.frames.release(serve.sends.popleft()[1], link.lane)
                moved = True
            if serve.granted < serve.wanted and link.broken_ns is None:
                self._move(link, serve, now_ns)
            if serve.ended and link.serves.pop(serve.sequence, None) is not None:
                self._source.unpin(serve.lease_id)
                moved = True
        if moved:
            link.last_used_ns = now_ns
        return moved

    def _break(self, link: ReaderLink, now_ns: int, *, over: bool = True) -> None:
        """Close a connection by force; its leases end as their sends become terminal. Unless the link is ``over``, its
        reader may go on with it."""
        self._links.pop(link.link_id, None)
        self._fencing.append(link)
        if over:
            self._ended[link.link_id] = None  # pulls that still come over it are not worth a connection
        while len(self._ended) > REMEMBERED_LINKS:
            self._ended.popitem(last=False)
        link.broken_ns = now_ns
        for serve in link.serves.values():
            serve.drop()
        with contextlib.suppress(KVPoolError):  # then its sends stay open, and its blocks pinned
            link.connection.close()
        self._settle(link, now_ns)
        for serve in link.serves.values():
            for _, staging in serve.sends:
                self.frames.write_off(staging, link.lane)
        self._next_tick_ns = 0

    def _look_at_timers(self, now_ns: int) -> None:
        for link in list(self._links.values()):
            late = [serve for serve in link.serves.values() if now_ns > serve.ends_at_ns]
            self.leases_expired += len(late)
            for serve in late:
                serve.drop()
            for serve in link.serves.values():
                goes_on = serve.sending or link.last_used_ns > serve.renewed_ns  # others wait their turn on this link
                if goes_on and now_ns <= serve.ends_at_ns and now_ns - serve.renewed_ns >= LEASE_RENEW_NS:
                    self._renew(serve, now_ns)
            self._collect(link, now_ns)
            stuck = any(serve.sends for serve in late)
            idle = not link.serves and now_ns - link.last_used_ns > self._options.idle_link_ns
            if stuck or idle or not link.connection.alive:
                self._break(link, now_ns, over=not idle)
        still = []
        for link in self._fencing:
            if self._settle(link, now_ns) and not link.serves:
                link.connection.drop()
            else:
                still.append(link)
        self._fencing = still

    def _renew(self, serve: Serve, now_ns: int) -> None:
        serve.renewed_ns = now_ns
        self._source.renew(serve.lease_id)

    def _settle(self, link: ReaderLink, now_ns: int) -> bool:
        """Move the close of a broken link on and release what ended by it. True when the connection is closed."""
        self._port.progress_all()
        closed = link.connection.closed
        self._collect(link, now_ns)
        return closed


def _replaces(pull: Pull, old: ReaderLink) -> bool:
    """Whether a pull over a new link shows that an older link is over."""
    if pull.reader.worker_id != old.reader.worker_id:
        return False
    return pull.reader != old.reader or pull.holder == old.asked
