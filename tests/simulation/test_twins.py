"""Requests with the same prefix beside each other, in virtual time: what they compute in vain, and when they start."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from kvpool.plan import Plan, PlanKind
from tests.simulation.twin_world import MS, SIZE, US, Link, TwinWorld, plan_of

TOKEN_NS = 100 * US


@dataclass(frozen=True)
class Scene:
    """Two or three requests; ``cancel`` is when the first one leaves.

    Attributes:
        redo_ns: what computing the longest prompt takes.
    """

    arrivals: tuple[tuple[int, str, list[int], Plan], ...]
    link: tuple[int, int | None, int | None, int]
    redo_ns: int
    cancel_ns: int | None

    def world(self) -> TwinWorld:
        links = {"peer": Link(*self.link)}
        world = TwinWorld(links, TOKEN_NS)
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
    fault = (rng.randrange(blocks), rng.choice([None, 5, 30]), rng.choice([1, 4]) * MS) if faults else (None, None, 0)
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
    for seed in range(12):
        world = scene(seed, kinds=kinds, faults=faults, cancels=cancels).world()
        world.run()
        assert (world.wasted.again, world.wasted.arrived) == (0, 0), f"seed {seed}"
        assert not world.pool.counts().referenced
