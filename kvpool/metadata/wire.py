"""Values ↔ protobuf messages of ``proto/kvpool/v1/metadata.proto``. Knows no gRPC.

Reading is where foreign input enters: every function that takes a message raises `RequestError`, naming the field,
when it is malformed. Writing never fails.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from kvpool.errors import RequestError
from kvpool.metadata.events import (
    BatchAck,
    BlockAction,
    BlockEvent,
    BlocksChanged,
    Delta,
    EventBatch,
    Heartbeat,
    LeaveReason,
    MemberChanged,
    MemberGone,
    MemberView,
    Placement,
    Pulse,
    Reported,
    SnapshotHeader,
    Welcome,
)
from kvpool.metadata.prefixes import Prefixes
from kvpool.metadata.v1 import metadata_pb2 as pb
from kvpool.reports import LoadSample, PrefillSample, RequestOutcome, WorkerLoad, WorkerReport
from kvpool.types import (
    BLOCK_HASH_BYTES,
    BlockHash,
    MemberInfo,
    MemberState,
    RequestId,
    Role,
    Tier,
    WorkerEpoch,
    WorkerId,
    WorkerKey,
)

# Generated messages have no types that mypy follows here (pyproject excludes them), hence `Any` for messages.
Message = Any
_T = TypeVar("_T")

_ROLES: dict[Role, Any] = {Role.MIXED: 1, Role.PREFILL: 2, Role.DECODE: 3}
_STATES: dict[MemberState, Any] = {MemberState.ALIVE: 1, MemberState.SUSPECT: 2, MemberState.DRAINING: 3}
_REASONS: dict[LeaveReason, Any] = {LeaveReason.LEFT: 1, LeaveReason.EXPIRED: 2, LeaveReason.REPLACED: 3}
_TIERS: dict[Tier, Any] = {tier: int(tier) for tier in Tier}
_ROLE_OF = {number: role for role, number in _ROLES.items()}
_STATE_OF = {number: state for state, number in _STATES.items()}
_REASON_OF = {number: reason for reason, number in _REASONS.items()}
LOAD_FIELDS = tuple(name for name in WorkerLoad.__dataclass_fields__ if name != "served_request_ids")
_OUTCOME_FIELDS = tuple(
    name for name in RequestOutcome.__dataclass_fields__ if name.endswith("_ns") or name.startswith(("tokens", "bytes"))
)


MAX_BATCH_BLOCKS = 65_536
"""Blocks that one batch may carry: a larger one would hold up the service's other callers."""

MAX_GROUPS = 64
MAX_ID_LENGTH = 256
"""Characters of a worker's id: the directory remembers ids, so they must not be books."""

MAX_REPORT_BYTES = 4 * 1024 * 1024
"""The directory keeps the newest report of every worker; the largest that `workers.reporter` makes has about 1 MB."""

_HASHES_AT_ONCE = 512  # a format is compiled and kept by `struct` for every length: 32 bytes a hash
_MANY = struct.Struct(f"{BLOCK_HASH_BYTES}s" * _HASHES_AT_ONCE)


def pack_hashes(hashes: Iterable[BlockHash]) -> bytes:
    """Hashes one after the other."""
    return b"".join(hashes)


def unpack_hashes(packed: bytes) -> tuple[BlockHash, ...]:
    """The hashes that `pack_hashes` packed.

    Raises:
        RequestError: the length is no multiple of a hash's.
    """
    count, rest = divmod(len(packed), BLOCK_HASH_BYTES)
    if rest:
        raise RequestError(
            f"hashes has {len(packed)} bytes, which is no multiple of {BLOCK_HASH_BYTES}", field="hashes"
        )
    whole = count - count % _HASHES_AT_ONCE
    unpacked = list(itertools.chain.from_iterable(_MANY.iter_unpack(packed[: whole * BLOCK_HASH_BYTES])))
    unpacked.extend(struct.unpack_from(f"{BLOCK_HASH_BYTES}s" * (count - whole), packed, whole * BLOCK_HASH_BYTES))
    return tuple(unpacked)


# -- keys and members -----------------------------------------------------------------------------------------------


def key_to_wire(key: WorkerKey) -> Message:
    """`WorkerKey` → message."""
    return pb.WorkerKey(worker_id=key.worker_id, worker_epoch=key.worker_epoch)


def key_from_wire(message: Message) -> WorkerKey:
    """Message → `WorkerKey`."""
    if not message.worker_id:
        raise RequestError("worker_id is empty", field="worker_id")
    if len(message.worker_id) > MAX_ID_LENGTH:
        raise RequestError(f"worker_id has more than {MAX_ID_LENGTH} characters", field="worker_id")
    return WorkerKey(WorkerId(message.worker_id), WorkerEpoch(message.worker_epoch))


