"""The engine thread: schedule, run, post-process, until closed.

One beat: **schedule** (follow loads and cancellations, plan a step), **run** (fill pages into views, one engine step),
**post-process** (deliver tokens, then seal and offer blocks, then end what is finished). With nothing to do the thread
sleeps until an event or the next deadline; it never polls.

``lock`` guards scheduler, requests and loads. It is never held while the engine computes, so a request that arrives in
mid-step starts its loads at once. Engine, bridge and views belong to the engine thread.

A failed request ends with its typed error. A failed engine ends every request with `UnavailableError`, so that the
client tries another worker; the loop then stops and stays broken.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvpool.errors import CapacityError, DeadlineError, DuplicateError, KVPoolError, NumericsError, UnavailableError
from kvpool.reports import (
    DECODE_NS,
    DECODE_REQUESTS,
    DECODE_STEPS,
    LoadSample,
    PrefillSample,
    RequestOutcome,
    WorkerLoad,
)
from kvpool.request import FinishReason, TokenChunk, TokenLogprobs
from kvpool.types import RequestId, WorkerId
from workers.bridge import Bridge
from workers.engine.base import Engine, SequenceSlice
from workers.flights import Flights
from workers.gate import Gate
from workers.limits import goodput_counter
from workers.reporter import Reporter
from workers.scheduler import Scheduler
from workers.sequence import Sequence
from workers.step import Step, Work
from workers.stopping import Decode, ends_silently, finish_reason

CLOSE_NS = 5_000_000_000
MIN_SLEEP_S = 0.001
MAX_SLEEP_S = 1.0

Sink = Callable[[TokenChunk | KVPoolError], None]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoopParts:
    """What a loop drives; see `workers.core.CoreParts`. ``load`` and ``counters`` are what reports carry; ``pulling``
    says, under the lock, whether blocks are in use by a load that no request waits for."""

    worker_id: WorkerId
    engine: Engine
    scheduler: Scheduler
    gate: Gate
    bridge: Bridge
    flights: Flights
    reporter: Reporter
    lock: threading.RLock
    wake: threading.Event
    clock_ns: Callable[[], int]
    decode: Decode | None
    load: Callable[[], WorkerLoad]
    counters: Callable[[], Mapping[str, int]]
    samples: deque[LoadSample]
    pulling: Callable[[], bool]


@dataclass(slots=True)
class _Active:
    sequence: Sequence
    sink: Sink


class EngineLoop:
    """Requests in service, and the beats that serve them."""

    def __init__(self, parts: LoopParts) -> None:
        self._parts = parts
        self._active: dict[RequestId, _Active] = {}
        self._leaving: list[_Active] = []  # their last chunk is out, their pages are not back yet
        self._cancels: set[RequestId] = set()
        self._idle = threading.Condition(parts.lock)
        self._closing = False
        self.failure: BaseException | None = None
        self.step_until_ns: int | None = None

    # -- from any thread

    def admit(self, sequence: Sequence, sink: Sink) -> None:
        """Queue a request and start its loads.

        Raises:
            DuplicateError: one with its id is running.
            CapacityError: too many requests wait.
            UnavailableError: the loop ended.
        """
        parts = self._parts
        with parts.lock:
            if self.failure is not None or self._closing:
                raise UnavailableError(f"{parts.worker_id} is closed or broken ({self.failure}); use another worker")
            if sequence.request_id in self._active:
                raise DuplicateError(
                    f"a request with the id {sequence.request_id} runs here already; wait for it or use another id",
                    request_id=sequence.request_id,
                )
            order = parts.scheduler.add(sequence, sequence.arrival_ns)
            self._active[sequence.request_id] = _Active(sequence, sink)
            parts.reporter.accept(sequence.request_id)
            if order is not None:
                parts.flights.start(order)
        parts.wake.set()

    def cancel(self, request_id: RequestId, decision_id: str | None = None) -> None:
        """End a request at the next beat, but only the attempt of ``decision_id`` when that is given. Unknown ids are
        fine."""
        with self._parts.lock:
            active = self._active.get(request_id)
            if active is not None and decision_id in (None, active.sequence.decision_id):
                self._cancels.add(request_id)
        self._parts.wake.set()

    def wait_idle(self, timeout_ns: int) -> bool:
        """Wait until no request is active and no load in flight; False when the time ran out."""
        with self._idle:
            return self._idle.wait_for(self._is_idle, timeout_ns / 1e9)

    def _is_idle(self) -> bool:
        return not self._active and not self._leaving and not self._parts.flights.count

    def stop(self) -> None:
        """Ask the thread to end every request and return."""
        with self._parts.lock:
            self._closing = True
        self._parts.wake.set()

    # -- the engine thread

    def run(self, on_failure: Callable[[BaseException], None] | None) -> None:
        """Serve until `stop` or until the engine breaks; then end every request and outlast every load."""
        try:
            while not self._closing:
                self._beat()
        except BaseException as error:
            log.exception("%s: the engine broke", self._parts.worker_id)
            self._broke(error, on_failure)
        self._end_all()
        self._outlast_loads()

    def _broke(self, error: BaseException, on_failure: Callable[[BaseException], None] | None) -> None:
        with self._parts.lock:
            self.failure = error
        if on_failure is None:
            return
        try:
            on_failure(error)
        except Exception:
            log.exception("%s: nobody could be told that the engine broke", self._parts.worker_id)

    def _beat(self) -> None:
        parts = self._parts
        parts.wake.clear()
        with parts.lock:
            cancelled = [self._active[request_id] for request_id in self._cancels if request_id in self._active]
            self._cancels.clear()
            landed = parts.flights.follow()
            if landed or not parts.flights.count:
                self._idle.notify_all()
        for active in cancelled:
            self._end(active, self._last_chunk(active.sequence, (), (), FinishReason.CANCELLED))
        with parts.lock:
            step = parts.scheduler.plan_step(parts.clock_ns())
            for order in step.loads:
                parts.flights.start(order)
            parts.flights.cancel(step.cancelled_flights)
        for slot in step.closed_slots:
            parts.engine.close(slot)
        self._expire(step)
        if step.work:
            self._run(step)
        with parts.lock:
            owed = [sequence for sequence in step.owed if sequence.slot is not None]  # else it left in the step
            for sequence in owed:
                parts.scheduler.rescue(sequence)
        for sequence in (*landed, *owed):
            parts.bridge.seal(sequence)  # after the step: a checksum must not stand before a first token
        self._report()
        if not step.work:
            with parts.lock:
                if not self._active and not parts.flights.count and not parts.pulling():
                    parts.bridge.check_at_rest()
            if not landed and not owed:  # else others can use what was sealed just now
                self._sleep(step)

    def _expire(self, step: Step) -> None:
        for sequence in step.expired:
            error = DeadlineError(
                f"the request did not finish within {sequence.request.timeout_ns / 1e9:.3f} s; raise its timeout or "
                "lower max_tokens",
                request_id=sequence.request_id,
                generated_tokens=sequence.generated_tokens,
            )
            self._end(self._active[sequence.request_id], error)

    def _sleep(self, step: Step) -> None:
        parts = self._parts
        now_ns = parts.clock_ns()
        moments = [parts.reporter.due_ns(now_ns)]
        if step.wake_ns is not None:
            moments.append(step.wake_ns)
        parts.wake.wait(min(MAX_SLEEP_S, max(MIN_SLEEP_S, (min(moments) - now_ns) / 1e9)))

    def _report(self) -> None:
        parts = self._parts
        now_ns = parts.clock_ns()
        with parts.lock:
            while parts.samples:
                parts.reporter.load(parts.samples.popleft())
            if now_ns < parts.reporter.due_ns(now_ns):
                return
            parts.reporter.send(now_ns, parts.load(), parts.counters())

    # -- run

    def _run(self, step: Step) -> None:
        parts = self._parts
        works = [work for work in step.work if self._open(work)]
        for work in works:
            parts.bridge.fill(work)
        batch = [work for work in works if work.count]
        started_ns = parts.clock_ns()
        self._foresee(batch, started_ns)
        batch, results = self._compute(batch)
        self.step_until_ns = None
        with parts.lock:
            parts.gate.fill_block_ns = parts.bridge.fill_block_ns
            self._learn(batch, parts.clock_ns() - started_ns)
        filled = [work for work in works if not work.count]
        self._post_process([*filled, *batch], [*([None] * len(filled)), *results])

    def _open(self, work: Work) -> bool:
        """Open the view of a sequence that runs for the first time; False when there is no memory for it now."""
        sequence, parts = work.sequence, self._parts
        if sequence.slot is not None:
            return True
        try:
            sequence.slot = parts.engine.open(sequence.view_capacity_tokens)
        except CapacityError as error:
            with parts.lock:
                hope = parts.scheduler.defer(sequence)
            if not hope:
                self._end(self._active[sequence.request_id], error)
            return False
        return True

    def _compute(self, batch: list[Work]) -> tuple[list[Work], list[TokenLogprobs | None]]:
        """One engine step; requests whose numbers are broken end, the others are computed again."""
        while batch:
            try:
                return batch, self._parts.engine.step([_slice(work) for work in batch])
            except NumericsError as error:
                slots = {int(slot) for slot in str(error.details.get("slots", "")).split(",") if slot}
                broken = [work for work in batch if work.sequence.slot in slots]
                if not broken:
                    raise
                for work in broken:
                    self._end(self._active[work.sequence.request_id], error)
                batch = [work for work in batch if work not in broken]
        return [], []

    def _foresee(self, batch: list[Work], now_ns: int) -> None:
        expected_ns = self._parts.gate.prefill_ns(sum(work.count for work in batch)) if batch else None
        if expected_ns is not None:
            self.step_until_ns = now_ns + expected_ns

    def _learn(self, batch: list[Work], elapsed_ns: int) -> None:
        """Prefill speed from passes that did nothing else, decode speed from all that decoded."""
        decoding = sum(work.sequence.decoding for work in batch)
        if decoding:
            counters = self._parts.reporter.counters
            counters[DECODE_STEPS] += 1
            counters[DECODE_REQUESTS] += decoding
            counters[DECODE_NS] += elapsed_ns
        if not batch or decoding:
            return
        self._parts.gate.observe(sum(work.count for work in batch), elapsed_ns)
        if len(batch) == 1:
            self._parts.reporter.prefill(PrefillSample(batch[0].count, batch[0].start, elapsed_ns))

    # -- post-process

    def _post_process(self, works: list[Work], results: list[TokenLogprobs | None]) -> None:
        parts = self._parts
        finished: list[tuple[_Active, TokenChunk]] = []
        for work, result in zip(works, results, strict=True):
            parts.scheduler.ran(work)
            if result is None:
                continue
            active = self._active[work.sequence.request_id]
            chunk = self._take_token(work.sequence, result)
            if chunk.finish is None:
                self._deliver(active, chunk)
            else:
                finished.append((active, chunk))
        for active, chunk in finished:
            assert chunk.finish is not None
            counter = goodput_counter(active.sequence, chunk.finish, parts.clock_ns())
            with parts.lock:
                if counter is not None:
                    parts.reporter.counters[counter] += 1
                self._put_away(active)  # first: whoever has the last chunk may use the id again
                self._leaving.append(active)
            self._deliver(active, chunk)
        ending = {active.sequence.request_id for active, _ in finished}
        with parts.lock:
            for sequence in (work.sequence for work in works):
                ends_here = sequence.request_id in ending
                if ends_here or sequence.request.hands_over or parts.scheduler.awaited(sequence):
                    parts.scheduler.rescue(sequence)
        for work in works:
            parts.bridge.seal(work.sequence)
        for active, _ in finished:
            self._end(active, None)

    def _take_token(self, sequence: Sequence, result: TokenLogprobs) -> TokenChunk:
        parts = self._parts
        if sequence.tally.first_token_ns is None:
            sequence.tally.first_token_ns = parts.clock_ns()
            self._first_token(sequence)
        sequence.append(result.token)
        sampling = sequence.request.sampling
        output = sequence.tokens[sequence.prompt_tokens :]
        finish = finish_reason(sampling, parts.engine.eos_token_ids, output, parts.decode)
        silent = ends_silently(sampling, parts.engine.eos_token_ids, result.token)
        tokens = () if silent else (result.token,)
        logprobs = (result,) if tokens and sampling.logprobs else ()
        if finish is None:
            return TokenChunk(sequence.request_id, tokens, logprobs)
        return self._last_chunk(sequence, tokens, logprobs, finish)

    def _first_token(self, sequence: Sequence) -> None:
        stats = sequence.stats(self._parts.worker_id)
        outcome = RequestOutcome(
            request_id=sequence.request_id,
            decision_id=sequence.decision_id,
            worker_id=self._parts.worker_id,
            ttft_ns=stats.ttft_ns,
            tokens_cached=stats.tokens_cached,
            tokens_loaded=stats.tokens_loaded,
            tokens_redone=stats.tokens_redone,
            bytes_loaded=stats.bytes_loaded,
            load_ns=stats.load_ns,
            queue_ns=stats.queue_ns,
            load_failures=stats.load_failures,
        )
        with self._parts.lock:
            self._parts.reporter.outcome(outcome)

    def _last_chunk(
        self,
        sequence: Sequence,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        finish: FinishReason,
    ) -> TokenChunk:
        return TokenChunk(sequence.request_id, tokens, logprobs, finish, sequence.stats(self._parts.worker_id))

    # -- endings

    def _deliver(self, active: _Active, item: TokenChunk | KVPoolError) -> None:
        try:
            active.sink(item)
        except Exception:
            log.exception("the sink of %s failed; its request is cancelled", active.sequence.request_id)
            with self._parts.lock:
                self._parts.reporter.counters["sink_failures"] += 1
            self.cancel(active.sequence.request_id, active.sequence.decision_id)

    def _end(self, active: _Active, item: TokenChunk | KVPoolError | None) -> None:
        """Take a request out and deliver its last item, None when that is delivered already."""
        parts = self._parts
        with parts.lock:
            slot = parts.scheduler.remove(active.sequence)
            self._put_away(active)
            self._leaving = [other for other in self._leaving if other is not active]
            if isinstance(item, KVPoolError):
                parts.reporter.counters[f"request_failures.{item.code}"] += 1
        if slot is not None:
            parts.engine.close(slot)
        if item is not None:
            self._deliver(active, item)
        with parts.lock:
            self._idle.notify_all()

    def _put_away(self, active: _Active) -> None:
        """It is active no more; under the lock. Another request may have its id by now."""
        request_id = active.sequence.request_id
        if self._active.get(request_id) is active:
            del self._active[request_id]
            self._cancels.discard(request_id)

    def _end_all(self) -> None:
        why = "was closed" if self.failure is None else f"broke: {self.failure!r}"
        with self._parts.lock:
            left = list(self._active.values())
            self._active.clear()
            for active in self._leaving:
                self._parts.scheduler.remove(active.sequence)
            self._leaving.clear()
        for active in left:
            error = UnavailableError(
                f"{self._parts.worker_id} {why}; retry on another worker", request_id=active.sequence.request_id
            )
            with self._parts.lock:
                self._parts.reporter.counters[f"request_failures.{error.code}"] += 1
                self._parts.scheduler.remove(active.sequence)
            self._deliver(active, error)

    def _outlast_loads(self) -> None:
        """Give every load up and wait, bounded, until each is terminal."""
        parts = self._parts
        deadline_ns = parts.clock_ns() + CLOSE_NS
        with parts.lock:
            parts.flights.cancel_all()
        while parts.flights.count and parts.clock_ns() < deadline_ns:
            parts.wake.clear()
            with parts.lock:
                parts.flights.follow()
            if parts.flights.count:
                parts.wake.wait(0.05)
        with parts.lock:
            self._idle.notify_all()


def _slice(work: Work) -> SequenceSlice:
    sequence, stop = work.sequence, work.start + work.count
    if sequence.slot is None:
        raise UnavailableError(f"{sequence.request_id} has no open view")
    sampling = sequence.request.sampling if work.samples else None
    return SequenceSlice(sequence.slot, tuple(sequence.tokens[work.start : stop]), work.start, sampling)
