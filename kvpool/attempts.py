"""One request over as many attempts as it takes: what the client does when a worker or the router fails.

Tokens that were delivered stay; the next worker goes on behind them. A worker that failed the request is left out
until nobody else is there. Everything ends at the request's deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvpool.errors import (
    CapacityError,
    DeadlineError,
    DuplicateError,
    KVPoolError,
    OverloadError,
    StaleError,
    UnavailableError,
)
from kvpool.plan import PlanKind, Route
from kvpool.request import FinishReason, GenerateRequest, RequestStats, TokenChunk
from kvpool.types import WorkerId, WorkerKey

if TYPE_CHECKING:
    from kvpool.cluster.connection import ClusterConnection

MAX_FAILED_ATTEMPTS = 64  # without a token in between; waiting for room or for a router ends with the budget only
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
MAX_ASKED_S = 5.0  # a router that wants to be asked later than this is asked now and then all the same

HAND_OVER_WAIT_S = 0.25
"""Longest wait, after the first token, for the end of the load that followed the prefill."""

UNROUTED = WorkerId("unrouted")
"""`RequestStats.worker_id` of a request that was cancelled before it had a worker."""


class Attempts:
    """One request over as many workers as it takes, inside its deadline.

    Args:
        connection: to router and workers.
        request: as the user asked it.
        cancelled: set when the user cancels.
        deadline_s: on the monotonic clock.
    """

    def __init__(
        self, connection: ClusterConnection, request: GenerateRequest, cancelled: asyncio.Event, deadline_s: float
    ) -> None:
        self._connection = connection
        self._request = request
        self._cancelled = cancelled
        self._deadline_s = deadline_s
        self._started_s = time.monotonic()
        self._delivered: list[int] = []
        self._ttft_ns: int | None = None
        self._waited_ns: int | None = None
        self._excluded: set[WorkerKey] = set()
        self._failed: set[WorkerKey] = set()
        self._served: set[WorkerKey] = set()
        self._failures = 0
        self._attempts = 0
        self._waits = False  # at the router, which asked to be asked again, or was being asked at the end
        self._serving: WorkerKey | None = None

    async def run(self) -> AsyncGenerator[TokenChunk]:
        """Chunks in order, the last with ``finish``. Once.

        Raises:
            DeadlineError: the budget is over.
            OverloadError: its limits cannot be met.
            UnavailableError: too many attempts failed in a row, or there is no cluster any more.
            KVPoolError: the request was refused or cannot be served.
        """
        try:
            async with contextlib.aclosing(self._run()) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            if self._waits:
                self._connection.leave(self._request.request_id)

    async def _run(self) -> AsyncGenerator[TokenChunk]:
        backoff_s = FIRST_BACKOFF_S
        while True:
            self._attempts += 1
            delivered_before = len(self._delivered)
            route: Route | None = None
            try:
                route = await self._route()
                if route is None:
                    self._attempts -= 1
                    break
                if self._waited_ns is None:
                    self._waited_ns = self._elapsed_ns()
                async with contextlib.aclosing(self._serve(route)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except (UnavailableError, StaleError, CapacityError, DuplicateError) as error:
                last_error = error
                if len(self._delivered) > delivered_before:
                    backoff_s, self._failures = FIRST_BACKOFF_S, 0
                self._weigh(error, route)
            asked_s = retry_after_s(last_error)
            if asked_s is None:
                pause_s, backoff_s = backoff_s, min(backoff_s * 2, MAX_BACKOFF_S)
            else:  # until the last moment: its turn may come sooner than the router thinks
                pause_s = min(asked_s, max(0.5 * self._remaining_s(), FIRST_BACKOFF_S))
                self._attempts -= 1
            if time.monotonic() + pause_s >= self._deadline_s:
                raise self._too_late(last_error) from last_error
            if await self._cancelled_within(pause_s):
                break
        yield _cancelled_chunk(self._request, UNROUTED, self._attempts)

    def _weigh(self, error: KVPoolError, route: Route | None) -> None:
        """What an attempt's end says about the next one; raises when there should be none."""
        if isinstance(error, OverloadError):
            error.details["request_id"] = self._request.request_id  # by which the router's reasons are found
            raise error  # its limits cannot be met: that is for the user to decide
        if isinstance(error, CapacityError):
            return  # full, not broken: wait and ask again, anyone may be free by then
        if route is None:
            if is_final(error):
                raise error
            self._excluded.clear()  # nobody else is there: who failed once may serve by now
            return
        if isinstance(error, DuplicateError):
            if self._serving not in self._failed | self._served:
                raise error  # another client's request
            return  # our own earlier attempt, given up or handed over, and not ended yet
        worker = self._serving or route.worker
        self._excluded.add(worker)
        self._failed.add(worker)
        self._failures += 1
        if self._failures >= MAX_FAILED_ATTEMPTS:
            raise UnavailableError(
                f"request {self._request.request_id} failed {self._failures} times in a row; last error: {error}",
                attempts=self._attempts,
                request_id=self._request.request_id,
            ) from error

    def _too_late(self, last_error: KVPoolError) -> DeadlineError:
        return DeadlineError(
            f"request {self._request.request_id} did not finish within its budget; last error: {last_error}",
            attempts=self._attempts,
            request_id=self._request.request_id,
            timeout_s=self._request.timeout_ns / 1e9,
        )

    async def _route(self) -> Route | None:
        """The router's answer, None when the user cancels before it comes."""
        asking = asyncio.ensure_future(
            self._connection.route(self._current(), frozenset(self._excluded), self._remaining_s())
        )
        waiter = asyncio.ensure_future(self._cancelled.wait())
        try:
            await asyncio.wait({asking, waiter}, return_when=asyncio.FIRST_COMPLETED)
            if not self._cancelled.is_set():
                return asking.result()
            if asking.done() and asking.exception() is None:
                self._connection.give_back(asking.result())
            return None
        finally:
            waiter.cancel()
            await _give_up(asking)
            error = None if asking.cancelled() else asking.exception()
            self._waits = asking.cancelled() or (error is not None and retry_after_s(error) is not None)

    async def _serve(self, route: Route) -> AsyncGenerator[TokenChunk]:
        """Chunks of one attempt, on one worker or handed over after the first token."""
        part = route.hand_over
        if part is None:
            async with contextlib.aclosing(self._stream(route, self._current())) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        request = self._current()
        last = len(request.generated) + 1 >= request.sampling.max_tokens
        sampling = replace(request.sampling, max_tokens=len(request.generated) + 1)
        one = replace(request, sampling=sampling, hands_over=not last)
        following = asyncio.ensure_future(self._connection.follow(request, part, self._remaining_s()))
        stats: RequestStats | None = None
        handed_over = False
        try:
            async with contextlib.aclosing(self._stream(route, one)) as chunks:
                async for chunk in chunks:
                    if last or chunk.finish is not FinishReason.LENGTH:
                        yield chunk
                        if chunk.finish is not None:
                            return
                        continue
                    stats = chunk.stats
                    yield replace(chunk, finish=None, stats=None)
            # The last blocks were offered with the first token; they are on their way.
            await asyncio.wait({following}, timeout=min(HAND_OVER_WAIT_S, self._remaining_s()))
            handed_over = True
        finally:
            await _give_up(following)
            self._connection.unfollow(part)
            if not handed_over:
                self._connection.give_back(route, followed=True)  # the decode worker is not waiting for anything
        plan = part.plan._replace(patient=False)
        second = Route(
            route.request_id, part.decision_id, part.worker.worker_id, part.worker, part.control_address, plan
        )
        async with contextlib.aclosing(self._stream(second, self._current())) as chunks:
            async for chunk in chunks:
                yield chunk if chunk.stats is None or stats is None else _of_both(chunk, stats)

    async def _stream(self, route: Route, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        """Chunks of one worker; ends with a cancelled chunk when the user cancels."""
        self._serving = route.worker
        chunks = self._connection.stream(route, request, self._remaining_s())
        waiter = asyncio.ensure_future(self._cancelled.wait())
        step: asyncio.Future[TokenChunk | None] | None = None
        try:
            while True:
                step = asyncio.ensure_future(anext(chunks, None))
                await asyncio.wait({step, waiter}, return_when=asyncio.FIRST_COMPLETED)
                if not step.done():
                    yield _cancelled_chunk(self._request, route.worker_id, self._attempts)
                    return
                chunk = step.result()
                if chunk is None:
                    return
                if chunk.finish is FinishReason.CANCELLED and not self._cancelled.is_set():
                    raise UnavailableError(f"worker {route.worker} ended the request, which nobody had cancelled")
                self._served.add(route.worker)
                self._delivered.extend(chunk.tokens)
                if self._delivered and self._ttft_ns is None:
                    self._ttft_ns = self._elapsed_ns()
                if chunk.stats is not None:
                    chunk = replace(chunk, stats=self._with_own_part(chunk.stats))
                yield chunk
        finally:
            waiter.cancel()
            if step is not None:
                await _give_up(step)
            await chunks.aclose()

    def _with_own_part(self, stats: RequestStats) -> RequestStats:
        """What the worker says, and what only the client knows."""
        return replace(stats, attempts=self._attempts, waited_ns=self._waited_ns or 0)

    def _current(self) -> GenerateRequest:
        """The request as it stands: what was delivered is context now, and the budget has shrunk."""
        return replace(
            self._request,
            generated=tuple(self._delivered),
            timeout_ns=max(1, int(self._remaining_s() * 1e9)),
            elapsed_ns=self._elapsed_ns(),
            ttft_ns=self._ttft_ns,
        )

    def _elapsed_ns(self) -> int:
        return self._request.elapsed_ns + int((time.monotonic() - self._started_s) * 1e9)

    def _remaining_s(self) -> float:
        return max(0.001, self._deadline_s - time.monotonic())

    async def _cancelled_within(self, seconds: float) -> bool:
        """Wait so long, or until the user cancels."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._cancelled.wait(), seconds)
        return self._cancelled.is_set()


async def _give_up(future: asyncio.Future[Any]) -> None:
    """Cancel and wait for the end, whatever it is. Nobody needs the result any more."""
    future.cancel()
    await asyncio.wait({future})
    if not future.cancelled():
        future.exception()  # marks it as seen


def _of_both(chunk: TokenChunk, prefill: RequestStats) -> TokenChunk:
    """The end of a request that was handed over: how its prompt came about is what the prefill worker says."""
    assert chunk.stats is not None
    stats = replace(
        prefill,
        attempts=chunk.stats.attempts,
        preemptions=prefill.preemptions + chunk.stats.preemptions,
        load_failures=prefill.load_failures + chunk.stats.load_failures,
        decoded_by=chunk.stats.worker_id,
    )
    return replace(chunk, stats=stats)


def _cancelled_chunk(request: GenerateRequest, worker_id: WorkerId, attempts: int) -> TokenChunk:
    stats = RequestStats(
        worker_id=worker_id,
        plan=PlanKind.REDO.value,
        prompt_tokens=len(request.prompt),
        tokens_cached=0,
        tokens_loaded=0,
        tokens_redone=0,
        attempts=attempts,
    )
    return TokenChunk(request.request_id, (), finish=FinishReason.CANCELLED, stats=stats)


def retry_after_s(error: BaseException) -> float | None:
    """When the router wants to be asked again; None when it did not say, and the error ends an attempt."""
    if not isinstance(error, CapacityError) or isinstance(error, OverloadError):
        return None
    asked = error.details.get("retry_after_s")
    return min(float(asked), MAX_ASKED_S) if asked else None


def is_final(error: KVPoolError) -> bool:
    """There is no cluster, or no connection to it, which no retry brings back; see `ClusterConnection.call`."""
    return bool(error.details.get("gone"))
