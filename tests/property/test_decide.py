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
from router import cost, kernel
from router.compiled import kernels
from router.cost import Costs
from router.decide import Decision, decide
from router.estimators import LinkCurve, PrefillCurve
from router.planning import Harm, Params
from router.scores import open_case
from router.signals import Features, Footprint, Snapshot, holdings, readable
from router.striping import MIN_GAIN
from tests.unit.router_kit import CURVE, FOOTPRINT, FixedFailures, Worker, key, request, snapshot

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
    beside=st.floats(0.0, 1.0),
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
    # what a worker reads from its own disk or fills into its device tier might come sooner over a free link
    workers = [replace(worker, fill_byte_ns=None, tier=Tier(min(worker.tier, Tier.HOST))) for worker in workers]
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


@st.composite
def striped(draw: st.DrawFn) -> list[Worker]:
    """Busy holders of much of the prompt, and workers that are free: loads from several holders pay."""
    size = draw(st.integers(3, 7))
    holders = draw(st.integers(2, size - 1))
    busy, free = st.sampled_from([0.2e9, 0.2e9, 0.3e9]), st.sampled_from([0.0, 0.0, 1e7])
    return [
        Worker(
            number=number,
            blocks=draw(st.sampled_from([60, 90, 95, 99, 99]) if number < holders else st.sampled_from([0, 0, 20])),
            wait_ns=draw(busy if number < holders else free),
            in_ns=draw(st.sampled_from([0.0, 0.0, 2e7])),
            out_ns=draw(st.sampled_from([0.0, 0.0, 2e7])),
            tier=draw(st.sampled_from([Tier.DEVICE, Tier.HOST])),
        )
        for number in range(size)
    ]


SEVERAL = st.builds(Features, split=st.booleans(), stripes=st.sampled_from([2, 4]))
ALLOWED = (1.0 - MIN_GAIN) ** -3
"""What a plan over fewer holders may cost against one over four."""


@settings(max_examples=300, deadline=None)
@given(
    striped(),
    st.sampled_from([0.5, 1.0, 2.0, 8.0]),
    st.lists(st.sampled_from([0.0, 0.01, 0.01, 0.3, 0.8]), min_size=7, max_size=7),
    SEVERAL,
    st.sampled_from([Params(), PLAIN]),
    st.randoms(use_true_random=False),
)
def test_loads_from_several_holders_do_not_depend_on_the_order_of_candidates(
    workers: list[Worker], byte_ns: float, rates: list[float], able: Features, params: Params, rng: Random
) -> None:
    failures = FixedFailures(0.0, {key(number): rate for number, rate in enumerate(rates)})
    shuffled = list(workers)
    rng.shuffle(shuffled)
    shots = [
        snapshot(each, links=LinkCurve(1e6, byte_ns), failures=failures, features=able) for each in (workers, shuffled)
    ]
    first, second = (decide(request(), shot, params) for shot in shots)
    assert (first.worker, first.plan, first.price_ns) == (second.worker, second.plan, second.price_ns)


@settings(max_examples=300, deadline=None)
@given(striped(), st.sampled_from([0.5, 1.0, 2.0, 8.0]), SEVERAL, st.sampled_from([1.1, 2.0, 10.0]))
def test_a_faster_link_never_ends_a_load_from_several_holders_in_a_redo(
    workers: list[Worker], byte_ns: float, able: Features, factor: float
) -> None:
    before = price(workers, LinkCurve(1e6, byte_ns), 0.01, able)
    after = price(workers, LinkCurve(1e6 / factor, byte_ns / factor), 0.01, able)
    assert after.price_ns <= before.price_ns * ALLOWED
    assert not before.plan.loads or after.plan.loads or after.price_ns == before.price_ns


@settings(max_examples=300, deadline=None)
@given(striped(), st.sampled_from([0.5, 1.0, 2.0, 8.0]), SEVERAL, st.integers(0, 6), st.sampled_from([50, 95, 99]))
def test_a_further_holder_never_ends_a_load_from_several_for_a_dearer_one(
    workers: list[Worker], byte_ns: float, able: Features, who: int, blocks: int
) -> None:
    who %= len(workers)
    idle = [replace(worker, in_ns=0.0, out_ns=0.0) for worker in workers]  # of two readers one may be free too late
    without = [replace(worker, blocks=0) if i == who else worker for i, worker in enumerate(idle)]
    extended = [replace(worker, blocks=blocks) if i == who else worker for i, worker in enumerate(idle)]
    link = LinkCurve(1e6, byte_ns)
    assert price(extended, link, 0.01, able).price_ns <= price(without, link, 0.01, able).price_ns * ALLOWED


@SETTINGS
@given(clusters(2), links, rates, features)
def test_an_unknown_worker_is_never_preferred_to_the_same_worker_known_idle(
    workers: list[Worker], link: LinkCurve, rate: float, able: Features
) -> None:
    known = [replace(worker, wait_ns=0.0) for worker in workers]
    unknown = [replace(workers[0], wait_ns=None), *known[1:]]
    assert price(unknown, link, rate, able).price_ns >= price(known, link, rate, able).price_ns


