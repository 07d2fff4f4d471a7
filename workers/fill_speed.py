"""How fast pages are copied into views.  (pure)"""

from __future__ import annotations

FIRST_MIB_NS = 250_000
"""What filling a MiB from pages takes before the first one was measured: 4 GB/s."""

_KEEP = 0.8
_MIB = 1 << 20


class FillSpeed:
    """Time per MiB from pages into views; recent fills weigh more, large ones by their size."""

    def __init__(self) -> None:
        self._bytes = self._ns = 0.0
        self.mib_ns = FIRST_MIB_NS

    def block_ns(self, block_bytes: int) -> int | None:
        """What filling in one block takes, at least 1; None before a fill was seen."""
        return max(1, self.mib_ns * block_bytes // _MIB) if self._bytes else None

    def observe(self, num_bytes: int, elapsed_ns: int) -> None:
        """A fill took so long."""
        self._bytes = _KEEP * self._bytes + num_bytes
        self._ns = _KEEP * self._ns + elapsed_ns
        self.mib_ns = max(1, round(self._ns / self._bytes * _MIB))
