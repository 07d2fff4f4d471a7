"""The router's door: whether a decided request starts now, by its limits, by who waits and by what workers have to do.

`router.admission` has the rules, `router.waiting` who waits; here they meet one request.  (pure)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvpool.request import NO_LIMITS, Limits
from kvpool.types import BlockHash, RequestId, WorkerKey
from router.admission import Admission, Forecast, Ruling, admit
from router.decide import Decision
from router.kernel import Floats
from router.peers import Peers
from router.signals import Snapshot
from router.waiting import Hold, Turn, WaitingRoom

ADMITTED = Ruling(Admission.ADMIT)
"""What almost every request is told, without a look at anything but the chosen worker's queue."""


@dataclass(frozen=True, slots=True)
class RequestMeta:
    """What the shell knows of a request.

    Attributes:
        request_id: identity; a retry keeps it.
        prompt_tokens: length of the prompt.
        chain: hashes of its full blocks.
        max_tokens: tokens to generate at most.
        exclude: incarnations that just failed this request.
        limits: what it asks of the service.
        elapsed_ns: time since the user's call.
    """

    request_id: RequestId
    prompt_tokens: int
    chain: tuple[BlockHash, ...]
    max_tokens: int = 1
    exclude: frozenset[WorkerKey] = frozenset()
    limits: Limits = NO_LIMITS
    elapsed_ns: int = 0


class Door:
    """Not thread-safe.

    Args:
        hold: from when on requests wait here for workers.
        peers: says how many wait at other routers.
    """

    def __init__(self, hold: Hold, peers: Peers) -> None:
        self._hold = hold
        self._peers = peers
        self._room = WaitingRoom()

    def waiting(self, now_ns: int) -> int:
        """Requests that wait and keep asking; those that another router decided have stopped."""
        self._room.expire(now_ns)
        return len(self._room)

    def waited_ns(self, request_id: RequestId, now_ns: int) -> int | None:
        """For how long a request has been waiting; None when it does not."""
        self._room.expire(now_ns)
        since_ns = self._room.since_ns(request_id)
        return None if since_ns is None else now_ns - since_ns

    def rule(
        self,
        meta: RequestMeta,
        exclude: frozenset[WorkerKey],
        snapshot: Snapshot,
        decision: Decision,
        tpot_ns: float | None,
        doubt: float,
    ) -> Ruling:
        """Rule on a decided request.

        Args:
            exclude: workers that cannot take it.
            tpot_ns: expected gap between its tokens, or `router.admission.STAYS_SLOW_NS`; None when it does not
                matter, or nobody knows.
            doubt: `router.admission.doubt` about its first token where the chosen worker is idle.
        """
        limits, now_ns = meta.limits, snapshot.now_ns
        turn = self._turn(meta, snapshot, decision)
        if limits is NO_LIMITS and turn is None and not len(self._room):
            return ADMITTED
        self._room.expire(now_ns)
        outranked = self._room.outranks(limits.priority)
        hold_ns = 0.0 if turn is None else self._hold_ns(meta.request_id, exclude, turn, snapshot)
        busy = snapshot.columns.gpu_free_ns.item(decision.position) > now_ns
        prefill_ns, doubt = decision.promise.gpu_ns, 1.0 if busy else doubt
        ruling = admit(
            limits,
            Forecast(decision.price_ns, tpot_ns, meta.elapsed_ns, outranked, hold_ns, prefill_ns, doubt),
        )
        since_ns = self._room.since_ns(meta.request_id)
        if ruling.admission is Admission.QUEUE:
            slow = ruling.missed == "tpot"
            back_ns = now_ns + ruling.retry_after_ns
            self._room.enter(
                meta.request_id, now_ns, back_ns, None if slow else turn, limits.priority if slow else None
            )
        else:
            self._room.leave(meta.request_id)
        return ruling if since_ns is None else replace(ruling, waited_ns=now_ns - since_ns)

    def leave(self, request_id: RequestId) -> None:
        """The request waits no longer."""
        self._room.leave(request_id)

    def _turn(self, meta: RequestMeta, snapshot: Snapshot, decision: Decision) -> Turn | None:
        """Place in the queue of a request whose worker has enough to do; None for one that is sent at once.

        Who was failed by another worker waits like all others, and as the oldest comes first: when a worker dies, those
        who were on it must not all stand in the queues of the rest at once.
        """
        hold, now_ns = self._hold, snapshot.now_ns
        wait_ns = snapshot.columns.gpu_free_ns.item(decision.position) - now_ns
        if wait_ns <= hold.free_ns:
            return None
        work_ns = decision.promise.gpu_ns
        due_ns = hold.due_ns(now_ns - meta.elapsed_ns, work_ns, meta.limits.priority)
        return Turn(due_ns, work_ns, decision.position)

    def _hold_ns(self, request_id: RequestId, exclude: frozenset[WorkerKey], turn: Turn, snapshot: Snapshot) -> float:
        """For how long the work before a request keeps the workers more than busy enough.

        Or until a worker may be free for it, if that is sooner: its own, after those before it that would have the same
        one; or with n before it the worker that is free as the next after n others, should each of them take one.
        """
        waits = open_waits(snapshot, exclude)
        ahead = self._room.ahead(request_id, turn).of_all(self._peers.waiting_scale)
        if not len(waits):
            return -self._hold.backlog_ns
        hold_ns = (float(waits.sum()) + ahead.work_ns) / len(waits) - self._hold.backlog_ns
        free_ns = snapshot.columns.gpu_free_ns.item(turn.position) - snapshot.now_ns + ahead.same_ns
        if ahead.number < len(waits):
            free_ns = min(free_ns, float(np.partition(waits, ahead.number)[ahead.number]))
        return min(hold_ns, free_ns - self._hold.free_ns)


def open_waits(snapshot: Snapshot, exclude: frozenset[WorkerKey]) -> Floats:
    """Prefill work before each worker that may take a request."""
    open_to_it = snapshot.columns.closed_ns == 0.0
    open_to_it[[snapshot.positions[key] for key in exclude if key in snapshot.positions]] = False
    waits: Floats = np.maximum(snapshot.columns.gpu_free_ns[open_to_it] - snapshot.now_ns, 0.0)
    return waits
