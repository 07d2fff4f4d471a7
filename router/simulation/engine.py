"""One simulated engine: chunked prefill and continuous decode in one stream of steps.

A step computes up to ``chunk_tokens`` tokens: one for every decoding sequence, the rest for queued prefills in order
of arrival, skipping those whose loads have not ended (loads hold up nobody else). Steps without prefill are run
together until one sequence finishes or something arrives. TTFT ends with the step that computes the last prompt
token.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from router.simulation.events import EventLoop
from router.simulation.presets import Preset


class TailLoad(Protocol):
    """A split plan's load, tail first, as the engine sees it."""

    def frontier_tokens(self, now_ns: int) -> int:
        """Tokens before the part of the tail that has arrived."""

    def joined(self) -> int:
        """The front reached the tail: give up the rest of the load; returns the boundary in tokens."""

    def chunk_tokens(self, position: int) -> int:
        """Tokens to compute from ``position`` before looking at the tail again."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in an engine.

    Attributes:
        prompt_tokens, output_tokens: lengths.
        position: prompt tokens whose KV is here.
        ready: may be prefilled; False while its loads must be awaited.
        tail: a split plan's load.
        busy_ns: its share of the steps that prefilled it.
        computed: prompt tokens computed here.
        in_step: prompt tokens the running step computes.
        expected: boundary its loads are expected to reach, in tokens.
    """

    name: str
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    position: int = 0
    ready: bool = True
    tail: TailLoad | None = None
    started_ns: int | None = None
    first_token_ns: int | None = None
    finished_ns: int | None = None
    busy_ns: float = 0.0
    computed: int = 0
    context_at_start: int = 0
    in_step: int = 0
    expected: int = 0

    def queued_tokens(self) -> int:
        """Prompt tokens that no step computes yet and no load is expected to bring."""
        whole = max(self.position + self.in_step, 0 if self.ready and self.tail is None else self.expected)
        return max(0, self.prompt_tokens - whole)


