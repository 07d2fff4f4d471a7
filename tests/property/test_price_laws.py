"""What must hold of prices in any cluster: more holders and faster links never make a request dearer."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.types import Tier
from router.decide import Decision, _search, decide
from router.estimators import LinkCurve
from router.planning import Harm, Params
from router.scores import open_case
from router.signals import Features
from tests.property.decide_kit import PLAIN, World, harms, worlds
from tests.unit.router_kit import Worker, request

SETTINGS = settings(max_examples=250, deadline=None)
blocks_held = st.sampled_from([1, 5, 12, 20, 40, 60, 90, 95, 99, 150])


def price(world: World, params: Params = PLAIN) -> Decision:
    return decide(request(), world.shot(), params)


def no_more_than(price_ns: float) -> float:
    """To rounding: prices are whole nanoseconds, and sums of hours in other orders differ in the last digits."""
    return price_ns * (1.0 + 1e-12) + 1.0


def holding(world: World, who: int, blocks: int) -> World:
    """The same, with one worker holding so much."""
    who %= len(world.workers)
    return replace(
        world,
        workers=[replace(worker, blocks=blocks) if i == who else worker for i, worker in enumerate(world.workers)],
    )


@SETTINGS
@given(worlds(), st.integers(0, 6), blocks_held)
def test_adding_a_holder_never_raises_the_price_and_removing_one_never_lowers_it(
    world: World, who: int, blocks: int
) -> None:
    extended, without = holding(world, who, blocks), holding(world, who, 0)
    assert price(extended).price_ns <= no_more_than(price(without).price_ns)


def test_a_reader_that_has_more_does_not_use_fewer_holders_and_wait_longer() -> None:
    holders = [Worker(number, blocks=20, wait_ns=1e9) for number in (1, 2)]
    world = World([Worker(0), *holders], LinkCurve(0.0, 2.0), features=Features(stripes=4))
    prices = [price(holding(world, 0, blocks)).price_ns for blocks in range(20)]
    assert prices == sorted(prices, reverse=True)


@SETTINGS
@given(worlds(), harms, st.integers(0, 6), blocks_held)
def test_adding_a_holder_never_raises_what_a_request_costs_itself_and_others(
    world: World, harm: Harm, who: int, blocks: int
) -> None:
    scores = []
    for each in (holding(world, who, blocks), holding(world, who, 0)):
        cases = [open_case(request(), each.shot(), Params(harm=harm), own_disk=own_disk) for own_disk in (True, False)]
        scores.append(min(_search(case).choice.score for case in cases))
    assert scores[0] <= no_more_than(scores[1])


@SETTINGS
@given(worlds(), st.floats(1.0, 100.0))
def test_a_faster_link_never_turns_a_load_into_a_redo(world: World, factor: float) -> None:
    before, after = price(world), price(world.faster(factor))
    assert after.price_ns <= no_more_than(before.price_ns)
    if before.plan.loads and not after.plan.loads and not _reads_own_disk(world.workers, after):
        assert after.price_ns == before.price_ns  # equal to the nanosecond


def _reads_own_disk(workers: list[Worker], made: Decision) -> bool:
    return workers[made.position].tier is Tier.DISK and made.own_blocks > 0


@SETTINGS
@given(worlds(), st.sampled_from([PLAIN, Params()]), st.randoms(use_true_random=False))
def test_the_choice_does_not_depend_on_the_order_of_candidates(world: World, params: Params, rng: Random) -> None:
    shuffled = list(world.workers)
    rng.shuffle(shuffled)
    first, second = price(world, params), price(replace(world, workers=shuffled), params)
    assert (first.worker, first.plan, first.price_ns) == (second.worker, second.plan, second.price_ns)


@SETTINGS
@given(worlds(), st.integers(0, 10**9))
def test_fixed_bytes_never_make_a_plan_cheaper(world: World, extra: int) -> None:
    footprint = world.footprint
    heavier = replace(world, footprint=replace(footprint, fixed_bytes=footprint.fixed_bytes + extra))
    assert price(world).price_ns <= no_more_than(price(heavier).price_ns)


@SETTINGS
@given(worlds(), st.integers(0, 6))
def test_a_holder_that_fails_less_never_raises_the_price(world: World, who: int) -> None:
    name = sorted(world.rates)[who % len(world.rates)]
    surer = replace(world, rates={**world.rates, name: 0.5 * world.rates[name]})
    assert price(surer).price_ns <= no_more_than(price(world).price_ns)
