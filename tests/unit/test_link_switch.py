"""When a link's traffic is compressed: only where it arrives sooner, and never for long when it does not."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvpool.transport.compression import Codec
from kvpool.transport.switch import (
    OFF_NS,
    RAW_EVERY,
    SAMPLE_BYTES,
    TRIAL_BYTES,
    Burst,
    BurstMeter,
    CodecBook,
    CodecSpeed,
    LinkSwitch,
)

MB = 1_000_000
BF16 = {
    Codec.ZSTD: CodecSpeed(1.43, 1 / 0.66, 1 / 1.5),
    Codec.LZ4: CodecSpeed(1.145, 1 / 0.79, 1 / 2.2),
}
"""What was measured, in ns per byte."""


def burst(bytes_per_s: float, size: int = 8 * MB, *, ratio: float = 1.0) -> Burst:
    """A burst whose uncompressed bytes arrived at this rate."""
    return Burst(size, int(size / ratio), int(size / bytes_per_s * 1e9), ratio != 1.0)


def learned(bytes_per_s: float) -> LinkSwitch:
    switch = LinkSwitch()
    switch.observe(burst(bytes_per_s), 0)
    return switch


def test_an_unknown_link_is_raw() -> None:
    assert LinkSwitch().choose(BF16, 0) is None
    assert not LinkSwitch().wants_sample


def test_a_slow_link_is_raw_until_a_codec_was_measured() -> None:
    switch = learned(125 * MB)
    assert switch.wants_sample
    assert switch.choose({}, 0) is None
    assert switch.choose(BF16, 0) is Codec.ZSTD


@pytest.mark.parametrize("rate", [625 * MB, 1_250 * MB, 12_000 * MB])
def test_a_link_faster_than_the_codecs_is_raw(rate: float) -> None:
    assert learned(rate).choose(BF16, 0) is None


def test_blocks_of_a_fast_link_are_not_even_sampled() -> None:
    assert not learned(5_000 * MB).wants_sample


def test_between_its_two_thresholds_the_switch_stays_where_it_is() -> None:
    speeds = {
        Codec.ZSTD: CodecSpeed(2.0, 1.0, 0.0)
    }  # encoding is the slowest stage: pays below 795, stays on below 855
    assert learned(820 * MB).choose(speeds, 0) is None
    switch = learned(780 * MB)
    assert switch.choose(speeds, 0) is Codec.ZSTD
    for _ in range(4):
        switch.observe(burst(820 * MB), 0)
    assert switch.choose(speeds, 0) is Codec.ZSTD
    switch.observe(burst(870 * MB), 0)
    assert switch.choose(speeds, 0) is None


@pytest.mark.parametrize("rate", [10 * MB, 125 * MB, 250 * MB])
def test_up_to_two_gigabits_bf16_is_compressed(rate: float) -> None:
    assert learned(rate).choose(BF16, 0) is Codec.ZSTD


def test_a_codec_that_barely_shrinks_is_not_worth_it() -> None:
    assert learned(10 * MB).choose({Codec.LZ4: CodecSpeed(1.05, 0.1, 0.1)}, 0) is None


def test_the_codec_that_arrives_first_wins() -> None:
    speeds = {Codec.ZSTD: CodecSpeed(2.0, 4.0, 1.0), Codec.LZ4: CodecSpeed(1.4, 1.0, 0.5)}
    assert learned(300 * MB).choose(speeds, 0) is Codec.LZ4
    assert learned(50 * MB).choose(speeds, 0) is Codec.ZSTD


def test_one_stall_does_not_make_a_fast_link_slow() -> None:
    switch = learned(5_000 * MB)
    switch.observe(burst(20 * MB), 0)
    assert switch.choose(BF16, 0) is None
    for _ in range(4):
        switch.observe(burst(20 * MB), 0)
    assert switch.choose(BF16, 0) is Codec.ZSTD


def test_frames_never_make_a_link_look_slower() -> None:
    switch = learned(125 * MB)
    switch.choose(BF16, 0)
    for _ in range(8):
        switch.observe(burst(140 * MB, ratio=1.43), 0)
    assert switch.bytes_per_s == 125 * MB


def test_now_and_then_a_pull_goes_raw_to_see_what_the_link_can_do() -> None:
    switch = learned(125 * MB)
    chosen = [switch.choose(BF16, 0) for _ in range(2 * RAW_EVERY)]
    assert chosen.count(None) == 2
    assert switch.codec is Codec.ZSTD
    for _ in range(4):
        switch.observe(burst(1_250 * MB), 0)
    assert switch.choose(BF16, 0) is None


def test_frames_that_deliver_less_than_raw_did_are_turned_off_for_a_while() -> None:
    switch = learned(125 * MB)
    assert switch.choose(BF16, 0) is Codec.ZSTD
    for _ in range(-(-TRIAL_BYTES // (8 * MB))):
        switch.observe(burst(100 * MB, ratio=1.43), 5)
    assert switch.choose(BF16, 5 + OFF_NS - 1) is None
    assert switch.choose(BF16, 5 + OFF_NS) is Codec.ZSTD


def fail_a_trial(switch: LinkSwitch, now_ns: int) -> None:
    assert switch.choose(BF16, now_ns) is Codec.ZSTD
    for _ in range(-(-TRIAL_BYTES // (8 * MB))):
        switch.observe(burst(100 * MB, ratio=1.43), now_ns)


def test_every_trial_that_fails_keeps_frames_off_for_longer_until_one_succeeds() -> None:
    switch = learned(125 * MB)
    now_ns, waits = 0, []
    for _ in range(7):
        fail_a_trial(switch, now_ns)
        begun_ns = now_ns
        while switch.choose(BF16, now_ns) is None:
            now_ns += OFF_NS
        waits.append((now_ns - begun_ns) // OFF_NS)
    assert waits == [1, 2, 4, 8, 16, 32, 32]
    for _ in range(-(-TRIAL_BYTES // (8 * MB))):
        switch.observe(burst(150 * MB, ratio=1.43), now_ns)
    fail_a_trial(switch, now_ns)
    assert switch.choose(BF16, now_ns + OFF_NS) is Codec.ZSTD


def test_a_peer_whose_frames_do_not_unpack_stays_raw() -> None:
    switch = learned(125 * MB)
    assert switch.choose(BF16, 0) is Codec.ZSTD
    switch.fault()
    assert switch.codec is None
    assert switch.choose(BF16, 10 * OFF_NS) is None


def test_measurements_of_a_codec_are_folded_in() -> None:
    book = CodecBook()
    assert book.speeds == {}
    book.learn(Codec.ZSTD, CodecSpeed(1.4, 1.0, 1.0))
    book.learn(Codec.ZSTD, CodecSpeed(2.4, 2.0, 0.0))
    seen = book.speeds[Codec.ZSTD]
    assert (seen.ratio, seen.encode_ns_per_byte, seen.decode_ns_per_byte) == pytest.approx((1.6, 1.2, 0.8))


def collect(meter: BurstMeter, arrivals: Mapping[int, int]) -> list[Burst]:
    bursts = (meter.arrived(size, size, framed=False, idle=False, now_ns=at) for at, size in arrivals.items())
    return [burst for burst in bursts if burst is not None]


def test_a_burst_counts_from_the_first_grant_and_goes_on_until_it_says_something() -> None:
    meter = BurstMeter()
    meter.began(100)
    meter.began(500)
    half = SAMPLE_BYTES // 2
    assert collect(meter, {1100: half, 2100: half, 3100: half, 4100: half}) == [
        Burst(SAMPLE_BYTES, SAMPLE_BYTES, 2000),
        Burst(SAMPLE_BYTES, SAMPLE_BYTES, 2000),
    ]


def test_a_small_read_says_nothing_about_the_rate() -> None:
    meter = BurstMeter()
    meter.began(0)
    assert meter.arrived(10, 10, framed=False, idle=True, now_ns=50) is None
    meter.began(10_000_000_000)  # the pause in between is nobody's slowness
    done = meter.arrived(SAMPLE_BYTES, SAMPLE_BYTES, framed=False, idle=True, now_ns=10_000_001_000)
    assert done == Burst(SAMPLE_BYTES, SAMPLE_BYTES, 1000)


def test_a_burst_with_a_frame_in_it_says_so() -> None:
    meter = BurstMeter()
    meter.began(0)
    assert meter.arrived(10, 5, framed=True, idle=False, now_ns=1) is None
    done = meter.arrived(SAMPLE_BYTES, SAMPLE_BYTES, framed=False, idle=False, now_ns=2)
    assert done == Burst(SAMPLE_BYTES + 10, SAMPLE_BYTES + 5, 2, True)
    meter.forget()
    assert meter.arrived(SAMPLE_BYTES, SAMPLE_BYTES, framed=False, idle=True, now_ns=9) is None