def harmed(
    workers: list[Worker],
    link: LinkCurve,
    rate: float,
    able: Features,
    arrivals: list[float],
    empty: list[float],
    pressure: list[float],
) -> Snapshot:
    shot = snapshot(workers, links=link, failures=FixedFailures(rate), features=able)
    shot.columns.arrivals[:] = arrivals[: len(workers)]
    shot.columns.empty_blocks[:] = empty[: len(workers)]
    shot.columns.pressure[:] = pressure[: len(workers)]
    return shot._replace(arrival_scale=1e-9)


@SETTINGS
@given(clusters(2), links, rates, features, harms, six(1e-3, 1e3), six(0.0, 200.0), six(0.0, 16.0))
def test_bounds_lose_no_optimum(
    workers: list[Worker],
    link: LinkCurve,
    rate: float,
    able: Features,
    harm: Harm,
    arrivals: list[float],
    empty: list[float],
    pressure: list[float],
) -> None:
    _check_optimum(harmed(workers, link, rate, able, arrivals, empty, pressure), harm)


@st.composite
def equals(draw: st.DrawFn) -> list[Worker]:
    """Workers between which and whose plans it is a near thing."""
    return [
        Worker(
            number=number,
            blocks=draw(st.sampled_from([0, 0, 5, 20, 90, 95, 99])),
            wait_ns=draw(st.sampled_from([0.0, 0.0, 3e7, 9e7])),
            in_ns=draw(st.sampled_from([0.0, 2e7])),
            out_ns=draw(st.sampled_from([0.0, 0.0, 2e7, 5e7])),
            curve=replace(CURVE, token_ns=CURVE.token_ns * draw(st.sampled_from([0.8, 1.0, 1.0, 1.3]))),
        )
        for number in range(draw(st.integers(3, 6)))
    ]


@settings(max_examples=400, deadline=None)
@given(equals(), st.data(), features, st.sampled_from([0.0, 0.01, 0.3]), six(0.0, 3e-8))
def test_no_optimum_is_lost_where_it_is_a_near_thing(
    workers: list[Worker], data: st.DataObject, able: Features, rate: float, arrivals: list[float]
) -> None:
    speeds = st.builds(LinkCurve, alpha_ns=st.just(1e6), byte_ns=st.floats(0.5, 8.0))
    names = [key(worker.number).worker_id for worker in workers]
    pairs = {(a, b): data.draw(speeds) for a in names[:2] for b in names if a != b}
    shot = snapshot(workers, links=data.draw(speeds), pairs=pairs, failures=FixedFailures(rate), features=able)
    shot.columns.arrivals[:] = arrivals[: len(workers)]
    _check_optimum(shot._replace(arrival_scale=1.0), Harm(base=0.2, follow=6.0))


def _check_optimum(shot: Snapshot, harm: Harm) -> None:
    made = decide(request(), shot, Params(harm=harm))
    scores = _every_score(shot, harm)
    least = min(scores.values())
    assert _score(shot, harm, made.position, made.price_ns, made.promise.gpu_ns) == pytest.approx(
        least, rel=1e-9, abs=2.0
    )
    shown = {(item.position, item.source.position, item.price.kind) for item in made.loads}
    floor = min((score for what, score in scores.items() if what not in shown and what[1] is not None), default=None)
    if made.load_floor_ns is not None and floor is not None:
        assert made.load_floor_ns <= floor * (1 + 1e-9) + 2.0


def _reads_own_disk(workers: list[Worker], made: Decision) -> bool:
    return workers[made.position].tier is Tier.DISK and made.own_blocks > 0


def _waits(shot: Snapshot) -> list[float]:
    """The wait of every worker, what lies on its disk and is filled into its device tier included."""
    columns, waits = shot.columns, []
    for i, view in enumerate(shot.workers):
        wait = max(float(columns.gpu_free_ns[i]) - shot.now_ns, float(columns.closed_ns[i]))
        if columns.reported_ns[i] < shot.now_ns - Costs().stale_report_ns:
            wait += Costs().unknown_wait_ns
        tiers = {tier: min(blocks, 99) for tier, blocks in shot.prefixes.get(view.key, {}).items()}
        memory = max((blocks for tier, blocks in tiers.items() if tier is not Tier.DISK), default=0)
        on_disk = tiers.get(Tier.DISK, 0) - memory
        curve = columns.curve(i)
        if on_disk > 0:
            link = shot.links.curve(view.key.worker_id, view.key.worker_id, Tier.DISK, shot.now_ns)
            redo = curve.time_ns(16 * on_disk, 16 * memory) - curve.t0_ns
            wait = max(wait, min(link.time_ns(on_disk * FOOTPRINT.block_bytes), wait + redo))
        byte_ns, device = shot.fills.get(view.key), tiers.get(Tier.DEVICE, 0)
        filled = tiers.get(Tier.HOST, 0) - device
        if byte_ns is not None and filled > 0:
            redo = curve.time_ns(16 * filled, 16 * device) - curve.t0_ns
            wait += min(filled * FOOTPRINT.block_bytes * byte_ns, redo)
        waits.append(wait)
    return waits


