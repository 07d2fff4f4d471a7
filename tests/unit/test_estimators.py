"""What the router learns: curves, links, failure rates."""

from __future__ import annotations

import json
from random import Random

import pytest

from kvpool.types import Tier, WorkerEpoch, WorkerId, WorkerKey
from router.estimators import (
    FAILURE_PRIOR,
    LINK_HALF_LIFE_NS,
    LINK_PRIORS,
    PREFILL_PRIOR,
    FailureEstimators,
    LinkCurve,
    LinkEstimators,
    PrefillCurve,
    PrefillEstimators,
)
from router.fit import nonnegative_least_squares

S = 1_000_000_000
MS = 1_000_000
A, B = WorkerId("a"), WorkerId("b")
LINK = (A, B, Tier.DEVICE)
QWEN3_8B = PrefillCurve(t0_ns=44 * MS, token_ns=18_900.0, pair_ns=0.1)


def feed_prefills(estimators: PrefillEstimators, curve: PrefillCurve, count: int, noise: float, seed: int) -> None:
    rng = Random(seed)
    for _ in range(count):
        new, context = rng.randrange(64, 8192), rng.choice([0, 0, 2048, 16_384])
        elapsed = curve.time_ns(new, context) * rng.uniform(1 - noise, 1 + noise)
        estimators.observe(A, new, context, round(elapsed))


def feed_link(estimators: LinkEstimators, curve: LinkCurve, count: int, start_ns: int = 0, seed: int = 1) -> None:
    rng = Random(seed)
    for i in range(count):
        size = rng.randrange(100_000, 50_000_000)
        elapsed = round(curve.time_ns(size) * rng.uniform(0.95, 1.05))
        estimators.observe(LINK, size, elapsed, start_ns + i * MS)


def test_a_curve_exists_before_the_first_sample() -> None:
    assert PrefillEstimators().curve(A) == PREFILL_PRIOR
    assert LinkEstimators().curve(A, B, Tier.HOST, 0) == LINK_PRIORS[Tier.HOST]


def test_the_first_prefill_rescales_the_prior() -> None:
    estimators = PrefillEstimators()
    estimators.observe(A, 2048, 0, round(QWEN3_8B.time_ns(2048, 0)))
    assert estimators.curve(A).time_ns(2048, 0) == pytest.approx(QWEN3_8B.time_ns(2048, 0), rel=0.05)


def test_prefill_coefficients_are_recovered_from_noisy_passes() -> None:
    estimators = PrefillEstimators()
    feed_prefills(estimators, QWEN3_8B, 200, noise=0.05, seed=3)
    learned = estimators.curve(A)
    for new, context in ((128, 0), (2048, 0), (8192, 0), (512, 16_384)):
        assert learned.time_ns(new, context) == pytest.approx(QWEN3_8B.time_ns(new, context), rel=0.05)
    assert learned.token_ns == pytest.approx(QWEN3_8B.token_ns, rel=0.1)
    assert 1.0 <= learned.p90_ratio < 1.2


def test_published_prefill_times_of_gpt_oss_fit_within_nine_percent() -> None:
    published_ms = {2048: 70.6, 8192: 205.0, 16_384: 426.0, 32_768: 983.0, 49_152: 1695.0}
    estimators = PrefillEstimators()
    for _ in range(20):
        for tokens, elapsed in published_ms.items():
            estimators.observe(A, tokens, 0, round(elapsed * MS))
    for tokens, elapsed in published_ms.items():
        assert estimators.curve(A).time_ns(tokens, 0) == pytest.approx(elapsed * MS, rel=0.09)


def test_equal_samples_do_not_degenerate_the_fit() -> None:
    estimators = PrefillEstimators()
    for _ in range(2000):
        estimators.observe(A, 512, 0, 60 * MS)
    curve = estimators.curve(A)
    assert curve.time_ns(512, 0) == pytest.approx(60 * MS, rel=0.01)
    assert curve.time_ns(64, 0) < curve.time_ns(512, 0) < curve.time_ns(4096, 0)


def test_one_outlier_moves_a_prefill_curve_by_a_bounded_step() -> None:
    estimators = PrefillEstimators()
    feed_prefills(estimators, QWEN3_8B, 100, noise=0.02, seed=4)
    before = estimators.curve(A).time_ns(2048, 0)
    estimators.observe(A, 2048, 0, round(1000 * before))
    estimators.observe(A, 2048, 0, round(before / 1000))
    assert estimators.curve(A).time_ns(2048, 0) == pytest.approx(before, rel=0.3)


