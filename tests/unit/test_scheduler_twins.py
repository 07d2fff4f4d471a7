"""Requests with a common prefix beside each other: whose load and whose view serve whom."""

from __future__ import annotations

import pytest

from kvpool.plan import REDO, Plan, PlanKind
from kvpool.types import WorkerId
from tests.unit.test_scheduler import HOLDER, Bench, load_plan


def test_a_prefix_on_its_way_for_one_request_is_not_loaded_again_for_another() -> None:
    bench = Bench()
    bench.gate.observe(1, 10**9)
    bench.submit("first", [*range(20), 90, 91], load_plan(0, 5))
    bench.submit("second", [*range(20), 92, 93], load_plan(0, 5))
    assert list(bench.orders) == ["first"]
    assert bench.beat() == [], "both wait for the one load"
    bench.scheduler.progress(bench.orders["first"].flight, range(5))
    bench.scheduler.land(bench.orders["first"].flight)
    assert bench.beat() == [("first", 5, 20, 2), ("second", 5, 20, 2)]


@pytest.mark.parametrize("plan", [REDO, load_plan(0, 5)])
def test_who_waited_for_anothers_load_neither_computes_nor_orders_it_again_when_it_lands(plan: Plan) -> None:
    bench = Bench()
    first = bench.submit("first", [*range(20), 90, 91], load_plan(0, 5))
    for name in ("second", "third"):
        bench.submit(name, [*range(20), *map(ord, name)], plan)
    assert bench.beat() == []
    bench.scheduler.progress(bench.orders["first"].flight, range(5))
    assert bench.scheduler.land(bench.orders["first"].flight) is first
    step = bench.plan()
    assert step.loads == ()
    filled = [(work.sequence.request_id, len(work.fill), work.start) for work in step.work]
    assert filled == [("first", 5, 20), ("second", 5, 20), ("third", 5, 20)]
    bench.run(step)


def test_what_a_load_brought_behind_a_gap_is_read_by_a_twin_after_the_load_is_over() -> None:
    bench = Bench(max_step_tokens=8)
    bench.gate.observe(1, 10**6)
    bench.submit("computes", range(40))
    bench.run(bench.plan())
    bench.submit("loads", range(41), load_plan(5, 10))
    bench.scheduler.progress(bench.orders["loads"].flight, {6, 7, 8, 9})
    bench.scheduler.land(bench.orders["loads"].flight)
    starts = [work[2:] for _ in range(4) for work in bench.beat() if work[0] == "computes"]
    assert starts == [(8, 8), (16, 8), (39, 1), (40, 1)], "and not from 24 on"


def test_who_counted_on_anothers_load_orders_its_own_when_that_fails() -> None:
    bench = Bench()
    bench.submit("first", [*range(20), 90, 91], load_plan(0, 5))
    second = bench.submit("second", [*range(20), 92, 93], load_plan(0, 5))
    bench.scheduler.land(bench.orders["first"].flight)
    assert [order.sequence for order in bench.plan().loads] == [second]


def test_a_twin_reads_what_anothers_load_brought_before_that_is_over() -> None:
    bench = Bench()
    bench.gate.observe(1, 10**9)
    first = bench.submit("first", [*range(40), 90], load_plan(0, 10))
    short = bench.submit("short", [*range(12), 91, 92], load_plan(0, 3))
    bench.scheduler.progress(bench.orders["first"].flight, range(3))
    assert bench.beat() == [("short", 3, 12, 2)]
    assert short.table.pages()[:3] == first.table.pages()[:3], "in the same pages"
    bench.scheduler.remove(short)
    bench.scheduler.progress(bench.orders["first"].flight, range(10))
    bench.scheduler.land(bench.orders["first"].flight)
    assert bench.beat() == [("first", 10, 40, 1)]


@pytest.mark.parametrize("arrived", [0, 2, 5])
def test_a_twin_inherits_the_load_of_a_request_that_goes(arrived: int) -> None:
    bench = Bench()
    bench.gate.observe(1, 10**9)
    first = bench.submit("first", [*range(24), 90, 91], load_plan(0, 6))
    second = bench.submit("second", [*range(20), 92, 93], load_plan(0, 5))
    flight = bench.orders["first"].flight
    bench.scheduler.progress(flight, range(arrived))
    if arrived:
        bench.beat()
    bench.scheduler.remove(first)
    step = bench.plan()
    bench.run(step)
    assert (step.loads, step.cancelled_flights) == ((), (flight,) if arrived == 5 else ())
    bench.scheduler.progress(flight, range(6))
    assert bench.scheduler.land(flight) is second
    bench.seal(second)
    bench.beat()
    assert second.generated_tokens
    assert second.table.sealed_blocks >= 5
    bench.scheduler.remove(second)
    assert bench.pool.counts().referenced == bench.pool.counts().in_flight == 0


def test_what_a_request_computed_and_cannot_offer_yet_is_owed_to_a_twin_that_comes_while_it_waits() -> None:
    bench = Bench()
    bench.gate.observe(1, 10**6)
    plan = load_plan(0, 8)._replace(kind=PlanKind.SPLIT, predicted_load_ns=33 * 10**6)
    first = bench.submit("first", [*range(32), 90, 91], plan)
    assert bench.beat() == [("first", 0, 0, 16)]
    bench.now_ns += 12 * 10**6
    bench.scheduler.progress(bench.orders["first"].flight, {7, 6, 5})
    assert bench.beat() == [], "the last block comes before it could be computed"
    bench.submit("second", [*range(32), 92, 93])
    step = bench.plan()
    assert (step.work, step.owed) == ((), (first,))
    bench.scheduler.rescue(first)
    bench.seal(first)
    bench.scheduler.progress(bench.orders["first"].flight, {7, 6, 5, 4})
    assert sorted(bench.beat()) == [("first", 4, 32, 2), ("second", 8, 32, 2)]


def test_a_twin_loads_from_its_own_holder_when_the_load_it_would_wait_for_crawls() -> None:
    bench = Bench()
    bench.gate.observe(1, 10**6)
    bench.submit("first", [*range(40), 90, 91], load_plan(0, 10)._replace(predicted_load_ns=5 * 10**6))
    other = load_plan(0, 10).loads[0]._replace(holder=HOLDER._replace(worker_id=WorkerId("other")))
    own = load_plan(0, 10)._replace(loads=(other,), predicted_load_ns=5 * 10**6)
    second = bench.submit("second", [*range(40), 92, 93], own)
    assert list(bench.orders) == ["first"]
    bench.scheduler.progress(bench.orders["first"].flight, {0})
    assert bench.plan().loads == ()
    bench.now_ns += 2 * 10**6
    (order,) = bench.plan().loads
    assert (order.sequence, sorted(order.pages)) == (second, list(range(1, 10)))
