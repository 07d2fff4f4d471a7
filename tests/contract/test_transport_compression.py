"""Compressed frames over a real transport: negotiation, both ends' counters, corruption, and the switch itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import xxhash

from kvpool.errors import IntegrityError
from kvpool.transport.base import BlockStatus, HeldBlock, ReadState
from kvpool.transport.compression import Codec
from kvpool.transport.switch import Burst
from kvpool.transport.ucx import UcxOptions, UcxTransport
from kvpool.transport.ucx.reader import ReaderHalf
from kvpool.transport.ucx.settings import Compression
from tests.contract.transport_rig import End, S, block_hash, request, start_end

BLOCK = 256 * 1024
BLOCKS = 24
TCP = {"TLS": "tcp,self"}

Make = Callable[[Compression, Compression], tuple[End, End]]


def bf16_like(number: int) -> np.ndarray:
    """A block as a model would leave it: normal numbers in bf16."""
    numbers = np.random.Generator(np.random.PCG64(number)).normal(size=BLOCK // 2).astype(np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


@pytest.fixture
def make() -> Iterator[Make]:
    ends: list[End] = []

    def pair(holder: Compression, reader: Compression) -> tuple[End, End]:
        for name, mode, filled in (("holder", holder, True), ("reader", reader, False)):
            transport = UcxTransport(UcxOptions(settings=TCP, compression=mode))
            ends.append(start_end(transport, name, blocks=BLOCKS, block_bytes=BLOCK, filled=filled))
        store = ends[0].store
        for number in range(BLOCKS):
            block = ends[0].slot(number)
            block[:] = bf16_like(number)
            store.held[block_hash(number)] = HeldBlock(number * BLOCK, xxhash.xxh3_64_intdigest(block))
        return ends[0], ends[1]

    yield pair
    for end in reversed(ends):
        end.transport.close()
        stats = end.transport.stats()
        assert stats.staging_bytes == 0, "staging is lost"
        assert end.store.leases == {}, "a read lease outlived the transports"


def half(end: End) -> ReaderHalf:
    assert isinstance(end.transport, UcxTransport)
    assert end.transport._running is not None
    return end.transport._running.reader


def assert_arrived(reader: End) -> None:
    for number in range(BLOCKS):
        assert np.array_equal(reader.slot(number), bf16_like(number)), f"block {number} differs"


def test_bf16_blocks_travel_smaller_and_arrive_the_same(make: Make) -> None:
    holder, reader = make(Compression.AUTO, Compression.ALWAYS)
    progress = reader.transport.read(request(holder.peer, list(range(BLOCKS)), BLOCK)).wait(20 * S)
    assert progress.state is ReadState.DONE, progress.error
    assert progress.bytes_arrived == BLOCKS * BLOCK
    assert_arrived(reader)
    stats = reader.transport.stats()
    assert stats.frames_read > 1
    assert 0.2 < stats.bytes_saved / (BLOCKS * BLOCK) < 0.5
    assert stats.decode_ns > 0
    assert holder.transport.stats().encode_ns > 0
    assert stats.bytes_read == holder.transport.stats().bytes_served == BLOCKS * BLOCK


@pytest.mark.parametrize(
    ("holder_mode", "reader_mode"),
    [
        (Compression.OFF, Compression.ALWAYS),
        (Compression.ALWAYS, Compression.OFF),
        (Compression.AUTO, Compression.AUTO),
    ],
)
def test_a_holder_that_knows_no_frames_or_a_reader_that_wants_none_gets_raw_runs(
    make: Make, holder_mode: Compression, reader_mode: Compression
) -> None:
    holder, reader = make(holder_mode, reader_mode)
    progress = reader.transport.read(request(holder.peer, list(range(BLOCKS)), BLOCK)).wait(20 * S)
    assert progress.state is ReadState.DONE
    assert_arrived(reader)
    assert reader.transport.stats().frames_read == 0


def test_a_codec_nobody_knows_is_answered_raw(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, reader = make(Compression.AUTO, Compression.AUTO)
    monkeypatch.setattr(half(reader).frames, "wanted", lambda peer, now_ns: (77, 78))
    assert reader.transport.read(request(holder.peer, [1, 2], BLOCK)).wait(20 * S).state is ReadState.DONE
    assert reader.transport.stats().frames_read == 0


def test_the_checksum_is_that_of_the_uncompressed_block(make: Make) -> None:
    holder, reader = make(Compression.AUTO, Compression.ALWAYS)
    holder.store.segment[3 * BLOCK + 5] ^= 1  # spoilt after it was sealed: it packs and unpacks, and is still wrong
    progress = reader.transport.read(request(holder.peer, list(range(BLOCKS)), BLOCK)).wait(20 * S)
    assert isinstance(progress.error, IntegrityError)
    assert [number for number, status in enumerate(progress.statuses) if status is BlockStatus.CORRUPT] == [3]
    assert reader.transport.stats().bad_frames == 0


def test_a_frame_that_does_not_unpack_is_a_typed_error_counted_and_ends_frames_from_that_peer(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, reader = make(Compression.AUTO, Compression.AUTO)
    frames = half(reader).frames
    monkeypatch.setattr(
        frames, "wanted", lambda peer, now_ns: () if frames._switch(peer)._broken else (Codec.ZSTD, Codec.LZ4)
    )

    def spoil(into: memoryview, encode_ns: int) -> None:
        into[0] ^= 0xFF

    with monkeypatch.context() as spoilt:
        spoilt.setattr("kvpool.transport.ucx.frames.stamp_encode_time", spoil)
        progress = reader.transport.read(request(holder.peer, [1, 2, 3], BLOCK)).wait(20 * S)
    assert isinstance(progress.error, IntegrityError)
    assert set(progress.statuses) == {BlockStatus.CORRUPT}
    assert reader.transport.stats().bad_frames > 0
    again = reader.transport.read(request(holder.peer, list(range(BLOCKS)), BLOCK)).wait(20 * S)
    assert again.state is ReadState.DONE
    assert_arrived(reader)


def test_a_link_that_is_slow_is_measured_on_a_real_block_and_switched_on(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, reader = make(Compression.AUTO, Compression.AUTO)
    everything = request(holder.peer, list(range(BLOCKS)), BLOCK)
    switch = half(reader).frames._switch(holder.key)
    learn = switch.observe

    def observe(burst: Burst, now_ns: int) -> None:  # as if bytes had come at 20 MB/s
        learn(replace(burst, elapsed_ns=burst.wire_bytes * 50), now_ns)

    monkeypatch.setattr(switch, "observe", observe)
    for _ in range(4):
        assert reader.transport.read(everything).wait(20 * S).state is ReadState.DONE
    stats = reader.transport.stats()
    assert stats.frames_read > 0
    assert stats.bytes_saved > 0
    assert stats.compressed_links == 1
    assert_arrived(reader)


def test_a_link_at_the_speed_of_this_machine_is_never_compressed(make: Make) -> None:
    holder, reader = make(Compression.AUTO, Compression.AUTO)
    for _ in range(8):
        progress = reader.transport.read(request(holder.peer, list(range(BLOCKS)), BLOCK)).wait(20 * S)
        assert progress.state is ReadState.DONE
    rate = half(reader).frames._switch(holder.key).bytes_per_s
    assert rate is not None
    if rate > 1e9:  # on a starved machine the loopback is a slow link, and whatever the switch does is right
        assert reader.transport.stats().frames_read == 0