def info_to_wire(info: MemberInfo) -> Message:
    """`MemberInfo` → message."""
    return pb.MemberInfo(
        key=key_to_wire(info.key),
        role=_ROLES[info.role],
        transport=info.transport,
        data_address=info.data_address,
        layout_fingerprint=info.layout_fingerprint,
        hash_scheme=info.hash_scheme,
        block_tokens=info.block_tokens,
        block_bytes=info.block_bytes,
        capacity_blocks=info.capacity_blocks,
        control_address=info.control_address,
        calibration=[_prefill_to_wire(item) for item in info.calibration],
    )


def info_from_wire(message: Message) -> MemberInfo:
    """Message → `MemberInfo`."""
    return MemberInfo(
        key=key_from_wire(message.key),
        role=_named(_ROLE_OF, message.role, "role"),
        transport=message.transport,
        data_address=message.data_address,
        layout_fingerprint=message.layout_fingerprint,
        hash_scheme=message.hash_scheme,
        block_tokens=message.block_tokens,
        block_bytes=message.block_bytes,
        capacity_blocks=tuple(message.capacity_blocks),
        control_address=message.control_address,
        calibration=tuple(_prefill_from_wire(item) for item in message.calibration),
    )


def state_to_wire(state: MemberState) -> Any:
    """`MemberState` → enum number."""
    return _STATES[state]


def state_from_wire(number: int) -> MemberState:
    """Enum number → `MemberState`."""
    return _named(_STATE_OF, number, "state")


def welcome_to_wire(welcome: Welcome) -> Message:
    """`Welcome` → message."""
    return pb.JoinResponse(
        directory_epoch=welcome.directory_epoch, lease_ns=welcome.lease_ns, applied_sequence=welcome.applied_sequence
    )


def welcome_from_wire(message: Message) -> Welcome:
    """Message → `Welcome`."""
    applied = message.applied_sequence if message.HasField("applied_sequence") else None
    return Welcome(message.directory_epoch, message.lease_ns, applied)


def heartbeat_to_wire(beat: Heartbeat) -> Message:
    """`Heartbeat` → message."""
    return pb.HeartbeatRequest(
        key=key_to_wire(beat.key),
        directory_epoch=beat.directory_epoch,
        probe_answer=beat.probe_answer,
        draining=beat.draining,
        event_lag_ns=beat.event_lag_ns,
    )


def heartbeat_from_wire(message: Message) -> Heartbeat:
    """Message → `Heartbeat`."""
    answer = message.probe_answer if message.HasField("probe_answer") else None
    key = key_from_wire(message.key)
    return Heartbeat(key, message.directory_epoch, answer, message.draining, message.event_lag_ns)


def pulse_to_wire(pulse: Pulse) -> Message:
    """`Pulse` → message."""
    return pb.HeartbeatResponse(state=_STATES[pulse.state], lease_ns=pulse.lease_ns, probe=pulse.probe)


def pulse_from_wire(message: Message) -> Pulse:
    """Message → `Pulse`."""
    probe = message.probe if message.HasField("probe") else None
    return Pulse(state_from_wire(message.state), message.lease_ns, probe)


# -- events ---------------------------------------------------------------------------------------------------------


def batch_to_wire(batch: EventBatch) -> Message:
    """`EventBatch` → message."""
    return pb.EventBatch(
        key=key_to_wire(batch.key),
        directory_epoch=batch.directory_epoch,
        sequence=batch.sequence,
        snapshot_begin=batch.snapshot_begin,
        snapshot_end=batch.snapshot_end,
        events=[
            pb.BlockEvent(
                removed=event.action is BlockAction.REMOVED,
                tier=_TIERS[event.tier],
                group=event.group,
                linked=event.linked,
                hashes=b"".join(event.hashes),
            )
            for event in batch.events
        ],
    )


def batch_from_wire(message: Message) -> EventBatch:
    """Message → `EventBatch`."""
    packed_bytes = sum(len(event.hashes) for event in message.events)
    if packed_bytes > MAX_BATCH_BLOCKS * BLOCK_HASH_BYTES:
        raise RequestError(f"a batch takes at most {MAX_BATCH_BLOCKS} blocks; send several", field="events")
    return EventBatch(
        key=key_from_wire(message.key),
        directory_epoch=message.directory_epoch,
        sequence=message.sequence,
        snapshot_begin=message.snapshot_begin,
        snapshot_end=message.snapshot_end,
        events=tuple(
            BlockEvent(
                BlockAction.REMOVED if event.removed else BlockAction.STORED,
                _tier(event.tier),
                unpack_hashes(event.hashes),
                _group(event.group),
                event.linked,
            )
            for event in message.events
        ),
    )


