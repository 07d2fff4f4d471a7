"""Laws of the decision for any cluster."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.plan import PlanKind
from kvpool.types import Tier
from router import cost
from router.cost import Costs
from router.decide import Decision, decide
from router.disks import await_disks
from router.estimators import LinkCurve, PrefillCurve
from router.fills import await_fills
from router.planning import Harm, Params
from router.scores import crowds, harm_ns, keep_ns
from router.signals import Features, Footprint, Snapshot, holdings, readable
from tests.unit.router_kit import FOOTPRINT, FixedFailures, Worker, key, request, snapshot

SETTINGS = settings(max_examples=150, deadline=None)
times = st.floats(0.0, 1e11)
curves = st.builds(PrefillCurve, t0_ns=st.floats(0, 1e9), token_ns=st.floats(1.0, 1e7), pair_ns=st.floats(0.0, 1e4))
links = st.one_of(
    st.builds(LinkCurve, alpha_ns=st.floats(0, 1e9), byte_ns=st.floats(0.0, 1e4)),
    st.builds(LinkCurve, alpha_ns=st.floats(0, 1e6), byte_ns=st.floats(0.0, 1.0)),
)


@st.composite
def clusters(draw: st.DrawFn, least: int = 1) -> list[Worker]:
    size = draw(st.integers(least, 6))
    return [
        Worker(
            number=number,
            blocks=draw(st.sampled_from([0, 0, 1, 40, 99, 150])),
            wait_ns=draw(st.one_of(st.just(0.0), times, st.none())),
            in_ns=draw(st.one_of(st.just(0.0), times)),
            out_ns=draw(st.one_of(st.just(0.0), times)),
            requests=draw(st.integers(0, 3)),
            curve=draw(curves),
            tier=draw(st.sampled_from(Tier)),
            in_memory=draw(st.sampled_from([0, 0, 1, 40])),
            in_device=draw(st.sampled_from([0, 1, 40])),
            fill_byte_ns=draw(st.sampled_from([None, None, 0.0, 0.2, 1e3])),
        )
        for number in range(size)
    ]


features = st.builds(Features, split=st.booleans())
rates = st.floats(0.0, 0.9)
harms = st.builds(
    Harm,
    base=st.floats(0.0, 3.0),
    follow=st.floats(0.0, 3.0),
    cap_ns=st.floats(1.0, 1e11),
    share=st.floats(0.0, 1.0),
    linger=st.floats(0.0, 1.0),
    keep=st.sampled_from([0.0, 0.5, 3.0]),
)
PLAIN = Params(harm=Harm())


def six(least: float, most: float) -> st.SearchStrategy[list[float]]:
    """One number for each worker of the largest cluster."""
    return st.lists(st.floats(least, most), min_size=6, max_size=6)


def price(workers: list[Worker], link: LinkCurve, rate: float, able: Features, tokens: int = 1600) -> Decision:
    shot = snapshot(workers, links=link, failures=FixedFailures(rate), features=able)
    return decide(request(tokens), shot, PLAIN)


@SETTINGS
@given(clusters(), links, rates, features, st.integers(1, 10_000_000))
def test_prices_are_finite_and_never_negative(
    workers: list[Worker], link: LinkCurve, rate: float, able: Features, tokens: int
) -> None:
    made = price(workers, link, rate, able, tokens)
    assert made.price_ns >= 0
    assert math.isfinite(made.price_ns)
    assert made.plan.predicted_ttft_ns >= 0
    assert made.promise.gpu_ns >= 0
    assert 0 < made.promise.tokens <= tokens
    position = made.own_blocks
    for piece in made.plan.loads:  # the chain is unbroken from the reader's own prefix, or from the computed front
        if made.plan.kind is PlanKind.LOAD:
            assert piece.start == position
        assert position <= piece.start < piece.stop <= (tokens - 1) // 16
        position = piece.stop
        assert piece.holder != made.worker
    assert made.plan.load_deadline_ns >= 0
    assert (made.plan.kind is PlanKind.REDO) == (not made.plan.loads)


@SETTINGS
@given(clusters(2), links, rates, features, st.floats(1.0, 100.0))
def test_a_faster_link_never_turns_a_load_into_a_redo(
    workers: list[Worker], link: LinkCurve, rate: float, able: Features, factor: float
) -> None:
    before = price(workers, link, rate, able)
    if before.plan.kind is PlanKind.REDO:
        return
    faster = LinkCurve(link.alpha_ns / factor, link.byte_ns / factor)
    after = price(workers, faster, rate, able)
    assert after.price_ns <= before.price_ns
    if after.plan.kind is PlanKind.REDO and not _reads_own_disk(workers, after):  # only when equal to the nanosecond
        assert after.price_ns == before.price_ns


@SETTINGS
@given(clusters(2), links, rates, features, st.integers(0, 5), st.integers(1, 150))
def test_adding_a_holder_never_raises_the_price_and_removing_one_never_lowers_it(
    workers: list[Worker], link: LinkCurve, rate: float, able: Features, who: int, blocks: int
) -> None:
    who %= len(workers)
    without = [replace(worker, blocks=0) if i == who else worker for i, worker in enumerate(workers)]
    extended = [replace(worker, blocks=blocks) if i == who else worker for i, worker in enumerate(workers)]
    assert price(extended, link, rate, able).price_ns <= price(without, link, rate, able).price_ns


@SETTINGS
@given(clusters(), links, rates, features, st.sampled_from([0.001, 0.5, 2.0, 1000.0]))
def test_scaling_all_times_scales_the_price(
    workers: list[Worker], link: LinkCurve, rate: float, able: Features, factor: float
) -> None:
    def scaled(value: float | None) -> float | None:
        return None if value is None else value * factor

    others = [
        replace(
            worker,
            wait_ns=scaled(worker.wait_ns),
            in_ns=worker.in_ns * factor,
            out_ns=worker.out_ns * factor,
            fill_byte_ns=scaled(worker.fill_byte_ns),
            curve=PrefillCurve(
                worker.curve.t0_ns * factor, worker.curve.token_ns * factor, worker.curve.pair_ns * factor
            ),
        )
        for worker in workers
    ]
    costs = Costs()
    base = snapshot(workers, now_ns=0, links=link, failures=FixedFailures(rate), features=able)
    other = snapshot(
        others,
        now_ns=0,
        links=LinkCurve(link.alpha_ns * factor, link.byte_ns * factor),
        failures=FixedFailures(rate),
        features=able,
    )
    stretched = Params(
        costs=Costs(costs.notice_ns * factor, costs.unknown_wait_ns * factor, costs.stale_report_ns), harm=Harm()
    )
    expected = decide(request(), base, PLAIN).price_ns * factor
    assert decide(request(), other, stretched).price_ns == pytest.approx(expected, rel=1e-6, abs=2 * max(1.0, factor))


@SETTINGS
@given(clusters(2), links, rates, features, st.randoms(use_true_random=False))
def test_the_choice_does_not_depend_on_the_order_of_candidates(
    workers: list[Worker], link: LinkCurve, rate: float, able: Features, rng: Random
) -> None:
    shuffled = list(workers)
    rng.shuffle(shuffled)
    first, second = price(workers, link, rate, able), price(shuffled, link, rate, able)
    assert first.worker == second.worker
    assert first.plan == second.plan
    assert first.price_ns == second.price_ns


@SETTINGS
@given(clusters(2), links, rates, features)
def test_an_unknown_worker_is_never_preferred_to_the_same_worker_known_idle(
    workers: list[Worker], link: LinkCurve, rate: float, able: Features
) -> None:
    known = [replace(worker, wait_ns=0.0) for worker in workers]
    unknown = [replace(workers[0], wait_ns=None), *known[1:]]
    assert price(unknown, link, rate, able).price_ns >= price(known, link, rate, able).price_ns


@SETTINGS
@given(
    clusters(2),
    links,
    rates,
    features,
    harms,
    six(1e-3, 1e3),
    six(0.0, 200.0),
    six(0.0, 16.0),
    st.sampled_from([0, 24]),
)
def test_bounds_lose_no_optimum(
    workers: list[Worker],
    link: LinkCurve,
    rate: float,
    able: Features,
    harm: Harm,
    arrivals: list[float],
    empty: list[float],
    pressure: list[float],
    few: int,
) -> None:
    shot = snapshot(workers, links=link, failures=FixedFailures(rate), features=able)
    shot.columns.arrivals[:] = arrivals[: len(workers)]
    shot.columns.empty_blocks[:] = empty[: len(workers)]
    shot = shot._replace(arrival_scale=1e-9, pressure=np.array(pressure[: len(workers)]))
    pruned = decide(request(), shot, Params(priced_pairs=0, harm=harm), few=few)
    everything = _every_score(shot, harm)
    assert _score(shot, harm, pruned.position, pruned.price_ns, pruned.promise.gpu_ns) == pytest.approx(
        min(everything), rel=1e-9, abs=2.0
    )


def _reads_own_disk(workers: list[Worker], made: Decision) -> bool:
    return workers[made.position].tier is Tier.DISK and made.own_blocks > 0


def _score(shot: Snapshot, harm: Harm, position: int, ttft_ns: float, gpu_ns: float) -> float:
    waits = cost.wait_ns(shot, Costs())
    await_disks(waits, request(), shot)
    await_fills(waits, request(), shot)
    crowd = crowds(shot, harm, waits)
    owners = {item.position: item.blocks for item in holdings(request(), shot)}
    keep = keep_ns(request(), shot, harm, owners)
    return ttft_ns + harm_ns(harm, gpu_ns, float(crowd[position])) + (0.0 if keep is None else float(keep[position]))


def _every_score(shot: Snapshot, harm: Harm) -> list[float]:
    """Scores of all plans over all pairs, without any bound."""
    columns, tokens = shot.columns, 1600
    waits = cost.wait_ns(shot, Costs())
    await_disks(waits, request(tokens), shot)
    await_fills(waits, request(tokens), shot)
    held = holdings(request(tokens), shot)
    own = {item.position: item.blocks for item in held}
    found = []
    for i in range(len(columns)):
        curve = PrefillCurve(float(columns.t0_ns[i]), float(columns.token_ns[i]), float(columns.pair_ns[i]))
        mine = own.get(i, 0)
        redo = curve.time_ns(tokens - 16 * mine, 16 * mine)
        found.append(_score(shot, harm, i, float(waits[i]) + redo, redo))
        for item in readable(held, request(tokens), shot):
            row = shot.links.row(shot.workers[item.position].key.worker_id, item.tier, shot.now_ns)
            backlog = max(columns.out_free_ns[item.position], columns.in_free_ns[i]) - shot.now_ns
            pair = cost.Pair(
                float(waits[i]), redo, mine, item.blocks, tokens, max(0.0, float(backlog)),
                float(row.alpha_ns[i]), float(row.byte_ns[i]), shot.failures.probability(key(0), shot.now_ns),
                curve.t0_ns, curve.token_ns, curve.pair_ns,
            )  # fmt: skip
            plans = [cost.price_load(pair, shot.footprint, Costs())]
            if shot.features.split:
                plans.append(cost.price_split(pair, shot.footprint))
            found.extend(_score(shot, harm, i, plan.ttft_ns, plan.gpu_ns) for plan in plans if plan is not None)
    return found


@SETTINGS
@given(clusters(), links, rates, features, harms, six(1e-9, 1e3), six(0.0, 200.0), six(0.0, 16.0), st.booleans())
def test_lists_for_few_workers_and_arrays_for_many_decide_the_same(
    workers: list[Worker],
    link: LinkCurve,
    rate: float,
    able: Features,
    harm: Harm,
    arrivals: list[float],
    empty: list[float],
    pressure: list[float],
    exclude: bool,
) -> None:
    shot = snapshot(workers, links=link, failures=FixedFailures(rate), features=able)
    shot.columns.arrivals[:] = arrivals[: len(workers)]
    shot.columns.empty_blocks[:] = empty[: len(workers)]
    shot = shot._replace(arrival_scale=1e-9, pressure=np.array(pressure[: len(workers)]))
    asked = request(exclude=frozenset({key(0)}) if exclude and len(workers) > 1 else frozenset())
    lists, arrays = (decide(asked, shot, Params(harm=harm), few=few) for few in (10, 0))
    assert (lists.worker, lists.plan, lists.price_ns) == (arrays.worker, arrays.plan, arrays.price_ns)
    assert lists.promise == arrays.promise
    assert lists.wait == arrays.wait.tolist()  # type: ignore[union-attr]
    assert lists.redo == arrays.redo.tolist()  # type: ignore[union-attr]


@SETTINGS
@given(clusters(2), links, features)
def test_deciding_changes_none_of_its_inputs(workers: list[Worker], link: LinkCurve, able: Features) -> None:
    shot = snapshot(workers, links=link, features=able)
    before = shot.columns.copy()
    decide(request(exclude=frozenset({key(99)})), shot, Params())
    for name in before.__dataclass_fields__:
        assert (getattr(before, name) == getattr(shot.columns, name)).all()


@SETTINGS
@given(clusters(2), links, rates, st.integers(0, 10**9))
def test_fixed_bytes_never_make_a_plan_cheaper(workers: list[Worker], link: LinkCurve, rate: float, extra: int) -> None:
    heavier = Footprint(FOOTPRINT.block_tokens, FOOTPRINT.block_bytes, extra)
    plain = snapshot(workers, links=link, failures=FixedFailures(rate))
    loaded = snapshot(workers, links=link, failures=FixedFailures(rate), footprint=heavier)
    assert decide(request(), loaded, PLAIN).price_ns >= decide(request(), plain, PLAIN).price_ns
