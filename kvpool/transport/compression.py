"""Lossless frames for slow links: split elements into byte planes, compress the planes that pay.  (pure)

KV numbers share their exponents, not their mantissas: as a whole they do not compress (1.00), by byte planes they do.
Measured on the KV of SmolLM2, zstd level 1 on the planes that pay: bf16 1.43, fp32 1.17, fp16 1.15; lz4 on bf16 1.15.

    ┌ magic · version · width · encode µs · raw bytes ┐┌ codec · stored bytes ┐×width┌ planes … ┐┌ tail ┐

``width`` is the bytes per element, at most `MAX_WIDTH`; the tail is what a last partial element leaves over. A plane
that does not shrink is stored as it is, so a frame is never longer than `frame_bound`. A decoder believes nothing: it
knows how many bytes must come out, allocates at most that, and answers anything else with `IntegrityError`. Whether
the bytes are the *right* ones is not its business; the checksum of the uncompressed block says that.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import lz4.block
import numpy as np
import zstandard

from kvpool.errors import IntegrityError, RequestError

MAGIC = 0x4B46
VERSION = 1
MAX_WIDTH = 8
WIDTHS = (1, 2, 4)  # element widths a planner tries
SAMPLE_BYTES = 128 * 1024
PLANE_PAYS = 0.9  # a plane is compressed when its sample shrinks below this
FRAME_PAYS = 0.95  # a plan is worth having when the whole sample does
WIDER_PAYS = 0.98  # more planes must shrink it further below this; a multiple of the true width does nearly as well
ZSTD_LEVEL = 1  # higher levels shrink these planes no further and cost twice

_HEAD = struct.Struct("<HBBIQ")  # magic, version, width, encode time in µs, raw bytes
_PLANE = struct.Struct("<BQ")  # codec, stored bytes
_ENCODE_US_AT = 4
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Codec(IntEnum):
    """How a plane is stored. The number is the wire value."""

    RAW = 0
    LZ4 = 1
    ZSTD = 2


CODECS = (Codec.ZSTD, Codec.LZ4)
"""What this release can decode, the stronger first."""


@dataclass(frozen=True, slots=True)
class PlanePlan:
    """How blocks of one kind are encoded: a codec per byte plane, least significant byte first."""

    planes: tuple[Codec, ...]

    @property
    def width(self) -> int:
        """Bytes per element."""
        return len(self.planes)


PLAIN = PlanePlan((Codec.RAW,))
"""Nothing pays: the frame carries the bytes as they are."""


def frame_bound(raw_bytes: int) -> int:
    """No frame of this many bytes is longer."""
    return _HEAD.size + MAX_WIDTH * _PLANE.size + raw_bytes


def plan_planes(sample: memoryview, codec: Codec) -> PlanePlan:
    """The element width and the planes of a sample for which ``codec`` pays.

    Args:
        sample: bytes of a real block; at most `SAMPLE_BYTES` of them are looked at.
        codec: what to try.

    Returns:
        `PLAIN` when nothing pays.
    """
    data = sample[:SAMPLE_BYTES]
    best, limit = PLAIN, FRAME_PAYS * len(data)
    for width in WIDTHS:
        if len(data) < width:
            continue
        chosen: list[Codec] = []
        total = len(data) % width
        for index in range(width):
            plane = _take_plane(data, width, index)
            packed = len(_compress(codec, plane))
            pays = packed <= PLANE_PAYS * len(plane)
            chosen.append(codec if pays else Codec.RAW)
            total += packed if pays else len(plane)
        if total < limit:
            best, limit = PlanePlan(tuple(chosen)), WIDER_PAYS * total
    return best


def encode_frame(data: memoryview, plan: PlanePlan, into: memoryview) -> int:
    """Write one frame.

    Args:
        data: what to send; only read.
        plan: see `plan_planes`; any plan is correct for any bytes.
        into: at least ``frame_bound(len(data))`` bytes.

    Returns:
        Bytes of the frame. Its encode time is zero; see `stamp_encode_time`.

    Raises:
        RequestError: ``into`` is too short or the plan too wide.
    """
    width = plan.width
    if not 1 <= width <= MAX_WIDTH or len(into) < frame_bound(len(data)):
        raise RequestError(f"a frame of {len(data)} bytes needs {frame_bound(len(data))} bytes and 1–8 planes")
    _HEAD.pack_into(into, 0, MAGIC, VERSION, width, 0, len(data))
    at = _HEAD.size + width * _PLANE.size
    for index, codec in enumerate(plan.planes):
        stored = _write_plane(data, width, index, codec, into[at:])
        _PLANE.pack_into(into, _HEAD.size + index * _PLANE.size, stored[0], stored[1])
        at += stored[1]
    tail = len(data) % width
    into[at : at + tail] = data[len(data) - tail :]
    return at + tail


def stamp_encode_time(frame: memoryview, encode_ns: int) -> None:
    """Tell the reader, in the frame, how long encoding took; it decides whether the next read wants frames."""
    struct.pack_into("<I", frame, _ENCODE_US_AT, min(encode_ns // 1000, (1 << 32) - 1))


@dataclass(frozen=True, slots=True)
class FrameFacts:
    """What a decoded frame says about itself."""

    frame_bytes: int
    raw_bytes: int
    encode_ns: int


def decode_frame(frame: memoryview, into: memoryview) -> FrameFacts:
    """Unpack a frame into a place of exactly its size. Bytes behind the frame are ignored.

    Args:
        frame: what arrived.
        into: where the bytes go. After an error its content is undefined.

    Raises:
        IntegrityError: this is not a frame of ``len(into)`` bytes, it is cut short, or a plane does not unpack.
    """
    width, encode_us, planes, at = _parse(frame, len(into))
    target = np.frombuffer(into, dtype=np.uint8)
    elements = len(into) // width
    body = target[: elements * width].reshape(elements, width)
    for index, (codec, stored) in enumerate(planes):
        body[:, index] = _unpack(codec, frame[at : at + stored], elements)
        at += stored
    tail = len(into) - elements * width
    into[len(into) - tail :] = frame[at : at + tail]
    return FrameFacts(at + tail, len(into), encode_us * 1000)


def frame_length(frame: memoryview, raw_bytes: int) -> int:
    """Bytes of a frame that must hold ``raw_bytes``, without unpacking it.

    Raises:
        IntegrityError: as `decode_frame`.
    """
    width, _, planes, at = _parse(frame, raw_bytes)
    return at + sum(stored for _, stored in planes) + raw_bytes % width


# ── leaves ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _parse(frame: memoryview, expected: int) -> tuple[int, int, list[tuple[int, int]], int]:
    """Width, encode time in µs, planes, and where their bytes begin; everything checked against the sizes."""
    try:
        magic, version, width, encode_us, raw_bytes = _HEAD.unpack_from(frame)
        if magic != MAGIC or version != VERSION or not 1 <= width <= MAX_WIDTH:
            raise IntegrityError(f"not a frame: magic {magic:#x}, version {version}, width {width}")
        planes = [_PLANE.unpack_from(frame, _HEAD.size + index * _PLANE.size) for index in range(width)]
    except struct.error as error:
        raise IntegrityError(f"a frame is cut short: {error}") from error
    if raw_bytes != expected:
        raise IntegrityError(f"a frame holds {raw_bytes} bytes where {expected} were asked for")
    at = _HEAD.size + width * _PLANE.size
    elements = expected // width
    if any(stored > elements for _, stored in planes):
        raise IntegrityError("a plane of a frame is longer than what it stands for")
    if at + sum(stored for _, stored in planes) + expected % width > len(frame):
        raise IntegrityError("a frame is cut short")
    return width, encode_us, planes, at


def _unpack(codec: int, stored: memoryview, elements: int) -> _Bytes:
    """One plane; allocates at most ``elements`` bytes."""
    raw: bytes | memoryview
    try:
        if codec == Codec.RAW:
            raw = stored
        elif codec == Codec.LZ4:
            raw = lz4.block.decompress(stored, uncompressed_size=elements)
        elif codec == Codec.ZSTD:
            if zstandard.frame_content_size(stored) != elements:  # it would allocate what the frame claims
                raise IntegrityError("a zstd plane claims another size than it must have")
            raw = zstandard.ZstdDecompressor().decompress(stored)
        else:
            raise IntegrityError(f"unknown codec {codec}; both ends need one release")
    except (lz4.block.LZ4BlockError, zstandard.ZstdError, ValueError) as error:
        raise IntegrityError(f"a plane does not unpack: {error}") from error
    if len(raw) != elements:
        raise IntegrityError(f"a plane unpacks to {len(raw)} bytes where {elements} were due")
    return np.frombuffer(raw, dtype=np.uint8)


def _write_plane(data: memoryview, width: int, index: int, codec: Codec, into: memoryview) -> tuple[Codec, int]:
    """Store one plane at the front of ``into``; returns how, and its stored bytes."""
    elements = len(data) // width
    if codec is not Codec.RAW:
        packed = _compress(codec, _take_plane(data, width, index))
        if len(packed) < elements:
            into[: len(packed)] = packed
            return codec, len(packed)
    _copy_plane(data, width, index, np.frombuffer(into[:elements], dtype=np.uint8))
    return Codec.RAW, elements


def _take_plane(data: memoryview, width: int, index: int) -> _Bytes:
    plane = np.empty(len(data) // width, dtype=np.uint8)
    _copy_plane(data, width, index, plane)
    return plane


def _copy_plane(data: memoryview, width: int, index: int, target: _Bytes) -> None:
    elements = len(data) // width
    if width in (2, 4):  # five times as fast as a strided copy
        words = np.frombuffer(data[: elements * width], dtype=f"<u{width}")
        np.right_shift(words, 8 * index, out=target, casting="unsafe")
        return
    target[:] = np.frombuffer(data[: elements * width], dtype=np.uint8).reshape(elements, width)[:, index]


def _compress(codec: Codec, plane: _Bytes) -> bytes:
    if codec is Codec.LZ4:
        return bytes(lz4.block.compress(plane.data, store_size=False))
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(plane.data)


def decodable(wanted: Sequence[int]) -> Codec | None:
    """The first of the codecs a reader wants that this release knows; None to answer raw."""
    return next((Codec(item) for item in wanted if item in CODECS), None)
