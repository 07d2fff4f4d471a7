"""Laws of the decision for any cluster."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.plan import PlanKind
from kvpool.types import Tier
from router import cost, kernel, kernel_stripes
from router.compiled import kernels
from router.cost import Costs, Pair
from router.decide import Decision, _ways, decide
from router.estimators import LinkCurve, PrefillCurve
from router.planning import Harm, Params
from router.scores import open_case
from router.signals import Features, Holding, Snapshot, holdings, readable
from tests.property.decide_kit import PLAIN, World, clusters, features, harms, links, rates, worlds
from tests.unit.router_kit import FOOTPRINT, FixedFailures, Worker, key, request, snapshot

SETTINGS = settings(max_examples=150, deadline=None)


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


@settings(max_examples=250, deadline=None)
@given(worlds(), harms, six(0.0, 3e-8), st.one_of(st.none(), six(0.2, 1.0)))
def test_no_optimum_is_lost_where_it_is_a_near_thing(
    world: World, harm: Harm, arrivals: list[float], shares: list[float] | None
) -> None:
    shot = world.shot()
    shot.columns.arrivals[:] = (arrivals * 2)[: len(shot.columns)]
    if shares is not None:
        shot = shot._replace(together={view.key: share for view, share in zip(shot.workers, shares, strict=False)})
    _check_optimum(shot._replace(arrival_scale=1.0), harm)


def _check_optimum(shot: Snapshot, harm: Harm) -> None:
    made = decide(request(), shot, Params(harm=harm))
    found = {own_disk: _every_score(shot, harm, own_disk) for own_disk in (True, False)}
    assert _score_of(made, shot, harm) == pytest.approx(
        min(min(scores.values()) for scores in found.values()), rel=1e-9, abs=2.0
    )
    shown = {(item.position, item.source.position, item.price.kind) for item in made.loads if item.holders == 1}
    scores = found[made.plan.own_disk]
    floor = min((score for what, score in scores.items() if what not in shown and what[1] is not None), default=None)
    if made.load_floor_ns is not None and floor is not None and not any(item.holders > 1 for item in made.loads):
        assert made.load_floor_ns <= floor * (1 + 1e-9) + 2.0


def _score_of(made: Decision, shot: Snapshot, harm: Harm) -> float:
    """What was decided, by the formula; of a load from several holders as many count as were priced."""
    counts = [
        item.holders
        for item in made.loads
        if item.position == made.position and round(item.price.ttft_ns) == made.price_ns
    ]
    count = min(counts) if made.plan.loads else 1
    mine = made.own_blocks
    return _score(shot, harm, made.position, made.price_ns, made.promise.gpu_ns, mine, count)


def _waits(shot: Snapshot, own_disk: bool) -> tuple[list[float], list[float]]:
    """The queue of every worker; and its wait, what lies on its disk and is filled into its device tier included."""
    columns, queues, waits = shot.columns, [], []
    for i, view in enumerate(shot.workers):
        wait = max(float(columns.gpu_free_ns[i]) - shot.now_ns, float(columns.closed_ns[i]))
        if columns.reported_ns[i] < shot.now_ns - Costs().stale_report_ns:
            wait += Costs().unknown_wait_ns
        queues.append(wait)
        tiers = {tier: min(blocks, 99) for tier, blocks in shot.prefixes.get(view.key, {}).items()}
        memory = max((blocks for tier, blocks in tiers.items() if tier is not Tier.DISK), default=0)
        on_disk = tiers.get(Tier.DISK, 0) - memory
        curve = columns.curve(i)
        if on_disk > 0 and own_disk:
            link = shot.links.curve(view.key.worker_id, view.key.worker_id, Tier.DISK, shot.now_ns)
            redo = curve.time_ns(16 * on_disk, 16 * memory) - curve.t0_ns
            wait = max(wait, min(link.time_ns(on_disk * FOOTPRINT.block_bytes), wait + redo))
        byte_ns, device = shot.fills.get(view.key), tiers.get(Tier.DEVICE, 0)
        filled = tiers.get(Tier.HOST, 0) - device
        if byte_ns is not None and filled > 0:
            redo = curve.time_ns(16 * filled, 16 * device) - curve.t0_ns
            wait += min(filled * FOOTPRINT.block_bytes * byte_ns, redo)
        waits.append(wait)
    return queues, waits


def _score(
    shot: Snapshot, harm: Harm, position: int, ttft_ns: float, gpu_ns: float, own: int, holders: int = 1
) -> float:
    """The formula of `router.planning.Harm`, word by word."""
    columns, (queues, _) = shot.columns, _waits(shot, own_disk=True)
    follow = [float(columns.arrivals[i]) * shot.arrival_scale * harm.follow * queue for i, queue in enumerate(queues)]
    shared = min(harm.share_limit, harm.share * sum(follow) / len(follow))
    crowd = harm.base + follow[position] + harm.beside * float(columns.requests[position]) + shared
    leaving = max(0.0, 100 - float(columns.empty_blocks[position]) - own)
    redo = 16 * float(columns.token_ns.min())
    keep = harm.keep * leaving * redo * float(columns.pressure[position])
    return ttft_ns * (1.0 + harm.several * (holders - 1)) + min(gpu_ns, harm.cap_ns) * crowd + keep


_Scores = dict[tuple[int, int | tuple[int, ...] | None, PlanKind], float]


def _every_score(shot: Snapshot, harm: Harm, own_disk: bool) -> _Scores:
    """Scores of all plans over all pairs, and sets of holders, by worker, holders and kind, without any bound."""
    columns, found = shot.columns, _Scores()
    _, waits = _waits(shot, own_disk)
    held = holdings(request(), shot)
    memory = readable(held, request(), shot)
    own = {item.position: item.blocks for item in (held if own_disk else memory)}
    for i in range(len(columns)):
        curve, mine = columns.curve(i), own.get(i, 0)
        redo = curve.time_ns(1600 - 16 * mine, 16 * mine)
        found[i, None, PlanKind.REDO] = _score(shot, harm, i, waits[i] + redo, redo, mine)
        fill = shot.footprint.block_bytes * shot.fills.get(shot.workers[i].key, 0.0)
        bare = cost.make_pair(waits[i], redo, mine, 0, 1600, shot.footprint, 0.0, LinkCurve(0.0, 0.0), 0.0, curve, fill)
        others = [item for item in memory if item.position != i and columns.holder[item.position]]
        for item in others:
            pair, _ = _together(shot, bare, i, (item,))
            for plan in (cost.price_load(pair, Costs()), cost.price_split(pair) if shot.features.split else None):
                if plan is not None:
                    score = _score(shot, harm, i, plan.ttft_ns, plan.gpu_ns, mine)
                    found[i, item.position, plan.kind] = score
        for count in range(2, shot.features.stripes + 1):
            for chosen in combinations(others, count):
                pair, latest_ns = _together(shot, bare, i, chosen)
                for plan in (
                    cost.price_whole_load(pair, Costs()),
                    cost.price_split(pair) if shot.features.split else None,
                ):
                    if plan is None or latest_ns >= plan.load_ns:
                        continue
                    if plan.boundary < 8 * count:
                        continue
                    score = _score(shot, harm, i, plan.ttft_ns, plan.gpu_ns, mine, count)
                    found[i, tuple(item.position for item in chosen), plan.kind] = score
    return found


def _together(shot: Snapshot, bare: Pair, i: int, chosen: tuple[Holding, ...]) -> tuple[Pair, float]:
    """The link that these holders are together, as a pair, and when the last of them can start."""
    columns, share = shot.columns, shot.together.get(shot.workers[i].key, 1.0) if len(chosen) > 1 else 1.0
    starts, rates, survives = [], [], 1.0
    for item in chosen:
        key = shot.workers[item.position].key
        link = shot.links.curve(key.worker_id, shot.workers[i].key.worker_id, item.tier, shot.now_ns)
        backlog = max(0.0, columns.out_free_ns[item.position] - shot.now_ns, columns.in_free_ns[i] - shot.now_ns)
        starts.append(float(backlog) + link.alpha_ns)
        rates.append(share / max(link.byte_ns, 1e-12))
        survives *= 1.0 - shot.failures.probability(key, shot.now_ns)
    rate = sum(rates)
    start_ns = sum(a * b for a, b in zip(starts, rates, strict=True)) / rate + shot.footprint.fixed_bytes / rate
    blocks = min(item.blocks for item in chosen)
    pair = bare._replace(
        held_blocks=blocks,
        start_ns=start_ns,
        block_ns=shot.footprint.block_bytes / rate,
        failure=1.0 - survives,
    )
    return pair, max(starts)


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
    work, kept = case.work.copy(), np.zeros_like(case.kept)
    with np.errstate(all="ignore"):
        assert kernel.score_redo(table, work, kept, sheet) == case.redo
        assert (work == case.work).all()
        assert (kept == case.kept).all()
        assert (sheet == case.sheet).all()
        for at, source in enumerate(case.sources):
            row = shot.links.row(shot.workers[source.position].key.worker_id, source.tier, shot.now_ns)
            sides = [(function, sheet.copy()) for function in (kernel.best_load, kernels().best_load)]
            said = [f(table, work, kept, mine, row, at, rate, case.redo[0], 3) for f, mine in sides]
            assert said[0] == said[1]
            assert (sides[0][1] == sides[1][1]).all()


@SETTINGS
@given(worlds(), harms)
def test_nothing_is_lost_by_passing_holders_over_without_a_look_at_their_links(world: World, harm: Harm) -> None:
    shot, params = world.shot(), Params(harm=harm)
    looked = decide(request(), shot, params)
    shot.columns.linked_ns.fill(math.inf)
    made = decide(request(), shot, params)
    assert (made.kept == looked.kept).all()
    assert made._replace(kept=looked.kept) == looked


@SETTINGS
@given(worlds(), harms)
def test_the_compiled_search_for_several_holders_says_what_its_source_says(world: World, harm: Harm) -> None:
    shot = world.shot()
    case, most, table = open_case(request(), shot, Params(harm=harm)), 4, shot.columns.table
    sides = []
    for reach, best in (
        (kernel_stripes.stripes_reach, kernel_stripes.best_stripes),
        (kernels().stripes_reach, kernels().best_stripes),
    ):
        found, pool, chosen = np.zeros((16, 3)), np.zeros(4), np.zeros(most)
        with np.errstate(all="ignore"):
            rows, number, left = reach(table, case.work, case.kept, case.sheet, found, pool, math.inf, most)
            sources = [case.sources[int(at)] for at in pool[:number].tolist()]
            ways = _ways(case, sources, found[:rows])
            said = best(table, case.work, case.kept, case.sheet, found[:rows], *ways, chosen, math.inf)
        sides.append((rows, number, left, said, found.tolist(), pool.tolist(), chosen.tolist()))
    assert sides[0] == sides[1]


@SETTINGS
@given(clusters(2), links, features)
def test_deciding_changes_none_of_its_inputs(workers: list[Worker], link: LinkCurve, able: Features) -> None:
    shot = snapshot(workers, links=link, features=able)
    before = shot.columns.table.copy()
    decide(request(exclude=frozenset({key(99)})), shot, Params())
    assert (before == shot.columns.table).all()
