"""The directory: who is a member, who holds what, who is under suspicion.  (pure)

All state is soft: the owners are the truth, and a directory that starts empty is told everything again. Calls take
the time, change the state and return numbered `Delta`s in order for the shell to relay to watchers; applying them to
a `kvpool.metadata.view.DirectoryView` of the same epoch gives a copy.

Invariants: one member per worker id, of the highest epoch seen; every call of an older epoch is refused (`StaleError`);
exactly the members are workers of the index; exactly the ``ALIVE`` ones are visible in it.

Not thread-safe; one owner calls it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum

from kvpool.errors import IncompatibleError, InvariantViolation, RequestError, StaleError
from kvpool.metadata.events import (
    BatchAck,
    BlockAction,
    BlocksChanged,
    Change,
    Delta,
    DirectoryCounters,
    EventBatch,
    Heartbeat,
    LeaveReason,
    MemberChanged,
    MemberGone,
    MemberView,
    Pulse,
    Reported,
    SnapshotHeader,
    Welcome,
)
from kvpool.metadata.index import PrefixIndex
from kvpool.metadata.membership import MAX_NAME_LENGTH, DirectoryLimits, Member, check_compatible, check_info
from kvpool.metadata.pins import Duty, Pin, PinBook, PinView, Tending, assign, refuse_full, view_of
from kvpool.metadata.prefixes import Prefixes
from kvpool.metadata.worker_totals import WorkerTotals
from kvpool.reports import WorkerReport
from kvpool.types import BlockHash, MemberInfo, MemberState, WorkerEpoch, WorkerId, WorkerKey

Deltas = tuple[Delta, ...]

DUTIES_NS = 500_000_000
"""How long an assignment of copies stands."""


class StaleReason(Enum):
    """Why a call was refused with `StaleError`; ``details["reason"]`` carries the value."""

    FENCED = "fenced"  # a newer epoch is known, or this one left: stop
    NOT_A_MEMBER = "not_a_member"  # never joined here, or expired: join again
    DIRECTORY_RESTARTED = "directory_restarted"  # meant for another incarnation: join again


class DirectoryState:
    """One incarnation of the directory.

    Args:
        directory_epoch: its number, larger than that of every incarnation before.
        limits: bounds and times.
        now_ns: the present; all later times are on the same monotonic clock.
    """

    def __init__(self, directory_epoch: int, limits: DirectoryLimits, now_ns: int) -> None:
        self.directory_epoch = directory_epoch
        self.limits = limits
        self.index = PrefixIndex(max_entries=limits.max_entries, max_workers=limits.max_workers)
        self.counters = DirectoryCounters()
        self._members: dict[WorkerId, Member] = {}
        self._fences: OrderedDict[WorkerId, WorkerEpoch] = OrderedDict()
        self.pins = PinBook()
        self.worker_totals = WorkerTotals()
        self._duties: dict[WorkerKey, tuple[Duty, ...]] = {}
        self._duties_until_ns = now_ns
        self._sequence = 0
        self._ticked_ns = now_ns

    @property
    def sequence(self) -> int:
        """Number of the newest delta; 0 before the first."""
        return self._sequence

    # -- membership ---------------------------------------------------------------------------------------------

    def join(self, info: MemberInfo, now_ns: int, *, draining: bool = False) -> tuple[Welcome, Deltas]:
        """A worker wants to be a member. Joining again with the same epoch renews the lease and keeps the blocks.

        ``draining``: some directory told it to drain. That it remembers, so that it survives this one's restart.

        Raises:
            RequestError: the info is malformed.
            StaleError: a newer epoch of the worker is known, or this one has left.
            IncompatibleError: it could not exchange blocks with the members.
            CapacityError: too many members.
        """
        check_info(info)
        worker_id, epoch = info.key.worker_id, info.key.worker_epoch
        self._refuse_fenced(info.key)
        others = [member for member in self._members.values() if member.info.key.worker_id != worker_id]
        if others:
            self._check_compatible(info, others[0].info)
        deltas: list[Delta] = []
        member = self._members.get(worker_id)
        if member is not None and member.info.key.worker_epoch != epoch:
            self.counters.replaced += 1
            deltas.append(self._remove(member, LeaveReason.REPLACED))
            member = None
        lease_until_ns = now_ns + self.limits.lease_ns
        if member is None:
            self.index.add_worker(info.key)
            member = self._members[worker_id] = Member(info, lease_until_ns)
            member.draining = draining
            self.index.set_visible(info.key, not draining)
            self._fence(worker_id, epoch)
            self.counters.joins += 1
            deltas.append(self._emit(MemberChanged(info, member.state)))
        else:
            member.lease_until_ns = lease_until_ns
            deltas.extend(self._drain(member, draining))
            if member.info != info:
                member.info = info
                deltas.append(self._emit(MemberChanged(info, member.state)))
        applied = None if member.broken else member.applied
        return Welcome(self.directory_epoch, self.limits.lease_ns, applied), tuple(deltas)

    def heartbeat(self, beat: Heartbeat, now_ns: int) -> tuple[Pulse, Deltas]:
        """Renew a membership lease, and take what else the worker says.

        Raises:
            StaleError: not a member of this incarnation; ``details["reason"]`` is a `StaleReason`.
        """
        member = self._member(beat.key, beat.directory_epoch)
        member.lease_until_ns = now_ns + self.limits.lease_ns
        member.event_lag_ns = beat.event_lag_ns
        member.answer_probe(beat.probe_answer)
        deltas = self._drain(member, beat.draining) + self._restore(member, now_ns)
        token = None if member.suspicion is None else member.suspicion.token
        return Pulse(member.state, self.limits.lease_ns, token), deltas

    def suspect(
        self, key: WorkerKey, reporter: WorkerKey | None, reason: str, *, token: int, now_ns: int
    ) -> tuple[bool, Deltas]:
        """A load from ``key`` failed: hide it at once and probe it (see `kvpool.metadata.membership`).

        Args:
            key: the holder.
            reporter: the worker that says so; None for a router.
            reason: `KVPoolError.code` of the failure.
            token: unpredictable number for the probe.
            now_ns: the present.

        Returns:
            Whether this report started a suspicion.

        Raises:
            StaleError: holder or reporter is not a member.
            RequestError: the reason is a novel.
        """
        if len(reason) > MAX_NAME_LENGTH:
            raise RequestError(f"reason has {len(reason)} characters, more than {MAX_NAME_LENGTH}", field="reason")
        if reporter is not None:
            self._member(reporter)
        member = self._member(key)
        if not member.suspect(reason, token, now_ns, self.limits):
            self.counters.suspects_ignored += 1
            return False, ()
        self.counters.suspects += 1
        return True, self._show(member)

    def drain(self, worker_id: WorkerId) -> tuple[WorkerKey, Deltas]:
        """Send no more requests or readers to a worker. May be repeated.

        Raises:
            RequestError: no such member.
        """
        member = self._members.get(worker_id)
        if member is None:
            known = ", ".join(sorted(self._members)) or "none"
            raise RequestError(f"no member is called {worker_id!r:.80}; members: {known:.500}", worker=worker_id[:80])
        return member.info.key, self._drain(member, True)

    def leave(self, key: WorkerKey) -> Deltas:
        """A worker goes for good; this epoch of it cannot join again. May be repeated.

        Raises:
            StaleError: a newer epoch is a member.
        """
        member = self._members.get(key.worker_id)
        if member is None:
            self._fence(key.worker_id, WorkerEpoch(key.worker_epoch + 1))
            return ()
        self._member(key)
        self.counters.leaves += 1
        delta = self._remove(member, LeaveReason.LEFT)
        self._fence(key.worker_id, WorkerEpoch(key.worker_epoch + 1))
        return (delta,)

    def tick(self, now_ns: int, sweep_blocks: int = 4096) -> Deltas:
        """End leases and suspicions that are over, and clear a little of what left workers held.

        A directory that was itself paused must not punish the workers whose heartbeats waited in its sockets: a gap
        between ticks longer than half a lease is added to every lease.
        """
        gap_ns = now_ns - self._ticked_ns
        self._ticked_ns = now_ns
        deltas: list[Delta] = []
        for member in list(self._members.values()):
            if gap_ns > self.limits.lease_ns // 2:
                member.lease_until_ns += gap_ns
            if member.lease_until_ns <= now_ns:
                self.counters.expired += 1
                deltas.append(self._remove(member, LeaveReason.EXPIRED))
            else:
                deltas.extend(self._restore(member, now_ns))
        self.index.sweep(sweep_blocks)
        return tuple(deltas)

    # -- blocks and reports -------------------------------------------------------------------------------------

    def publish(self, batch: EventBatch) -> tuple[BatchAck, Deltas]:
        """Apply a batch of events; a repeated one is acknowledged and changes nothing.

        Raises:
            StaleError: not a member of this incarnation.
        """
        member = self._member(batch.key, batch.directory_epoch)
        applied = member.applied or 0
        if member.applied is not None and batch.sequence <= applied:
            self.counters.duplicate_batches += 1
            return BatchAck(batch.sequence, applied), ()
        if not batch.snapshot_begin:
            if member.applied is None or member.broken:
                return BatchAck(batch.sequence, applied, resync=True), ()
            if batch.sequence != applied + 1:
                member.broken = True
                self.counters.gaps += 1
                return BatchAck(batch.sequence, applied, resync=True), ()
        direct = self.index.empty(batch.key) if batch.snapshot_begin else None
        refused = self._apply(member, batch)
        changed = BlocksChanged(batch, direct)
        return BatchAck(batch.sequence, batch.sequence, refused_blocks=refused), (self._emit(changed),)

    def report(self, report: WorkerReport) -> Deltas:
        """Keep and relay a worker's report; an older one than the newest known is dropped.

        Raises:
            StaleError: not a member.
        """
        member = self._member(report.key)
        if member.report is not None and report.sequence <= member.report.sequence:
            return ()
        member.report = report
        self.worker_totals.add(report)
        self.counters.reports += 1
        return (self._emit(Reported(report)),)

    def lookup(self, chain: Sequence[BlockHash], group: int = 0) -> Prefixes:
        """How long a prefix of ``chain`` every ``ALIVE`` worker holds. Pins nothing, renews nothing."""
        self.counters.lookups += 1
        return self.index.prefixes(chain, group=group)

    # -- housekeeping and pins ----------------------------------------------------------------------------------

    def tend(
        self, key: WorkerKey, hashes: Sequence[BlockHash], pins_digest: int, pins: Sequence[Pin], now_ns: int
    ) -> Tending:
        """What a worker should know to keep house.

        Args:
            key: the worker.
            hashes: blocks it may evict soon.
            pins_digest: of its book of pins.
            pins: its pins, when it knows that the books differ.
            now_ns: the present.

        Raises:
            StaleError: not a member.
            RequestError: a pin is malformed.
        """
        self._member(key)
        _, refused = self.pins.merge(pins)
        self.counters.refused_pins += refused
        copies = self.index.copies(key, hashes)
        differ = pins_digest != self.pins.digest
        return Tending(
            others=tuple(count for count, _ in copies),
            spare=tuple(kept for _, kept in copies),
            pins_digest=self.pins.digest,
            pins=self.pins.all() if differ else (),
            duties=self._duties_now(now_ns).get(key, ()),
        )

    def merge_pins(self, pins: Sequence[Pin]) -> tuple[PinView, ...]:
        """Take pins from an administrator; returns all active ones and who holds them.

        Raises:
            RequestError: one is malformed.
            CapacityError: one found no room.
        """
        _, refused = self.pins.merge(pins)
        self.counters.refused_pins += refused
        refuse_full(refused)
        return tuple(view_of(pin, self._lengths(pin)) for pin in self.pins.active())

    def _lengths(self, pin: Pin) -> dict[WorkerKey, int]:
        return {key: max(tiers.values()) for key, tiers in self.index.prefixes(pin.chain).items()}

    def _duties_now(self, now_ns: int) -> dict[WorkerKey, tuple[Duty, ...]]:
        """Who should copy what; worked out once in a while for all, not for everyone who asks."""
        if now_ns >= self._duties_until_ns:
            self._duties_until_ns = now_ns + DUTIES_NS
            able = [member.info for member in self._members.values() if member.state is MemberState.ALIVE]
            self._duties = assign(self.pins.active(), able, self._lengths)
        return self._duties

    # -- views --------------------------------------------------------------------------------------------------

    def members(self) -> tuple[MemberView, ...]:
        """All members, in the order they joined."""
        return tuple(
            MemberView(
                member.info, member.state, member.report, self.index.loading(member.info.key), member.event_lag_ns
            )
            for member in self._members.values()
        )

    def suspicions(self) -> dict[WorkerKey, str]:
        """Suspected members and why."""
        return {
            member.info.key: member.suspicion.reason
            for member in self._members.values()
            if member.suspicion is not None
        }

    def header(self) -> SnapshotHeader:
        """Start of a snapshot for a watcher; `PrefixIndex.dump`, begun at the same moment, is the rest."""
        return SnapshotHeader(self.directory_epoch, self._sequence, self.members())

    def check(self) -> None:
        """Verify the invariants in the module's docstring.

        Raises:
            InvariantViolation: one does not hold.
        """
        self.index.check()
        if {member.info.key for member in self._members.values()} != set(self.index.workers):
            raise InvariantViolation("members and workers of the index differ")
        for worker_id, member in self._members.items():
            if self._fences.get(worker_id, 0) > member.info.key.worker_epoch:
                raise InvariantViolation(f"{member.info.key} is a member although it is fenced")
            if self.index.visible(member.info.key) != (member.state is MemberState.ALIVE):
                raise InvariantViolation(f"{member.info.key} is {member.state.value} but its visibility disagrees")

    # -- private ------------------------------------------------------------------------------------------------

    def _emit(self, change: Change) -> Delta:
        self._sequence += 1
        return Delta(self.directory_epoch, self._sequence, change)

    def _member(self, key: WorkerKey, directory_epoch: int | None = None) -> Member:
        """The member with exactly this key.

        Raises:
            StaleError: fenced, not a member, or meant for another incarnation.
        """
        self._refuse_fenced(key)
        if directory_epoch is not None and directory_epoch != self.directory_epoch:
            raise StaleError(
                "the directory has restarted; join again and send a snapshot",
                reason=StaleReason.DIRECTORY_RESTARTED.value,
                worker=str(key),
            )
        member = self._members.get(key.worker_id)
        if member is None or member.info.key != key:
            raise StaleError(
                f"{key} is not a member; it never joined, left, or its membership lease ended: join again",
                reason=StaleReason.NOT_A_MEMBER.value,
                worker=str(key),
            )
        return member

    def _refuse_fenced(self, key: WorkerKey) -> None:
        newest = self._fences.get(key.worker_id)
        if newest is not None and key.worker_epoch < newest:
            self.counters.fenced += 1
            raise StaleError(
                f"{key} is fenced: a newer epoch of it is known, or it left; stop this incarnation",
                reason=StaleReason.FENCED.value,
                worker=str(key),
                newest_epoch=newest,
            )

    def _fence(self, worker_id: WorkerId, epoch: WorkerEpoch) -> None:
        self._fences[worker_id] = max(epoch, self._fences.get(worker_id, epoch))
        self._fences.move_to_end(worker_id)
        while len(self._fences) > self.limits.max_fences:
            self._fences.popitem(last=False)

    def _check_compatible(self, info: MemberInfo, member: MemberInfo) -> None:
        try:
            check_compatible(info, member)
        except IncompatibleError:
            self.counters.incompatible += 1
            raise

    def _remove(self, member: Member, reason: LeaveReason) -> Delta:
        del self._members[member.info.key.worker_id]
        self.index.remove_worker(member.info.key)
        return self._emit(MemberGone(member.info.key, reason))

    def _drain(self, member: Member, draining: bool) -> Deltas:
        """Note that a member drains; there is no way back but another epoch."""
        if not draining or member.draining:
            return ()
        member.draining = True
        return self._show(member)

    def _restore(self, member: Member, now_ns: int) -> Deltas:
        if not member.restore(now_ns):
            return ()
        self.counters.restored += 1
        return self._show(member)

    def _show(self, member: Member) -> Deltas:
        """Make the index and the watchers see a member's state."""
        self.index.set_visible(member.info.key, member.state is MemberState.ALIVE)
        return (self._emit(MemberChanged(member.info, member.state)),)

    def _apply(self, member: Member, batch: EventBatch) -> int:
        """Apply a batch that is in order; returns blocks refused."""
        member.applied, member.broken = batch.sequence, False
        self.counters.batches += 1
        if batch.snapshot_begin:
            self.counters.snapshots += 1
        stored, removed, refused = apply_batch(self.index, batch)
        self.counters.stored_blocks += stored
        self.counters.removed_blocks += removed
        self.counters.refused_blocks += refused
        return refused


def apply_batch(index: PrefixIndex, batch: EventBatch, direct: bool | None = None) -> tuple[int, int, int]:
    """Apply a batch to an index; returns entries stored, entries removed, blocks refused. ``direct``: see
    `BlocksChanged`."""
    stored = removed = refused = 0
    if batch.snapshot_begin:
        index.begin_snapshot(batch.key, direct)
    for event in batch.events:
        if event.action is BlockAction.STORED:
            result = index.stored(batch.key, event.tier, event.hashes, group=event.group, linked=event.linked)
            stored += result.added
            refused += result.refused
        else:
            removed += index.removed(batch.key, event.tier, event.hashes, group=event.group)
    if batch.snapshot_end:
        index.end_snapshot(batch.key)
    return stored, removed, refused
