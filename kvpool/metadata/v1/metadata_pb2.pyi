from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_DEVICE: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_MIXED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]

class MemberState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_STATE_UNSPECIFIED: _ClassVar[MemberState]
    MEMBER_STATE_ALIVE: _ClassVar[MemberState]
    MEMBER_STATE_SUSPECT: _ClassVar[MemberState]
    MEMBER_STATE_DRAINING: _ClassVar[MemberState]

class LeaveReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEAVE_REASON_UNSPECIFIED: _ClassVar[LeaveReason]
    LEAVE_REASON_LEFT: _ClassVar[LeaveReason]
    LEAVE_REASON_EXPIRED: _ClassVar[LeaveReason]
    LEAVE_REASON_REPLACED: _ClassVar[LeaveReason]
TIER_DEVICE: Tier
TIER_HOST: Tier
TIER_DISK: Tier
ROLE_UNSPECIFIED: Role
ROLE_MIXED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
MEMBER_STATE_UNSPECIFIED: MemberState
MEMBER_STATE_ALIVE: MemberState
MEMBER_STATE_SUSPECT: MemberState
MEMBER_STATE_DRAINING: MemberState
LEAVE_REASON_UNSPECIFIED: LeaveReason
LEAVE_REASON_LEFT: LeaveReason
LEAVE_REASON_EXPIRED: LeaveReason
LEAVE_REASON_REPLACED: LeaveReason

class WorkerKey(_message.Message):
    __slots__ = ("worker_id", "worker_epoch")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    worker_epoch: int
    def __init__(self, worker_id: _Optional[str] = ..., worker_epoch: _Optional[int] = ...) -> None: ...