def _score(shot: Snapshot, harm: Harm, position: int, ttft_ns: float, gpu_ns: float) -> float:
    """The formula of `router.planning.Harm`, word by word."""
    columns, waits = shot.columns, _waits(shot)
    follow = [float(columns.arrivals[i]) * shot.arrival_scale * harm.follow * wait for i, wait in enumerate(waits)]
    shared = min(harm.share_limit, harm.share * sum(follow) / len(follow))
    crowd = harm.base + follow[position] + harm.beside * float(columns.requests[position]) + shared
    own = next((item.blocks for item in holdings(request(), shot) if item.position == position), 0)
    leaving = max(0.0, 100 - float(columns.empty_blocks[position]) - own)
    redo = 16 * float(columns.token_ns.min())
    keep = harm.keep * leaving * redo * float(columns.pressure[position])
    return ttft_ns + min(gpu_ns, harm.cap_ns) * crowd + keep


def _every_score(shot: Snapshot, harm: Harm) -> dict[tuple[int, int | None, PlanKind], float]:
    """Scores of all plans over all pairs, by worker, holder and kind, without any bound."""
    columns, tokens = shot.columns, 1600
    waits = _waits(shot)
    held = holdings(request(tokens), shot)
    own = {item.position: item.blocks for item in held}
    found: dict[tuple[int, int | None, PlanKind], float] = {}
    for i in range(len(columns)):
        curve, mine = columns.curve(i), own.get(i, 0)
        redo = curve.time_ns(tokens - 16 * mine, 16 * mine)
        found[i, None, PlanKind.REDO] = _score(shot, harm, i, waits[i] + redo, redo)
        for item in readable(held, request(tokens), shot):
            row = shot.links.row(shot.workers[item.position].key.worker_id, item.tier, shot.now_ns)
            backlog = max(columns.out_free_ns[item.position], columns.in_free_ns[i]) - shot.now_ns
            link = LinkCurve(float(row[0, i]), float(row[1, i]))
            failure = shot.failures.probability(key(0), shot.now_ns)
            pair = cost.make_pair(
                waits[i],
                redo,
                mine,
                item.blocks,
                tokens,
                shot.footprint,
                max(0.0, float(backlog)),
                link,
                failure,
                curve,
            )
            plans = [cost.price_load(pair, Costs())]
            if shot.features.split:
                plans.append(cost.price_split(pair))
            for plan in plans:
                if plan is not None:
                    found[i, item.position, plan.kind] = _score(shot, harm, i, plan.ttft_ns, plan.gpu_ns)
    return found


@SETTINGS
@given(clusters(), links, rates, features, harms, six(1e-9, 1e3), six(0.0, 200.0), six(0.0, 16.0), st.booleans())
def test_compiled_code_says_what_its_source_says(
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
    shot = harmed(workers, link, rate, able, arrivals, empty, pressure)
    asked = request(exclude=frozenset({key(0)}) if exclude and len(workers) > 1 else frozenset())
    case = open_case(asked, shot, Params(harm=harm))
    table, sheet = shot.columns.table, case.sheet.copy()
    work, kept = case.work.copy(), np.empty_like(case.kept)
    with np.errstate(all="ignore"):
        assert kernel.score_redo(table, work, kept, sheet) == case.redo
        assert (work == case.work).all()
        assert (kept == case.kept).all()
        assert (sheet == case.sheet).all()
        for at, source in enumerate(case.sources):
            row = shot.links.row(shot.workers[source.position].key.worker_id, source.tier, shot.now_ns)
            sides = [(function, sheet.copy()) for function in (kernel.best_load, kernels().best_load)]
            said = [f(table, work, kept, mine, row, at, rate, case.redo[0]) for f, mine in sides]
            assert said[0] == said[1]
            assert (sides[0][1] == sides[1][1]).all()


@SETTINGS
@given(clusters(2), links, features)
def test_deciding_changes_none_of_its_inputs(workers: list[Worker], link: LinkCurve, able: Features) -> None:
    shot = snapshot(workers, links=link, features=able)
    before = shot.columns.table.copy()
    decide(request(exclude=frozenset({key(99)})), shot, Params())
    assert (before == shot.columns.table).all()


@SETTINGS
@given(clusters(2), links, rates, st.integers(0, 10**9))
def test_fixed_bytes_never_make_a_plan_cheaper(workers: list[Worker], link: LinkCurve, rate: float, extra: int) -> None:
    heavier = Footprint(FOOTPRINT.block_tokens, FOOTPRINT.block_bytes, extra)
    plain = snapshot(workers, links=link, failures=FixedFailures(rate))
    loaded = snapshot(workers, links=link, failures=FixedFailures(rate), footprint=heavier)
    assert decide(request(), loaded, PLAIN).price_ns >= decide(request(), plain, PLAIN).price_ns
