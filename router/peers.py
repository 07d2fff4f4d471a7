"""How much of the traffic other routers send, and what this one therefore expects them to have promised.  (pure)

Routers do not talk to each other. Workers tell all of them which requests they accepted; those that this router did
not send are others'. Between two reports others see the same queues and choose like this one, so each promise of this
router that no report has shown yet stands for as many as its share of the traffic says. A single router has all of it.
"""

from __future__ import annotations

_KEEP = 0.98  # of the memory, for each request that was accepted
_PRIOR = 4.0  # requests of one's own that count as seen at first
MAX_SCALE = 8.0


class Peers:
    """This router's share of the traffic."""

    def __init__(self) -> None:
        self._own = self._all = _PRIOR

    def accepted(self, *, own: bool) -> None:
        """A worker accepted a request, of this router or of another one."""
        self._own = _KEEP * self._own + (1.0 if own else 0.0)
        self._all = _KEEP * self._all + 1.0

    @property
    def scale(self) -> float:
        """Promises of all routers for each of this one."""
        return min(MAX_SCALE, self._all / self._own) if self._own > 0.0 else MAX_SCALE
