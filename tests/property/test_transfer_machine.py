"""Laws of the load machine under any order of reports: no page is lost, reused early or settled twice."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.transfer.machine import (
    Begin,
    Cancel,
    CancelRead,
    Ended,
    Finish,
    Instruction,
    LoadMachine,
    LoadState,
    Outcome,
    PagesFree,
    PagesUsable,
    Settled,
    Slice,
    Source,
    StartRead,
    Tick,
)
from kvpool.types import WorkerEpoch, WorkerId, WorkerKey

DEADLINE = 1_000
OUTCOMES = list(Outcome)


class World:
    """Drives a machine as a lawful transport would, and checks the laws after every step."""

    def __init__(self, seed: int, blocks: int, slices: int, alternates: int) -> None:
        self.rng = random.Random(seed)
        cuts = sorted(self.rng.sample(range(blocks + 1), min(slices, blocks) + 1)) if blocks else [0]
        parts = [
            Slice(tuple(range(start, stop)), tuple(self._source(stop, blocks) for _ in range(1 + alternates)))
            for start, stop in itertools.pairwise(cuts)
        ]
        self.wanted = [index for index in range(blocks) if self.rng.random() < 0.8]
        self.machine = LoadMachine(self.wanted, parts, DEADLINE)
        self.open: dict[int, set[int]] = {}
        self.cancelled: set[int] = set()
        self.started = 0
        self.usable: list[int] = []
        self.free: list[int] = []
        self.finished: list[LoadState] = []
        self.now_ns = 0

    def _source(self, stop: int, blocks: int) -> Source:
        name = f"w{self.rng.randrange(4)}"
        key = WorkerKey(WorkerId(name), WorkerEpoch(1))
        return Source(key, b"", "memory", self.rng.choice([stop, blocks, max(1, stop - 1)]))

    def feed(self, out: list[Instruction]) -> None:
        for instruction in out:
            assert not self.finished, "an instruction came after the load was finished"
            match instruction:
                case StartRead(read_id, _, indices, deadline_ns):
                    assert read_id not in self.open
                    assert self.now_ns + deadline_ns == DEADLINE, "a retry got a deadline of its own"
                    assert deadline_ns > 0
                    named = set().union(*self.open.values()) if self.open else set()
                    assert not named & set(indices), "a page is named by two reads at once"
                    assert not set(self.usable) & set(indices)
                    assert not set(self.free) & set(indices)
                    self.open[read_id] = set(indices)
                    self.started += 1
                case CancelRead(read_id):
                    assert read_id in self.open
                    self.cancelled.add(read_id)
                case PagesUsable(indices):
                    self.usable += indices
                case PagesFree(indices):
                    named = set().union(*self.open.values()) if self.open else set()
                    assert not named & set(indices), "a page was freed while a read may still write it"
                    self.free += indices
                case Finish(state):
                    self.finished.append(state)
        settled = self.usable + self.free
        assert len(settled) == len(set(settled)), "a page was settled twice"

    def step(self) -> None:
        self.now_ns += self.rng.randrange(0, 60)
        roll = self.rng.random()
        if roll < 0.05:
            self.feed(self.machine.handle(Cancel(), self.now_ns))
        elif roll < 0.15:
            self.feed(self.machine.handle(Tick(), self.now_ns))
        elif self.open:
            read_id = self.rng.choice(sorted(self.open))
            self._report(read_id, ends=self.now_ns >= DEADLINE or self.rng.random() < 0.4)

    def _report(self, read_id: int, *, ends: bool) -> None:
        names = sorted(self.open[read_id])
        chosen = names if ends and self.rng.random() < 0.5 else self.rng.sample(names, self.rng.randint(0, len(names)))
        if ends:
            outcomes = {index: self.rng.choice(OUTCOMES) for index in chosen}
            failure = self.rng.choice([None, "peer_gone", "stall", "integrity", "cancelled"])
            del self.open[read_id]
            self.feed(self.machine.handle(Ended(read_id, outcomes, failure, failure == "stall"), self.now_ns))
            return
        outcomes = dict.fromkeys(chosen, Outcome.ARRIVED)
        self.open[read_id] -= set(chosen)
        self.feed(self.machine.handle(Settled(read_id, outcomes), self.now_ns))


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    blocks=st.integers(0, 24),
    slices=st.integers(1, 4),
    alternates=st.integers(0, 3),
)
def test_every_load_ends_by_its_deadline_with_every_page_settled_once(
    seed: int, blocks: int, slices: int, alternates: int
) -> None:
    world = World(seed, blocks, slices, alternates)
    world.feed(world.machine.handle(Begin(), 0))
    steps = 0
    while not world.finished:
        world.step()
        steps += 1
        assert steps < 2_000, "the load did not end although time passed its deadline"
    assert sorted(world.usable + world.free) == world.wanted
    assert world.finished == [world.machine.state]
    assert (world.machine.state is LoadState.VERIFIED) == (not world.free)
    assert not world.open
    assert world.started <= slices * (1 + alternates) * max(1, 1 + alternates)
    front = world.machine.front_blocks
    assert set(world.wanted[:front]) <= set(world.usable)
    assert front == len(world.wanted) or world.wanted[front] not in world.usable


def test_the_world_notices_a_machine_that_frees_a_page_early() -> None:
    world = World(1, 8, 1, 0)
    world.wanted = list(range(8))
    world.machine = LoadMachine(world.wanted, [Slice(tuple(range(8)), (world._source(8, 8),))], DEADLINE)
    world.feed(world.machine.handle(Begin(), 0))
    named = next(iter(world.open.values()), set())
    assert named
    with pytest.raises(AssertionError, match="freed while"):
        world.feed([PagesFree((min(named),))])