class Engine:
    """Steps of one node. ``on_prefilled`` and ``on_finished`` are called as sequences reach these points."""

    def __init__(
        self,
        loop: EventLoop,
        preset: Preset,
        on_prefilled: Callable[[Sequence], None],
        on_finished: Callable[[Sequence], None],
        slowdown: float = 1.0,
    ) -> None:
        self._loop = loop
        self._preset = preset
        self._on_prefilled = on_prefilled
        self._on_finished = on_finished
        self.slowdown = slowdown
        self.waiting: list[Sequence] = []
        self._decoding: list[tuple[int, int, Sequence]] = []  # heap by the decode step that ends it
        self._steps = 0
        self._context = 0
        self._serial = 0
        self._version = 0
        self._busy_until_ns: int | None = None
        self._run_start_ns = 0
        self._run_step_ns = 0.0
        self._run_steps = 0
        self.busy_ns = 0
        self.prefill_tokens = 0

    @property
    def decoding(self) -> int:
        """Sequences that decode."""
        return len(self._decoding)

    @property
    def idle(self) -> bool:
        """No step runs that prefills."""
        return self._busy_until_ns is None or self._run_steps > 0

    def step_remaining_ns(self) -> int:
        """Rest of the running step, 0 when idle or when the step only decodes."""
        if self._busy_until_ns is None or self._run_steps:
            return 0
        return max(0, self._busy_until_ns - self._loop.now_ns)

    def work_ns(self) -> float:
        """True time until every prefill that is here has ended, if all loads bring what they are expected to bring."""
        curve = self._preset.curve
        work = 0.0
        for item in self.waiting:
            tokens = item.queued_tokens()
            steps = tokens / self._preset.chunk_tokens
            work += steps * curve.t0_ns + tokens * curve.token_ns
            work += tokens * curve.pair_ns * (item.prompt_tokens - 0.5 * tokens)
        return self.step_remaining_ns() + work * self.slowdown

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)
        self.wake()

    def wake(self) -> None:
        """Something became ready: start a step, or cut a run of decode steps short at the next step's end."""
        if self._busy_until_ns is None:
            self._next()
        elif self._run_steps > 1 and any(item.ready for item in self.waiting):
            done = int((self._loop.now_ns - self._run_start_ns) / self._run_step_ns) + 1
            if done < self._run_steps:
                self._run_steps = done
                self._version += 1
                self._busy_until_ns = max(self._loop.now_ns, self._run_start_ns + int(done * self._run_step_ns))
                self._loop.at(self._busy_until_ns, self._end_run, self._version)

    def drop_all(self) -> list[Sequence]:
        """The node died: forget everything; returns what it had not finished."""
        lost = [*self.waiting, *(item[2] for item in self._decoding)]
        self.waiting.clear()
        self._decoding.clear()
        self._context = 0
        self._version += 1
        self._busy_until_ns = None
        self._run_steps = 0
        return lost

    def _next(self) -> None:
        parts = self._choose()
        if parts:
            self._start_step(parts)
        elif self._decoding:
            self._start_run()
        else:
            self._busy_until_ns = None

    def _choose(self) -> list[tuple[Sequence, int]]:
        if len(self._decoding) >= self._preset.max_running:
            return []
        budget = max(1, self._preset.chunk_tokens - len(self._decoding))
        parts = []
        for sequence in self.waiting:
            if not sequence.ready:
                continue
            if sequence.tail is not None:
                self._meet(sequence)
            tokens = sequence.prompt_tokens - sequence.position
            if sequence.tail is not None:
                tokens = min(tokens, sequence.tail.chunk_tokens(sequence.position))
            parts.append((sequence, min(tokens, budget)))
            budget -= parts[-1][1]
            if budget <= 0:
                break
        return parts

    def _meet(self, sequence: Sequence) -> None:
        """Take over the tail when the computed front has reached it."""
        tail = sequence.tail
        assert tail is not None
        if sequence.position >= tail.frontier_tokens(self._loop.now_ns):
            sequence.position = max(sequence.position, tail.joined())
            sequence.tail = None

    def _start_step(self, parts: list[tuple[Sequence, int]]) -> None:
        curve = self._preset.curve
        total = curve.t0_ns + self._decode_extra()
        shares = []
        for sequence, tokens in parts:
            if sequence.started_ns is None:
                sequence.started_ns = self._loop.now_ns
                sequence.context_at_start = sequence.position
            share = tokens * (curve.token_ns + curve.pair_ns * (sequence.position + 0.5 * tokens))
            shares.append(share)
            total += share
            sequence.in_step = tokens
        length_ns = max(1, round(total * self.slowdown))
        whole = sum(shares)
        for (sequence, _), share in zip(parts, shares, strict=True):
            sequence.busy_ns += length_ns * share / whole
        self._version += 1
        self._run_steps = 0
        self._busy_until_ns = self._loop.now_ns + length_ns
        self.busy_ns += length_ns
        self._loop.at(self._busy_until_ns, self._end_step, parts, self._version)

    def _end_step(self, parts: list[tuple[Sequence, int]], version: int) -> None:
        if version != self._version:
            return
        self._advance_decode(1)
        for sequence, tokens in parts:
            sequence.position += tokens
            sequence.computed += tokens
            sequence.in_step = 0
            self.prefill_tokens += tokens
            if sequence.tail is not None:
                self._meet(sequence)
            if sequence.position >= sequence.prompt_tokens:
                self.waiting.remove(sequence)
                self._prefilled(sequence)
        self._next()

    def _prefilled(self, sequence: Sequence) -> None:
        sequence.first_token_ns = self._loop.now_ns
        self._on_prefilled(sequence)
        if sequence.output_tokens <= 1:
            self._finish(sequence)
            return
        self._serial += 1
        self._context += sequence.prompt_tokens
        heapq.heappush(self._decoding, (self._steps + sequence.output_tokens - 1, self._serial, sequence))

    def _start_run(self) -> None:
        self._run_steps = max(1, self._decoding[0][0] - self._steps)
        self._run_step_ns = (self._preset.step_ns + self._decode_extra()) * self.slowdown
        self._run_start_ns = self._loop.now_ns
        self._version += 1
        self._busy_until_ns = self._loop.now_ns + max(1, int(self._run_steps * self._run_step_ns))
        self._loop.at(self._busy_until_ns, self._end_run, self._version)

    def _end_run(self, version: int) -> None:
        if version != self._version:
            return
        steps, self._run_steps = self._run_steps, 0
        self.busy_ns += self._loop.now_ns - self._run_start_ns
        self._advance_decode(steps)
        self._next()

    def _advance_decode(self, steps: int) -> None:
        self._steps += steps
        self._context += steps * len(self._decoding)
        while self._decoding and self._decoding[0][0] <= self._steps:
            _, _, sequence = heapq.heappop(self._decoding)
            self._context -= sequence.prompt_tokens + sequence.output_tokens - 1
            self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        sequence.finished_ns = self._loop.now_ns
        self._on_finished(sequence)

    def _decode_extra(self) -> float:
        return len(self._decoding) * self._preset.sequence_ns + self._context * self._preset.context_ns
