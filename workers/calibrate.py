"""A worker's first prefill samples, measured before it joins, so that its first requests are priced from evidence.

Without them the router would have to guess from a prior that fits no particular machine, and the first request would
pay for the engine's warm-up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvpool.reports import PrefillSample
from workers.engine.base import Engine, SequenceSlice

SIZES = (512, 128, 16)
"""Tokens per pass, largest first: the first sample sets the scale of the curve, the others its shape."""

WARM_UP_TOKENS = 16

MAX_PAIR_RATIO = 1 / 2048
"""At most: a token behind 2,048 others costs twice the first. Published models lie between 1/190,000 and 1/7,000."""


def calibrate(engine: Engine, max_step_tokens: int, clock_ns: Callable[[], int]) -> tuple[PrefillSample, ...]:
    """Time one prefill pass of each size. Runs on the calling thread, before anyone else uses the engine.

    Args:
        engine: with no open sequences.
        max_step_tokens: larger passes never happen on this worker.
        clock_ns: monotonic clock.
    """
    limit = min(max_step_tokens, engine.max_context_tokens)
    _pass_ns(engine, min(WARM_UP_TOKENS, limit), clock_ns)
    sizes = dict.fromkeys(min(size, limit) for size in SIZES)
    return tuple(PrefillSample(size, 0, _pass_ns(engine, size, clock_ns)) for size in sizes)


def pair_ratio(samples: Sequence[PrefillSample]) -> float:
    """How much more a token costs for every token before it, relative to the first one's cost; 0 when not known.

    Three passes from nothing give ``t = t0 + a·n + b·n²/2`` exactly; the answer is b/a, within [0, `MAX_PAIR_RATIO`],
    because on a busy machine the three may give anything.
    """
    times = {sample.new_tokens: sample.elapsed_ns for sample in samples if sample.context_tokens == 0}
    if len(times) < 3:
        return 0.0
    (n0, t0), (n1, t1), (n2, t2) = sorted(times.items())[-3:]
    low, high = (t1 - t0) / (n1 - n0), (t2 - t1) / (n2 - n1)
    pair_ns = 2 * (high - low) / (n2 - n0)
    token_ns = low - pair_ns * (n0 + n1) / 2
    if pair_ns <= 0 or token_ns <= 0:
        return 0.0
    return min(MAX_PAIR_RATIO, pair_ns / token_ns)


def _pass_ns(engine: Engine, tokens: int, clock_ns: Callable[[], int]) -> int:
    slot = engine.open(tokens)
    try:
        piece = SequenceSlice(slot=slot, tokens=(0,) * tokens, start=0, sampling=None)
        start_ns = clock_ns()
        engine.step([piece])
        return max(1, clock_ns() - start_ns)
    finally:
        engine.close(slot)
