"""One load from disk: what its caller sees of it, and what the disk tier's thread tells it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvpool.types import BlockHash


@dataclass(frozen=True, slots=True)
class DiskProgress:
    """A snapshot of one load from disk; as `workers.ports.LoadProgress`."""

    arrived: frozenset[int]
    terminal: bool
    failures: tuple[str, ...]
    bytes_arrived: int
    started_ns: int
    finished_ns: int | None


class DiskLoad:
    """Blocks on their way from disk into pages. Made by `DiskTier.load`; safe to use from any thread."""

    def __init__(self, wants: Mapping[int, tuple[BlockHash, int]], deadline_ns: int, now_ns: int) -> None:
        self.wants = wants
        self.deadline_ns = deadline_ns
        self.cancelled = threading.Event()
        self._lock = threading.Lock()
        self._progress = DiskProgress(frozenset(), False, (), 0, now_ns, None)
        self._callbacks: list[Callable[[Any], None]] = []

    def progress(self) -> DiskProgress:
        """Current snapshot."""
        with self._lock:
            return self._progress

    def cancel(self) -> None:
        """Give it up; a block that is being copied lands before the load is terminal."""
        self.cancelled.set()

    def on_change(self, callback: Callable[[Any], None]) -> None:
        """Call after every block and once terminal; at once when terminal already."""
        with self._lock:
            if not self._progress.terminal:
                self._callbacks.append(callback)
                return
        callback(self._progress)

    def advance(self, *, arrived: int | None = None, num_bytes: int = 0, failure: str | None = None) -> None:
        """One block arrived or failed; for the tier's thread."""
        before = self._progress
        self._set(
            DiskProgress(
                before.arrived if arrived is None else before.arrived | {arrived},
                False,
                before.failures if failure is None else (*before.failures, failure),
                before.bytes_arrived + num_bytes,
                before.started_ns,
                None,
            )
        )

    def finish(self, now_ns: int) -> None:
        """Nothing lands any more; for the tier's thread."""
        before = self._progress
        self._set(DiskProgress(before.arrived, True, before.failures, before.bytes_arrived, before.started_ns, now_ns))

    def _set(self, progress: DiskProgress) -> None:
        with self._lock:
            self._progress = progress
            callbacks = tuple(self._callbacks)
            if progress.terminal:
                self._callbacks.clear()
        for callback in callbacks:
            callback(progress)
