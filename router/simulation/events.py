"""Simulated time: a heap of events at integer nanoseconds; equal moments in the order of scheduling.  (pure)"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from kvpool.errors import InvariantViolation


class EventLoop:
    """Runs events in time order. Two runs with the same schedule are equal to the bit."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.processed = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0

    def at(self, when_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        """Run ``action(*arguments)`` at a moment that is not in the past.

        Raises:
            InvariantViolation: the moment has passed.
        """
        if when_ns < self.now_ns:
            raise InvariantViolation(f"event scheduled {self.now_ns - when_ns} ns in the past")
        self._serial += 1
        heapq.heappush(self._heap, (when_ns, self._serial, action, arguments))

    def after(self, delay_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        """Run ``action(*arguments)`` after a delay ≥ 0."""
        self.at(self.now_ns + delay_ns, action, *arguments)

    def run(self, until_ns: int | None = None) -> None:
        """Process events until none is left, or none before ``until_ns``."""
        heap = self._heap
        while heap and (until_ns is None or heap[0][0] <= until_ns):
            self.now_ns, _, action, arguments = heapq.heappop(heap)
            self.processed += 1
            action(*arguments)