def test_a_worker_without_samples_borrows_the_curve_of_the_others() -> None:
    estimators = PrefillEstimators()
    feed_prefills(estimators, QWEN3_8B, 50, noise=0.0, seed=5)
    assert estimators.curve(B).time_ns(4096, 0) == pytest.approx(QWEN3_8B.time_ns(4096, 0), rel=0.05)
    assert estimators.samples(B) == 0


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_prefill_drift_by_ten_is_followed_within_thirty_observations(factor: float) -> None:
    estimators = PrefillEstimators()
    feed_prefills(estimators, QWEN3_8B, 300, noise=0.05, seed=6)
    slow = PrefillCurve(QWEN3_8B.t0_ns * factor, QWEN3_8B.token_ns * factor, QWEN3_8B.pair_ns * factor)
    feed_prefills(estimators, slow, 30, noise=0.05, seed=7)
    assert estimators.curve(A).time_ns(4096, 0) == pytest.approx(slow.time_ns(4096, 0), rel=0.1)


def test_alpha_and_beta_of_a_link_are_recovered() -> None:
    estimators = LinkEstimators()
    feed_link(estimators, LinkCurve(2.0 * MS, 0.2), 60)
    curve = estimators.curve(A, B, Tier.DEVICE, 60 * MS)
    assert curve.alpha_ns == pytest.approx(2.0 * MS, rel=0.25)
    assert curve.byte_ns == pytest.approx(0.2, rel=0.05)
    assert curve.bytes_per_second == pytest.approx(5e9, rel=0.05)


@pytest.mark.parametrize("factor", [10.0, 0.1, 3.0])
def test_a_link_that_changes_is_followed_within_thirty_observations(factor: float) -> None:
    estimators = LinkEstimators()
    feed_link(estimators, LinkCurve(1.0 * MS, 0.1), 500)
    changed = LinkCurve(1.0 * MS * factor, 0.1 * factor)
    feed_link(estimators, changed, 30, start_ns=S, seed=2)
    learned = estimators.curve(A, B, Tier.DEVICE, S)
    assert learned.time_ns(20_000_000) == pytest.approx(changed.time_ns(20_000_000), rel=0.2)


def test_a_slow_first_load_does_not_brand_the_link_for_long() -> None:
    estimators = LinkEstimators()
    estimators.observe(LINK, 1_000_000, 6 * S, 0)  # connections are set up on first use
    feed_link(estimators, LinkCurve(1.0 * MS, 0.1), 10, start_ns=MS)
    assert estimators.curve(A, B, Tier.DEVICE, S).time_ns(10_000_000) < 4 * MS


@pytest.mark.parametrize("seed", range(20))
def test_a_new_link_extrapolates_though_loads_of_one_size_say_nothing_of_alpha(seed: int) -> None:
    estimators, rng, size = LinkEstimators(), Random(seed), 5_000_000
    links = [(WorkerId(f"h{number}"), B, Tier.HOST) for number in range(4)]
    for moment, (link, byte_ns) in enumerate(zip(links, (125.0, 31.0, 300.0, 31.0), strict=True)):
        for _ in range(2):
            estimators.observe(link, size, round(size * byte_ns * rng.uniform(0.9, 1.4)), moment * MS)
    expected = LinkCurve(0.0, 31.0).time_ns(4 * size)
    assert 0.7 < estimators.curve(links[3][0], B, Tier.HOST, 4 * MS).time_ns(4 * size) / expected < 1.4


def test_shared_bytes_take_their_part_of_the_time() -> None:
    estimators = LinkEstimators()
    for i in range(40):
        size = 1_000_000 * (1 + i % 5)
        estimators.observe(LINK, size, round(2 * size * 0.1), i, queued_bytes=size)
    assert estimators.curve(A, B, Tier.DEVICE, 40).byte_ns == pytest.approx(0.1, rel=0.05)


def test_an_unobserved_slow_link_fades_to_its_parent_and_is_tried_again() -> None:
    estimators = LinkEstimators()
    feed_link(estimators, LinkCurve(1.0 * MS, 100.0), 50)
    at_once = estimators.curve(A, B, Tier.DEVICE, 50 * MS)
    later = estimators.curve(A, B, Tier.DEVICE, 50 * MS + 6 * LINK_HALF_LIFE_NS)
    assert at_once.byte_ns > 90
    assert later.byte_ns < 5


