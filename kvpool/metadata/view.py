"""A watcher's copy of the directory: built from a snapshot, kept by deltas.  (pure)

A gap, a delta of another directory epoch or an unfinished snapshot is never papered over: `DirectoryView.apply` says
so and the shell asks for a new snapshot. While that loads, the old copy goes on answering.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvpool.metadata.events import BlocksChanged, Delta, MemberChanged, MemberGone, Placement, Reported, SnapshotHeader
from kvpool.metadata.index import PrefixIndex
from kvpool.metadata.prefixes import Prefixes
from kvpool.metadata.state import apply_batch
from kvpool.reports import WorkerReport
from kvpool.types import BlockHash, MemberInfo, MemberState, Tier, WorkerKey


@dataclass(frozen=True, slots=True)
class WatchedMember:
    """One member as a watcher sees it; ``report`` is its newest, None before the first."""

    info: MemberInfo
    state: MemberState
    report: WorkerReport | None


class _Copy:
    """One incarnation of the copy, complete or still loading."""

    def __init__(self, header: SnapshotHeader, max_entries: int, max_workers: int) -> None:
        self.directory_epoch = header.directory_epoch
        self.sequence = header.sequence
        self.index = PrefixIndex(max_entries=max_entries, max_workers=max_workers)
        self.members: dict[WorkerKey, WatchedMember] = {}
        self.loading = [member.info.key for member in header.members if member.loading]
        self.incoming: list[tuple[WorkerKey, Tier, Placement]] = []
        for member in header.members:
            self.index.add_worker(member.info.key)
            self.set_member(member.info, member.state, member.report)

    def set_member(self, info: MemberInfo, state: MemberState, report: WorkerReport | None) -> None:
        self.index.set_visible(info.key, state is MemberState.ALIVE)
        self.members[info.key] = WatchedMember(info, state, report)


class DirectoryView:
    """A copy of one directory. Not thread-safe.

    Args:
        max_entries: bound on the copy's index.
        max_workers: bound on members.
    """

    def __init__(self, *, max_entries: int, max_workers: int) -> None:
        self._limits = (max_entries, max_workers)
        self._copy = _Copy(SnapshotHeader(0, 0, ()), *self._limits)
        self._next: _Copy | None = None
        self.complete = False

    @property
    def directory_epoch(self) -> int:
        """Incarnation the copy is of, 0 before the first snapshot."""
        return self._copy.directory_epoch

    @property
    def sequence(self) -> int:
        """Newest delta in the copy."""
        return self._copy.sequence

    @property
    def index(self) -> PrefixIndex:
        """The copy of the index. Read it; only this class changes it."""
        return self._copy.index

    @property
    def members(self) -> tuple[WatchedMember, ...]:
        """All members known."""
        return tuple(self._copy.members.values())

    def begin(self, header: SnapshotHeader) -> None:
        """A snapshot starts; what an unfinished one before it brought is dropped."""
        self._next = _Copy(header, *self._limits)

    def fill(self, placements: Iterable[Placement]) -> None:
        """Take a part of the snapshot."""
        target = self._next
        if target is None:
            return
        for placement in placements:
            for key, tier, incoming in placement.holders:
                if incoming:
                    target.incoming.append((key, tier, placement))
                else:
                    target.index.stored(key, tier, placement.hashes, group=placement.group, linked=placement.linked)

    def finish(self) -> None:
        """The snapshot is whole: it replaces the copy."""
        target = self._next
        if target is None:
            return
        for key in target.loading:
            target.index.begin_snapshot(key, direct=False)
        for key, tier, item in target.incoming:
            target.index.stored(key, tier, item.hashes, group=item.group, linked=item.linked)
        target.loading, target.incoming = [], []
        self._copy, self._next, self.complete = target, None, True

    def apply(self, delta: Delta) -> bool:
        """Take the next delta; False when it does not follow and a new snapshot is needed.

        A delta that the copy already contains is passed over.
        """
        copy = self._copy
        if not self.complete or delta.directory_epoch != copy.directory_epoch or delta.sequence > copy.sequence + 1:
            return False
        if delta.sequence <= copy.sequence:
            return True
        copy.sequence = delta.sequence
        change = delta.change
        if isinstance(change, BlocksChanged):
            apply_batch(copy.index, change.batch, change.direct)
        elif isinstance(change, MemberChanged):
            known = copy.members.get(change.info.key)
            copy.index.add_worker(change.info.key)
            copy.set_member(change.info, change.state, known.report if known else None)
        elif isinstance(change, MemberGone):
            copy.members.pop(change.key, None)
            copy.index.remove_worker(change.key)
        elif isinstance(change, Reported):
            known = copy.members.get(change.report.key)
            if known is not None:
                copy.members[change.report.key] = WatchedMember(known.info, known.state, change.report)
        return True

    def is_current(self, directory_epoch: int, sequence: int) -> bool:
        """Whether the copy contains everything up to ``sequence``; if not, a new snapshot is needed."""
        copy = self._copy
        return self.complete and copy.directory_epoch == directory_epoch and copy.sequence >= sequence

    def prefixes(self, chain: Sequence[BlockHash], *, group: int = 0, learn: bool = True) -> Prefixes:
        """See `PrefixIndex.prefixes`; the chain is trusted unless ``learn`` is off."""
        return self._copy.index.prefixes(chain, group=group, learn=learn)