def ack_to_wire(ack: BatchAck) -> Message:
    """`BatchAck` → message."""
    return pb.BatchAck(received=ack.received, applied=ack.applied, resync=ack.resync, refused_blocks=ack.refused_blocks)


def ack_from_wire(message: Message) -> BatchAck:
    """Message → `BatchAck`."""
    return BatchAck(message.received, message.applied, message.resync, message.refused_blocks)


# -- reports --------------------------------------------------------------------------------------------------------


def load_to_wire(load: WorkerLoad) -> Message:
    """`WorkerLoad` → message. Negative values, which only a bug can bring, are sent as 0."""
    numbers = {name: max(0, int(getattr(load, name))) for name in LOAD_FIELDS}
    return pb.WorkerLoad(served_request_ids=load.served_request_ids, **numbers)


def load_from_wire(message: Message) -> WorkerLoad:
    """Message → `WorkerLoad`."""
    numbers = {name: getattr(message, name) for name in LOAD_FIELDS}
    return WorkerLoad(served_request_ids=tuple(RequestId(item) for item in message.served_request_ids), **numbers)


def _prefill_to_wire(sample: PrefillSample) -> Message:
    return pb.PrefillSample(
        new_tokens=sample.new_tokens, context_tokens=sample.context_tokens, elapsed_ns=max(0, sample.elapsed_ns)
    )


def _prefill_from_wire(message: Message) -> PrefillSample:
    return PrefillSample(message.new_tokens, message.context_tokens, message.elapsed_ns)


def report_to_wire(report: WorkerReport) -> Message:
    """`WorkerReport` → message."""
    return pb.WorkerReport(
        key=key_to_wire(report.key),
        sequence=report.sequence,
        load=load_to_wire(report.load),
        prefills=[_prefill_to_wire(item) for item in report.prefills],
        loads=[
            pb.LoadSample(
                holder=key_to_wire(item.holder),
                bytes=item.bytes,
                blocks=item.blocks,
                elapsed_ns=max(0, item.elapsed_ns),
                failure=item.failure,
                tier=None if item.tier is None else _TIERS[item.tier],
            )
            for item in report.loads
        ],
        outcomes=[_outcome_to_wire(item) for item in report.outcomes],
        counters=counters_to_wire(report.counters),
    )


def report_from_wire(message: Message) -> WorkerReport:
    """Message → `WorkerReport`."""
    if message.ByteSize() > MAX_REPORT_BYTES:
        raise RequestError(f"a report has more than {MAX_REPORT_BYTES} bytes; report more often", field="report")
    return WorkerReport(
        key=key_from_wire(message.key),
        sequence=message.sequence,
        load=load_from_wire(message.load),
        prefills=tuple(_prefill_from_wire(item) for item in message.prefills),
        loads=tuple(
            LoadSample(
                key_from_wire(item.holder),
                item.bytes,
                item.blocks,
                item.elapsed_ns,
                item.failure if item.HasField("failure") else None,
                _tier(item.tier) if item.HasField("tier") else None,
            )
            for item in message.loads
        ),
        outcomes=tuple(_outcome_from_wire(item) for item in message.outcomes),
        counters=tuple((item.name, item.value) for item in message.counters),
    )


def counters_to_wire(counters: Iterable[tuple[str, int]]) -> list[Message]:
    """(name, value) pairs → messages."""
    return [pb.Counter(name=name, value=max(0, value)) for name, value in counters]


# -- snapshots and deltas -------------------------------------------------------------------------------------------


def header_to_wire(header: SnapshotHeader) -> Message:
    """`SnapshotHeader` → message."""
    return pb.SnapshotHeader(
        directory_epoch=header.directory_epoch,
        sequence=header.sequence,
        members=[
            pb.MemberView(
                info=info_to_wire(item.info),
                state=_STATES[item.state],
                report=None if item.report is None else report_to_wire(item.report),
                loading=item.loading,
            )
            for item in header.members
        ],
    )


def header_from_wire(message: Message) -> SnapshotHeader:
    """Message → `SnapshotHeader`."""
    return SnapshotHeader(
        message.directory_epoch,
        message.sequence,
        tuple(
            MemberView(
                info_from_wire(item.info),
                state_from_wire(item.state),
                report_from_wire(item.report) if item.HasField("report") else None,
                item.loading,
            )
            for item in message.members
        ),
    )


