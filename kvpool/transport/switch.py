"""Whether a link is slow enough that compressed frames arrive sooner than raw bytes.  (pure)

One `LinkSwitch` per peer, on the reader's side. It learns the link's bandwidth from raw traffic, and asks for frames
only while

    slowest of (encode, wire / ratio, decode) + a quarter of the other two  <  0.92 · wire      (0.98 to stay on)

with wire = bytes / bandwidth. The stages overlap, the holder encodes a run while the one before it is on the wire and
another is decoded here; but cores are shared, and the first run of a read waits for all three. Rates and ratio are
those of this process on real blocks (`CodecBook`), later those that frames really had. What frames then deliver is
measured too: slower than the raw link was, they are turned off for a while. Now and then one pull goes raw, because a
link that became fast cannot show it while it waits for a codec.

Until a bandwidth and a codec are known the answer is raw. Clock and codecs are the caller's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvpool.transport.compression import Codec

TURN_ON = 0.92
STAY_ON = 0.98
NOT_HIDDEN = 0.25  # of the stages that are not the slowest
PROBE_BELOW_BYTES_PER_S = 1e9
"""Links as fast as this outrun every codec here; their blocks are not even sampled."""

SAMPLE_BYTES = 1 << 20  # fewer say more about delay than about rate
RATE_SAMPLES = 4  # the best of the last ones counts: a stall makes a link look slow, nothing makes it look fast
MEAN_SAMPLES = 16
RAW_EVERY = 32  # pulls
TRIAL_BYTES = 16 << 20  # arrived in frames before what they delivered is believed
OFF_NS = 10_000_000_000  # after a trial that failed; doubles with every further one in a row
MAX_OFF_NS = 320_000_000_000
WEIGHT = 0.2  # of a new measurement of a codec


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """What a codec does to blocks of this pool, in uncompressed bytes.

    Attributes:
        ratio: uncompressed bytes per compressed byte.
        encode_ns_per_byte, decode_ns_per_byte: of one thread.
    """

    ratio: float
    encode_ns_per_byte: float
    decode_ns_per_byte: float

    def ns_per_byte(self, wire_ns_per_byte: float) -> float:
        """Time per byte over a link: the slowest of the three stages, and what of the others is not hidden."""
        stages = (self.encode_ns_per_byte, wire_ns_per_byte / self.ratio, self.decode_ns_per_byte)
        return (1 - NOT_HIDDEN) * max(stages) + NOT_HIDDEN * sum(stages)


class CodecBook:
    """Speeds of the codecs, learned on real blocks; one per process end."""

    def __init__(self) -> None:
        self._speeds: dict[Codec, CodecSpeed] = {}

    @property
    def speeds(self) -> Mapping[Codec, CodecSpeed]:
        """By codec; empty until the first sample."""
        return self._speeds

    def learn(self, codec: Codec, seen: CodecSpeed) -> None:
        """Fold one measurement in."""
        old = self._speeds.get(codec)
        if old is None:
            self._speeds[codec] = seen
            return
        self._speeds[codec] = CodecSpeed(
            *(
                (1 - WEIGHT) * before + WEIGHT * now
                for before, now in (
                    (old.ratio, seen.ratio),
                    (old.encode_ns_per_byte, seen.encode_ns_per_byte),
                    (old.decode_ns_per_byte, seen.decode_ns_per_byte),
                )
            )
        )


@dataclass(frozen=True, slots=True)
class Burst:
    """Bytes that arrived back to back over one link.

    Attributes:
        raw_bytes: uncompressed.
        wire_bytes: as they travelled.
        elapsed_ns: from the first grant to the last arrival.
        framed: whether any of them came in frames.
    """

    raw_bytes: int = 0
    wire_bytes: int = 0
    elapsed_ns: int = 0
    framed: bool = False

    @property
    def bytes_per_s(self) -> float:
        """Rate on the wire."""
        return self.wire_bytes * 1e9 / self.elapsed_ns


class BurstMeter:
    """Cuts the traffic of one link into bursts that are long enough to say something about its rate."""

    def __init__(self) -> None:
        self._began_ns: int | None = None
        self._burst = Burst()

    def began(self, now_ns: int) -> None:
        """Something was granted; the time counts from here if nothing was under way."""
        if self._began_ns is None:
            self._began_ns = now_ns

    def arrived(self, raw_bytes: int, wire_bytes: int, *, framed: bool, idle: bool, now_ns: int) -> Burst | None:
        """Bytes arrived; ``idle`` when nothing is under way any more. Returns a burst that is complete."""
        burst = self._burst
        began_ns = now_ns if self._began_ns is None else self._began_ns
        self._burst = Burst(
            burst.raw_bytes + raw_bytes, burst.wire_bytes + wire_bytes, now_ns - began_ns, burst.framed or framed
        )
        done = self._burst if self._burst.wire_bytes >= SAMPLE_BYTES and self._burst.elapsed_ns > 0 else None
        if done is not None or idle:
            self._began_ns, self._burst = None if idle else now_ns, Burst()
        return done

    def forget(self) -> None:
        """What was under way was given up."""
        self._began_ns, self._burst = None, Burst()


class LinkSwitch:
    """Decides for one peer. Pure state: it moves only when it is told something."""

    def __init__(self) -> None:
        self._raw: deque[Burst] = deque(maxlen=MEAN_SAMPLES)
        self._faster: float = 0.0  # shown by frames since the last raw burst
        self._codec: Codec | None = None
        self._pulls = 0
        self._framed = Burst()
        self._off_ns = OFF_NS
        self._off_until_ns = 0
        self._broken = False

    @property
    def codec(self) -> Codec | None:
        """What frames are asked for in now; None for raw."""
        return self._codec

    @property
    def bytes_per_s(self) -> float | None:
        """Learned bandwidth of the link; None until it is known."""
        if not self._raw:
            return None
        return max(self._faster, *(burst.bytes_per_s for burst in list(self._raw)[-RATE_SAMPLES:]))

    @property
    def _raw_goodput(self) -> float:
        """What raw runs really delivered lately, pauses included, as `_framed` counts them."""
        return sum(burst.raw_bytes for burst in self._raw) * 1e9 / sum(burst.elapsed_ns for burst in self._raw)

    @property
    def wants_sample(self) -> bool:
        """Whether blocks of this link are worth measuring codecs on."""
        rate = self.bytes_per_s
        return rate is not None and rate < PROBE_BELOW_BYTES_PER_S

    def observe(self, burst: Burst, now_ns: int) -> None:
        """Learn from a burst. Frames can show that a link is faster than believed, never that it is slower."""
        if not burst.framed:
            self._raw.append(burst)
            self._faster = 0.0
        elif self._raw:
            self._faster = max(self._faster, burst.bytes_per_s)
        if not burst.framed or self._codec is None:
            return
        done = self._framed
        self._framed = replace(
            done, raw_bytes=done.raw_bytes + burst.raw_bytes, elapsed_ns=done.elapsed_ns + burst.elapsed_ns
        )
        if self._framed.raw_bytes >= TRIAL_BYTES:
            delivered = self._framed.raw_bytes * 1e9 / self._framed.elapsed_ns
            self._framed = Burst()
            if delivered >= self._raw_goodput:
                self._off_ns = OFF_NS
                return
            self._codec, self._off_until_ns = None, now_ns + self._off_ns
            self._off_ns = min(2 * self._off_ns, MAX_OFF_NS)

    def fault(self) -> None:
        """A frame of this peer did not unpack: raw from now on, whatever the link."""
        self._broken, self._codec = True, None

    def choose(self, speeds: Mapping[Codec, CodecSpeed], now_ns: int) -> Codec | None:
        """The codec to ask for in the next pull, None for raw."""
        rate = self.bytes_per_s
        if rate is None or not speeds or self._broken or now_ns < self._off_until_ns:
            self._codec = None
            return None
        raw_ns = 1e9 / rate
        best = min(speeds, key=lambda codec: (speeds[codec].ns_per_byte(raw_ns), codec))
        limit = TURN_ON if self._codec is None else STAY_ON
        if speeds[best].ns_per_byte(raw_ns) >= limit * raw_ns:
            self._codec = None
            return None
        if self._codec is None:
            self._framed, self._pulls = Burst(), 0
        self._codec = best
        self._pulls += 1
        return None if self._pulls % RAW_EVERY == 0 else best
