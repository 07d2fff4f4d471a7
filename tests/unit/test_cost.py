"""Prices against hand-worked numbers and brute force."""

from __future__ import annotations

import pytest

from kvpool.reports import WorkerLoad
from router import cost, kernel
from router.cost import Costs, Pair, Price
from router.decide import decide
from router.estimators import LinkCurve, PrefillCurve
from router.planning import Params
from router.signals import Footprint
from tests.unit.router_kit import BLOCK, CURVE, FOOTPRINT, MS, S, Worker, request, snapshot

NO_NOTICE = Costs(notice_ns=0.0)


def pair(
    curve: PrefillCurve = CURVE,
    *,
    total: int = 1600,
    own: int = 0,
    held: int = 90,
    wait: float = 0.0,
    backlog: float = 0.0,
    link: LinkCurve | None = None,
    failure: float = 0.0,
    footprint: Footprint = FOOTPRINT,
) -> Pair:
    redo_ns = curve.time_ns(total - own * BLOCK, own * BLOCK)
    link = link or LinkCurve(1.0 * MS, 0.25)
    return cost.make_pair(wait, redo_ns, own, held, total, footprint, backlog, link, failure, curve)


def load(made: Pair, costs: Costs = NO_NOTICE) -> Price:
    price = cost.price_load(made, costs)
    assert price is not None
    return price


def split(made: Pair) -> Price:
    price = cost.price_split(made)
    assert price is not None
    return price


def test_prefill_time_counts_every_pair_once() -> None:
    whole = CURVE.time_ns(1600, 0)
    parts = CURVE.time_ns(600, 0) + CURVE.time_ns(1000, 600) - CURVE.t0_ns
    assert parts == pytest.approx(whole)
    curve = (CURVE.t0_ns, CURVE.token_ns, CURVE.pair_ns)
    assert kernel.prefill_ns(*curve, 1600, 600) == pytest.approx(CURVE.time_ns(1000, 600))


def test_a_reported_queue_is_priced_per_request() -> None:
    load = WorkerLoad(waiting_requests=2, queued_prefill_tokens=2000, step_remaining_ns=7 * MS)
    assert cost.queue_ns(load, CURVE) == pytest.approx(7 * MS + 2 * CURVE.time_ns(1000, 0))
    assert cost.queue_ns(WorkerLoad(step_remaining_ns=3), CURVE) == 3


def test_a_load_waits_for_the_later_of_gpu_and_link() -> None:
    rest = CURVE.time_ns(160, 1440)
    transfer = 1.0 * MS + 90 * FOOTPRINT.block_bytes * 0.25
    priced = load(pair(), costs=NO_NOTICE)
    assert priced.ttft_ns == pytest.approx(transfer + rest)
    queued = load(pair(wait=1.0 * S), costs=NO_NOTICE)
    assert queued.ttft_ns == pytest.approx(1.0 * S + rest)
    behind = load(pair(backlog=2.0 * S), costs=NO_NOTICE)
    assert behind.ttft_ns == pytest.approx(2.0 * S + transfer + rest)


def test_a_slow_link_loads_what_is_free_while_the_gpu_is_busy_and_redoes_the_rest() -> None:
    slow = LinkCurve(1.0 * MS, 1000.0)
    block_ns = FOOTPRINT.block_bytes * slow.byte_ns
    wait = 1.0 * MS + 10.5 * block_ns
    priced = load(pair(wait=wait, link=slow), costs=NO_NOTICE)
    assert priced.boundary == 10
    assert priced.ttft_ns == pytest.approx(wait + CURVE.time_ns(1600 - 160, 160))


