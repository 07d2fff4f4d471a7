"""Choosing a token from logits: greedy or sampled, reproducibly.  (pure)

The draw at a position depends only on (seed, position): one counter-based Philox number, keyed by the seed and
counted by the position, picks a token by inverse transform. Batch, step and worker take no part, so a resumed or
retried request continues with the same tokens. Tokens are walked in the order of their ids, not of their
probabilities, so that rounding that swaps two near-equal tokens does not change the draw.

Source of Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpool.errors import NumericsError
from kvpool.request import SamplingParams, TokenLogprobs

Logits = npt.NDArray[np.float32]
"""Raw logits of one position, shape [vocab_size]. A token that must not appear may be -inf."""

_Probabilities = npt.NDArray[np.float64]


def sample(logits: Logits, params: SamplingParams, position: int) -> TokenLogprobs:
    """Choose the token at ``position`` (its index in prompt + output).

    The log-probabilities are those of the model: after softmax at temperature 1, whatever temperature and top_p do.

    Args:
        logits: float32, [vocab_size]; not changed.
        params: how to choose; temperature 0 takes the first maximum.
        position: at least 0.

    Raises:
        NumericsError: the logits hold NaN or +inf, or nothing but -inf.
    """
    log_total = log_sum_exp(logits)
    if params.temperature == 0.0:
        token = int(np.argmax(logits))
    else:
        token = _draw(logits, params, uniform(params.seed, position))
    return TokenLogprobs(
        token=token,
        logprob=float(logits[token]) - log_total,
        top=top_logprobs(logits, log_total, params.logprobs),
    )


def log_sum_exp(logits: Logits) -> float:
    """Logarithm of the softmax denominator.

    Raises:
        NumericsError: the logits hold NaN or +inf, or nothing but -inf.
    """
    peak = float(logits.max())
    if not np.isfinite(peak):
        raise NumericsError(f"the model produced logits without a finite maximum ({peak})")
    # float32 exponentials with a float64 sum: exact to about 1e-6, ten times cheaper than float64 throughout.
    with np.errstate(over="ignore"):  # a difference beyond float32 is -inf, whose exponential is the right 0
        total = float(np.exp(logits - np.float32(peak)).sum(dtype=np.float64))
    return peak + float(np.log(total))


def top_logprobs(logits: Logits, log_total: float, count: int) -> tuple[tuple[int, float], ...]:
    """The ``count`` most likely tokens with their log-probabilities, best first, equal ones by token id."""
    count = min(count, logits.size)
    if count == 0:
        return ()
    threshold = np.partition(logits, logits.size - count)[logits.size - count]
    tokens = np.flatnonzero(logits >= threshold)
    order = np.lexsort((tokens, -logits[tokens]))[:count]
    return tuple((int(token), float(logits[token]) - log_total) for token in tokens[order])


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that belongs to (seed, position)."""
    # random_raw is the documented bit stream of Philox4x64; distributions built on it may change between releases.
    raw = int(np.random.Philox(key=seed, counter=position).random_raw())
    return (raw >> 11) * 2.0**-53


def _draw(logits: Logits, params: SamplingParams, fraction: float) -> int:
    weights = _scaled_weights(logits, params.temperature)
    if params.top_p < 1.0:
        weights = _nucleus(weights, params.top_p)
    cumulative = np.cumsum(weights)
    # "right" passes over tokens without mass, also when the fraction is exactly 0.
    chosen = int(np.searchsorted(cumulative, fraction * cumulative[-1], side="right"))
    return min(chosen, int(np.flatnonzero(weights)[-1]))


def _scaled_weights(logits: Logits, temperature: float) -> _Probabilities:
    """Softmax numerators at a temperature; the largest is 1, so no temperature overflows."""
    with np.errstate(over="ignore"):  # as above
        scaled: _Probabilities = np.exp((logits.astype(np.float64) - float(logits.max())) / temperature)
    return scaled


def _nucleus(weights: _Probabilities, top_p: float) -> _Probabilities:
    """Keep the smallest set of most likely tokens that holds at least ``top_p`` of the mass; zero for the others."""
    order = np.argsort(-weights, kind="stable")
    cumulative = np.cumsum(weights[order])
    kept = int(np.searchsorted(cumulative, top_p * cumulative[-1], side="left")) + 1
    nucleus = np.zeros_like(weights)
    nucleus[order[:kept]] = weights[order[:kept]]
    return nucleus
