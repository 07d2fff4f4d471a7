"""A worker's first prefill samples, measured before it joins, so that its first requests are priced from evidence.

Without them the router would have to guess from a prior that fits no particular machine, and the first request would
pay for the engine's warm-up.
"""

from __future__ import annotations

from collections.abc import Callable

from kvpool.reports import PrefillSample
from workers.engine.base import Engine, SequenceSlice

SIZES = (512, 128, 16)
"""Tokens per pass, largest first: the first sample sets the scale of the curve, the others its shape."""

WARM_UP_TOKENS = 16


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


def _pass_ns(engine: Engine, tokens: int, clock_ns: Callable[[], int]) -> int:
    slot = engine.open(tokens)
    try:
        piece = SequenceSlice(slot=slot, tokens=(0,) * tokens, start=0, sampling=None)
        start_ns = clock_ns()
        engine.step([piece])
        return max(1, clock_ns() - start_ns)
    finally:
        engine.close(slot)
