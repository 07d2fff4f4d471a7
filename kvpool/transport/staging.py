"""Buffers in which frames wait: encoded ones until they are sent, arrived ones until they are whole.

Bounded and counted. A buffer is taken, and given back or written off exactly once. Written off is one that UCX may
still write into after its link was given up: it is never used again, is freed when the last operation on it is
dropped, and does not count against the living links, just as pages that a fence holds do not.

Owned by the transport's progress thread; not thread-safe.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvpool.errors import InvariantViolation

KEPT_BUFFERS = 16


@dataclass(slots=True, eq=False)
class Staging:
    """One buffer; ``view`` is what was asked for."""

    view: memoryview
    whole: memoryview
    over: bool = False


class StagingPool:
    """At most ``limit_bytes`` of buffers, as far as `fits` is heeded. Reuse wastes a quarter at most."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: list[memoryview] = []
        self.used_bytes = 0
        self.written_off_bytes = 0

    def fits(self, size: int) -> bool:
        """Whether a buffer stays within the limit; a single one always does."""
        return self.used_bytes == 0 or self.used_bytes + size <= self._limit_bytes

    def take(self, size: int) -> Staging:
        """A buffer of ``size`` bytes with arbitrary content. Ask `fits` before, unless somebody would starve."""
        whole = next((buffer for buffer in self._kept if 4 * size <= 4 * len(buffer) <= 5 * size), None)
        if whole is None:
            # No zeros: it is written before it is read, and touching pages for nothing is slow.
            whole = np.empty(size, dtype=np.uint8).data
        else:
            self._kept.remove(whole)
        self.used_bytes += len(whole)
        return Staging(whole[:size], whole)

    def give_back(self, staging: Staging) -> None:
        """Nothing reads or writes the buffer any more."""
        self._end(staging)
        self._kept.append(staging.whole)
        del self._kept[:-KEPT_BUFFERS]

    def write_off(self, staging: Staging) -> None:
        """Nobody knows whether something still writes into the buffer."""
        self._end(staging)
        self.written_off_bytes += len(staging.whole)

    def _end(self, staging: Staging) -> None:
        if staging.over:
            raise InvariantViolation("a staging buffer was returned twice")
        staging.over = True
        self.used_bytes -= len(staging.whole)
