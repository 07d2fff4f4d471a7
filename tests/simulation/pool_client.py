"""The client of the simulated pool: one request over as many attempts as it takes, after `kvpool.attempts`.

Calls and streams are what an actor system promises: in order, at most once, and a dead process is reported. A worker
that is silent is checked against the membership.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvpool.errors import CapacityError, DeadlineError, DuplicateError, KVPoolError, StaleError, UnavailableError
from kvpool.plan import Route
from kvpool.request import FinishReason, GenerateRequest, TokenChunk
from kvpool.types import WorkerKey

if TYPE_CHECKING:
    from tests.simulation.pool_world import PoolRouter, PoolWorld

MS = 1_000_000
ROUTE_TIMEOUT_NS = 150 * MS
LIVENESS_NS = 60 * MS
BACKOFF_NS = 10 * MS
RETRIED = (UnavailableError, StaleError, CapacityError, DuplicateError)


@dataclass(slots=True, eq=False)
class Ask:
    """One request and what became of it. ``ended`` is the finish reason, or the code of the error."""

    world: PoolWorld
    request: GenerateRequest
    deadline_ns: int
    router: PoolRouter
    delivered: list[int] = field(default_factory=list)
    attempt: int = 0
    route: Route | None = None
    excluded: set[WorkerKey] = field(default_factory=set)
    failed: set[WorkerKey] = field(default_factory=set)
    cancelled: bool = False
    ended: str | None = None
    ended_ns: int = 0
    endings: int = 0
    loaded: bool = False

    def start(self) -> None:
        """Ask for a route; everything ends at the deadline."""
        self.world.at(self.deadline_ns, lambda: self._fail(DeadlineError("too late")))
        self._next_attempt()

    def cancel(self) -> None:
        """The user gives up."""
        if self.ended is None:
            self.cancelled = True
            self._leave()
            self._end(FinishReason.CANCELLED.value)

    def _next_attempt(self) -> None:
        if self.ended is not None:
            return
        self.attempt += 1
        self.route = None
        number, router, excluded = self.attempt, self.router, frozenset(self.excluded)
        request = self._current()
        self.world.call(
            router, lambda: router.route_request(request, excluded, lambda got: self._on_route(number, got))
        )
        self.world.after(
            ROUTE_TIMEOUT_NS, lambda: self._on_route(number, UnavailableError("the router does not answer"))
        )

    def _on_route(self, number: int, got: Route | KVPoolError) -> None:
        if self.ended is not None or number != self.attempt or self.route is not None:
            return
        if isinstance(got, KVPoolError):
            self._weigh(got)
            return
        self.route = got
        plan = got.plan
        pieces = " ".join(f"{item.start}–{item.stop} of {item.holder}" for item in plan.loads)
        self.world.note(f"{self.request.request_id} goes to {got.worker}: {plan.kind.value} {pieces}")
        request, worker = self._current(), self.world.named(got.control_address)
        if not worker.up:
            self._lost(number)
            return
        worker.mourners.append(
            lambda: self.world.after(self.world.rng.randrange(1, 60 * MS), lambda: self._lost(number))
        )

        def sink(item: TokenChunk | KVPoolError) -> None:
            # what is computed ahead of the world's time arrives when the world is there
            self.world.reply(worker, lambda: self._on_item(number, item))

        self.world.call(worker, lambda: worker.submit(request, got, sink))
        self._watch(number, got.worker)

    def _watch(self, number: int, key: WorkerKey) -> None:
        """A silent worker that is no member any more is left."""

        def look() -> None:
            if self.ended is None and number == self.attempt:
                if self.router.up and self.router.view.complete and key not in self.router.known:
                    self._on_item(number, UnavailableError(f"{key} is no longer a member"))
                else:
                    self.world.after(LIVENESS_NS, look)

        self.world.after(LIVENESS_NS, look)

    def _lost(self, number: int) -> None:
        self._on_item(number, UnavailableError("the worker died"))

    def _on_item(self, number: int, item: TokenChunk | KVPoolError) -> None:
        if number != self.attempt or self.route is None:
            return
        if self.ended is not None:
            return  # cancelled or expired here; the worker did not know yet
        if isinstance(item, KVPoolError):
            self._leave()
            self._weigh(item)
            return
        self.delivered.extend(item.tokens)
        if item.finish is FinishReason.CANCELLED:
            self._weigh(UnavailableError("the worker ended the request, which nobody had cancelled"))
        elif item.finish is not None:
            self.loaded = item.stats is not None and item.stats.tokens_loaded > 0
            self._end(item.finish.value)

    def _weigh(self, error: KVPoolError) -> None:
        if not isinstance(error, RETRIED):
            self._fail(error)
            return
        if isinstance(error, CapacityError | DuplicateError):
            pass
        elif self.route is None:
            self.excluded.clear()
        else:
            self.excluded.add(self.route.worker)
            self.failed.add(self.route.worker)
        self.attempt += 1  # nothing of the old attempt counts any more
        self.world.after(self.world.rng.randrange(1, 2 * BACKOFF_NS), self._next_attempt)

    def _leave(self) -> None:
        """Tell the worker that this attempt is over."""
        route = self.route
        if route is None:
            return
        worker = self.world.named(route.control_address)
        self.world.call(worker, lambda: worker.loop.cancel(self.request.request_id, route.decision_id))

    def _fail(self, error: KVPoolError) -> None:
        if self.ended is None:
            self._leave()
            self._end(error.code)

    def _end(self, how: str) -> None:
        self.endings += 1
        self.world.note(f"{self.request.request_id} ends: {how} after {self.attempt} attempts")
        self.ended, self.ended_ns = how, self.world.now_ns

    def _current(self) -> GenerateRequest:
        left_ns = max(1, self.deadline_ns - self.world.now_ns)
        return replace(self.request, generated=tuple(self.delivered), timeout_ns=left_ns)


def check_ask(ask: Ask, reference: list[int], grace_ns: int) -> None:
    """What every request was promised."""
    name: Any = ask.request.request_id
    assert ask.ended is not None, f"{name} never ended"
    assert ask.endings == 1, f"{name} ended {ask.endings} times"
    assert ask.ended_ns <= ask.deadline_ns + grace_ns, f"{name} outlived its deadline"
    assert ask.delivered == reference[: len(ask.delivered)], f"{name} got a wrong token"
    if ask.ended == FinishReason.LENGTH.value:
        assert ask.delivered == reference, f"{name} got too few tokens"
    else:
        expected = {FinishReason.CANCELLED.value} if ask.cancelled else {DeadlineError.code}
        assert ask.ended in expected, f"{name} was lost: {ask.ended}"
