"""What a fault run may do to the block events a worker publishes: lose them, repeat them, hold them back.

Never on by itself: a link that nobody disturbs sends every batch once, at once. The protocol makes good what is lost
(sequence numbers, then a snapshot) and ignores what is repeated; while batches are late, the index is stale, and
whoever believes it must find out that blocks are gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Disturbance:
    """How often, and how late.

    Attributes:
        loss: chance in [0, 1] that a batch is not sent.
        repetition: chance in [0, 1] that a batch is sent twice.
        delay_s: every batch waits so long before it is sent, and all behind it with it.
    """

    loss: float = 0.0
    repetition: float = 0.0
    delay_s: float = 0.0

    def copies(self, batch: _T, chance: Callable[[], float]) -> tuple[_T, ...]:
        """What is sent in place of a batch; ``chance`` draws from [0, 1)."""
        if chance() < self.loss:
            return ()
        return (batch, batch) if chance() < self.repetition else (batch,)


CALM = Disturbance()
