"""How fast workers decode: time of a step that decodes for so many requests, learned from counters.  (pure)

    step(D) = s0 + s1 · D        D requests that decode in it

Prefill chunks that run beside them are in the measured steps, so what a worker usually does to its decodes is in its
curve. A worker without samples borrows the curve of all; before any sample nothing is known, and nothing is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvpool.reports import DECODE_NS, DECODE_REQUESTS, DECODE_STEPS
from kvpool.types import WorkerId
from router.fit import Features, RelativeFit

_PRIOR = (20e6, 1e6)  # only its shape counts: the first sample scales it
_PROBES: tuple[Features, ...] = ((1.0, 1.0), (1.0, 8.0), (1.0, 32.0))
_FORGETTING = 0.95


class DecodeEstimators:
    """Decode curves of all workers."""

    def __init__(self) -> None:
        self._all = self._new_fit()
        self._fits: dict[WorkerId, RelativeFit] = {}

    def observe(self, worker: WorkerId, before: Mapping[str, int], after: Mapping[str, int]) -> None:
        """Learn from a worker's running totals in two reports of one incarnation."""
        steps, requests, elapsed_ns = (
            after.get(name, 0) - before.get(name, 0) for name in (DECODE_STEPS, DECODE_REQUESTS, DECODE_NS)
        )
        if steps <= 0 or requests <= 0 or elapsed_ns <= 0:
            return
        fit = self._fits.setdefault(worker, self._new_fit())
        for target in (self._all, fit):
            target.observe((1.0, requests / steps), elapsed_ns / steps)

    def tpot_ns(self, worker: WorkerId, requests: float) -> float | None:
        """Expected gap between tokens when ``requests`` decode on a worker; None when nothing is known."""
        fit = self._fits.get(worker, self._all)
        return fit.predict((1.0, requests)) if fit.count else None

    @staticmethod
    def _new_fit() -> RelativeFit:
        return RelativeFit(_PRIOR, _PROBES, _FORGETTING)
