"""Sharing the windows between reads: bounds, order, and that nobody starves while urgent reads keep coming."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.transport.fair import OLDEST_EVERY, TURN_BYTES, Claim, Room, pick, share

MIB = 1 << 20
LANES = 3
SIZES = st.sampled_from([64 << 10, MIB, 3 * MIB, 8 * MIB, 40 * MIB])


def room(free_bytes: int, free_runs: int = 64, *, turns: int = 0) -> Room:
    return Room(free_bytes, free_runs, True, turns)


CLAIMS = st.lists(
    st.builds(
        lambda lane, urgency_ns, runs, first: (lane, urgency_ns, tuple(runs), min(first, len(runs) - 1)),
        st.integers(0, LANES - 1),
        st.integers(0, 5),
        st.lists(SIZES, min_size=1, max_size=12),
        st.integers(0, 11),
    ),
    max_size=8,
)


@settings(max_examples=300, deadline=None)
@given(CLAIMS, st.integers(0, 40 * MIB), st.integers(0, 60 * MIB), st.integers(1, 10), st.integers(0, 7))
def test_windows_hold_and_every_run_goes_once_and_in_order(
    drawn: list[tuple[int, int, tuple[int, ...], int]], lane_bytes: int, process_bytes: int, runs: int, turn: int
) -> None:
    claims = [Claim(lane, urgency, number, sizes, first) for number, (lane, urgency, sizes, first) in enumerate(drawn)]
    lanes = {lane: room(lane_bytes, runs, turns=turn) for lane in range(LANES)}
    shares = share(claims, lanes, room(process_bytes, 1000, turns=turn))
    moved = [0] * len(claims)
    sizes_in: dict[int, list[int]] = {lane: [] for lane in range(LANES)}
    for index, count in shares.turns:
        claim = claims[index]
        start = claim.first + moved[index]
        sizes = claim.run_bytes[start : start + count]
        assert len(sizes) == count > 0
        assert len(sizes) == 1 or sum(sizes) <= TURN_BYTES
        moved[index] += count
        sizes_in[claim.lane] += sizes
    for sizes in sizes_in.values():
        assert len(sizes) <= runs
        assert len(sizes) <= 1 or sum(sizes) <= lane_bytes
    everything = [size for sizes in sizes_in.values() for size in sizes]
    assert len(everything) <= 1 or sum(everything) <= process_bytes
    if claims:
        assert everything, "empty windows take at least one run"


@dataclass
class Read:
    urgency_ns: int
    sequence: int
    runs: tuple[int, ...]
    lane: int = 0
    first: int = 0


@dataclass
class World:
    """Two links inside one process window; whatever moved has arrived before the next turns are given out."""

    lane_bytes: int
    process_bytes: int
    reads: list[Read] = field(default_factory=list)
    lane_turns: dict[int, int] = field(default_factory=lambda: {0: 0, 1: 0})
    turns: int = 0
    arrivals: int = 0

    def add(self, urgency_ns: int, runs: tuple[int, ...], lane: int = 0) -> Read:
        self.arrivals += 1
        self.reads.append(Read(urgency_ns, self.arrivals, runs, lane))
        return self.reads[-1]

    def step(self) -> None:
        claims = [Claim(read.lane, read.urgency_ns, read.sequence, read.runs, read.first) for read in self.reads]
        lanes = {lane: room(self.lane_bytes, turns=turns) for lane, turns in self.lane_turns.items()}
        shares = share(claims, lanes, room(self.process_bytes, 1000, turns=self.turns))
        for index, count in shares.turns:
            self.reads[index].first += count
        self.lane_turns = {lane: room.turns for lane, room in shares.lanes.items()}
        self.turns = shares.process.turns
        self.reads = [read for read in self.reads if read.first < len(read.runs)]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.sampled_from([8 * MIB, 16 * MIB, 32 * MIB]),
    st.sampled_from([8 * MIB, 24 * MIB, 64 * MIB]),
    st.integers(0, 1),
    st.integers(0, 20),
)
def test_a_patient_read_ends_although_urgent_ones_keep_coming(
    patient_runs: int, lane_bytes: int, process_bytes: int, rivals_lane: int, head_start: int
) -> None:
    """Rivals ask for more than the windows give, on the same link and, maybe, on another."""
    world = World(lane_bytes, process_bytes)
    for _ in range(head_start):
        world.add(0, (8 * MIB,) * 2, rivals_lane)
    patient = world.add(10**12, (8 * MIB,) * patient_runs)
    steps = 0
    while patient in world.reads:
        for lane in {0, rivals_lane}:
            while sum(read.lane == lane for read in world.reads) < 12:
                world.add(0, (8 * MIB,) * 4, lane)
        world.step()
        steps += 1
        assert steps <= OLDEST_EVERY**2 * (patient_runs + 2 * head_start + OLDEST_EVERY), "it starves"


def test_the_world_notices_when_the_oldest_has_no_turn_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.transport.fair.OLDEST_EVERY", 10**9)
    with pytest.raises(AssertionError, match="it starves"):
        test_a_patient_read_ends_although_urgent_ones_keep_coming.hypothesis.inner_test(4, 8 * MIB, 8 * MIB, 0, 0)


def test_the_read_nearest_to_its_first_token_goes_first() -> None:
    world = World(8 * MIB, 64 * MIB)
    world.add(50, (8 * MIB,) * 10)
    urgent = world.add(1, (8 * MIB,) * 2)
    world.step()
    world.step()
    assert urgent not in world.reads


def test_an_urgent_read_keeps_three_turns_of_four() -> None:
    world = World(8 * MIB, 64 * MIB)
    old = world.add(50, (8 * MIB,) * 100)
    urgent = world.add(1, (8 * MIB,) * 100)
    for _ in range(40):
        world.step()
    assert (old.first, urgent.first) == (10, 30)


def test_who_has_the_turn_and_does_not_fit_is_not_overtaken() -> None:
    claims = [Claim(0, 0, 1, (40 * MIB,)), Claim(0, 1, 2, (64 << 10,))]
    busy = Room(16 * MIB, 64, empty=False)
    assert share(claims, {0: busy}, room(64 * MIB)).turns == ()


def test_equally_urgent_reads_go_by_age() -> None:
    claims = [Claim(0, 7, 3, (1,)), Claim(0, 7, 2, (1,)), Claim(0, 9, 1, (1,))]
    assert pick(claims, 0) == 1
    assert pick(claims, OLDEST_EVERY - 1) == 2
