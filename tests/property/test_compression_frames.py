"""Frames: whatever goes in comes out, and whatever garbage comes in is a typed error that allocates nothing big."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import IntegrityError
from kvpool.transport.compression import (
    CODECS,
    MAX_WIDTH,
    PLAIN,
    Codec,
    PlanePlan,
    decode_frame,
    encode_frame,
    frame_bound,
    plan_planes,
    stamp_encode_time,
)

PLANS = st.lists(st.sampled_from(list(Codec)), min_size=1, max_size=MAX_WIDTH).map(lambda it: PlanePlan(tuple(it)))
BYTES = st.one_of(
    st.binary(max_size=600),
    st.tuples(st.binary(min_size=1, max_size=9), st.integers(1, 200)).map(lambda it: it[0] * it[1]),
)


def encoded(data: bytes, plan: PlanePlan) -> bytearray:
    into = bytearray(frame_bound(len(data)))
    length = encode_frame(memoryview(data), plan, memoryview(into))
    assert length <= frame_bound(len(data))
    return into[:length]


def decoded(frame: bytes | bytearray, raw_bytes: int) -> bytes:
    into = bytearray(raw_bytes)
    decode_frame(memoryview(frame), memoryview(into))
    return bytes(into)


@given(data=BYTES, plan=PLANS)
@settings(max_examples=300, deadline=None)
def test_any_bytes_survive_any_plan(data: bytes, plan: PlanePlan) -> None:
    assert decoded(encoded(data, plan), len(data)) == data


@given(data=BYTES, plan=PLANS, behind=st.binary(max_size=50))
@settings(max_examples=100, deadline=None)
def test_bytes_behind_a_frame_do_not_matter(data: bytes, plan: PlanePlan, behind: bytes) -> None:
    assert decoded(encoded(data, plan) + behind, len(data)) == data


@given(data=BYTES, plan=PLANS, cut=st.floats(0, 1, exclude_max=True))
@settings(max_examples=200, deadline=None)
def test_a_frame_that_is_cut_short_is_an_integrity_error(data: bytes, plan: PlanePlan, cut: float) -> None:
    frame = encoded(data, plan)
    with pytest.raises(IntegrityError):
        decoded(frame[: int(len(frame) * cut)], len(data))


@given(data=BYTES, plan=PLANS, where=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255))
@settings(max_examples=400, deadline=None)
def test_a_spoilt_frame_is_an_integrity_error_or_other_bytes_and_never_anything_else(
    data: bytes, plan: PlanePlan, where: float, change: int
) -> None:
    frame = encoded(data, plan)
    frame[int(len(frame) * where)] ^= change
    try:
        decoded(frame, len(data))  # wrong bytes are the checksum's business
    except IntegrityError:
        return


@given(frame=st.binary(max_size=300), raw_bytes=st.integers(0, 4096))
@settings(max_examples=200, deadline=None)
def test_garbage_is_an_integrity_error(frame: bytes, raw_bytes: int) -> None:
    with pytest.raises(IntegrityError):
        decoded(frame, raw_bytes)


@given(data=BYTES, plan=PLANS, more=st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_a_frame_of_another_size_is_refused(data: bytes, plan: PlanePlan, more: int) -> None:
    with pytest.raises(IntegrityError, match="were asked for"):
        decoded(encoded(data, plan), len(data) + more)


@pytest.mark.parametrize("codec", CODECS)
def test_a_plane_that_claims_a_gigabyte_is_refused_before_memory_is_taken(codec: Codec) -> None:
    huge = bytes(64 << 20)
    frame = encoded(huge, PlanePlan((codec,)))
    small = 4096
    frame[8:16] = small.to_bytes(8, "little")  # the header now promises what is asked for
    stored = int.from_bytes(frame[17:25], "little")
    frame[17:25] = min(stored, small).to_bytes(8, "little")
    into = memoryview(bytearray(small))
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError):
            decode_frame(memoryview(frame), into)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_bytes_that_do_not_compress_cost_a_header_and_no_more() -> None:
    data = np.random.Generator(np.random.PCG64(1)).integers(0, 256, 100_003, dtype=np.uint8).tobytes()
    for codec in CODECS:
        assert plan_planes(memoryview(data), codec) == PLAIN
        assert len(encoded(data, PlanePlan((codec,) * 4))) - len(data) < 100


def bf16_like(elements: int) -> bytes:
    numbers = np.random.Generator(np.random.PCG64(2)).normal(size=elements).astype(np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def test_the_high_plane_of_bf16_is_found_and_pays() -> None:
    data = bf16_like(64 * 1024)
    plan = plan_planes(memoryview(data), Codec.ZSTD)
    assert plan == PlanePlan((Codec.RAW, Codec.ZSTD))
    frame = encoded(data, plan)
    assert len(data) / len(frame) > 1.25
    assert decoded(frame, len(data)) == data


def test_the_time_an_encoder_took_travels_with_the_frame() -> None:
    frame = encoded(b"abcd" * 100, PLAIN)
    stamp_encode_time(memoryview(frame), 5_000_000)
    facts = decode_frame(memoryview(frame), memoryview(bytearray(400)))
    assert (facts.encode_ns, facts.raw_bytes, facts.frame_bytes) == (5_000_000, 400, len(frame))
