"""A prefix that many workers hold: the few holders that a search looks at are as good as all of them."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.metadata.prefixes import PrefixRuns, Run, TierSteps, _one_by_one, by_tiers, joined
from kvpool.types import MemberState, Tier, WorkerKey
from router import kernel
from router.compiled import kernels
from router.decide import decide
from router.estimators import LinkCurve
from router.fleet import Fleet
from router.learned import Learned
from router.planning import Params
from router.scores import FIRST_HOLDERS, open_case
from router.signals import Features, Snapshot
from tests.property.decide_kit import PLAIN
from tests.unit.router_kit import MS, FixedFailures, Worker, key, request, snapshot

MOST_WORKERS = 180


def crowd(rng: Random) -> tuple[Snapshot, PrefixRuns]:
    """Hundreds of workers, most of which hold one of a few lengths, and who holds them."""
    size = rng.randrange(2 * FIRST_HOLDERS, MOST_WORKERS)
    lengths = rng.sample([0, 20, 60, 95, 99, 120], rng.randrange(2, 5))
    alike, tier = rng.random() < 0.5, rng.choice([Tier.DEVICE, Tier.HOST])
    on_disk = rng.choice([0.0, 0.0, 0.1])
    busy = [0.0] if alike else [0.0, 0.0, 1e7, 3e7, 9e7]
    workers = [
        Worker(
            number,
            blocks=rng.choice(lengths),
            wait_ns=rng.choice([0.0, 2e8, 3e8, None]) if rng.random() < 0.3 else rng.choice([2e8, 3e8]),
            in_ns=rng.choice(busy),
            out_ns=rng.choice([*busy, -1e7, -5e6]),
            requests=rng.randrange(3),
            state=rng.choice([MemberState.ALIVE] * 9 + [MemberState.SUSPECT]),
            tier=Tier.DISK if rng.random() < on_disk else tier,
            in_memory=rng.choice([0, 20, 60]),
        )
        for number in range(size)
    ]
    some = [key(rng.randrange(size)).worker_id for _ in range(6)]
    pairs = {(a, b): LinkCurve(MS, rng.choice([0.3, 1.0, 2.0])) for a in some for b in some if a != b}
    shot = snapshot(
        workers,
        links=LinkCurve(MS, rng.choice([0.3, 1.0, 2.0, 4.0])),
        pairs=pairs,
        failures=FixedFailures(0.01, {key(number): 0.3 for number in range(0, size, 7)}),
        features=Features(split=rng.random() < 0.5, stripes=rng.choice([1, 4])),
    )
    alike_ones: dict[tuple[tuple[Tier, int], ...], list[WorkerKey]] = {}
    for name, tiers in shot.prefixes.items():
        alike_ones.setdefault(tuple(tiers.items()), []).append(name)
    return shot, PrefixRuns([(dict(tiers), tuple(names)) for tiers, names in alike_ones.items()])


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([PLAIN, Params()]))
def test_looking_at_the_first_holders_of_each_length_loses_nothing(seed: int, params: Params) -> None:
    whole, prefixes = crowd(Random(seed))
    fleet = Fleet(Learned().links)
    fleet.index = dict(whole.positions)
    pruned = whole._replace(prefixes=prefixes, places=fleet.places)
    assert dict(prefixes) == whole.prefixes
    made, expected = decide(request(), pruned, params), decide(request(), whole, params)
    if not any(Tier.DISK in tiers for tiers, _ in prefixes.runs):
        assert len(open_case(request(), pruned, params).held) <= 2 * FIRST_HOLDERS * len(prefixes.runs)
    assert (made.kept == expected.kept).all()
    assert made._replace(kept=expected.kept) == expected


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1 << 32))
def test_the_compiled_choice_of_first_holders_says_what_its_source_says(seed: int) -> None:
    rng = Random(seed)
    shot, _ = crowd(rng)
    places = np.array(rng.sample(range(len(shot.columns)), rng.randrange(1, len(shot.columns))))
    sides = []
    for first in (kernel.first_holders, kernels().first_holders):
        chosen = np.zeros(6)
        sides.append((first(shot.columns.table, places, chosen, shot.now_ns), chosen.tolist()))
    assert sides[0] == sides[1]


def test_positions_of_many_workers_are_kept_until_the_members_change() -> None:
    fleet, keys = Fleet(Learned().links), (key(0), key(1), key(2))
    fleet.index = {key(2): 0, key(0): 1}
    assert fleet.places(keys).tolist() == [1, 0]
    assert fleet.places(keys) is fleet.places(keys)
    assert fleet.places((key(0), key(1), key(2))).tolist() == [1, 0]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 32))
def test_runs_of_several_tiers_are_what_entries_one_by_one_would_be(seed: int) -> None:
    rng = Random(seed)
    keys = tuple(key(number) for number in range(rng.randrange(1, 120)))
    found: list[TierSteps] = []
    for tier in Tier:
        lengths = [rng.choice([0, 3, 5, 9]) for _ in keys]
        ends = {length: [at for at, own in enumerate(lengths) if own == length] for length in (3, 5, 9)}
        found.append((tier, [(length, sum(1 << at for at in members)) for length, members in ends.items()]))

    def keys_of(bits: int) -> tuple[WorkerKey, ...]:
        return tuple(name for at, name in enumerate(keys) if bits >> at & 1)

    assert by_tiers(found, keys_of) == _one_by_one(found, keys_of)


@pytest.mark.parametrize("holders", [1, 64, 65, 300])
def test_runs_read_like_entries(holders: int) -> None:
    keys = tuple(key(number) for number in range(holders))
    runs: list[Run] = [({Tier.HOST: 9}, keys[1:]), ({Tier.HOST: 12}, keys[:1])]
    read = joined(runs)
    assert isinstance(read, PrefixRuns) is (holders > 64)
    assert read == {name: {Tier.HOST: 9} for name in keys[1:]} | {keys[0]: {Tier.HOST: 12}}
    assert read[keys[0]] == {Tier.HOST: 12}
    assert (len(read), key(1000) in read, read.get(key(1000))) == (holders, False, None)
