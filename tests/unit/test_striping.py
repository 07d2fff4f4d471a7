"""Loads from several holders: priced, dealt out, promised, and learned from."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.plan import PlanKind
from kvpool.reports import LoadSample, RequestOutcome
from kvpool.types import RequestId, Tier
from router.core import RouterCore
from router.cost import Price
from router.decide import Decision, decide
from router.estimators import LinkCurve
from router.planning import Params
from router.signals import Features, Holding
from router.striping import Way, deal, share_out
from router.together import LEAST, Together
from tests.unit.router_kit import FOOTPRINT, MS, FakeDirectory, S, Worker, key, member, report, request, snapshot
from tests.unit.test_router_core import Clock, meta

LINK = LinkCurve(1.0 * MS, 2.0)  # 64 MB in 128 ms, redo in 190 ms
ABLE = Features(stripes=4)
BUSY = 3.0 * S


def made(workers: list[Worker], able: Features = ABLE, link: LinkCurve = LINK, **more: object) -> Decision:
    return decide(request(), snapshot(workers, links=link, features=able, **more), Params())  # type: ignore[arg-type]


def holders(count: int, **more: object) -> list[Worker]:
    return [Worker(0), *(Worker(i, blocks=99, wait_ns=BUSY, **more) for i in range(1, count + 1))]  # type: ignore[arg-type]


def test_two_holders_bring_a_half_each_in_about_half_the_time() -> None:
    single, striped = made(holders(2), Features()), made(holders(2))
    assert striped.plan.kind is PlanKind.LOAD
    assert {piece.holder for piece in striped.plan.loads} == {key(1), key(2)}
    assert striped.price_ns < 0.6 * single.price_ns
    assert sum(transfer.num_bytes for transfer in striped.promise.transfers) == 99 * FOOTPRINT.block_bytes
    assert max(t.busy_ns for t in striped.promise.transfers) < 0.51 * single.promise.transfers[0].busy_ns
    assert sum(t.in_ns for t in striped.promise.transfers) == pytest.approx(
        0.5 * single.promise.transfers[0].busy_ns, rel=0.01
    )


def test_slices_cover_the_load_in_order_and_every_holder_stands_behind_the_others() -> None:
    plan = made(holders(3)).plan
    place = 0
    for piece in plan.loads:
        assert piece.start == place
        place = piece.stop
        others = {key(1), key(2), key(3)} - {piece.holder}
        assert {ref.holder for ref in piece.alternates} == others
    assert place == 99
    assert len(plan.loads) == 3 * 4


def test_a_faster_holder_brings_more() -> None:
    links = {(key(1).worker_id, key(0).worker_id): LinkCurve(1.0 * MS, 1.0)}
    plan = made(holders(2), pairs=links).plan
    brought = {number: sum(p.stop - p.start for p in plan.loads if p.holder == key(number)) for number in (1, 2)}
    assert brought[1] == pytest.approx(66, abs=2)


def test_a_holder_that_starts_late_brings_less_or_nothing() -> None:
    late = [Worker(0), Worker(1, blocks=99, wait_ns=BUSY), Worker(2, blocks=99, wait_ns=BUSY, out_ns=40.0 * MS)]
    plan = made(late).plan
    brought = {number: sum(p.stop - p.start for p in plan.loads if p.holder == key(number)) for number in (1, 2)}
    assert brought[1] > brought[2] > 0
    hopeless = [Worker(0), Worker(1, blocks=99, wait_ns=BUSY), Worker(2, blocks=99, wait_ns=BUSY, out_ns=1.0 * S)]
    assert {piece.holder for piece in made(hopeless).plan.loads} == {key(1)}


def test_a_short_prefix_is_not_striped() -> None:
    for blocks, holders_used in ((15, 1), (17, 2)):
        workers = [Worker(0), *(Worker(i, blocks=blocks, wait_ns=BUSY) for i in (1, 2))]
        plan = decide(request(320), snapshot(workers, links=LinkCurve(0.0, 1.0), features=ABLE), Params()).plan
        assert len({piece.holder for piece in plan.loads}) == holders_used


def test_a_holder_with_less_of_the_prompt_takes_no_part() -> None:
    workers = [Worker(0), Worker(1, blocks=99, wait_ns=BUSY), Worker(2, blocks=50, wait_ns=BUSY)]
    assert {piece.holder for piece in made(workers).plan.loads} == {key(1)}


def test_a_split_over_two_holders_meets_earlier_than_over_one() -> None:
    link = LinkCurve(1.0 * MS, 6.0)
    single, striped = (made(holders(2), Features(split=True, stripes=n), link) for n in (1, 2))
    assert single.plan.kind is striped.plan.kind is PlanKind.SPLIT
    assert striped.price_ns < 0.9 * single.price_ns
    assert striped.plan.split_tokens is not None
    assert single.plan.split_tokens is not None
    assert striped.plan.split_tokens < single.plan.split_tokens
    assert striped.plan.loads[0].start == striped.plan.split_tokens // 16


def test_two_holders_may_pay_where_one_does_not() -> None:
    link = LinkCurve(1.0 * MS, 3.5)
    assert made(holders(2), Features(), link).plan.kind is PlanKind.REDO
    assert len({piece.holder for piece in made(holders(2), ABLE, link).plan.loads}) == 2


def test_a_reader_that_takes_no_more_from_two_than_from_one_is_not_striped() -> None:
    shot = snapshot(holders(2), links=LINK, features=ABLE)._replace(together={key(0): 0.5})
    assert len(decide(request(), shot, Params()).plan.loads) == 1


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 1000),
    st.lists(st.integers(0, 300), min_size=1, max_size=4),
)
def test_dealing_loses_and_repeats_no_block(start: int, blocks: list[int]) -> None:
    if not sum(blocks):
        return
    parts = deal(start, start + sum(blocks), blocks)
    assert [low for low, _, _ in parts] == [start, *(high for _, high, _ in parts[:-1])]
    assert parts[-1][1] == start + sum(blocks)
    for who, count in enumerate(blocks):
        assert sum(high - low for low, high, by in parts if by == who) == count


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1e8), st.floats(0.01, 100.0)), min_size=2, max_size=4),
    st.floats(0, 1e9),
    st.one_of(st.none(), st.integers(1, 60 * 16)),
)
def test_shares_bring_every_block_once_and_by_the_speed_of_their_holders(
    links: list[tuple[float, float]], extra_ns: float, front: int | None
) -> None:
    ways = [Way(Holding(n + 1, 80, Tier.HOST), *link) for n, link in enumerate(links)]
    end_ns = max(way.start_ns for way in ways) + extra_ns
    price = Price(PlanKind.LOAD, end_ns, end_ns, 0.0, 80, end_ns, front)
    made = share_out(price, ways, 10, FOOTPRINT, 0.0, 1.0)
    assert sum(made.blocks) == 80 - (10 if front is None else 10 + front // 16)
    assert min(made.blocks) > 0
    rates = {way.holding: (end_ns - way.start_ns) / way.byte_ns for way in ways}
    for way, count in zip(made.ways, made.blocks, strict=True):
        if sum(rates.values()):
            assert count == pytest.approx(sum(made.blocks) * rates[way.holding] / sum(rates.values()), abs=1.0)


# -- learning


def test_what_a_reader_takes_at_once_is_learned_and_fades() -> None:
    together = Together()
    for _ in range(4):
        together.observe(key(0), 100.0, 200.0 * together.shares.get(key(0), 1.0), now_ns=0)
    assert together.shares[key(0)] == pytest.approx(0.5, abs=0.02)
    together.fade(key(0), 60 * S)
    assert together.shares[key(0)] == pytest.approx(0.75, abs=0.02)
    together.fade(key(0), 3600 * S)
    assert key(0) not in together.shares
    together.observe(key(0), 1.0, 1e9, 0)
    assert together.shares[key(0)] >= LEAST
    together.forget(key(0))
    assert together.shares == {}


def _striping_core() -> tuple[RouterCore, Clock]:
    directory, clock = FakeDirectory(), Clock()
    core = RouterCore(directory, clock, features=ABLE)
    from kvpool.reports import WorkerLoad
    from kvpool.types import MemberState

    for number in range(3):
        core.on_member_change(member(number), MemberState.ALIVE)
        busy = WorkerLoad(waiting_requests=8, queued_prefill_tokens=30_000) if number else None
        core.on_report(report(number, 0, busy))
    directory.held = {key(1): {Tier.DEVICE: 99}, key(2): {Tier.DEVICE: 99}}
    return core, clock


def test_a_reader_whose_own_end_is_the_narrowest_soon_loads_from_one_holder_again() -> None:
    core, _ = _striping_core()
    size = 99 * FOOTPRINT.block_bytes
    for sequence in range(1, 4):
        name = RequestId(f"r{sequence}")
        route = core.route(meta(str(name)))
        if len({piece.holder for piece in route.plan.loads}) < 2:
            break
        start_ns, byte_ns = core.record(name).decision.together  # type: ignore[union-attr, misc]
        taken_ns = round(2.0 * (start_ns + size * byte_ns))
        halves = tuple(LoadSample(key(n), size // 2, 50, taken_ns) for n in (1, 2))
        outcome = RequestOutcome(name, route.decision_id, key(0).worker_id, taken_ns, 0, 1584, 16, size, taken_ns, 0)
        core.on_report(report(0, sequence, loads=halves, outcomes=(outcome,)))
    assert len({piece.holder for piece in core.route(meta("later")).plan.loads}) == 1
    assert core.status()["links"] == []  # slower than known, and not the links' fault


def test_samples_of_a_single_load_are_learned_again_after_the_striped_one() -> None:
    core, clock = _striping_core()
    core.route(meta("r"))
    clock.now_ns += 60 * S
    core.on_report(report(0, 1, loads=(LoadSample(key(1), 1_000_000, 2, S),)))
    assert core.status()["links"][0]["samples"] == 1
