"""How much of the traffic other routers send, and what this one therefore expects of them.  (pure)

Routers do not talk to each other. Workers tell all of them which requests they accepted; those that this router did
not send are others'. Between two reports others see the same queues and choose like this one, so each promise of this
router that no report has shown yet stands for as many as its share of the traffic says. A single router has all of it.

As many requests wait at each of the others as here. Their share of what workers accept does not say that: a router that
lets its requests wait for longer sends less, would take more to be before them, and let them wait for longer still. So
the number of routers counts, unless the others are silent.
"""

from __future__ import annotations

_KEEP = 0.98  # of the memory, for each request that was accepted
_PRIOR = 4.0  # requests of one's own that count as seen at first
MAX_SCALE = 8.0
SILENT_SCALE = 1.1
"""Others that send so little (of all promises for each of this router) do not count."""


class Peers:
    """This router's share of the traffic.

    Args:
        routers: number of routers of the cluster, this one included.
    """

    def __init__(self, routers: int = 1) -> None:
        self._routers = float(routers)
        self._own = self._all = _PRIOR

    def accepted(self, *, own: bool) -> None:
        """A worker accepted a request, of this router or of another one."""
        self._own = _KEEP * self._own + (1.0 if own else 0.0)
        self._all = _KEEP * self._all + 1.0

    @property
    def scale(self) -> float:
        """Promises of all routers for each of this one."""
        return min(MAX_SCALE, self._all / self._own) if self._own > 0.0 else MAX_SCALE

    @property
    def waiting_scale(self) -> float:
        """Requests that wait at all routers for each that waits here."""
        return self._routers if self.scale > SILENT_SCALE else 1.0