class MemberInfo(_message.Message):
    __slots__ = ("key", "role", "transport", "data_address", "layout_fingerprint", "hash_scheme", "block_tokens", "block_bytes", "capacity_blocks", "control_address", "calibration")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HASH_SCHEME_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    key: WorkerKey
    role: Role
    transport: str
    data_address: bytes
    layout_fingerprint: str
    hash_scheme: str
    block_tokens: int
    block_bytes: int
    capacity_blocks: _containers.RepeatedScalarFieldContainer[int]
    control_address: str
    calibration: _containers.RepeatedCompositeFieldContainer[PrefillSample]
    def __init__(self, key: _Optional[_Union[WorkerKey, _Mapping]] = ..., role: _Optional[_Union[Role, str]] = ..., transport: _Optional[str] = ..., data_address: _Optional[bytes] = ..., layout_fingerprint: _Optional[str] = ..., hash_scheme: _Optional[str] = ..., block_tokens: _Optional[int] = ..., block_bytes: _Optional[int] = ..., capacity_blocks: _Optional[_Iterable[int]] = ..., control_address: _Optional[str] = ..., calibration: _Optional[_Iterable[_Union[PrefillSample, _Mapping]]] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("info", "draining")
    INFO_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    info: MemberInfo
    draining: bool
    def __init__(self, info: _Optional[_Union[MemberInfo, _Mapping]] = ..., draining: _Optional[bool] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("directory_epoch", "lease_ns", "applied_sequence")
    DIRECTORY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_NS_FIELD_NUMBER: _ClassVar[int]
    APPLIED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    directory_epoch: int
    lease_ns: int
    applied_sequence: int
    def __init__(self, directory_epoch: _Optional[int] = ..., lease_ns: _Optional[int] = ..., applied_sequence: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("key", "directory_epoch", "probe_answer", "draining", "event_lag_ns")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROBE_ANSWER_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    EVENT_LAG_NS_FIELD_NUMBER: _ClassVar[int]
    key: WorkerKey
    directory_epoch: int
    probe_answer: int
    draining: bool
    event_lag_ns: int
    def __init__(self, key: _Optional[_Union[WorkerKey, _Mapping]] = ..., directory_epoch: _Optional[int] = ..., probe_answer: _Optional[int] = ..., draining: _Optional[bool] = ..., event_lag_ns: _Optional[int] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("state", "lease_ns", "probe")
    STATE_FIELD_NUMBER: _ClassVar[int]
    LEASE_NS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    state: MemberState
    lease_ns: int
    probe: int
    def __init__(self, state: _Optional[_Union[MemberState, str]] = ..., lease_ns: _Optional[int] = ..., probe: _Optional[int] = ...) -> None: ...

class BlockEvent(_message.Message):
    __slots__ = ("removed", "tier", "group", "linked", "hashes")
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LINKED_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    removed: bool
    tier: Tier
    group: int
    linked: bool
    hashes: bytes
    def __init__(self, removed: _Optional[bool] = ..., tier: _Optional[_Union[Tier, str]] = ..., group: _Optional[int] = ..., linked: _Optional[bool] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class EventBatch(_message.Message):
    __slots__ = ("key", "directory_epoch", "sequence", "snapshot_begin", "snapshot_end", "events")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BEGIN_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_END_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    key: WorkerKey
    directory_epoch: int
    sequence: int
    snapshot_begin: bool
    snapshot_end: bool
    events: _containers.RepeatedCompositeFieldContainer[BlockEvent]
    def __init__(self, key: _Optional[_Union[WorkerKey, _Mapping]] = ..., directory_epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., snapshot_begin: _Optional[bool] = ..., snapshot_end: _Optional[bool] = ..., events: _Optional[_Iterable[_Union[BlockEvent, _Mapping]]] = ...) -> None: ...

class BatchAck(_message.Message):
    __slots__ = ("received", "applied", "resync", "refused_blocks")
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    REFUSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    received: int
    applied: int
    resync: bool
    refused_blocks: int
    def __init__(self, received: _Optional[int] = ..., applied: _Optional[int] = ..., resync: _Optional[bool] = ..., refused_blocks: _Optional[int] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("waiting_requests", "running_requests", "queued_prefill_tokens", "queued_context_tokens", "step_remaining_ns", "free_blocks", "total_blocks", "in_flight_bytes", "served_request_ids", "empty_blocks", "idle_ns", "fill_mib_ns")
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_REMAINING_NS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SERVED_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    EMPTY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IDLE_NS_FIELD_NUMBER: _ClassVar[int]
    FILL_MIB_NS_FIELD_NUMBER: _ClassVar[int]
    waiting_requests: int
    running_requests: int
    queued_prefill_tokens: int
    queued_context_tokens: int
    step_remaining_ns: int
    free_blocks: int
    total_blocks: int
    in_flight_bytes: int
    served_request_ids: _containers.RepeatedScalarFieldContainer[str]
    empty_blocks: int
    idle_ns: int
    fill_mib_ns: int
    def __init__(self, waiting_requests: _Optional[int] = ..., running_requests: _Optional[int] = ..., queued_prefill_tokens: _Optional[int] = ..., queued_context_tokens: _Optional[int] = ..., step_remaining_ns: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., in_flight_bytes: _Optional[int] = ..., served_request_ids: _Optional[_Iterable[str]] = ..., empty_blocks: _Optional[int] = ..., idle_ns: _Optional[int] = ..., fill_mib_ns: _Optional[int] = ...) -> None: ...

class PrefillSample(_message.Message):
    __slots__ = ("new_tokens", "context_tokens", "elapsed_ns")
    NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_NS_FIELD_NUMBER: _ClassVar[int]
    new_tokens: int
    context_tokens: int
    elapsed_ns: int
    def __init__(self, new_tokens: _Optional[int] = ..., context_tokens: _Optional[int] = ..., elapsed_ns: _Optional[int] = ...) -> None: ...

class LoadSample(_message.Message):
    __slots__ = ("holder", "bytes", "blocks", "elapsed_ns", "failure", "tier")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_NS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    holder: WorkerKey
    bytes: int
    blocks: int
    elapsed_ns: int
    failure: str
    tier: Tier
    def __init__(self, holder: _Optional[_Union[WorkerKey, _Mapping]] = ..., bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., elapsed_ns: _Optional[int] = ..., failure: _Optional[str] = ..., tier: _Optional[_Union[Tier, str]] = ...) -> None: ...

class RequestOutcome(_message.Message):
    __slots__ = ("request_id", "decision_id", "worker_id", "ttft_ns", "tokens_cached", "tokens_loaded", "tokens_redone", "bytes_loaded", "load_ns", "queue_ns", "load_failures")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TTFT_NS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_CACHED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_LOADED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_REDONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_LOADED_FIELD_NUMBER: _ClassVar[int]
    LOAD_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FAILURES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    decision_id: str
    worker_id: str
    ttft_ns: int
    tokens_cached: int
    tokens_loaded: int
    tokens_redone: int
    bytes_loaded: int
    load_ns: int
    queue_ns: int
    load_failures: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_id: _Optional[str] = ..., decision_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., ttft_ns: _Optional[int] = ..., tokens_cached: _Optional[int] = ..., tokens_loaded: _Optional[int] = ..., tokens_redone: _Optional[int] = ..., bytes_loaded: _Optional[int] = ..., load_ns: _Optional[int] = ..., queue_ns: _Optional[int] = ..., load_failures: _Optional[_Iterable[str]] = ...) -> None: ...

class Counter(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: int
    def __init__(self, name: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("key", "sequence", "load", "prefills", "loads", "outcomes", "counters")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    key: WorkerKey
    sequence: int
    load: WorkerLoad
    prefills: _containers.RepeatedCompositeFieldContainer[PrefillSample]
    loads: _containers.RepeatedCompositeFieldContainer[LoadSample]
    outcomes: _containers.RepeatedCompositeFieldContainer[RequestOutcome]
    counters: _containers.RepeatedCompositeFieldContainer[Counter]
    def __init__(self, key: _Optional[_Union[WorkerKey, _Mapping]] = ..., sequence: _Optional[int] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., prefills: _Optional[_Iterable[_Union[PrefillSample, _Mapping]]] = ..., loads: _Optional[_Iterable[_Union[LoadSample, _Mapping]]] = ..., outcomes: _Optional[_Iterable[_Union[RequestOutcome, _Mapping]]] = ..., counters: _Optional[_Iterable[_Union[Counter, _Mapping]]] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("reports",)
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    reports: _containers.RepeatedCompositeFieldContainer[WorkerReport]
    def __init__(self, reports: _Optional[_Iterable[_Union[WorkerReport, _Mapping]]] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("hashes", "group")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    group: int
    def __init__(self, hashes: _Optional[bytes] = ..., group: _Optional[int] = ...) -> None: ...

class PrefixLength(_message.Message):
    __slots__ = ("tier", "blocks")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    blocks: int
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., blocks: _Optional[int] = ...) -> None: ...

class WorkerPrefix(_message.Message):
    __slots__ = ("key", "lengths")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    key: WorkerKey
    lengths: _containers.RepeatedCompositeFieldContainer[PrefixLength]
    def __init__(self, key: _Optional[_Union[WorkerKey, _Mapping]] = ..., lengths: _Optional[_Iterable[_Union[PrefixLength, _Mapping]]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("directory_epoch", "workers")
    DIRECTORY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    directory_epoch: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerPrefix]
    def __init__(self, directory_epoch: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerPrefix, _Mapping]]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("member", "tier", "incoming")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    INCOMING_FIELD_NUMBER: _ClassVar[int]
    member: int
    tier: Tier
    incoming: bool
    def __init__(self, member: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., incoming: _Optional[bool] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("holders", "group", "linked", "hashes")
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LINKED_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    holders: _containers.RepeatedCompositeFieldContainer[Holder]
    group: int
    linked: bool
    hashes: bytes
    def __init__(self, holders: _Optional[_Iterable[_Union[Holder, _Mapping]]] = ..., group: _Optional[int] = ..., linked: _Optional[bool] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class MemberView(_message.Message):
    __slots__ = ("info", "state", "report", "loading")
    INFO_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    info: MemberInfo
    state: MemberState
    report: WorkerReport
    loading: bool
    def __init__(self, info: _Optional[_Union[MemberInfo, _Mapping]] = ..., state: _Optional[_Union[MemberState, str]] = ..., report: _Optional[_Union[WorkerReport, _Mapping]] = ..., loading: _Optional[bool] = ...) -> None: ...

class SnapshotHeader(_message.Message):
    __slots__ = ("directory_epoch", "sequence", "members")
    DIRECTORY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    directory_epoch: int
    sequence: int
    members: _containers.RepeatedCompositeFieldContainer[MemberView]
    def __init__(self, directory_epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., members: _Optional[_Iterable[_Union[MemberView, _Mapping]]] = ...) -> None: ...

class SnapshotPart(_message.Message):
    __slots__ = ("placements",)
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    placements: _containers.RepeatedCompositeFieldContainer[Placement]
    def __init__(self, placements: _Optional[_Iterable[_Union[Placement, _Mapping]]] = ...) -> None: ...

class SnapshotEnd(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Alive(_message.Message):
    __slots__ = ("directory_epoch", "sequence")
    DIRECTORY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    directory_epoch: int
    sequence: int
    def __init__(self, directory_epoch: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class MemberChanged(_message.Message):
    __slots__ = ("info", "state")
    INFO_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    info: MemberInfo
    state: MemberState
    def __init__(self, info: _Optional[_Union[MemberInfo, _Mapping]] = ..., state: _Optional[_Union[MemberState, str]] = ...) -> None: ...

class MemberGone(_message.Message):
    __slots__ = ("key", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: WorkerKey
    reason: LeaveReason
    def __init__(self, key: _Optional[_Union[WorkerKey, _Mapping]] = ..., reason: _Optional[_Union[LeaveReason, str]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("directory_epoch", "sequence", "member", "gone", "blocks", "report", "direct")
    DIRECTORY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    directory_epoch: int
    sequence: int
    member: MemberChanged
    gone: MemberGone
    blocks: EventBatch
    report: WorkerReport
    direct: bool
    def __init__(self, directory_epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., member: _Optional[_Union[MemberChanged, _Mapping]] = ..., gone: _Optional[_Union[MemberGone, _Mapping]] = ..., blocks: _Optional[_Union[EventBatch, _Mapping]] = ..., report: _Optional[_Union[WorkerReport, _Mapping]] = ..., direct: _Optional[bool] = ...) -> None: ...

class WatchEvent(_message.Message):
    __slots__ = ("header", "part", "end", "delta", "alive")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    header: SnapshotHeader
    part: SnapshotPart
    end: SnapshotEnd
    delta: Delta
    alive: Alive
    def __init__(self, header: _Optional[_Union[SnapshotHeader, _Mapping]] = ..., part: _Optional[_Union[SnapshotPart, _Mapping]] = ..., end: _Optional[_Union[SnapshotEnd, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ...) -> None: ...

class SuspectRequest(_message.Message):
    __slots__ = ("key", "reporter", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REPORTER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: WorkerKey
    reporter: WorkerKey
    reason: str
    def __init__(self, key: _Optional[_Union[WorkerKey, _Mapping]] = ..., reporter: _Optional[_Union[WorkerKey, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class SuspectResponse(_message.Message):
    __slots__ = ("started",)
    STARTED_FIELD_NUMBER: _ClassVar[int]
    started: bool
    def __init__(self, started: _Optional[bool] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: WorkerKey
    def __init__(self, key: _Optional[_Union[WorkerKey, _Mapping]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: WorkerKey
    def __init__(self, key: _Optional[_Union[WorkerKey, _Mapping]] = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Pin(_message.Message):
    __slots__ = ("pin_id", "tenant", "hashes", "min_copies", "stamp_ns")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    MIN_COPIES_FIELD_NUMBER: _ClassVar[int]
    STAMP_NS_FIELD_NUMBER: _ClassVar[int]
    pin_id: str
    tenant: str
    hashes: bytes
    min_copies: int
    stamp_ns: int
    def __init__(self, pin_id: _Optional[str] = ..., tenant: _Optional[str] = ..., hashes: _Optional[bytes] = ..., min_copies: _Optional[int] = ..., stamp_ns: _Optional[int] = ...) -> None: ...

class HolderAt(_message.Message):
    __slots__ = ("key", "transport", "data_address", "blocks")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    key: WorkerKey
    transport: str
    data_address: bytes
    blocks: int
    def __init__(self, key: _Optional[_Union[WorkerKey, _Mapping]] = ..., transport: _Optional[str] = ..., data_address: _Optional[bytes] = ..., blocks: _Optional[int] = ...) -> None: ...

class Duty(_message.Message):
    __slots__ = ("pin_id", "holders")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    pin_id: str
    holders: _containers.RepeatedCompositeFieldContainer[HolderAt]
    def __init__(self, pin_id: _Optional[str] = ..., holders: _Optional[_Iterable[_Union[HolderAt, _Mapping]]] = ...) -> None: ...

class TendRequest(_message.Message):
    __slots__ = ("key", "hashes", "pins_digest", "pins")
    KEY_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    PINS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    key: WorkerKey
    hashes: bytes
    pins_digest: int
    pins: _containers.RepeatedCompositeFieldContainer[Pin]
    def __init__(self, key: _Optional[_Union[WorkerKey, _Mapping]] = ..., hashes: _Optional[bytes] = ..., pins_digest: _Optional[int] = ..., pins: _Optional[_Iterable[_Union[Pin, _Mapping]]] = ...) -> None: ...

class TendResponse(_message.Message):
    __slots__ = ("others", "spare", "pins_digest", "pins", "duties")
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    SPARE_FIELD_NUMBER: _ClassVar[int]
    PINS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    DUTIES_FIELD_NUMBER: _ClassVar[int]
    others: bytes
    spare: bytes
    pins_digest: int
    pins: _containers.RepeatedCompositeFieldContainer[Pin]
    duties: _containers.RepeatedCompositeFieldContainer[Duty]
    def __init__(self, others: _Optional[bytes] = ..., spare: _Optional[bytes] = ..., pins_digest: _Optional[int] = ..., pins: _Optional[_Iterable[_Union[Pin, _Mapping]]] = ..., duties: _Optional[_Iterable[_Union[Duty, _Mapping]]] = ...) -> None: ...

class PinsRequest(_message.Message):
    __slots__ = ("pins",)
    PINS_FIELD_NUMBER: _ClassVar[int]
    pins: _containers.RepeatedCompositeFieldContainer[Pin]
    def __init__(self, pins: _Optional[_Iterable[_Union[Pin, _Mapping]]] = ...) -> None: ...

class PinView(_message.Message):
    __slots__ = ("pin", "holders", "longest_blocks")
    PIN_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    pin: Pin
    holders: _containers.RepeatedCompositeFieldContainer[WorkerKey]
    longest_blocks: int
    def __init__(self, pin: _Optional[_Union[Pin, _Mapping]] = ..., holders: _Optional[_Iterable[_Union[WorkerKey, _Mapping]]] = ..., longest_blocks: _Optional[int] = ...) -> None: ...

class PinsResponse(_message.Message):
    __slots__ = ("pins",)
    PINS_FIELD_NUMBER: _ClassVar[int]
    pins: _containers.RepeatedCompositeFieldContainer[PinView]
    def __init__(self, pins: _Optional[_Iterable[_Union[PinView, _Mapping]]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MemberDescription(_message.Message):
    __slots__ = ("info", "state", "blocks", "load", "suspicion", "event_lag_ns")
    INFO_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SUSPICION_FIELD_NUMBER: _ClassVar[int]
    EVENT_LAG_NS_FIELD_NUMBER: _ClassVar[int]
    info: MemberInfo
    state: MemberState
    blocks: _containers.RepeatedScalarFieldContainer[int]
    load: WorkerLoad
    suspicion: str
    event_lag_ns: int
    def __init__(self, info: _Optional[_Union[MemberInfo, _Mapping]] = ..., state: _Optional[_Union[MemberState, str]] = ..., blocks: _Optional[_Iterable[int]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., suspicion: _Optional[str] = ..., event_lag_ns: _Optional[int] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("directory_epoch", "sequence", "uptime_ns", "lease_ns", "entries", "max_entries", "blocks", "watchers", "members", "counters")
    DIRECTORY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_NS_FIELD_NUMBER: _ClassVar[int]
    LEASE_NS_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    MAX_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WATCHERS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    directory_epoch: int
    sequence: int
    uptime_ns: int
    lease_ns: int
    entries: int
    max_entries: int
    blocks: int
    watchers: int
    members: _containers.RepeatedCompositeFieldContainer[MemberDescription]
    counters: _containers.RepeatedCompositeFieldContainer[Counter]
    def __init__(self, directory_epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., uptime_ns: _Optional[int] = ..., lease_ns: _Optional[int] = ..., entries: _Optional[int] = ..., max_entries: _Optional[int] = ..., blocks: _Optional[int] = ..., watchers: _Optional[int] = ..., members: _Optional[_Iterable[_Union[MemberDescription, _Mapping]]] = ..., counters: _Optional[_Iterable[_Union[Counter, _Mapping]]] = ...) -> None: ...