def placement_to_wire(placement: Placement, member_numbers: dict[WorkerKey, int]) -> Message:
    """`Placement` → message; holders are named by their place in the snapshot's header."""
    return pb.Placement(
        holders=[
            pb.Holder(member=member_numbers[key], tier=_TIERS[tier], incoming=incoming)
            for key, tier, incoming in placement.holders
        ],
        group=placement.group,
        linked=placement.linked,
        hashes=pack_hashes(placement.hashes),
    )


def placement_from_wire(message: Message, members: Sequence[MemberView]) -> Placement:
    """Message → `Placement`."""
    if any(holder.member >= len(members) for holder in message.holders):
        raise RequestError(f"a placement names a member beyond the {len(members)} of the header", field="holders")
    return Placement(
        tuple((members[item.member].info.key, _tier(item.tier), item.incoming) for item in message.holders),
        _group(message.group),
        unpack_hashes(message.hashes),
        message.linked,
    )


def delta_to_wire(delta: Delta) -> Message:
    """`Delta` → message."""
    change = delta.change
    direct = change.direct if isinstance(change, BlocksChanged) else None
    message = pb.Delta(directory_epoch=delta.directory_epoch, sequence=delta.sequence, direct=direct)
    if isinstance(change, BlocksChanged):
        message.blocks.CopyFrom(batch_to_wire(change.batch))
    elif isinstance(change, MemberChanged):
        message.member.CopyFrom(pb.MemberChanged(info=info_to_wire(change.info), state=_STATES[change.state]))
    elif isinstance(change, MemberGone):
        message.gone.CopyFrom(pb.MemberGone(key=key_to_wire(change.key), reason=_REASONS[change.reason]))
    else:
        message.report.CopyFrom(report_to_wire(change.report))
    return message


def delta_from_wire(message: Message) -> Delta:
    """Message → `Delta`."""
    kind = message.WhichOneof("change")
    change: MemberChanged | MemberGone | BlocksChanged | Reported
    if kind == "blocks":
        direct = message.direct if message.HasField("direct") else None
        change = BlocksChanged(batch_from_wire(message.blocks), direct)
    elif kind == "member":
        change = MemberChanged(info_from_wire(message.member.info), state_from_wire(message.member.state))
    elif kind == "gone":
        change = MemberGone(key_from_wire(message.gone.key), _named(_REASON_OF, message.gone.reason, "reason"))
    elif kind == "report":
        change = Reported(report_from_wire(message.report))
    else:
        raise RequestError("a delta without a change; the service is newer than this client", field="change")
    return Delta(message.directory_epoch, message.sequence, change)


def prefixes_to_wire(prefixes: Prefixes) -> list[Message]:
    """`Prefixes` → messages."""
    return [
        pb.WorkerPrefix(
            key=key_to_wire(key),
            lengths=[pb.PrefixLength(tier=_TIERS[tier], blocks=blocks) for tier, blocks in lengths.items()],
        )
        for key, lengths in prefixes.items()
    ]


def prefixes_from_wire(messages: Iterable[Message]) -> Prefixes:
    """Messages → `Prefixes`."""
    return {
        key_from_wire(item.key): {_tier(length.tier): length.blocks for length in item.lengths} for item in messages
    }


# -- private --------------------------------------------------------------------------------------------------------


def _named(names: dict[int, _T], number: int, field: str) -> _T:
    try:
        return names[number]
    except KeyError:
        raise RequestError(f"{field} has the unknown value {number}", field=field) from None


def _group(number: int) -> int:
    if number >= MAX_GROUPS:
        raise RequestError(f"group must be below {MAX_GROUPS}, got {number}", field="group")
    return number


def _tier(number: int) -> Tier:
    try:
        return Tier(number)
    except ValueError:
        raise RequestError(f"tier has the unknown value {number}", field="tier") from None


def _outcome_to_wire(item: RequestOutcome) -> Message:
    numbers = {name: max(0, int(getattr(item, name))) for name in _OUTCOME_FIELDS}
    return pb.RequestOutcome(
        request_id=item.request_id,
        decision_id=item.decision_id,
        worker_id=item.worker_id,
        load_failures=item.load_failures,
        **numbers,
    )


def _outcome_from_wire(message: Message) -> RequestOutcome:
    numbers = {name: getattr(message, name) for name in _OUTCOME_FIELDS}
    return RequestOutcome(
        request_id=RequestId(message.request_id),
        decision_id=message.decision_id,
        worker_id=WorkerId(message.worker_id),
        load_failures=tuple(message.load_failures),
        **numbers,
    )
