"""Pins and housekeeping ↔ protobuf.  (pure)"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvpool.metadata.pins import Duty, HolderAt, Pin, PinView, Tending
from kvpool.metadata.v1 import metadata_pb2 as pb
from kvpool.metadata.wire import key_from_wire, key_to_wire, pack_hashes, unpack_hashes

MAX_COUNT = 255


def pin_to_wire(pin: Pin) -> Any:
    """A pin as a message."""
    return pb.Pin(
        pin_id=pin.pin_id,
        tenant=pin.tenant,
        hashes=pack_hashes(pin.chain),
        min_copies=pin.min_copies,
        stamp_ns=pin.stamp_ns,
    )


def pins_from_wire(messages: Iterable[Any]) -> tuple[Pin, ...]:
    """Pins from messages."""
    return tuple(
        Pin(item.pin_id, item.tenant, unpack_hashes(item.hashes), item.min_copies, item.stamp_ns) for item in messages
    )


def view_to_wire(view: PinView) -> Any:
    """A pin and its holders as a message."""
    holders = [key_to_wire(key) for key in view.holders]
    return pb.PinView(pin=pin_to_wire(view.pin), holders=holders, longest_blocks=view.longest_blocks)


def view_from_wire(message: Any) -> PinView:
    """A pin and its holders from a message."""
    (pin,) = pins_from_wire([message.pin])
    return PinView(pin, tuple(map(key_from_wire, message.holders)), message.longest_blocks)


def tending_to_wire(tending: Tending) -> Any:
    """The answer to a worker's housekeeping as a message."""
    return pb.TendResponse(
        others=bytes(min(MAX_COUNT, count) for count in tending.others),
        spare=bytes(tending.spare),
        pins_digest=tending.pins_digest,
        pins=[pin_to_wire(pin) for pin in tending.pins],
        duties=[_duty_to_wire(duty) for duty in tending.duties],
    )


def tending_from_wire(message: Any) -> Tending:
    """The answer to a worker's housekeeping from a message."""
    return Tending(
        others=tuple(message.others),
        spare=tuple(map(bool, message.spare)),
        pins_digest=message.pins_digest,
        pins=pins_from_wire(message.pins),
        duties=tuple(_duty_from_wire(item) for item in message.duties),
    )


def _duty_to_wire(duty: Duty) -> Any:
    holders = [
        pb.HolderAt(
            key=key_to_wire(holder.key),
            transport=holder.transport,
            data_address=holder.data_address,
            blocks=holder.blocks,
        )
        for holder in duty.holders
    ]
    return pb.Duty(pin_id=duty.pin_id, holders=holders)


def _duty_from_wire(message: Any) -> Duty:
    holders = tuple(
        HolderAt(key_from_wire(item.key), item.transport, item.data_address, item.blocks) for item in message.holders
    )
    return Duty(message.pin_id, holders)
