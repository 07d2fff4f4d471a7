"""Values survive the wire, and nothing that a value has is missing there."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import reports
from kvpool.errors import RequestError
from kvpool.metadata import events, wire
from kvpool.metadata.v1 import metadata_pb2 as pb
from kvpool.reports import LoadSample, PrefillSample, RequestOutcome, WorkerLoad, WorkerReport
from kvpool.types import BlockHash, MemberInfo, MemberState, RequestId, Role, Tier, WorkerEpoch, WorkerId, WorkerKey

numbers = st.integers(0, 2**63)
names = st.text(min_size=1, max_size=12)
hash_tuples = st.lists(st.binary(min_size=16, max_size=16).map(BlockHash), max_size=5).map(tuple)
keys = st.builds(WorkerKey, names.map(WorkerId), numbers.map(WorkerEpoch))
infos = st.builds(
    MemberInfo,
    key=keys,
    role=st.sampled_from(Role),
    transport=names,
    data_address=st.binary(max_size=40),
    layout_fingerprint=names,
    hash_scheme=names,
    block_tokens=st.integers(0, 2**31),
    block_bytes=numbers,
    capacity_blocks=st.tuples(numbers, numbers, numbers),
    control_address=st.text(max_size=10),
    calibration=st.lists(st.builds(PrefillSample, numbers, numbers, numbers), max_size=2).map(tuple),
)
load_numbers = {field.name: numbers for field in fields(WorkerLoad) if field.name != "served_request_ids"}
loads = st.builds(WorkerLoad, served_request_ids=st.lists(names.map(RequestId), max_size=3).map(tuple), **load_numbers)
worker_reports = st.builds(
    WorkerReport,
    keys,
    numbers,
    loads,
    st.lists(st.builds(PrefillSample, numbers, numbers, numbers), max_size=2).map(tuple),
    st.lists(
        st.builds(LoadSample, keys, numbers, numbers, numbers, st.none() | names, st.none() | st.sampled_from(Tier)),
        max_size=2,
    ).map(tuple),
    st.lists(
        st.builds(
            RequestOutcome,
            names.map(RequestId),
            names,
            names.map(WorkerId),
            *[numbers] * 7,
            load_failures=st.lists(names, max_size=2).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
    st.lists(st.tuples(names, numbers), max_size=2).map(tuple),
)
block_events = st.builds(
    events.BlockEvent, st.sampled_from(events.BlockAction), st.sampled_from(Tier), hash_tuples, st.integers(0, 9),
    st.booleans(),
)  # fmt: skip
batches = st.builds(
    events.EventBatch, keys, numbers, numbers, st.lists(block_events, max_size=3).map(tuple), st.booleans(),
    st.booleans(),
)  # fmt: skip
changes = st.one_of(
    st.builds(events.MemberChanged, infos, st.sampled_from(MemberState)),
    st.builds(events.MemberGone, keys, st.sampled_from(events.LeaveReason)),
    st.builds(events.BlocksChanged, batches),
    st.builds(events.Reported, worker_reports),
)
views = st.builds(events.MemberView, infos, st.sampled_from(MemberState), st.none() | worker_reports, st.booleans())


def _through(message: Any) -> Any:
    """A message as it arrives."""
    return type(message).FromString(message.SerializeToString())


@given(value=st.builds(events.Delta, numbers, numbers, changes))
def test_every_delta_survives(value: events.Delta) -> None:
    assert wire.delta_from_wire(_through(wire.delta_to_wire(value))) == value


@given(value=st.builds(events.SnapshotHeader, numbers, numbers, st.lists(views, max_size=3).map(tuple)))
def test_every_snapshot_header_survives(value: events.SnapshotHeader) -> None:
    assert wire.header_from_wire(_through(wire.header_to_wire(value))) == value


@given(ack=st.builds(events.BatchAck, numbers, numbers, st.booleans(), numbers))
def test_every_ack_survives(ack: events.BatchAck) -> None:
    assert wire.ack_from_wire(_through(wire.ack_to_wire(ack))) == ack


@given(welcome=st.builds(events.Welcome, numbers, numbers, st.none() | numbers))
def test_every_welcome_survives(welcome: events.Welcome) -> None:
    assert wire.welcome_from_wire(_through(wire.welcome_to_wire(welcome))) == welcome


@given(pulse=st.builds(events.Pulse, st.sampled_from(MemberState), numbers, st.none() | numbers))
def test_every_pulse_survives(pulse: events.Pulse) -> None:
    assert wire.pulse_from_wire(_through(wire.pulse_to_wire(pulse))) == pulse


@given(beat=st.builds(events.Heartbeat, keys, numbers, st.none() | numbers, st.booleans(), numbers))
def test_every_heartbeat_survives(beat: events.Heartbeat) -> None:
    assert wire.heartbeat_from_wire(_through(wire.heartbeat_to_wire(beat))) == beat


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (MemberInfo, pb.MemberInfo),
        (WorkerKey, pb.WorkerKey),
        *((kind, getattr(pb, kind.__name__)) for kind in vars(reports).values() if hasattr(kind, "__dataclass_fields__")
          and kind.__module__ == reports.__name__),
    ],
)  # fmt: skip
def test_every_field_of_a_value_has_a_field_on_the_wire(value: Any, message: Any) -> None:
    assert set(value.__annotations__) <= set(message.DESCRIPTOR.fields_by_name)


def test_malformed_messages_are_refused_by_field() -> None:
    cases = [
        (
            wire.batch_from_wire,
            pb.EventBatch(key={"worker_id": "w"}, events=[pb.BlockEvent(hashes=b"short")]),
            "hashes",
        ),
        (wire.batch_from_wire, pb.EventBatch(), "worker_id"),
        (wire.batch_from_wire, pb.EventBatch(key={"worker_id": "w"}, events=[pb.BlockEvent(group=64)]), "group"),
        (wire.batch_from_wire, pb.EventBatch(events=[pb.BlockEvent(hashes=bytes(16 * 65_537))]), "events"),
        (wire.info_from_wire, pb.MemberInfo(key={"worker_id": "w"}), "role"),
        (wire.delta_from_wire, pb.Delta(), "change"),
        (lambda message: wire.placement_from_wire(message, []), pb.Placement(holders=[pb.Holder(member=3)]), "holders"),
    ]
    for read, message, field in cases:
        with pytest.raises(RequestError) as caught:
            read(message)  # type: ignore[no-untyped-call]
        assert caught.value.details["field"] == field


def test_negative_numbers_of_a_report_are_sent_as_zero() -> None:
    report = WorkerReport(WorkerKey(WorkerId("w"), WorkerEpoch(1)), 1, WorkerLoad(step_remaining_ns=-5))
    assert wire.report_from_wire(wire.report_to_wire(report)).load.step_remaining_ns == 0
