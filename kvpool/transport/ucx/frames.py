"""Compressed frames on the UCX transport: what its two halves and its helper threads do to have and to use them.

Reader: `FrameReader` decides per pull whether to ask for frames (`kvpool.transport.switch`), lends the staging buffers
that receives are posted into, and unpacks a frame that arrived whole into the reader's pages, on a helper's thread,
where the checksum of the uncompressed blocks is then verified. UCX itself never writes into a page of a framed pull.

Holder: `FrameWriter` packs granted runs into staging buffers on a helper's thread; the progress thread sends them from
there. While a run is being packed its read lease is not released.

Both are owned by the progress thread; only `Exam.run` and the packing run elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvpool.errors import IntegrityError
from kvpool.transport.compression import (
    CODECS,
    PLAIN,
    SAMPLE_BYTES,
    Codec,
    PlanePlan,
    decodable,
    decode_frame,
    encode_frame,
    frame_bound,
    frame_length,
    plan_planes,
    stamp_encode_time,
)
from kvpool.transport.staging import Staging, StagingPool
from kvpool.transport.switch import CodecBook, CodecSpeed, LinkSwitch
from kvpool.transport.ucx.links import Flight, Link, PostedRun
from kvpool.transport.ucx.settings import Compression
from kvpool.transport.verify import INLINE_BYTES, Check, Helpers
from kvpool.types import WorkerKey

STAGING_BYTES = 64 << 20  # of a holder; and one run for every reader that has none
FRAME_RUN_BYTES = 1 << 20  # longest framed run: the codecs and the wire work on neighbouring runs at the same time
REPLAN_BYTES = 256 << 20  # packed with one plan before the planes are looked at again
RESAMPLE_BYTES = 512 << 20  # raw traffic of slow links between two samples, while no frame teaches anything
MAX_SWITCHES = 4096
PACK_AHEAD = 3  # runs of one link that wait for helpers at once, so that nothing else waits long behind them
LANE_BYTES = 16 << 20  # of staging per reader

Clock = Callable[[], int]
"""CPU time of the calling thread: what a codec costs. What else ran meanwhile shows in what frames deliver."""


@dataclass(slots=True, eq=False)
class FramedCheck:
    """A frame that arrived: unpack it into the page, then check the blocks. Runs once, on one thread.

    Attributes:
        check: the page and its checksums.
        frame: the staging buffer.
        fault: what was wrong with the frame, None when it unpacked.
        frame_bytes, encode_ns, decode_ns: what it cost; zero until it ran.
    """

    check: Check
    frame: memoryview
    fault: IntegrityError | None = None
    frame_bytes: int = 0
    encode_ns: int = 0
    decode_ns: int = 0

    def run(self) -> tuple[bool, ...]:
        """Which blocks are intact; none of a frame that does not unpack."""
        begun_ns = time.thread_time_ns()
        try:
            facts = decode_frame(self.frame, self.check.data)
        except IntegrityError as error:
            self.fault = error
            return (False,) * len(self.check.expected)
        self.decode_ns = time.thread_time_ns() - begun_ns
        self.frame_bytes, self.encode_ns = facts.frame_bytes, facts.encode_ns
        return self.check.run()


RunCheck = Check | FramedCheck


@dataclass(slots=True, eq=False)
class Exam:
    """What makes blocks of runs that arrived, or says that they are none. Runs once, on one thread.

    Attributes:
        checks: one per run.
        inline: whether it is too short to be handed to a helper.
        sample: verified bytes on which the codecs are to be measured too.
        speeds: what that found.
    """

    checks: list[RunCheck]
    inline: bool
    sample: memoryview | None
    speeds: Mapping[Codec, CodecSpeed] = field(default_factory=dict)

    def run(self) -> list[tuple[bool, ...]]:
        """Which blocks are intact, per run."""
        verdicts = [check.run() for check in self.checks]
        if self.sample is not None:
            self.speeds = measure(self.sample)
        return verdicts


def measure(block: memoryview, clock_ns: Clock = time.thread_time_ns) -> dict[Codec, CodecSpeed]:
    """What the codecs do to a real block, here and now; takes a few milliseconds."""
    sample = block[:SAMPLE_BYTES]
    frame, back = bytearray(frame_bound(len(sample))), bytearray(len(sample))
    speeds = {}
    for codec in CODECS:
        plan = plan_planes(sample, codec)
        times = [clock_ns()]
        length = encode_frame(sample, plan, memoryview(frame))
        times.append(clock_ns())
        decode_frame(memoryview(frame), memoryview(back))
        times.append(clock_ns())
        size = len(sample)
        speeds[codec] = CodecSpeed(size / length, (times[1] - times[0]) / size, (times[2] - times[1]) / size)
    return speeds


class FrameReader:
    """The reader's side.

    Args:
        mode: whether frames are asked for.
        staging_bytes: bound of the staging.
    """

    def __init__(self, mode: Compression, staging_bytes: int) -> None:
        self._mode = mode
        self._book = CodecBook()
        self._switches: OrderedDict[WorkerKey, LinkSwitch] = OrderedDict()
        self._pool = StagingPool(staging_bytes)
        self._unsampled_bytes = RESAMPLE_BYTES
        self.frames = self.faults = self.bytes_saved = self.decode_ns = 0

    @property
    def staging_bytes(self) -> int:
        """Staging in use."""
        return self._pool.used_bytes

    @property
    def links_on(self) -> int:
        """Peers from which frames are asked for now."""
        return sum(switch.codec is not None for switch in self._switches.values())

    def wanted(self, peer: WorkerKey, now_ns: int) -> tuple[Codec, ...]:
        """The codecs to offer in the next pull, the preferred first; empty for raw."""
        if self._mode is Compression.OFF:
            return ()
        if self._mode is Compression.ALWAYS:
            return CODECS
        codec = self._switch(peer).choose(self._book.speeds, now_ns)
        return () if codec is None else (codec,)

    def fits(self, run_bytes: int) -> bool:
        """Whether there is staging for a run."""
        return self._pool.fits(frame_bound(run_bytes))

    def take(self, run_bytes: int) -> Staging:
        """Staging for the frame of a run; see `fits`."""
        return self._pool.take(frame_bound(run_bytes))

    def release(self, staging: Staging | None) -> None:
        """The receive into it is over, and so is the unpacking; nothing to do for one that was written off."""
        if staging is not None and not staging.over:
            self._pool.give_back(staging)

    def write_off(self, staging: Staging | None) -> None:
        """Its link was given up while the receive was open."""
        if staging is not None and not staging.over:
            self._pool.write_off(staging)

    def arrived(self, link: Link, runs: Sequence[PostedRun], now_ns: int) -> None:
        """Learn about a link from runs that just arrived over it."""
        if self._mode is not Compression.AUTO:
            return
        for place, posted in enumerate(runs):
            raw_bytes = wire_bytes = posted.flight.run_bytes
            if posted.staging is not None:
                with contextlib.suppress(IntegrityError):  # whoever unpacks it says so
                    wire_bytes = frame_length(posted.staging.view, raw_bytes)
            idle = not link.posted and place == len(runs) - 1
            framed = posted.staging is not None
            burst = link.meter.arrived(raw_bytes, wire_bytes, framed=framed, idle=idle, now_ns=now_ns)
            if burst is not None:
                self._switch(link.peer.key).observe(burst, now_ns)

    def exam_of(self, link: Link, runs: Sequence[PostedRun], segment: memoryview, block_bytes: int) -> Exam:
        """How to examine runs that just arrived over a link."""
        checks: list[RunCheck] = []
        for posted in runs:
            check = posted.flight.check(segment, block_bytes)
            checks.append(check if posted.staging is None else FramedCheck(check, posted.staging.view))
        first = checks[0]
        sample = first.data if isinstance(first, Check) and self._wants_sample(link, runs) else None
        size = sum(posted.flight.run_bytes for posted in runs)
        return Exam(checks, sample is None and size <= INLINE_BYTES, sample)

    def settle(self, runs: Sequence[PostedRun], exam: Exam) -> None:
        """Learn from an exam that was run, count its frames and take their staging back."""
        for codec, speed in exam.speeds.items():
            self._book.learn(codec, speed)
        for posted, done in zip(runs, exam.checks, strict=True):
            self.release(posted.staging)
            if isinstance(done, FramedCheck):
                self._count(posted.flight, done)

    def _wants_sample(self, link: Link, runs: Sequence[PostedRun]) -> bool:
        if self._mode is not Compression.AUTO or not self._switch(link.peer.key).wants_sample:
            return False
        self._unsampled_bytes += sum(posted.flight.run_bytes for posted in runs if posted.staging is None)
        if self._unsampled_bytes < RESAMPLE_BYTES:
            return False
        self._unsampled_bytes = 0
        return True

    def _count(self, flight: Flight, done: FramedCheck) -> None:
        self.frames += 1
        if done.fault is not None:
            self.faults += 1
            self._switch(flight.pull.reading.link.peer.key).fault()
            return
        size = flight.run_bytes
        self.bytes_saved += size - done.frame_bytes
        self.decode_ns += done.decode_ns
        if done.encode_ns:
            seen = CodecSpeed(size / done.frame_bytes, done.encode_ns / size, done.decode_ns / size)
            self._book.learn(flight.pull.codec, seen)

    def _switch(self, peer: WorkerKey) -> LinkSwitch:
        switch = self._switches.get(peer)
        if switch is None:
            switch = self._switches[peer] = LinkSwitch()
            while len(self._switches) > MAX_SWITCHES:
                self._switches.popitem(last=False)
        return switch


@dataclass(slots=True, eq=False)
class Lane:
    """What one reader's link holds of a holder's helpers and staging."""

    packing: int = 0
    staged_bytes: int = 0


class FrameWriter:
    """The holder's side.

    A reader that takes nothing holds `LANE_BYTES` of staging at most, and a link that holds nothing may always have one
    run packed, so that readers who stopped never keep others waiting.

    Args:
        mode: OFF answers every pull raw.
        helpers: threads that pack.
    """

    def __init__(self, mode: Compression, helpers: Helpers) -> None:
        self._mode = mode
        self._helpers = helpers
        self._pool = StagingPool(STAGING_BYTES)
        self._plans: dict[Codec, PlanePlan] = {}
        self._packed_bytes: dict[Codec, int] = {}
        self.encode_ns = 0

    @property
    def staging_bytes(self) -> int:
        """Staging in use."""
        return self._pool.used_bytes

    def accept(self, wanted: tuple[int, ...]) -> Codec:
        """How to answer a reader that wants these codecs; RAW when it wants none that is known here."""
        return Codec.RAW if self._mode is Compression.OFF else decodable(wanted) or Codec.RAW

    def fits(self, run_bytes: int, lane: Lane) -> bool:
        """Whether a run may be packed for a link now."""
        size = frame_bound(run_bytes)
        if not lane.staged_bytes:
            return True
        return lane.packing < PACK_AHEAD and lane.staged_bytes + size <= LANE_BYTES and self._pool.fits(size)

    def pack(self, run: memoryview, codec: Codec, lane: Lane, then: Callable[[Staging, int, int], None]) -> None:
        """Pack a run on a helper's thread; see `fits`. The run must stay as it is until then.

        Args:
            run: pinned blocks.
            codec: what the reader was told.
            lane: of its link.
            then: gets the staging, the frame's length in it and the time, on the progress thread; it owns the staging.
        """
        staging = self._pool.take(frame_bound(len(run)))
        lane.packing += 1
        lane.staged_bytes += len(staging.view)
        self._packed_bytes[codec] = self._packed_bytes.get(codec, 0) + len(run)
        if self._packed_bytes[codec] > REPLAN_BYTES:
            self._packed_bytes[codec] = 0
            self._plans.pop(codec, None)

        def take(packed: _Packed, now_ns: int) -> None:
            lane.packing -= 1
            self._plans[codec] = packed.plan
            self.encode_ns += packed.encode_ns
            then(staging, packed.frame_bytes, now_ns)

        self._helpers.submit(functools.partial(_pack, run, codec, self._plans.get(codec), staging.view), take)

    def release(self, staging: Staging | None, lane: Lane) -> None:
        """It was sent, or never will be; nothing to do for one that was written off."""
        if staging is not None and not staging.over:
            lane.staged_bytes -= len(staging.view)
            self._pool.give_back(staging)

    def write_off(self, staging: Staging | None, lane: Lane) -> None:
        """Its link was given up while the send was open."""
        if staging is not None and not staging.over:
            lane.staged_bytes -= len(staging.view)
            self._pool.write_off(staging)


@dataclass(frozen=True, slots=True)
class _Packed:
    frame_bytes: int
    encode_ns: int
    plan: PlanePlan


def _pack(run: memoryview, codec: Codec, plan: PlanePlan | None, into: memoryview) -> _Packed:
    """On a helper's thread."""
    begun_ns = time.thread_time_ns()
    if plan is None:
        plan = PLAIN if codec is Codec.RAW else plan_planes(run, codec)
        begun_ns = time.thread_time_ns()
    frame_bytes = encode_frame(run, plan, into)
    encode_ns = time.thread_time_ns() - begun_ns
    stamp_encode_time(into, encode_ns)
    return _Packed(frame_bytes, encode_ns, plan)
