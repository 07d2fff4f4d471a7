"""Which number an incarnation of a worker takes.  (pure)

Wall-clock nanoseconds grow from one incarnation to the next, with nothing stored, as long as the clock does. One that
was set back gives a number below its predecessor's, and the directory refuses it as a zombie. It can be told from a
real zombie: what fenced it carries a number from the future.
"""

from __future__ import annotations

from kvpool.errors import StaleError
from kvpool.types import WorkerEpoch

MAX_EPOCH = 2**63


def epoch_after(refusal: StaleError, now_unix_ns: int) -> WorkerEpoch | None:
    """The number to start with after the directory refused one, None when a successor really runs.

    Args:
        refusal: of the first join of a process that has just been started.
        now_unix_ns: this machine's wall clock.
    """
    newest = refusal.details.get("newest_epoch")
    if not isinstance(newest, int) or not now_unix_ns < newest < MAX_EPOCH:
        return None
    return WorkerEpoch(newest + 1)
