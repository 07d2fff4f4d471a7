"""Laws of the estimators under arbitrary observations."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.types import Tier, WorkerId
from router.estimators import LinkEstimators, PrefillEstimators
from router.fit import nonnegative_least_squares

A, B = WorkerId("a"), WorkerId("b")
tokens = st.integers(1, 200_000)
times = st.integers(-10, 10**13)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(tokens, st.integers(0, 200_000), times), max_size=40))
def test_prefill_curves_stay_finite_and_nonnegative_whatever_is_observed(samples: list[tuple[int, int, int]]) -> None:
    estimators = PrefillEstimators()
    for new, context, elapsed in samples:
        estimators.observe(A, new, context, elapsed)
        curve = estimators.curve(A)
        for value in (curve.t0_ns, curve.token_ns, curve.pair_ns, curve.p90_ratio):
            assert math.isfinite(value)
            assert value >= 0.0
        assert curve.time_ns(1000, 1000) >= 0.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-5, 10**11), times, st.integers(0, 10**12)), max_size=40))
def test_link_curves_stay_finite_and_nonnegative_whatever_is_observed(samples: list[tuple[int, int, int]]) -> None:
    estimators = LinkEstimators()
    now = 0
    for size, elapsed, gap in samples:
        now += gap
        estimators.observe((A, B, Tier.DEVICE), size, elapsed, now)
        curve = estimators.curve(A, B, Tier.DEVICE, now)
        assert math.isfinite(curve.alpha_ns)
        assert math.isfinite(curve.byte_ns)
        assert curve.alpha_ns >= 0.0
        assert curve.byte_ns >= 0.0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.floats(0.01, 10.0), min_size=3, max_size=3), min_size=4, max_size=8),
    st.lists(st.floats(-10.0, 10.0), min_size=8, max_size=8),
)
def test_the_nonnegative_minimum_beats_every_corner_and_step(rows: list[list[float]], values: list[float]) -> None:
    matrix, target = np.array(rows), np.array(values[: len(rows)])
    gram, rhs = matrix.T @ matrix + 1e-3 * np.eye(3), matrix.T @ target
    solved = nonnegative_least_squares(gram.tolist(), rhs.tolist())

    def objective(theta: np.ndarray) -> float:
        return float(theta @ gram @ theta - 2 * rhs @ theta)

    if solved is None:
        assert objective(np.zeros(3)) <= 1e-9
        return
    best = np.array(solved)
    assert (best >= 0).all()
    assert objective(best) <= 1e-9  # no worse than nothing at all
    for i in range(3):
        for step in (1e-3, -1e-3):
            moved = best.copy()
            moved[i] = max(0.0, moved[i] + step)
            assert objective(best) <= objective(moved) + 1e-7 * max(1.0, abs(objective(best)))
