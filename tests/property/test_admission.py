"""Laws of admission for any limits and any forecast."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import OverloadError
from kvpool.reports import WorkerLoad
from kvpool.request import Limits
from router.admission import (
    MAX_DEGRADABLE_QUEUE_NS,
    MAX_HOLD_NS,
    MAX_QUEUE_NS,
    MAX_RETRY_NS,
    MIN_RETRY_NS,
    STAYS_SLOW_NS,
    Admission,
    Forecast,
    admit,
)
from router.decoding import FADE_NS
from router.waiting import MAX_YIELD_NS
from tests.unit.router_kit import MS, report
from tests.unit.test_router_core import make_core, meta

SETTINGS = settings(max_examples=300, deadline=None)
times = st.integers(1, 10**12)
limits = st.builds(
    Limits, ttft_ns=st.none() | times, tpot_ns=st.none() | times, priority=st.integers(-5, 5), may_degrade=st.booleans()
)
forecasts = st.builds(
    Forecast,
    ttft_ns=st.floats(0, 1e12),
    tpot_ns=st.none() | st.floats(0, 1e12) | st.just(STAYS_SLOW_NS),
    elapsed_ns=st.integers(0, 10**12),
    outranked=st.booleans(),
    hold_ns=st.floats(-1e12, 1e12),
    prefill_ns=st.floats(0, 1e12),
    doubt=st.floats(1, 10),
)


@SETTINGS
@given(limits, forecasts)
def test_only_a_request_with_a_limit_that_may_not_degrade_is_ever_shed(limit: Limits, forecast: Forecast) -> None:
    ruling = admit(limit, forecast)
    if ruling.admission is Admission.SHED:
        assert not limit.may_degrade
        assert limit.ttft_ns is not None or limit.tpot_ns is not None
        assert MIN_RETRY_NS <= ruling.retry_after_ns <= MAX_RETRY_NS
    if ruling.admission is Admission.DEGRADE:
        assert limit.may_degrade
    if ruling.admission is Admission.QUEUE:
        assert ruling.retry_after_ns > 0


@SETTINGS
@given(limits, forecasts)
def test_queueing_ends(limit: Limits, forecast: Forecast) -> None:
    waited = max(MAX_QUEUE_NS, MAX_YIELD_NS, MAX_HOLD_NS, limit.ttft_ns or 0)
    assert admit(limit, replace(forecast, elapsed_ns=waited)).admission is not Admission.QUEUE


@SETTINGS
@given(limits, forecasts)
def test_limits_that_are_met_admit_whoever_is_neither_outranked_nor_held(limit: Limits, forecast: Forecast) -> None:
    met = limit.ttft_ns is None or forecast.elapsed_ns + forecast.ttft_ns <= limit.ttft_ns
    met &= limit.tpot_ns is None or forecast.tpot_ns is None or forecast.tpot_ns <= limit.tpot_ns
    if met:
        assert admit(limit, replace(forecast, outranked=False, hold_ns=0.0)).admission is Admission.ADMIT


@SETTINGS
@given(limits, forecasts, st.floats(1.0, 100.0))
def test_a_shorter_queue_never_refuses_who_would_have_been_admitted(
    limit: Limits, forecast: Forecast, factor: float
) -> None:
    if admit(limit, forecast).admission is Admission.ADMIT and not forecast.outranked:
        assert admit(limit, replace(forecast, ttft_ns=forecast.ttft_ns / factor)).admission is Admission.ADMIT


@SETTINGS
@given(limits, forecasts)
def test_nobody_waits_for_faster_decoding_in_vain_or_for_long_if_it_may_degrade(
    limit: Limits, forecast: Forecast
) -> None:
    ruling = admit(limit, forecast)
    if ruling.missed == "tpot" and ruling.admission is Admission.QUEUE:
        assert forecast.tpot_ns != STAYS_SLOW_NS
        assert not limit.may_degrade or forecast.elapsed_ns < MAX_DEGRADABLE_QUEUE_NS
    if ruling.missed == "tpot" and ruling.admission is Admission.SHED:
        assert ruling.retry_after_ns == FADE_NS


decode_reports = st.tuples(  # worker, time since the report before, time of a step, requests that decode
    st.integers(0, 2), st.integers(0, 2 * FADE_NS), st.integers(1, 1000), st.integers(1, 32)
)
impatient = st.builds(Limits, tpot_ns=times, priority=st.integers(-5, 5), may_degrade=st.booleans())


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), st.lists(decode_reports, max_size=30), st.integers(0, 2 * FADE_NS), impatient)
def test_whoever_comes_when_nothing_decodes_is_never_queued_and_admitted_within_the_fade_time(
    workers: int, history: list[tuple[int, int, int, int]], silence_ns: int, limit: Limits
) -> None:
    core, _, clock = make_core(workers)
    totals = [dict.fromkeys(("decode_steps", "decode_requests", "decode_ns"), 0) for _ in range(workers)]
    for sequence, (chosen, gap_ns, step_ms, running) in enumerate(history, 1):
        clock.now_ns += gap_ns
        number = chosen % workers
        for name, more in zip(totals[number], (10, 10 * running, 10 * step_ms * MS), strict=True):
            totals[number][name] += more
        load = WorkerLoad(running_requests=running)
        core.on_report(report(number, sequence, load, counters=tuple(totals[number].items())))
    last_ns = clock.now_ns
    for number in range(workers):
        core.on_report(report(number, len(history) + 1, counters=tuple(totals[number].items())))
    clock.now_ns += silence_ns
    try:
        core.route(meta("r", limits=limit))
    except OverloadError:
        assert clock.now_ns < last_ns + FADE_NS
        assert not limit.may_degrade
        clock.now_ns = last_ns + FADE_NS
        core.route(meta("r", limits=limit))