@pytest.mark.parametrize("byte_ns", [0.05, 0.5, 2.0, 2.6, 3.0, 5.0, 50.0])
@pytest.mark.parametrize("wait", [0.0, 30e6, 200e6])
@pytest.mark.parametrize("pair_ns", [0.0, 20.0, 200.0])
def test_the_two_boundaries_beat_every_other_boundary(byte_ns: float, wait: float, pair_ns: float) -> None:
    curve = PrefillCurve(5.0 * MS, 100_000.0, pair_ns)
    link = LinkCurve(1.0 * MS, byte_ns)
    best = min(
        max(wait, link.time_ns((m - 10) * FOOTPRINT.block_bytes)) + curve.time_ns(1600 - 16 * m, 16 * m)
        for m in range(11, 91)
    )
    redo = wait + curve.time_ns(1600 - 160, 160)
    priced = load(pair(curve, own=10, wait=wait, link=link))
    assert min(redo, priced.ttft_ns) == pytest.approx(min(redo, best), rel=1e-9)


def test_a_failing_holder_costs_its_notice_and_the_redo() -> None:
    safe = load(pair(), costs=Costs(notice_ns=100e6))
    risky = load(pair(failure=0.5), costs=Costs(notice_ns=100e6))
    redo = CURVE.time_ns(1600, 0)
    failed = safe.load_ns + 100e6 + redo
    assert safe.ttft_ns == pytest.approx(safe.happy_ns)
    assert risky.ttft_ns == pytest.approx(0.5 * safe.happy_ns + 0.5 * failed)


def test_fixed_bytes_are_always_loaded() -> None:
    state = Footprint(BLOCK, 0, fixed_bytes=40_000_000)
    priced = load(pair(footprint=state))
    assert priced.load_ns == pytest.approx(1.0 * MS + 40_000_000 * 0.25)


def test_a_holder_that_has_no_more_than_the_worker_is_no_source() -> None:
    assert cost.price_load(pair(own=90), NO_NOTICE) is None


@pytest.mark.parametrize("pair_ns", [0.0, 20.0, 500.0])
@pytest.mark.parametrize("byte_ns", [1.0, 2.5, 10.0])
@pytest.mark.parametrize("own", [0, 20])
def test_the_split_point_is_the_best_of_all_points(pair_ns: float, byte_ns: float, own: int) -> None:
    curve = PrefillCurve(0.0, 100_000.0, pair_ns)
    priced = split(pair(curve, own=own, link=LinkCurve(1.0 * MS, byte_ns)))
    front = priced.front_tokens
    assert front is not None
    span = (90 - own) * BLOCK
    token_ns = FOOTPRINT.block_bytes / BLOCK * byte_ns
    rest = curve.time_ns(160, 1440)
    best = min(max(curve.time_ns(k, own * BLOCK), 1.0 * MS + (span - k) * token_ns) + rest for k in range(1, span))
    assert 0 < front < span
    assert priced.ttft_ns == pytest.approx(best, rel=2e-3)
    assert priced.ttft_ns <= best * (1 + 1e-9)


def test_a_purely_quadratic_prefill_splits_at_the_golden_section_when_load_and_redo_are_equal() -> None:
    span = 90 * BLOCK
    curve = PrefillCurve(0.0, 0.0, 100.0)
    token_ns = curve.time_ns(span, 0) / span
    link = LinkCurve(0.0, token_ns * BLOCK / FOOTPRINT.block_bytes)
    front = split(pair(curve, link=link)).front_tokens
    assert front is not None
    assert front / span == pytest.approx(0.618, abs=1e-3)


def test_a_linear_prefill_splits_in_the_harmonic_way() -> None:
    span = 90 * BLOCK
    curve = PrefillCurve(0.0, 100_000.0, 0.0)
    token_ns = 50_000.0
    link = LinkCurve(0.0, token_ns * BLOCK / FOOTPRINT.block_bytes)
    priced = split(pair(curve, link=link))
    compute, load = 100_000.0 * span, token_ns * span
    assert priced.ttft_ns == pytest.approx(compute * load / (compute + load) + curve.time_ns(160, 1440))


def test_a_worker_that_never_reported_or_went_silent_is_priced_as_busy() -> None:
    shot = snapshot([Worker(0), Worker(1, wait_ns=None)])
    assert decide(request(), shot, Params()).wait.tolist() == [0.0, Costs().unknown_wait_ns]
    later = decide(request(), shot._replace(now_ns=shot.now_ns + 11 * S), Params())
    assert later.wait[0] == Costs().unknown_wait_ns
