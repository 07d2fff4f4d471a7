"""What travels between owners, the directory and its watchers, as plain values.  (pure)

The wire form is ``proto/kvpool/v1/metadata.proto``; `kvpool.metadata.wire` translates.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvpool.reports import WorkerReport
from kvpool.types import BlockHash, MemberInfo, MemberState, Tier, WorkerKey


class BlockAction(Enum):
    """What happened to blocks."""

    STORED = "stored"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """Blocks of one tier and group that were stored or removed.

    ``linked``: each hash is the child of the one before it, so the index may keep them as one run.
    """

    action: BlockAction
    tier: Tier
    hashes: tuple[BlockHash, ...]
    group: int = 0
    linked: bool = False


@dataclass(frozen=True, slots=True)
class EventBatch:
    """One numbered batch of a worker's events.

    Attributes:
        key: whose blocks.
        directory_epoch: incarnation of the directory it is meant for.
        sequence: grows by one from batch to batch for the life of a worker epoch, across streams and snapshots.
        snapshot_begin: what follows describes the worker's blocks from nothing.
        snapshot_end: with this batch the snapshot is whole.
        events: in order.
    """

    key: WorkerKey
    directory_epoch: int
    sequence: int
    events: tuple[BlockEvent, ...] = ()
    snapshot_begin: bool = False
    snapshot_end: bool = False


@dataclass(frozen=True, slots=True)
class BatchAck:
    """The answer to one batch.

    Attributes:
        received: sequence of the batch this answers.
        applied: everything up to here was applied or superseded; 0 when nothing was.
        resync: batches are missing: send a snapshot.
        refused_blocks: blocks of this batch that found no room in the index.
    """

    received: int
    applied: int
    resync: bool = False
    refused_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to a join.

    Attributes:
        directory_epoch: incarnation of the directory.
        lease_ns: the membership lease; send heartbeats at a third of it or more often.
        applied_sequence: last batch of this worker the directory has applied, None when it knows nothing and needs a
            snapshot.
    """

    directory_epoch: int
    lease_ns: int
    applied_sequence: int | None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A worker lives.

    Attributes:
        key: the worker.
        directory_epoch: incarnation of the directory it joined.
        probe_answer: the token of the last `Pulse`, None when there was none.
        draining: some directory told it to drain, or it wants to.
        event_lag_ns: age of its oldest event batch without an answer.
    """

    key: WorkerKey
    directory_epoch: int
    probe_answer: int | None = None
    draining: bool = False
    event_lag_ns: int = 0


@dataclass(frozen=True, slots=True)
class Pulse:
    """The answer to a heartbeat.

    Attributes:
        state: how the directory sees the worker.
        lease_ns: the renewed lease, from now on.
        probe: token to return with the next heartbeat, None when the worker is not suspected.
    """

    state: MemberState
    lease_ns: int
    probe: int | None = None


class LeaveReason(Enum):
    """Why a worker is no longer a member."""

    LEFT = "left"
    EXPIRED = "expired"  # its membership lease ran out
    REPLACED = "replaced"  # a newer epoch of it joined


@dataclass(frozen=True, slots=True)
class MemberChanged:
    """A worker joined, or its state changed."""

    info: MemberInfo
    state: MemberState


@dataclass(frozen=True, slots=True)
class MemberGone:
    """A worker is no longer a member; its blocks are gone with it."""

    key: WorkerKey
    reason: LeaveReason


@dataclass(frozen=True, slots=True)
class BlocksChanged:
    """An event batch was applied.

    ``direct``, of one that begins a snapshot: the worker held nothing, so what follows was seen at once and not only
    when the snapshot was whole. A copy that is being built cannot tell by itself, since it may know of later blocks
    already. None: by what is held.
    """

    batch: EventBatch
    direct: bool | None = None


@dataclass(frozen=True, slots=True)
class Reported:
    """A worker reported about itself."""

    report: WorkerReport


Change = MemberChanged | MemberGone | BlocksChanged | Reported
"""What a directory call changed."""


@dataclass(frozen=True, slots=True)
class MemberView:
    """One member as a snapshot shows it.

    ``loading``: a snapshot is about to replace the blocks it is known to hold. ``event_lag_ns`` stays in the directory.
    """

    info: MemberInfo
    state: MemberState
    report: WorkerReport | None
    loading: bool
    event_lag_ns: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Blocks that the same holders hold, as `PrefixIndex.dump` yields them.

    Attributes:
        holders: worker, tier, and whether the entry belongs to a snapshot that is not complete yet.
        group: attention group.
        hashes: the blocks.
        linked: each is the child of the one before it.
    """

    holders: tuple[tuple[WorkerKey, Tier, bool], ...]
    group: int
    hashes: tuple[BlockHash, ...]
    linked: bool


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """What a watcher starts from; placements follow, then the deltas after ``sequence``."""

    directory_epoch: int
    sequence: int
    members: tuple[MemberView, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """One numbered change of one directory epoch."""

    directory_epoch: int
    sequence: int
    change: Change


@dataclass(slots=True)
class DirectoryCounters:
    """Running totals since the directory started; each has a row in the metrics."""

    joins: int = 0
    leaves: int = 0
    expired: int = 0
    replaced: int = 0
    fenced: int = 0
    incompatible: int = 0
    suspects: int = 0
    suspects_ignored: int = 0
    restored: int = 0
    batches: int = 0
    duplicate_batches: int = 0
    gaps: int = 0
    snapshots: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    refused_blocks: int = 0
    reports: int = 0
    lookups: int = 0
    watchers_dropped: int = 0
    refused_pins: int = 0
