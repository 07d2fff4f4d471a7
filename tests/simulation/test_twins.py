"""Requests with the same prefix beside each other, in virtual time: what they compute in vain, and when they start."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from random import Random

import pytest

from kvpool.plan import REDO, Plan, PlanKind
from tests.simulation.twin_world import SIZE, START_NS, US, Link, TwinWorld, plan_of

TOKEN_NS = 100 * US
CHUNK_TOKENS = 64
"""Small against a prompt, so that the bound means something."""


@dataclass(frozen=True)
class Scene:
    """Two or three requests; ``cancel`` is when the first one leaves.

    Attributes:
        redo_ns: what computing the longest prompt takes.
    """

    arrivals: tuple[tuple[int, str, list[int], Plan], ...]
    link: tuple[int, int | None, int | None]
    redo_ns: int
    cancel_ns: int | None

    @property
    def stall_ns(self) -> int:
        """The longest that a source which sends nothing goes unnoticed."""
        return max(plan.stall_ns for _, _, _, plan in self.arrivals)

    def redo(self) -> Scene:
        """The same requests without any load."""
        return replace(self, arrivals=tuple((at, name, prompt, REDO) for at, name, prompt, _ in self.arrivals))

    def without_first(self) -> Scene:
        """As if the first request had never been there."""
        return replace(self, arrivals=self.arrivals[1:], cancel_ns=None)

    def world(self, **limits: int) -> TwinWorld:
        links = {"peer": Link(*self.link)}
        world = TwinWorld(links, TOKEN_NS, **limits)
        for arrival in self.arrivals:
            world.submit_at(*arrival)
        if self.cancel_ns is not None:
            world.cancel_at(self.cancel_ns, "t0")
        return world


def scene(seed: int, *, kinds: tuple[PlanKind, ...], faults: bool = False, cancels: bool = False) -> Scene:
    """Any length, any speed of the link between a tenth and ten times that of computing, any moment of arrival."""
    rng = Random(seed)
    blocks = rng.randrange(16, 200)
    redo_ns = blocks * SIZE * TOKEN_NS
    ratio = rng.choice([0.1, 0.3, 0.6, 1.0, 1.0, 1.6, 3, 10])
    block_ns = int(SIZE * TOKEN_NS * ratio)
    fault = (rng.randrange(blocks), rng.choice([None, 5, 15])) if faults else (None, None)
    spread_ns = int(min(1, ratio) * redo_ns) + 1
    document = [rng.randrange(97) for _ in range(blocks * SIZE)]
    arrivals: list[tuple[int, str, list[int], Plan]] = []
    for number in range(rng.choice([2, 2, 3])):
        at_ns = rng.randrange(spread_ns) if number else 0
        shared = blocks if rng.random() < 0.6 else rng.randrange(4, blocks + 1)
        kind = rng.choice(kinds)
        meeting = min(int(blocks * ratio / (1 + ratio)), shared - 1) if kind is PlanKind.SPLIT else 0
        plan = plan_of(kind, meeting, shared, {"peer": Link(block_ns)})
        prompt = document[: shared * SIZE] + [100 + number] * rng.randrange(1, 9)
        arrivals.append((at_ns, f"t{number}", prompt, plan))
    cancel_ns = rng.randrange(1, spread_ns + 1) if cancels else None
    return Scene(tuple(arrivals), (block_ns, *fault), redo_ns, cancel_ns)


@pytest.mark.parametrize("kinds", [(PlanKind.SPLIT,), tuple(PlanKind)], ids=["split", "mixed"])
@pytest.mark.parametrize("faults", [False, True], ids=["", "faults"])
@pytest.mark.parametrize("cancels", [False, True], ids=["", "cancels"])
def test_twins_compute_nothing_that_lies_here(kinds: tuple[PlanKind, ...], faults: bool, cancels: bool) -> None:
    """Nothing that another one's view holds, its load brought, or the pool has when the step is planned."""
    for seed in range(6):
        world = scene(seed, kinds=kinds, faults=faults, cancels=cancels).world()
        world.run()
        assert (world.wasted.again, world.wasted.arrived) == (0, 0), f"seed {seed}"
        assert not world.pool.counts().referenced


@pytest.mark.parametrize(
    "kinds", [(PlanKind.LOAD,), (PlanKind.SPLIT,), tuple(PlanKind)], ids=["load", "split", "mixed"]
)
@pytest.mark.parametrize("cancels", [False, True], ids=["", "cancels"])
def test_a_twin_ends_no_later_than_if_everything_were_computed(kinds: tuple[PlanKind, ...], cancels: bool) -> None:
    """But for a chunk and the time in which a silent source is noticed, whether the link holds its speed, crawls or
    dies, and whether or not the first request goes."""
    for seed, faults in product((8, 9, 34), (False, True)):
        drawn = scene(seed, kinds=kinds, faults=faults, cancels=cancels)
        worlds = [drawn, drawn.redo(), *([drawn.redo().without_first()] if cancels else [])]
        ttft, *redone = [world.world(max_step_tokens=CHUNK_TOKENS) for world in worlds]
        for world in (ttft, *redone):
            world.run()
        allowed_ns = START_NS + CHUNK_TOKENS * TOKEN_NS + drawn.stall_ns
        for name in ttft.ttft_ns.keys() & redone[0].ttft_ns.keys():
            redo_ns = max(world.ttft_ns.get(name, 0) for world in redone)
            assert ttft.ttft_ns[name] <= redo_ns + allowed_ns, f"seed {seed}: {name}"
