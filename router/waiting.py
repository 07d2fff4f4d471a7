"""Who waits at the router, and until when: late binding while there is more work than workers.  (pure)

A request that is sent to a worker is bound to it: to its queue, its cache and its place in that queue. While workers
have little to do that costs nothing. Once all of them have seconds of prefill before them, it does: by the time its
turn comes another worker may have its prefix or be free, and a short request stands behind long ones. So then requests
wait at the router (each at its client, which asks again), and are decided when a worker is about to need them, in the
order of their *due* moments:

    due = arrival + age · prefill − priority · yield

Everybody gets older at the same pace, so nobody waits for requests that come more than ``age`` times its own prefill
after it: short ones pass long ones, and long ones are not forgotten.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from kvpool.types import RequestId

POLL_NS = 100_000_000
"""A request that waits asks again after this time at the earliest."""
GRACE_NS = 900_000_000
"""It has given up when it is overdue by this."""
MAX_POLL_NS = 5_000_000_000
"""It asks again after this time at the latest, however long the queue."""
MAX_YIELD_NS = 2_000_000_000
"""A request without a limit on its first token yields to each higher level of priority for no longer than this."""
MAX_WAITING = 10_000


@dataclass(frozen=True, slots=True)
class Hold:
    """From when on requests wait at the router.

    Attributes:
        backlog_ns: mean prefill work before each worker from which on they do. It must keep every worker busy, and
            leave the choice something to choose from.
        free_ns: a worker with no more than this before it takes the request that chose it at once.
        age: how many times its own prefill a request lets pass those who come after it.
    """

    backlog_ns: float = 3e9
    free_ns: float = 5e8
    age: float = 2.0

    def due_ns(self, arrival_ns: float, prefill_ns: float, priority: int) -> float:
        """When it is the request's turn, compared with others."""
        return arrival_ns + self.age * prefill_ns - float(priority) * MAX_YIELD_NS


NEVER = Hold(backlog_ns=math.inf, free_ns=math.inf)
"""Every request is sent to a worker as it comes."""


def poll_ns(wait_ns: float) -> int:
    """When a request that is to wait this long asks again: half way, so that it comes in time and not too often."""
    return round(min(max(0.5 * wait_ns, POLL_NS), MAX_POLL_NS))


class Turn(NamedTuple):
    """Place of a request in the queue: when it is due, and its prefill time."""

    due_ns: float
    work_ns: float


class _Waiter(NamedTuple):
    priority: int
    turn: Turn | None
    until_ns: int


class WaitingRoom:
    """Who was told to wait and keeps asking. Not thread-safe; bounded."""

    def __init__(self) -> None:
        self._waiting: dict[RequestId, _Waiter] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._waiting

    def expire(self, now_ns: int) -> None:
        """Forget who has given up."""
        if self._waiting:
            self._waiting = {name: waiter for name, waiter in self._waiting.items() if waiter.until_ns > now_ns}

    def outranks(self, priority: int) -> bool:
        """Somebody of a higher priority waits."""
        return any(waiter.priority > priority for waiter in self._waiting.values())

    def ahead_ns(self, request_id: RequestId, turn: Turn) -> float:
        """Prefill work of those whose turn is before a request's."""
        due_ns, ahead_ns = turn.due_ns, 0.0
        for name, waiter in self._waiting.items():
            if waiter.turn is not None and waiter.turn.due_ns < due_ns and name != request_id:
                ahead_ns += waiter.turn.work_ns
        return ahead_ns

    def enter(self, request_id: RequestId, priority: int, turn: Turn | None, back_ns: int) -> None:
        """A request waits, and will ask again at ``back_ns``; one that does not has given up.

        Args:
            turn: its place among those that wait for workers; None when it waits for something else.
        """
        if request_id in self._waiting or len(self._waiting) < MAX_WAITING:
            self._waiting[request_id] = _Waiter(priority, turn, back_ns + GRACE_NS)

    def leave(self, request_id: RequestId) -> None:
        """It starts, is refused, or was cancelled."""
        self._waiting.pop(request_id, None)
