"""Laws of admission for any limits and any forecast."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.request import Limits
from router.admission import MAX_HOLD_NS, MAX_QUEUE_NS, MAX_RETRY_NS, MIN_RETRY_NS, Admission, Forecast, admit
from router.waiting import MAX_YIELD_NS

SETTINGS = settings(max_examples=300, deadline=None)
times = st.integers(1, 10**12)
limits = st.builds(
    Limits, ttft_ns=st.none() | times, tpot_ns=st.none() | times, priority=st.integers(-5, 5), may_degrade=st.booleans()
)
forecasts = st.builds(
    Forecast,
    ttft_ns=st.floats(0, 1e12),
    tpot_ns=st.none() | st.floats(0, 1e12),
    elapsed_ns=st.integers(0, 10**12),
    outranked=st.booleans(),
    hold_ns=st.floats(-1e12, 1e12),
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
