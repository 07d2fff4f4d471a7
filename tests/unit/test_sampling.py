"""Choosing tokens: greedy, sampled, reproducible, and refusing what is not finite."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvpool.errors import NumericsError
from kvpool.request import SamplingParams
from workers.sampling import _draw, sample, top_logprobs, uniform

RNG = np.random.default_rng(3)


def logits_of(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_greedy_takes_the_first_of_equal_maxima() -> None:
    assert sample(logits_of(1.0, 5.0, 5.0, 2.0), SamplingParams(), 0).token == 1


def test_logprobs_are_those_of_a_float64_softmax_at_temperature_one() -> None:
    logits = (RNG.standard_normal(50_000) * 8).astype(np.float32)
    exact = logits.astype(np.float64) - logits.max()
    exact -= math.log(np.exp(exact).sum())
    for temperature in (0.0, 0.3, 5.0):
        chosen = sample(logits, SamplingParams(temperature=temperature, logprobs=4), 11)
        assert chosen.logprob == pytest.approx(exact[chosen.token], abs=2e-6)
        assert [token for token, _ in chosen.top] == list(np.argsort(-exact)[:4])


def test_top_logprobs_list_equal_ones_by_token_id() -> None:
    logits = logits_of(2.0, 7.0, 2.0, 2.0, 2.0)
    assert [token for token, _ in top_logprobs(logits, 0.0, 3)] == [1, 0, 2]
    assert len(top_logprobs(logits, 0.0, 20)) == 5
    assert top_logprobs(logits, 0.0, 0) == ()


def test_a_draw_depends_only_on_seed_and_position() -> None:
    logits = RNG.standard_normal(1000).astype(np.float32)
    params = SamplingParams(temperature=1.0, seed=42)
    forward = [sample(logits, params, position).token for position in range(20)]
    backward = [sample(logits, params, position).token for position in reversed(range(20))]
    assert forward == backward[::-1]
    assert len(set(forward)) > 10
    assert forward != [sample(logits, SamplingParams(temperature=1.0, seed=43), p).token for p in range(20)]


def test_the_stream_of_numbers_never_changes_between_releases() -> None:
    drawn = [uniform(0, 0), uniform(1, 0), uniform(0, 1), uniform(2**63 - 1, 10**6)]
    assert drawn == [0.011546754286331562, 0.3035680343067586, 0.5023796042735054, 0.1653810847067234]


def test_sampled_frequencies_follow_the_distribution() -> None:
    logits = logits_of(0.0, 1.0, 2.0, -1.0)
    weights = np.exp(logits.astype(np.float64) / 0.7)
    params = SamplingParams(temperature=0.7, seed=5)
    counts = np.bincount([sample(logits, params, position).token for position in range(4000)], minlength=4)
    assert counts / 4000 == pytest.approx(weights / weights.sum(), abs=0.03)


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05])).astype(np.float32)
    drawn = {sample(logits, SamplingParams(temperature=1.0, top_p=0.7), position).token for position in range(300)}
    assert drawn == {0, 1}
    drawn = {sample(logits, SamplingParams(temperature=1.0, top_p=0.4), position).token for position in range(300)}
    assert drawn == {0}


def test_a_token_without_mass_is_never_drawn() -> None:
    logits = logits_of(-math.inf, 0.0, -math.inf, 0.0, -math.inf)
    drawn = {sample(logits, SamplingParams(temperature=2.0), position).token for position in range(200)}
    assert drawn == {1, 3}


def test_the_smallest_fraction_passes_over_tokens_without_mass() -> None:
    assert _draw(logits_of(-math.inf, -math.inf, 0.0, 1.0), SamplingParams(temperature=1.0), 0.0) == 2


def test_extreme_temperatures_do_not_overflow() -> None:
    logits = logits_of(-3e38, 3e38, 0.0)
    assert sample(logits, SamplingParams(temperature=1e-300), 0).token == 1
    assert sample(logits, SamplingParams(temperature=100.0), 0).token == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(NumericsError):
        sample(logits_of(0.0, bad, 1.0), SamplingParams(), 0)
    with pytest.raises(NumericsError):
        sample(logits_of(-math.inf, -math.inf), SamplingParams(temperature=1.0), 0)


def test_sampling_leaves_the_logits_as_they_were() -> None:
    logits = RNG.standard_normal(100).astype(np.float32)
    before = logits.copy()
    sample(logits, SamplingParams(temperature=0.5, top_p=0.5, logprobs=3), 1)
    assert np.array_equal(before, logits)