def test_best_bounds_every_link_at_every_age() -> None:
    estimators = LinkEstimators()
    feed_link(estimators, LinkCurve(0.2 * MS, 0.05), 50)
    best = estimators.best(Tier.DEVICE)
    for age in (0, S, 100 * S, 10_000 * S):
        for reader in (B, WorkerId("c")):
            curve = estimators.curve(A, reader, Tier.DEVICE, age)
            assert best.alpha_ns <= curve.alpha_ns
            assert best.byte_ns <= curve.byte_ns


def test_learned_state_survives_a_restart_through_json() -> None:
    prefills, links = PrefillEstimators(), LinkEstimators()
    feed_prefills(prefills, QWEN3_8B, 40, noise=0.05, seed=8)
    feed_link(links, LinkCurve(1.0 * MS, 0.1), 40)
    again, links_again = PrefillEstimators(), LinkEstimators()
    again.restore(json.loads(json.dumps(prefills.to_dict())))
    links_again.restore(json.loads(json.dumps(links.to_dict(10))), shift_ns=0)
    assert again.curve(A) == prefills.curve(A)
    assert links_again.curve(A, B, Tier.DEVICE, 40 * MS) == links.curve(A, B, Tier.DEVICE, 40 * MS)
    feed_prefills(prefills, QWEN3_8B, 5, noise=0.05, seed=9)
    feed_prefills(again, QWEN3_8B, 5, noise=0.05, seed=9)
    assert again.curve(A) == prefills.curve(A)


def test_a_restored_link_is_as_old_as_it_was_and_fades_on() -> None:
    links, again = LinkEstimators(), LinkEstimators()
    feed_link(links, LinkCurve(1.0 * MS, 50.0), 40)
    again.restore(json.loads(json.dumps(links.to_dict(10))), shift_ns=-7000 * MS)
    later = 60_000 * MS
    assert again.curve(A, B, Tier.DEVICE, later - 7000 * MS) == links.curve(A, B, Tier.DEVICE, later)


def test_only_the_links_observed_last_are_saved() -> None:
    links = LinkEstimators()
    for i, reader in enumerate("xyz"):
        links.observe((A, WorkerId(reader), Tier.DEVICE), 1000, 1000, i)
    assert {link[1] for link in links.to_dict(2)["links"]} == {"y", "z"}


def test_links_are_bounded_and_the_oldest_leaves() -> None:
    links = LinkEstimators(max_links=2)
    for i, reader in enumerate("xyz"):
        links.observe((A, WorkerId(reader), Tier.DEVICE), 1000, 1000, i)
    assert {reader for _, reader, _ in links.known()} == {"y", "z"}


@pytest.mark.parametrize("elapsed", [0, -5])
def test_impossible_times_are_ignored(elapsed: int) -> None:
    prefills, links = PrefillEstimators(), LinkEstimators()
    prefills.observe(A, 100, 0, elapsed)
    links.observe(LINK, 100, elapsed, 0)
    assert prefills.curve(A) == PREFILL_PRIOR
    assert links.known() == {}


def test_failures_raise_the_rate_at_once_and_it_fades_with_time() -> None:
    failures, holder = FailureEstimators(), WorkerKey(A, WorkerEpoch(1))
    assert failures.probability(holder, 0) == FAILURE_PRIOR
    failures.observe(holder, True, 0)
    once = failures.probability(holder, 0)
    failures.observe(holder, True, 0)
    assert 0.3 < once < failures.probability(holder, 0) < 1.0
    assert failures.probability(holder, 600 * S) < 0.02
    for _ in range(50):
        failures.observe(holder, False, 0)
    assert failures.probability(holder, 0) < 0.02


def test_a_new_incarnation_starts_with_the_prior() -> None:
    failures = FailureEstimators()
    failures.observe(WorkerKey(A, WorkerEpoch(1)), True, 0)
    assert failures.probability(WorkerKey(A, WorkerEpoch(2)), 0) == FAILURE_PRIOR


def test_least_squares_keeps_coefficients_nonnegative() -> None:
    # the unconstrained solution is (3, -1): the best nonnegative one is on the axis
    solved = nonnegative_least_squares([[1.0, 1.0], [1.0, 2.0]], [2.0, 1.0])
    assert solved is not None
    assert solved == pytest.approx((2.0, 0.0))
    assert nonnegative_least_squares([[0.0]], [0.0]) is None
