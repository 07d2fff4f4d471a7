"""How fast workers decode: time of a step that decodes for so many requests, learned from counters.  (pure)

    step(D) = s0 + s1 · D        D requests that decode in it

Prefill chunks that run beside them are in the measured steps, so what a worker usually does to its decodes is in its
curve. What a worker showed counts while it decodes and for `FADE_NS` after. Then its speed is unknown, as before its
first sample, and what it does next teaches it from nothing: nobody is refused for an unknown speed, so requests with
limits probe it, and those of a past overload are not shut out by what only they could correct. For the same reason
nobody borrows the curve of others.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvpool.reports import DECODE_NS, DECODE_REQUESTS, DECODE_STEPS
from kvpool.types import WorkerId
from router.fit import Features, RelativeFit

_PRIOR = (20e6, 1e6)  # only its shape counts: the first sample scales it
_PROBES: tuple[Features, ...] = ((1.0, 1.0), (1.0, 8.0), (1.0, 32.0))
_FORGETTING = 0.95

FADE_NS = 10_000_000_000
"""So long after a worker's last decode steps it counts as fast as they were."""


class DecodeEstimators:
    """Decode curves of all workers."""

    def __init__(self) -> None:
        self._fits: dict[WorkerId, RelativeFit] = {}
        self._seen_ns: dict[WorkerId, int] = {}

    def observe(self, worker: WorkerId, before: Mapping[str, int], after: Mapping[str, int], now_ns: int) -> None:
        """Learn from a worker's running totals in two reports of one incarnation, the second of them from now."""
        steps, requests, elapsed_ns = (
            after.get(name, 0) - before.get(name, 0) for name in (DECODE_STEPS, DECODE_REQUESTS, DECODE_NS)
        )
        if steps <= 0 or requests <= 0 or elapsed_ns <= 0:
            return
        fit = self._fresh(worker, now_ns)
        if fit is None:
            fit = self._fits[worker] = RelativeFit(_PRIOR, _PROBES, _FORGETTING)
        fit.observe((1.0, requests / steps), elapsed_ns / steps)
        self._seen_ns[worker] = now_ns

    def tpot_ns(self, worker: WorkerId, requests: float, now_ns: int) -> float | None:
        """Expected gap between tokens when ``requests`` decode on a worker; None when its speed is unknown."""
        fit = self._fresh(worker, now_ns)
        return None if fit is None else fit.predict((1.0, requests))

    def _fresh(self, worker: WorkerId, now_ns: int) -> RelativeFit | None:
        seen_ns = self._seen_ns.get(worker)
        return None if seen_ns is None or now_ns - seen_ns >= FADE_NS else self._fits[worker]
