"""Who waits at the router, and until when: late binding while there is more work than workers.  (pure)

A request that is sent to a worker is bound to it: to its queue, its cache and its place in that queue. While workers
have little to do that costs nothing. Once all of them have seconds of prefill before them, it does: by the time its
turn comes another worker may have its prefix or be free, and a short request stands behind long ones. So then requests
wait at the router (each at its client, which asks again), and are decided when a worker is about to need them, in the
order of their *due* moments:

    due = arrival + age · prefill − head start of its priority

Everybody gets older at the same pace, so nobody waits for requests of its priority that come more than ``age`` times
its own prefill after it: short ones pass long ones, and long ones are not forgotten. Head starts of priorities have an
end, so low ones are not forgotten either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvpool.types import RequestId

POLL_NS = 100_000_000
"""A request that waits asks again after this time at the earliest."""
GRACE_NS = 900_000_000
"""It has given up when it is overdue by this."""
MAX_POLL_NS = 5_000_000_000
"""It asks again after this time at the latest, however long the queue."""
MAX_YIELD_NS = 2_000_000_000
"""A request without a limit on its first token yields to a priority that is one higher for no longer than this."""
MAX_HEAD_START_NS = 30_000_000_000
"""What the highest priorities gain and the lowest lose: so nobody is passed by those who come a minute after it."""
MAX_WAITING = 10_000
"""Whoever comes when so many wait, waits as well, and stands before nobody until there is a place."""
MIN_PLACES = 64

_UNTIL, _DUE, _WORK, _POSITION = range(4)
NOBODY = (math.inf, math.inf, 0.0, -1.0)
"""What the room's table says of a free place, row by row: when its owner has given up, and its `Turn`."""


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
        head_start_ns = priority * MAX_YIELD_NS / (1.0 + abs(priority) * MAX_YIELD_NS / MAX_HEAD_START_NS)
        return arrival_ns + self.age * prefill_ns - head_start_ns


NEVER = Hold(backlog_ns=math.inf, free_ns=math.inf)
"""Every request is sent to a worker as it comes."""


def poll_ns(wait_ns: float) -> int:
    """When a request that is to wait this long asks again: half way, so that it comes in time and not too often. Those
    who wait long are spread over a quarter of the longest time, so that a burst does not come back as one."""
    most_ns = 0.75 * MAX_POLL_NS + wait_ns % (0.25 * MAX_POLL_NS) if wait_ns < math.inf else MAX_POLL_NS
    return round(min(max(0.5 * wait_ns, POLL_NS), most_ns))


class Turn(NamedTuple):
    """Place of a request in the queue: when it is due, its prefill time, and the position of the worker that it would
    have now."""

    due_ns: float
    work_ns: float
    position: int = 0


class Ahead(NamedTuple):
    """Those before a request: how many, their prefill work, and how much of it would go to the request's worker."""

    number: int
    work_ns: float
    same_ns: float

    def of_all(self, scale: float) -> Ahead:
        """Those at all routers, where ``scale`` requests wait for each one that waits here. The first of every room are
        about equally due, so a request stands behind the first of all others too. Which worker others' would have is
        not known."""
        if scale == 1.0:
            return self
        return Ahead(round((self.number + 1) * scale) - 1, self.work_ns * scale, self.same_ns)


class WaitingRoom:
    """Who was told to wait and keeps asking. Not thread-safe; bounded.

    Everybody has a place, a column of one table, so that a request is compared with thousands in microseconds.
    """

    def __init__(self) -> None:
        self._places: dict[RequestId, int] = {}
        self._names: list[RequestId] = []  # by place; of a free one, who had it last
        self._free: list[int] = []
        self._table = np.empty((len(NOBODY), 0))
        self._blocking: dict[RequestId, int] = {}
        self._since_ns: dict[RequestId, int] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._places

    def since_ns(self, request_id: RequestId) -> int | None:
        """When a request began to wait; None when it does not."""
        return self._since_ns.get(request_id)

    def expire(self, now_ns: int) -> None:
        """Forget who has given up."""
        for place in np.flatnonzero(self._table[_UNTIL] <= now_ns).tolist():
            self.leave(self._names[place])

    def outranks(self, priority: int) -> bool:
        """Somebody of a higher priority waits for something else than a worker's turn."""
        return any(blocking > priority for blocking in self._blocking.values())

    def ahead(self, request_id: RequestId, turn: Turn) -> Ahead:
        """Those whose turn is before a request's."""
        table = self._table
        before = table[_DUE] < turn.due_ns
        own = self._places.get(request_id)
        if own is not None:
            before[own] = False
        work_ns = before * table[_WORK]
        same_ns = work_ns @ (table[_POSITION] == turn.position)
        return Ahead(int(np.count_nonzero(before)), float(work_ns.sum()), float(same_ns))

    def enter(
        self, request_id: RequestId, now_ns: int, back_ns: int, turn: Turn | None, blocking: int | None = None
    ) -> None:
        """A request waits, and will ask again at ``back_ns``; one that does not has given up.

        Args:
            turn: its place among those that wait for workers; None when it stands before nobody.
            blocking: its priority, to which lower ones yield meanwhile; None when nobody yields to it.
        """
        place = self._places.get(request_id)
        if place is None:
            if len(self._places) >= MAX_WAITING:
                return
            place = self._take_place(request_id)
            self._since_ns[request_id] = now_ns
        self._table[:, place] = (back_ns + GRACE_NS, *(NOBODY[_DUE:] if turn is None else turn))
        self._blocking.pop(request_id, None)
        if blocking is not None:
            self._blocking[request_id] = blocking

    def leave(self, request_id: RequestId) -> None:
        """It starts, is refused, or was cancelled."""
        place = self._places.pop(request_id, None)
        if place is not None:
            self._table[:, place] = NOBODY
            self._free.append(place)
            self._blocking.pop(request_id, None)
            del self._since_ns[request_id]

    def _take_place(self, request_id: RequestId) -> int:
        if not self._free:
            have = len(self._names)
            more = min(max(have, MIN_PLACES), MAX_WAITING - have)
            self._table = np.append(self._table, np.tile(np.array(NOBODY)[:, None], more), axis=1)
            self._names += [request_id] * more
            self._free = list(range(have, have + more))[::-1]
        place = self._free.pop()
        self._names[place] = request_id
        self._places[request_id] = place
        return place
